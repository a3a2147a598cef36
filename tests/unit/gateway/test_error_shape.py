"""Errors as clients of the OpenAI API expect them, with the outcome in them."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import openai
import orjson
import pytest

from serving.gateway.errors import STATUS, RequestError, error_body, error_event
from serving.timeline import Outcome


def test_every_outcome_that_is_an_error_has_a_status() -> None:
    """An outcome without one would answer 500, or not at all, at the very moment that something is wrong."""
    silent = {Outcome.COMPLETED, Outcome.CANCELLED}
    assert set(STATUS) == set(Outcome) - silent
    for outcome, status in STATUS.items():
        assert RequestError(outcome, "x").status == status


@pytest.mark.parametrize("outcome", sorted(STATUS))
def test_an_error_has_the_openai_shape_and_names_its_outcome(outcome: Outcome) -> None:
    """A client maps an error to what happened by its body alone, streamed or not."""
    error = RequestError(outcome, "what happened", param="model", code="some_code")
    body = orjson.loads(error_body(error))["error"]
    assert set(body) == {"message", "type", "param", "code", "outcome"}
    assert (body["message"], body["param"], body["code"]) == ("what happened", "model", "some_code")
    assert body["outcome"] == outcome
    assert RequestError(outcome, "x").code == outcome
    event = error_event(error)
    assert event.startswith(b"data: ")
    assert event.endswith(b"\n\n")
    assert orjson.loads(event[6:]) == {"error": body}


def test_an_event_stays_one_event_whatever_the_message_says() -> None:
    """A line break in a message would cut the event in two, and the client would see neither."""
    event = error_event(RequestError(Outcome.ENGINE_ERROR, "one\n\ntwo\r\nthree"))
    assert event.count(b"\n") == 2


class _Answers(BaseHTTPRequestHandler):
    """Answers every request with the error that the server holds."""

    server: "_Server"

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        body = error_body(self.server.error)
        self.send_response(self.server.error.status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Says nothing."""


class _Server(ThreadingHTTPServer):
    error: RequestError


@pytest.fixture
def server() -> Iterator[_Server]:
    with _Server(("127.0.0.1", 0), _Answers) as served:
        thread = threading.Thread(target=served.serve_forever)
        thread.start()
        yield served
        served.shutdown()
        thread.join()


def test_the_official_client_raises_the_class_of_the_status(server: _Server) -> None:
    """Retry logic of real clients hangs on these classes, and reads code and param."""
    url = f"http://127.0.0.1:{server.server_port}/v1"
    with openai.OpenAI(api_key="x", base_url=url, max_retries=0) as client:
        for outcome, expected in (
            (Outcome.REJECTED_QUOTA, openai.RateLimitError),
            (Outcome.REJECTED_INVALID, openai.BadRequestError),
            (Outcome.REJECTED_AUTH, openai.AuthenticationError),
            (Outcome.NO_REPLICA, openai.InternalServerError),
        ):
            server.error = RequestError(outcome, "told", param="n")
            with pytest.raises(expected) as caught:
                client.completions.create(model="tiny", prompt="x")
            assert (caught.value.param, caught.value.code) == ("n", outcome)
