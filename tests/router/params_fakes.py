"""Small workers of the params dialect: ours, and native vLLM's."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
from collections.abc import AsyncIterator
from typing import Any

from .router_fakes import TIMEOUT_S, Asked, Behaviour, FakeWorker, Fleet, fleet

NULLS = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
_grants = itertools.count(1)


def handed_over(asked: Asked, *, lease_s: float | None = 30.0, **more: Any) -> dict[str, Any]:
    """What one of our prefills answers for this leg."""
    params: dict[str, Any] = {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": "i-1",
        "remote_block_ids": [[3, 1, 2]],
        "remote_request_id": asked.headers["x-request-id"],
        "remote_host": "127.0.0.1",
        "remote_port": 5600,
        "tp_size": 1,
        "remote_num_tokens": 33,
        "pd_grant": next(_grants),
    }
    if lease_s is not None:
        params["pd_lease_s"] = lease_s
    return params | more


def holding(**more: Any) -> Behaviour:
    """A prefill that answers at once, and holds."""
    return lambda asked: asked.reply(200, {"id": "p", "choices": [], "kv_transfer_params": handed_over(asked, **more)})


def nothing_held(params: Any) -> Behaviour:
    return lambda asked: asked.reply(200, {"id": "p", "choices": [], "kv_transfer_params": params})


def in_order(*behaviours: Behaviour) -> Behaviour:
    """One after the other; the last one stays."""
    turns = iter(behaviours)
    last = behaviours[-1]

    def behave(asked: Asked) -> None:
        next(turns, last)(asked)

    return behave


class ParamsWorker(FakeWorker):
    """Ours. `releases` are the calls that let holds go; `known` says whether it still has them."""

    release_status = 200
    known = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self.releases: asyncio.Queue[list[str]] = asyncio.Queue()
        self.info = {"dialect": "params", **self.info}

    async def released(self) -> list[str]:
        return await asyncio.wait_for(self.releases.get(), TIMEOUT_S)

    async def _answer(self, asked: Asked, reader: asyncio.StreamReader) -> None:
        if asked.path != "/v1/kv/release":
            await super()._answer(asked, reader)
            return
        ids = asked.body["request_ids"]
        self.releases.put_nowait(ids)
        asked.reply(self.release_status, {"released": ids, "unknown": []} if self.known else {"unknown": ids})


class VllmWorker(FakeWorker):
    """Native: health and models; `has_abort` says whether it was started with the call that ends requests."""

    has_abort = True
    max_model_len = 1024
    owned_by = "vllm"
    model = "m"
    aliases: tuple[str, ...] = ()
    key = ""  # guards what is under /v1

    async def _answer(self, asked: Asked, reader: asyncio.StreamReader) -> None:
        if self.key and asked.path.startswith("/v1/") and asked.headers.get("authorization") != f"Bearer {self.key}":
            asked.reply(401, {"error": "Unauthorized"})
        elif asked.path == "/v1/models":
            names = (self.model, *self.aliases)
            told = [{"id": name, "owned_by": self.owned_by, "max_model_len": self.max_model_len} for name in names]
            asked.reply(200, {"object": "list", "data": told})
        elif asked.path == "/inference/v1/abort_requests":
            self.aborts.put_nowait(asked.body)
            asked.reply(200 if self.has_abort else 404, {"aborted": 1})
        elif asked.path in ("/health", "/v1/completions", "/v1/chat/completions"):
            await super()._answer(asked, reader)
        else:
            asked.reply(404, {"detail": "Not Found"})


def vllm_error(status: int = 500) -> bytes:
    """As vLLM words whatever went wrong inside."""
    error = {"message": "Internal server error", "type": "InternalServerError", "param": None, "code": status}
    return json.dumps({"error": error}).encode()


@contextlib.asynccontextmanager
async def params_fleet(
    prefills: int = 1,
    decodes: int = 1,
    *,
    prefill: Behaviour | None = None,
    decode: Behaviour | None = None,
    **more: Any,
) -> AsyncIterator[Fleet]:
    """Ours, whose prefill holds at once unless it is told otherwise."""
    chosen = prefill or holding()
    async with fleet(prefills, decodes, prefill=chosen, decode=decode, kind=ParamsWorker, **more) as it:
        yield it


@contextlib.asynccontextmanager
async def vllm_fleet(
    prefills: int = 1,
    decodes: int = 1,
    *,
    prefill: Behaviour | None = None,
    decode: Behaviour | None = None,
    **more: Any,
) -> AsyncIterator[Fleet]:
    settings = {"backend": "vllm", **more}
    async with fleet(prefills, decodes, prefill=prefill, decode=decode, kind=VllmWorker, **settings) as it:
        yield it


def prefill_of(it: Fleet) -> ParamsWorker:
    assert isinstance(it.prefill, ParamsWorker)
    return it.prefill
