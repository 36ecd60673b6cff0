"""`kv_transfer_params`: what prefill answers when it holds a prompt's KV, and what of it decode needs to read that.

The fields are vLLM's (its NIXL pull connector), so that its routers pass them on; those with `pd_` are ours, and others
ignore them. A router changes nothing here: decode judges what comes, and every refusal names field and remedy.

A `pd_` field is what makes a hand-off safe: the number of the hold (never reused), the instance that held it, and the
prompt by digest and count. What a native vLLM prefill answers has none of them, and cannot be read by these workers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated

import msgspec
from msgspec import Meta

from pdplane.core.effects import AnswerHeld
from pdplane.core.errors import Refused, bad_request
from pdplane.core.events import ControlEndpoint, Handle
from pdplane.core.frames import PromptId
from pdplane.core.ids import HoldNo, Instance, PageId, Rank, Rid, Shape
from pdplane.core.layout import pages_for

from .body import NOT_JSON, convert

FIELD = "kv_transfer_params"
INVALID = "invalid_params"
PULL = "pull"
DIGEST_BYTES = 16
UNCHANGED = "pass on what prefill answered, unchanged, or leave kv_transfer_params out to have the prompt computed here"
ASK_TO_HOLD = (
    'send "kv_transfer_params": {"do_remote_decode": true} to prefill and what it answers to decode; a router does both'
)

_Block = Annotated[int, Meta(ge=0, le=2**31 - 1)]
_Port = Annotated[int, Meta(ge=1, le=65_535)]
_Size = Annotated[int, Meta(ge=1, le=4096)]
_Tokens = Annotated[int, Meta(ge=1, le=2**31 - 1)]
_Count = Annotated[int, Meta(ge=0, le=2**31 - 1)]


class KVTransferParams(msgspec.Struct, frozen=True, kw_only=True):
    """Prefill's answer, in the order in which it is written. `remote_block_ids`: one list per KV cache group, of which
    there is one. `remote_port` is the first of `pd_ports`, the control ports of the ranks of dp group `pd_dp`."""

    do_remote_prefill: bool
    do_remote_decode: bool
    remote_engine_id: Annotated[str, Meta(min_length=1, max_length=128)]
    remote_block_ids: list[list[_Block]]
    remote_request_id: Annotated[str, Meta(min_length=1, max_length=1024)]
    remote_host: Annotated[str, Meta(min_length=1, max_length=255)]
    remote_port: _Port
    tp_size: _Size
    dcp_size: _Size = 1
    pp_size: _Size = 1
    remote_num_tokens: _Tokens
    remote_blocks_expiry_time: float | None = None
    transfer_mode: str = PULL
    remote_prefill_cached_tokens: _Count = 0
    pd_grant: Annotated[int, Meta(ge=1, le=2**63 - 1)]
    pd_prompt_digest: str
    pd_num_tokens: _Tokens
    pd_lease_s: Annotated[float, Meta(ge=0)]
    pd_instance: str
    pd_ports: list[_Port]
    pd_dp: Annotated[int, Meta(ge=0, le=4095)]
    pd_dp_size: _Size = 1
    pd_page_size: _Size


class HandOff(msgspec.Struct, frozen=True):
    """What decode reads of it. `cached_tokens`: what prefill had in its own cache."""

    handle: Handle
    cached_tokens: int


def answered(
    held: AnswerHeld, *, instance: Instance, host: str, ports: Sequence[int], shape: Shape, dp: int, page_size: int
) -> KVTransferParams:
    """What names this hold to whoever reads it. `ports`: of each tensor parallel rank of dp group `dp`."""
    return KVTransferParams(
        do_remote_prefill=True,
        do_remote_decode=False,
        remote_engine_id=instance,
        remote_block_ids=[list(held.pages)],
        remote_request_id=held.rid,
        remote_host=host,
        remote_port=ports[0],
        tp_size=shape.tp,
        remote_num_tokens=held.row.prompt_tokens,
        remote_prefill_cached_tokens=held.row.cached_tokens,
        pd_grant=held.hold,
        pd_prompt_digest=held.row.prompt_digest.hex(),
        pd_num_tokens=held.row.prompt_tokens,
        pd_lease_s=round(held.lease_s, 3),
        pd_instance=instance,
        pd_ports=list(ports),
        pd_dp=dp,
        pd_dp_size=shape.dp,
        pd_page_size=page_size,
    )


def check_asked_to_hold(raw: object) -> None:
    """Prefill's leg. Raises Refused (400) where it does not ask that the KV be held, or names KV to be read first."""
    fields = _fields(raw, ASK_TO_HOLD) if raw is not None else {}
    if _flag(fields, "do_remote_prefill", ASK_TO_HOLD):
        raise _bad("do_remote_prefill", "is true, and this is a prefill worker: it reads nobody's KV", ASK_TO_HOLD)
    if not _flag(fields, "do_remote_decode", ASK_TO_HOLD):
        raise _bad("do_remote_decode", "is not true: this prefill worker serves one leg of a pair", ASK_TO_HOLD)
    named = _named(fields)
    if named:
        text = "names KV of an earlier turn to be read back, which these workers do not support"
        raise _bad(named, text, "leave it null, and the prompt is computed here")


