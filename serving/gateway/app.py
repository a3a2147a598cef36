"""The HTTP surface: which path does what. The two hot paths are plain ASGI endpoints of the FastAPI application."""

import time
from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus
from types import MappingProxyType

import orjson
from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from serving.gateway.client_side import ClientLeftError, ClientSide, Receive, Scope, Send
from serving.gateway.client_timings import MAX_BODY_BYTES, Accepted, parse_timings
from serving.gateway.errors import RequestError, error_body
from serving.gateway.exchange import Exchange
from serving.gateway.gateway import Gateway
from serving.gateway.head import Head
from serving.gateway.observation import readiness, take_snapshot
from serving.gateway.request import Kind
from serving.telemetry.catalog import TimingResult
from serving.telemetry.exposition import MetricsApp
from serving.telemetry.logs import Event
from serving.timeline import Outcome

Endpoint = Callable[[Scope, Receive, Send], Awaitable[None]]

SERVED = (
    "POST /v1/chat/completions",
    "POST /v1/completions",
    "GET /v1/models",
    "POST /v1/client-timings",
    "GET /healthz",
    "GET /readyz",
    "GET /metrics",
)


class _Endpoint:
    """A hot path: an exchange a request, without the framework's request and response objects."""

    def __init__(self, gateway: Gateway, kind: Kind) -> None:
        self._gateway = gateway
        self._kind = kind

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange(self._gateway, self._kind, scope, receive, send)
        self._gateway.opened(exchange)
        await exchange.run()


class _ClientTimings:
    """Reports of clients. No exchange: a report is no request for tokens and is in no lane's counts."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gateway = self._gateway
        head = Head.read(scope, gateway.clock)
        client = ClientSide(receive, send)
        try:
            caller = gateway.keys.identify(head.authorization)
            timings = parse_timings(await client.read_body(head.content_length, MAX_BODY_BYTES))
            taken = gateway.recent.take(timings, caller.name)
            if not isinstance(taken, Accepted):
                gateway.metrics.client_timing(taken)
                raise RequestError(
                    Outcome.REJECTED_INVALID,
                    "request_id is of no request that may still be reported on, by this key, for the first time",
                    param="request_id",
                    status=409 if taken is TimingResult.REPEATED else 404,
                )
        except ClientLeftError:
            return
        except RequestError as error:
            if error.status not in (404, 409):
                gateway.metrics.client_timing(TimingResult.INVALID)
            await _answer(send, error.status, error_body(error))
            return
        gateway.metrics.client_timing(TimingResult.ACCEPTED)
        gateway.metrics.client_ttft(taken.model, taken.lane, taken.cohort, timings.ttft)
        gateway.logs.event(
            Event.CLIENT_TIMINGS,
            request_id=timings.request_id,
            lane=taken.lane,
            client_ttft=timings.ttft,
            client_total=timings.total,
            gateway_ttft=taken.gateway_ttft,
            region=timings.region,
        )
        await _answer(send, 202, b'{"accepted":true}')


class _Healthz:
    """Says that the process lives, and never depends on load."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await _answer(send, 200, b'{"status":"ok"}')


class _Surface(FastAPI):
    """FastAPI, but for the hot paths, which go straight to their endpoints: its layers cost 50 µs a request and wrap
    every chunk that is sent. `/healthz` goes the same way, so that it is answered soonest where load is highest."""

    hot: Mapping[tuple[str, str], Endpoint] = MappingProxyType({})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        endpoint = self.hot.get((scope["method"], scope["path"])) if scope["type"] == "http" else None
        if endpoint is None:
            await super().__call__(scope, receive, send)
        else:
            await endpoint(scope, receive, send)


def make_app(gateway: Gateway) -> FastAPI:
    """The application of a gateway."""
    app = _Surface(title="Laneway", docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    app.hot = {
        ("POST", Kind.CHAT.path): _Endpoint(gateway, Kind.CHAT),
        ("POST", Kind.COMPLETION.path): _Endpoint(gateway, Kind.COMPLETION),
        ("GET", "/healthz"): _Healthz(),
    }
    started = int(time.time())

    async def models(request: Request) -> Response:
        try:
            gateway.keys.identify(request.headers.get("authorization", "").encode("latin-1") or None)
        except RequestError as error:
            return _json(error_body(error), error.status)
        listing = {
            "object": "list",
            "data": [
                {
                    "id": model.name,
                    "object": "model",
                    "created": started,
                    "owned_by": "laneway",
                    "max_model_len": model.max_model_len,
                }
                for model in gateway.spec.models
            ],
        }
        return _json(orjson.dumps(listing))

    async def readyz(request: Request) -> Response:
        ready, said = readiness(gateway)
        return _json(orjson.dumps(said), 200 if ready else 503)

    async def not_served(request: Request, fault: Exception) -> Response:
        status = fault.status_code if isinstance(fault, HTTPException) else 500
        served = ", ".join(SERVED)
        error = RequestError(
            Outcome.REJECTED_INVALID,
            f"{HTTPStatus(status).phrase.lower()}: served are {served}",
            status=status,
            code="not_found" if status == 404 else "method_not_allowed",
        )
        return _json(error_body(error), status)

    # Starlette takes an endpoint that is an object, not a function, for a plain ASGI application.
    app.router.routes.extend(
        [
            *(Route(path, endpoint, methods=[method]) for (method, path), endpoint in app.hot.items()),
            Route("/v1/client-timings", _ClientTimings(gateway), methods=["POST"]),
            Route("/v1/models", models, methods=["GET"]),
            Route("/readyz", readyz, methods=["GET"]),
            Route("/metrics", MetricsApp(gateway.metrics, lambda: take_snapshot(gateway)), methods=["GET", "HEAD"]),
        ]
    )
    app.add_exception_handler(404, not_served)
    app.add_exception_handler(405, not_served)
    return app


def _json(body: bytes, status: int = 200) -> Response:
    return Response(body, status, media_type="application/json")


async def _answer(send: Send, status: int, body: bytes) -> None:
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
