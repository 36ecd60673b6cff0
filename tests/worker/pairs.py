"""A prefill and a decode of the params dialect without a router, and the two legs by hand."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import httpx

from .fleets import COMPLETIONS, QUICK, Member, member, until

HOLD = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None}


class Pair:
    def __init__(self, prefill: Member, decode: Member, whole: Member) -> None:
        self.prefill, self.decode, self.whole = prefill, decode, whole

    async def hold(self, body: dict[str, Any], path: str = COMPLETIONS, **more: Any) -> httpx.Response:
        """The first leg, as routers send it."""
        leg = {**body, "stream": False, "max_tokens": 1, "kv_transfer_params": {**HOLD, **more}}
        leg.pop("stream_options", None)
        return await self.prefill.post(path, leg)

    async def params(self, body: dict[str, Any], path: str = COMPLETIONS) -> dict[str, Any]:
        """What prefill answers to the first leg."""
        answer = await self.hold(body, path)
        assert answer.status_code == 200, answer.text
        told: dict[str, Any] = answer.json()["kv_transfer_params"]
        return told

    async def read(self, body: dict[str, Any], params: Any, path: str = COMPLETIONS) -> httpx.Response:
        """The second leg."""
        return await self.decode.post(path, {**body, "kv_transfer_params": params})

    async def both(self, body: dict[str, Any], path: str = COMPLETIONS) -> httpx.Response:
        return await self.read(body, await self.params(body, path), path)

    async def at_rest(self) -> None:
        members = (self.prefill, self.decode, self.whole)
        await until(lambda: all(one.idle for one in members))
        for one in members:
            assert [shell.audit() for shell in one.shells] == [[]] * len(one.shells)


@contextlib.asynccontextmanager
async def pair(
    *, prefill: dict[str, Any] | None = None, decode: dict[str, Any] | None = None, **both: Any
) -> AsyncIterator[Pair]:
    """`both`: settings of prefill and decode. The aggregated worker beside them is the yardstick."""
    shared = {"dialect": "params", **QUICK, **both}
    async with (
        member("prefill", **{**shared, **(prefill or {})}) as left,
        member("decode", **{**shared, **(decode or {})}) as right,
        member("aggregated", **({"model": both["model"]} if "model" in both else {})) as whole,
    ):
        made = Pair(left, right, whole)
        yield made
        for one in (left, right, whole):
            one.let_go()