def read_hand_off(raw: object) -> HandOff | None:
    """Decode's leg: what it is to read; None where it is to compute the prompt itself. Raises Refused (400)."""
    fields = _fields(raw, UNCHANGED) if raw is not None else {}
    if _flag(fields, "do_remote_decode", UNCHANGED):
        text = "is true, and this is a decode worker: it holds nothing for others"
        raise _bad("do_remote_decode", text, ASK_TO_HOLD)
    if not _flag(fields, "do_remote_prefill", UNCHANGED):
        if named := _named(fields):
            raise _bad("do_remote_prefill", f"is not true, and yet {named} names KV to be read", UNCHANGED)
        return None
    _check_native(fields)
    _check_blocks(fields)
    return _hand_off(_read(fields))


class _Body(msgspec.Struct):
    kv_transfer_params: object = None


_BODY = msgspec.json.Decoder(_Body)


def handles_in(body: bytes) -> list[Handle]:
    """The hand-off that a body names which was refused for whatever reason, if it can be read: one at most."""
    try:
        told = read_hand_off(_BODY.decode(body).kv_transfer_params)
    except (*NOT_JSON, Refused):
        return []
    return [told.handle] if told else []


def reused_tokens(raw: object) -> list[int] | None:
    """The prompt's token ids, where a router has had them from the other leg (`prompt_token_ids`; vLLM's way to make
    sure that both see the same). Raises Refused (400); the vocabulary is the caller's to check."""
    if not isinstance(raw, Mapping) or raw.get("prompt_token_ids") is None:
        return None
    try:
        ids = convert(raw["prompt_token_ids"], list[_Count], f"{FIELD}.prompt_token_ids")
    except Refused as refused:
        remedy = "send the ids that the other leg answered, or leave it out"
        raise _bad("prompt_token_ids", _after_colon(refused), remedy) from None
    if not ids:
        raise _bad("prompt_token_ids", "is empty", "send the ids that the other leg answered, or leave it out")
    return ids


# --- one by one ---------------------------------------------------------------------------------------------------


def _fields(raw: object, remedy: str) -> Mapping[str, object]:
    if not isinstance(raw, Mapping):
        text = f"{FIELD} must be an object or null, got {_shown(raw)}; {remedy}"
        raise Refused(bad_request(text, code=INVALID, param=FIELD))
    return raw


def _flag(fields: Mapping[str, object], name: str, remedy: str) -> bool:
    value = fields.get(name)
    if value is not None and not isinstance(value, bool):
        raise _bad(name, f"must be true or false, got {_shown(value)}", remedy)
    return bool(value)


def _named(fields: Mapping[str, object]) -> str:
    """The first field that names KV at a peer; "" where there is none."""
    return next((name for name, value in fields.items() if name.startswith("remote_") and value is not None), "")


def _check_native(fields: Mapping[str, object]) -> None:
    """What a native vLLM answered says nothing by which a read could be shown to be right."""
    missing = [name for name in _OURS if fields.get(name) is None]
    if len(missing) == len(_OURS):
        text = (
            f"{FIELD} has none of {', '.join(_OURS)}: it is not what a prefill worker of ours answered. A native vLLM "
            "prefill pairs with a native vLLM decode only; give this router prefills of the same kind as its decodes"
        )
        raise Refused(bad_request(text, code=INVALID, param=f"{FIELD}.{_OURS[0]}"))


