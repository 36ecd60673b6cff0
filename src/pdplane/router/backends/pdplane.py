"""Our own workers, of either dialect: they say all of themselves in ``/server_info``, and take calls by rid."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from pdplane.core.attempts import DECODE, HANDOFF, Failure
from pdplane.core.errors import Cause
from pdplane.core.ids import Shape
from pdplane.core.layout import Stamp
from pdplane.wire.body import NOT_JSON
from pdplane.wire.registry import MAX_RANKS

from ..refusals import refusal
from ..upstream import Leg, WorkerAnswer
from ..worker import PARAMS, ROOMS, Limits, Worker
from . import EndedLeg, Get, StopCall

FOLLOWS_ROOM = frozenset({"", "auto", "follow_bootstrap_room"})
"""Of a prefill's dispatch, as it names it: room % dp is the rank. `auto` is resolved to that at a prefill."""

HOLD_LOST = frozenset({"spent", "expired", "unknown_hold", "wrong_instance"})
"""Decode's word that prefill no longer holds what it answered: another hand-off may go well, whoever makes it."""
HANDOFF_WRONG = frozenset({"invalid_params", "prompt_mismatch"})
"""Decode's word that the hand-off itself is wrong: the next one would be too."""

Size = Annotated[int, msgspec.Meta(ge=1, le=MAX_RANKS)]


class Pdplane:
    name = "pdplane"
    names_in_body = True
    hands_over_ids = False
    early_heads = False
    releases = True

    async def look(self, worker: Worker, get: Get) -> str:
        status, body = await get("/server_info")
        if status == 404:
            return "has no /server_info, so it is no pdplane worker; name native engines by --backend sglang or vllm"
        return take(worker, body) if status == 200 else ""

    def stop_calls(self, ended: EndedLeg, cause: Cause) -> list[StopCall]:
        calls = abort_calls(ended, cause)
        return [*calls, *(self.release_call(rid) for rid in ended.rids)] if ended.may_hold else calls

    def release_call(self, request_id: str) -> StopCall:
        return StopCall("/v1/kv/release", msgspec.json.encode({"request_ids": [request_id]}))

    def refusal(self, leg: Leg, said: WorkerAnswer, handed_over: bool) -> Failure:
        """What decode says of a hand-off is no answer to a client, who has sent none."""
        failure = refusal(leg, said)
        cause = failure.cause
        if not handed_over or leg.side != DECODE or cause.code not in HOLD_LOST | HANDOFF_WRONG:
            return failure
        lost = cause.code in HOLD_LOST
        told = msgspec.structs.replace(cause, status=502, retryable=lost, param=None)
        return Failure(cause=told, blames=HANDOFF if lost else "")


def abort_calls(ended: EndedLeg, cause: Cause) -> list[StopCall]:
    """A call per sample, by exact rid (and room)."""
    why = {"code": cause.code, "message": cause.message}
    rooms = ended.rooms or (None,) * len(ended.rids)
    return [
        StopCall(
            "/abort_request", msgspec.json.encode({"rid": rid, "room": room, "abort_all": False, "cause": why})
        )
        for rid, room in zip(ended.rids, rooms, strict=True)
    ]  # fmt: skip


class ServerInfo(msgspec.Struct):
    """What is read of ``/server_info``; native engines' names beside ours. All else is ignored."""

    role: str = ""
    disaggregation_mode: str = ""
    model: str = ""
    served_model_name: str = ""
    dialect: str = ROOMS
    stamp: dict[str, Any] | None = None
    limits: Limits = msgspec.field(default_factory=Limits)
    bootstrap_port: int | None = None
    disaggregation_bootstrap_port: int | None = None
    instance: str = ""
    shape: dict[str, Size] | None = None  # by axis
    dp_size: int | None = None
    tp_size: int | None = None
    pp_size: int | None = None
    decode_allocation_policy: str = ""
    load_balance_method: str | None = None
    transports: object = None
    draining: bool | str | None = None

    def group(self) -> Shape:
        """`shape`, or what the field's names say."""
        if self.shape is not None:
            return Shape(**{axis: size for axis, size in self.shape.items() if axis in Shape.__struct_fields__})
        dp, tp, pp = (min(max(size or 1, 1), MAX_RANKS) for size in (self.dp_size, self.tp_size, self.pp_size))
        return Shape(dp=dp, tp=tp, pp=pp)


_info = msgspec.json.Decoder(ServerInfo)


def take(worker: Worker, body: bytes) -> str:
    """Take over what a worker says of itself in ``/server_info``; why it cannot serve, or ""."""
    try:
        info = _info.decode(body)
        stamp = msgspec.convert(info.stamp, Stamp) if info.stamp is not None else None
    except NOT_JSON as error:
        return f"/server_info cannot be read: {error}"
    if info.dialect not in (ROOMS, PARAMS):
        return f"speaks the dialect {info.dialect!r}, and this router {ROOMS} and {PARAMS}; run the same release"
    if info.instance != worker.instance or info.dialect != worker.dialect:
        worker.born_again()
    worker.instance, worker.stamp, worker.limits = info.instance, stamp, info.limits
    worker.dialect = info.dialect
    worker.model = info.model or info.served_model_name or (stamp.model if stamp else "")
    worker.set_shape(info.group(), pins_ranks=(info.load_balance_method or "") not in FOLLOWS_ROOM)
    worker.policy = info.decode_allocation_policy if stamp is not None else ""
    worker.transports = info.transports
    worker.draining = worker.draining or words(info.draining)
    given = worker.address.bootstrap_port
    told = info.disaggregation_bootstrap_port if info.bootstrap_port is None else info.bootstrap_port
    worker.set_bootstrap(told if given is None else given)
    role = info.role or info.disaggregation_mode
    if role and role not in (worker.role, "null"):
        return f"is a {role} worker, but is listed as {worker.role}"
    return ""


def words(draining: bool | str | None) -> str:
    """Why a worker takes nothing new; "" where it does."""
    return "it takes nothing new" if draining is True else draining or ""
