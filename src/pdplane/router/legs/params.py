"""The params dialect: what each leg carries, and what prefill's answer hands over.

The legs leave in turn. Prefill's is the client's body cut down to one token that is thrown away; its answer names the
KV that prefill holds, in `kv_transfer_params`. Decode's is the client's body as it was with that object, byte for byte:
but for the name, the number and the lease of what is held, nobody here reads it.

Both legs must see the same tokens. Our own workers compare a digest. Others are made to: prefill is asked for the ids
of its prompt (`return_token_ids`), and decode gets ids in place of text, where its interface has a place for them.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from pdplane.core.attempts import PREFILL
from pdplane.core.ids import Rid
from pdplane.wire.body import NOT_JSON

from ..body import Body
from ..upstream import Leg, unframed

MAX_HANDOFF_BYTES = 16 * 1024 * 1024
CHAT: Final = "/v1/chat/completions"

_NOTHING = msgspec.Raw(b"")
_NULLS = (b"", b"null")
_ONE = msgspec.Raw(b"1")
_FALSE = msgspec.Raw(b"false")
_TRUE = msgspec.Raw(b"true")
_REMOTE_DECODE = msgspec.Raw(
    b'{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,"remote_block_ids":null,'
    b'"remote_host":null,"remote_port":null}'
)
_NOT_FOR_PREFILL = ("stream_options", "min_tokens", "min_completion_tokens")
_encode = msgspec.json.Encoder().encode

Fields = dict[str, msgspec.Raw]


class Handoff(msgspec.Struct, frozen=True, gc=False):
    """What prefill's answer said of the KV that it holds. `raw`: its `kv_transfer_params`, opaque, as they came.

    `request_id`: by which prefill lets the hold go; `number`: of the hold, where our own prefill says one; `lease_s`:
    left when it answered; `prompt_ids`: a JSON list, empty where it was not asked for or told none.
    """

    raw: bytes
    request_id: str
    number: int | None
    lease_s: float
    prompt_ids: bytes = b""


class _Params(msgspec.Struct):
    remote_block_ids: msgspec.Raw = _NOTHING
    remote_request_id: str = ""
    pd_grant: int | None = None
    pd_lease_s: float | None = None


class _Choice(msgspec.Struct):
    prompt_token_ids: msgspec.Raw = _NOTHING


class _Answer(msgspec.Struct):
    kv_transfer_params: msgspec.Raw = _NOTHING
    prompt_token_ids: msgspec.Raw = _NOTHING
    choices: list[_Choice] | None = None


_answer = msgspec.json.Decoder(_Answer)
_params = msgspec.json.Decoder(_Params)


def read_handoff(body: bytes, lease_s: float) -> Handoff | None:
    """None: no params, or no blocks in them, so that there is nothing to fetch. `lease_s`: where the answer names none.
    Raises one of NOT_JSON: not an answer of this dialect."""
    answer = _answer.decode(body)
    raw = bytes(answer.kv_transfer_params)
    if raw in _NULLS:
        return None
    params = _params.decode(raw)
    if params.pd_grant is None and _empty(params.remote_block_ids):
        return None
    ids = bytes(answer.prompt_token_ids)
    if ids in _NULLS and answer.choices:
        ids = bytes(answer.choices[0].prompt_token_ids)
    left_s = lease_s if params.pd_lease_s is None else params.pd_lease_s
    return Handoff(raw, params.remote_request_id, params.pd_grant, left_s, b"" if ids in _NULLS else ids)


def _empty(block_ids: msgspec.Raw) -> bool:
    """Of a list of lists: no number in it."""
    return bytes(block_ids) in _NULLS or not bytes(block_ids).strip(b"[], \t\r\n")


# --- bodies ---------------------------------------------------------------------------------------------------------


def mint_rids(request_id: str, sample: int, attempt: int) -> tuple[Rid, Rid]:
    """``<request>.<sample>.<leg>``, legs numbered over the attempts: prefill's and decode's. No comma, no address."""
    return Rid(f"{request_id}.{sample}.{2 * attempt}"), Rid(f"{request_id}.{sample}.{2 * attempt + 1}")


def for_prefill(body: Body, named: Fields, *, ask_ids: bool) -> bytes:
    """Prefill's body. `named`: fields of ours that go with it."""
    fields = body.fields()
    for name in _NOT_FOR_PREFILL:
        fields.pop(name, None)
    fields["stream"] = _FALSE
    fields["max_tokens"] = _ONE
    if "max_completion_tokens" in fields:
        fields["max_completion_tokens"] = _ONE
    if ask_ids:
        fields["return_token_ids"] = _TRUE
    return _encode(fields | {"kv_transfer_params": _REMOTE_DECODE} | named)


def for_decode(body: Body, named: Fields, handoff: Handoff | None, *, chat: bool) -> bytes:
    """Decode's body; without a hand-off it computes the prompt itself."""
    if handoff is None:
        return body.with_fields(named)
    params = handoff.raw
    if handoff.prompt_ids and not chat:
        fields = body.fields()
        fields["prompt"] = msgspec.Raw(handoff.prompt_ids)
        return _encode(fields | {"kv_transfer_params": msgspec.Raw(params)} | named)
    if handoff.prompt_ids:
        end = params.rindex(b"}")
        params = b'%b,"prompt_token_ids":%b}' % (params[:end].rstrip(), handoff.prompt_ids)
    return body.with_fields({"kv_transfer_params": msgspec.Raw(params)} | named)


def takes_ids(body: Body, *, chat: bool) -> bool:
    """Whether decode may be given ids in place of this prompt: not where the text is to be echoed, nor where it has no
    ids (embeddings, messages that hold more than text)."""
    try:
        asked = _asked.decode(body.plain())
    except NOT_JSON:
        return False  # what is wrong with it is prefill's to say
    if asked.echo not in (None, False) or asked.prompt_embeds is not None:
        return False
    if not chat:
        return True
    return all(message.content.__class__ is not list or _all_text(message.content) for message in asked.messages or ())


class _Message(msgspec.Struct):
    content: Any = None


class _Asked(msgspec.Struct):
    echo: Any = None
    prompt_embeds: Any = None
    messages: list[_Message] | None = None


_asked = msgspec.json.Decoder(_Asked)


def _all_text(parts: list[Any]) -> bool:
    return all(part.__class__ is str or (part.__class__ is dict and part.get("type") == "text") for part in parts)


# --- the leg ------------------------------------------------------------------------------------------------------


class HandoffLeg(Leg):
    """Prefill's: its whole answer is kept, and is the hand-off."""

    __slots__ = ()

    side = PREFILL

    def _received(self, data: bytes) -> None:
        if not 200 <= self.status < 300:
            self._hold(data)
            if self.complete and self.exchange is not None:
                self._refused()
            return
        self.held = self.held + data if self.held else data
        if len(self.held) > MAX_HANDOFF_BYTES:
            self._fail("upstream_garbled", f"sent an answer over {MAX_HANDOFF_BYTES} bytes")
        elif self.complete:
            exchange, attempt, body = self.exchange, self.attempt, unframed(self.held)
            assert exchange is not None
            self._free()
            exchange.prefill_answered(attempt, body)
