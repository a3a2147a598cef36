"""The bytes of the simulated replica's replies, in the shapes of vLLM 0.32.

A stream's chunks differ only in a few bytes, so what is common is made once a request: a token costs one concatenation
and no JSON.
"""

import re
from dataclasses import dataclass

import orjson
from tokenizers import Tokenizer

from serving.engine.simulated_request import Parsed

FINGERPRINT = "laneway-simulated"
DONE = b"data: [DONE]\n\n"
_PLAIN = re.compile(r"[A-Za-z ]+")


def text_pieces(tokenizer: Tokenizer) -> tuple[bytes, ...]:
    """Tokens of letters and spaces, which need no escape in JSON: what replies are made of."""
    texts = (tokenizer.decode([token]) for token in range(tokenizer.get_vocab_size()))
    return tuple(text.encode() for text in texts if _PLAIN.fullmatch(text))


def models_body(name: str, created: int, max_model_len: int) -> dict[str, object]:
    """The answer of `/v1/models`."""
    permission = {
        "id": f"modelperm-{created:x}",
        "object": "model_permission",
        "created": created,
        "allow_create_engine": False,
        "allow_sampling": True,
        "allow_logprobs": False,
        "allow_search_indices": False,
        "allow_view": True,
        "allow_fine_tuning": False,
        "organization": "*",
        "group": None,
        "is_blocking": False,
    }
    model = {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "laneway",
        "root": name,
        "parent": None,
        "max_model_len": max_model_len,
        "permission": [permission],
    }
    return {"object": "list", "data": [model]}


@dataclass(frozen=True, slots=True)
class Wording:
    """The text of one reply, the same for the same prompt: a walk over the pieces."""

    pieces: tuple[bytes, ...]
    seed: int

    def piece(self, index: int) -> bytes:
        """The token at `index`."""
        return self.pieces[(self.seed + index * (1 + self.seed % 97) + index * index) % len(self.pieces)]

    def text(self, tokens: int) -> bytes:
        """The first `tokens` of them."""
        return b"".join(map(self.piece, range(tokens)))


class ReplyShape:
    """One reply. `prompt_tokens` and the output's count are in its usage."""

    def __init__(self, parsed: Parsed, reply_id: str, created: int, model: str, prompt_tokens: int) -> None:
        self._parsed = parsed
        self._prompt_tokens = prompt_tokens
        kind = ("chat.completion.chunk" if parsed.stream else "chat.completion") if parsed.chat else "text_completion"
        head = {"id": reply_id, "object": kind, "created": created, "model": model}
        self._head = orjson.dumps(head)[:-1] + b',"choices":['
        if parsed.chat:
            self._before = b"data: " + self._head + b'{"index":0,"delta":{"content":"'
            self._after = b'"},"logprobs":null,"finish_reason":null,"token_ids":null}]'
        else:
            self._before = b"data: " + self._head + b'{"index":0,"text":"'
            self._after = (
                b'","logprobs":null,"finish_reason":null,"stop_reason":null,"prompt_token_ids":null,"token_ids":null}]'
            )
        self._token_end = self._after + b"}\n\n"

    def opening(self) -> bytes:
        """The chunk that comes just before the first token: a chat's role, and nothing for a text completion."""
        if not self._parsed.chat:
            return b""
        return b"".join(
            (
                *(b"data: ", self._head, b'{"index":0,"delta":{"role":"assistant","content":""},'),
                *(b'"logprobs":null,"finish_reason":null}]', self._running_usage(0)),
                b',"prompt_token_ids":null,"prompt_text":null}\n\n',
            )
        )

    def token(self, piece: bytes, count: int) -> bytes:
        """A chunk with one token; `count` is the output so far."""
        if self._parsed.continuous_usage:
            return b"".join((self._before, piece, self._after, self._running_usage(count), b"}\n\n"))
        return self._before + piece + self._token_end

    def closing(self, piece: bytes, count: int, reason: str) -> bytes:
        """The last token's chunk, the usage if it was asked for, and the end mark."""
        finish = b'"finish_reason":"' + reason.encode() + b'","stop_reason":null'
        if self._parsed.chat:
            ended = self._after.replace(b'"finish_reason":null', finish)
        else:
            ended = self._after.replace(b'"finish_reason":null,"stop_reason":null', finish)
        fingerprint = b',"system_fingerprint":"' + FINGERPRINT.encode() + b'"}\n\n'
        if not self._parsed.include_usage:
            return b"".join((self._before, piece, ended, fingerprint, DONE))
        usage = b',"usage":' + self._usage(count) + b"}"
        return b"".join(
            (
                *(self._before, piece, ended, self._running_usage(count), b"}\n\n"),
                *(b"data: ", self._head, b"]", usage, fingerprint, DONE),
            )
        )

    def whole(self, text: bytes, count: int, reason: str) -> bytes:
        """The body of a reply that is not streamed."""
        finish = b'"logprobs":null,"finish_reason":"' + reason.encode() + b'","stop_reason":null,"token_ids":null'
        if self._parsed.chat:
            choice: bytes = (
                b'{"index":0,"message":{"role":"assistant","content":"'
                + text
                + b'","refusal":null,"annotations":null,"audio":null,"function_call":null,"reasoning":null},'
                + finish
                + b',"routed_experts":null}]'
            )
            extra = b',"prompt_logprobs":null,"prompt_token_ids":null,"prompt_text":null'
        else:
            tail = b',"prompt_logprobs":null,"prompt_token_ids":null,"routed_experts":null}]'
            choice = b'{"index":0,"text":"' + text + b'",' + finish + tail
            extra = b""
        usage = self._usage(count) + b',"prompt_tokens_details":null,"completion_tokens_details":null}'
        return b"".join(
            (
                *(self._head, choice, b',"service_tier":null,"system_fingerprint":"', FINGERPRINT.encode()),
                *(b'","usage":', usage, extra),
                b',"kv_transfer_params":null,"ec_transfer_params":null,"metrics":null}',
            )
        )

    def _usage(self, count: int) -> bytes:
        """An open object, for what may follow."""
        total = self._prompt_tokens + count
        return b'{"prompt_tokens":%d,"total_tokens":%d,"completion_tokens":%d' % (self._prompt_tokens, total, count)

    def _running_usage(self, count: int) -> bytes:
        if not self._parsed.continuous_usage:
            return b""
        return b',"usage":' + self._usage(count) + b',"completion_tokens_details":null}'