def _check_blocks(fields: Mapping[str, object]) -> None:
    """As many blocks as the prompt has, before any of them is looked at."""
    groups = fields.get("remote_block_ids")
    if not isinstance(groups, Sequence) or isinstance(groups, str) or not all(isinstance(one, list) for one in groups):
        raise _bad("remote_block_ids", f"must be a list of one list of block ids, got {_shown(groups)}", UNCHANGED)
    if len(groups) != 1:
        raise _bad("remote_block_ids", f"has {len(groups)} KV cache groups, and these workers have one", UNCHANGED)
    tokens, size = fields.get("pd_num_tokens"), fields.get("pd_page_size")
    if not (_whole(tokens) and _whole(size)):
        return  # and is refused as that
    assert isinstance(tokens, int)
    assert isinstance(size, int)
    need, [blocks] = pages_for(tokens, size), groups
    if len(blocks) != need:
        text = f"has {len(blocks)} blocks, and {tokens} tokens in blocks of {size} need {need}"
        raise _bad("remote_block_ids", text, UNCHANGED)


def _read(fields: Mapping[str, object]) -> KVTransferParams:
    try:
        return convert(dict(fields), KVTransferParams, FIELD)
    except Refused as refused:
        cause = refused.cause
        raise Refused(bad_request(f"{cause.message}; {UNCHANGED}", code=INVALID, param=cause.param)) from None


def _hand_off(params: KVTransferParams) -> HandOff:
    _check_whole(params)
    ranks = [Rank(dp=params.pd_dp, tp=tp) for tp in range(params.tp_size)]
    ports = [ControlEndpoint(params.remote_host, port) for port in params.pd_ports]
    handle = Handle(
        instance=Instance(params.pd_instance),
        hold=HoldNo(params.pd_grant),
        pages=tuple(PageId(page) for page in params.remote_block_ids[0]),
        prompt=PromptId(_digest(params.pd_prompt_digest), params.pd_num_tokens),
        endpoints=tuple(zip(ranks, ports, strict=True)),
        shape=Shape(dp=params.pd_dp_size, cp=params.dcp_size, tp=params.tp_size, pp=params.pp_size),
        dp=params.pd_dp,
        lease_s=params.pd_lease_s,
        rid=Rid(params.remote_request_id),
    )
    return HandOff(handle, params.remote_prefill_cached_tokens)


def _check_whole(params: KVTransferParams) -> None:
    """What its fields say of each other."""
    [blocks], ports = params.remote_block_ids, params.pd_ports
    if len(set(blocks)) != len(blocks):
        raise _bad("remote_block_ids", "names a block twice", UNCHANGED)
    if params.transfer_mode != PULL:
        text = f"is {_shown(params.transfer_mode)}: decode reads here, so that only {PULL!r} can be"
        raise _bad("transfer_mode", text, "start prefill as a worker of ours")
    if params.remote_num_tokens != params.pd_num_tokens:
        text = f"is {params.remote_num_tokens}, and pd_num_tokens is {params.pd_num_tokens}"
        raise _bad("remote_num_tokens", text, UNCHANGED)
    if params.remote_prefill_cached_tokens > params.pd_num_tokens:
        text = f"is {params.remote_prefill_cached_tokens} of {params.pd_num_tokens} tokens"
        raise _bad("remote_prefill_cached_tokens", text, UNCHANGED)
    if params.pd_instance != params.remote_engine_id:
        text = f"is {params.pd_instance!r}, and remote_engine_id is {params.remote_engine_id!r}"
        raise _bad("pd_instance", text, UNCHANGED)
    if len(ports) != params.tp_size or len(set(ports)) != len(ports) or ports[0] != params.remote_port:
        text = f"is {_shown(ports)}: it must name a port for each of {params.tp_size} ranks, remote_port first"
        raise _bad("pd_ports", text, UNCHANGED)
    if params.pd_dp >= params.pd_dp_size:
        raise _bad("pd_dp", f"is {params.pd_dp} of {params.pd_dp_size} dp groups, numbered from 0", UNCHANGED)
    if not math.isfinite(params.pd_lease_s):
        raise _bad("pd_lease_s", "is no number of seconds", UNCHANGED)


def _digest(text: str) -> bytes:
    try:
        digest = bytes.fromhex(text)
    except ValueError:
        digest = b""
    if len(digest) != DIGEST_BYTES or len(text) != 2 * DIGEST_BYTES:
        raise _bad("pd_prompt_digest", f"must be {2 * DIGEST_BYTES} hex digits, got {_shown(text)}", UNCHANGED)
    return digest


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _bad(name: str, what: str, remedy: str) -> Refused:
    return Refused(bad_request(f"{FIELD}.{name} {what}; {remedy}", code=INVALID, param=f"{FIELD}.{name}"))


def _after_colon(refused: Refused) -> str:
    return refused.cause.message.partition(": ")[2]


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


_OURS = tuple(
    field.name for field in msgspec.structs.fields(KVTransferParams) if field.name.startswith("pd_") and field.required
)
