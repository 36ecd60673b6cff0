"""Native SGLang engines: rooms, no stamp, and the older name of ``/server_info`` where they lack the newer."""

from __future__ import annotations

from pdplane.core.attempts import Failure
from pdplane.core.errors import Cause

from ..refusals import refusal
from ..upstream import Leg, WorkerAnswer
from ..worker import Worker
from . import EndedLeg, Get, StopCall
from .pdplane import abort_calls, take


class Sglang:
    name = "sglang"
    names_in_body = True
    hands_over_ids = False
    early_heads = False
    releases = False

    async def look(self, worker: Worker, get: Get) -> str:
        for path in ("/server_info", "/get_server_info"):
            status, body = await get(path)
            if status == 200:
                return take(worker, body)
        if status == 404:
            return "has no /server_info nor /get_server_info, so it is no SGLang engine; see --backend"
        return ""

    def stop_calls(self, ended: EndedLeg, cause: Cause) -> list[StopCall]:
        return abort_calls(ended, cause)

    def release_call(self, request_id: str) -> StopCall:
        raise NotImplementedError("a room is no hold")

    def refusal(self, leg: Leg, said: WorkerAnswer, handed_over: bool) -> Failure:
        return refusal(leg, said)
