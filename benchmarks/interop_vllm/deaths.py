"""An engine of the pair is killed and comes back; a decode is told of an engine that is not there."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple, Protocol

import httpx
from asked import LIMIT_S, PATHS, Told, ask, told
from client import Call, post
from leaving import Pair
from prompts import Writer
from rows import Rows
from sides import MODEL, Side

NOTICED_WITHIN_S = 30.0
READY_WITHIN_S = 60.0
ASKS_PREFILL = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


class Server(Protocol):
    """`kill` is SIGKILL; after `start` it listens where it did before; `ready`: seconds until it served again."""

    @property
    def url(self) -> str: ...

    def kill(self) -> None: ...

    def start(self) -> None: ...

    async def ready(self) -> float: ...


class Promises(NamedTuple):
    """What holds of a kind of engine. `typed`: its own errors have a code, and say a request's fault with a 4xx;
    `releases`: prefill lets a hold go when it is told to; `free_within_s`: the living side's blocks, of a dead peer."""

    typed: bool
    releases: bool
    free_within_s: float


class Deaths:
    """`single`: URL of the one server whose texts are right. `seen`: what the tables at the end say of it."""

    def __init__(
        self, rows: Rows, servers: dict[str, Server], single: str, pair: Pair, promises: Promises, writer: Writer
    ) -> None:
        self._rows, self._servers, self._single, self._pair = rows, servers, single, pair
        self._promises, self._writer = promises, writer
        self._engine = ""  # prefill's id, as it says it itself
        self.seen: dict[str, str] = {}

    async def run(self) -> None:
        """Lies first: they need live engines."""
        await self._lies_to_decode()
        await self._lies_through_router()
        await self._killed("decode", self._pair.prefill, _streams)
        await self._killed("prefill", self._pair.decode, _prefill_asked)

    def _add(self, tried: str, wanted: str, got: str, ok: bool) -> None:
        self.seen[tried] = got
        self._rows.add(tried, wanted, got, ok)

    # --- an engine that is not there ------------------------------------------------------------------------------

    async def _lies_to_decode(self) -> None:
        body, prefill = self._body(60, 16), self._servers["prefill"].url
        params = await _hand_off(prefill, body)
        self._engine = str(params["remote_engine_id"])
        wrong = {**params, "remote_engine_id": other_engine(self._engine)}
        answer = await ask(self._servers["decode"].url, "completions", {**body, "kv_transfer_params": wrong})
        wanted = "4xx with a code, no text" if self._promises.typed else "an error, no text"
        right = _refused(answer) and (not self._promises.typed or (answer.status < 500 and has_code(answer)))
        self._add("decode itself told a wrong engine id", wanted, _in_time(answer), right)
        if self._promises.releases:
            await self._let_go(prefill, params["remote_request_id"])
        await self._right_again("a wrong engine id at decode")

    async def _let_go(self, prefill: str, request_id: str) -> None:
        """Nobody came for it, and prefill is told so."""
        held = await self._pair.prefill.used()
        _, answer = await post(prefill, "/v1/kv/release", {"request_ids": [request_id]})
        left = await self._pair.prefill.used()
        got = f"{held} blocks held, {left} after it; released {len(answer['released'])}"
        self._add("prefill told to let that hold go", "free", got, held > 0 and not left)

    async def _lies_through_router(self) -> None:
        truth, lie = self._engine.encode(), other_engine(self._engine).encode()
        self._pair.prefill_gate.reset(rewrite=lambda data: data.replace(truth, lie))
        answer = await ask(self._pair.front, "completions", self._body(60, 16))
        self._pair.reset()
        right = _refused(answer) and has_code(answer)
        self._add("a prefill that lies about its engine id", "a typed error, no text", _in_time(answer), right)
        await self._right_again("a lying prefill")

    # --- an engine that dies --------------------------------------------------------------------------------------

    async def _killed(self, role: str, other: Side, comes: Callable[[Pair, Call], Awaitable[None]]) -> None:
        """Killed in the midst of a request. Then it comes back, on the same ports."""
        victim = self._servers[role]
        call, late_s = await self._lose(victim, comes)
        typed = bool(call.error.get("code")) and "retryable" in call.error
        before = f"{call.status} and {call.tokens} tokens, then " if call.status == 200 else f"{call.status} "
        retryable = f" (retryable: {str(call.error['retryable']).lower()})" if typed else ""
        self._add(
            f"{role} killed in the midst of a request",
            f"a typed error within {NOTICED_WITHIN_S:g} s",
            f"{before}{told(call).error[:120]}{retryable} after {late_s:.1f} s",
            typed and late_s < NOTICED_WITHIN_S,
        )
        await self._freed(role, other)
        await self._refused_meanwhile(role)
        victim.start()
        took_s = await victim.ready()
        await self._right_again(f"{role} restarted", f", ready again after {took_s:.0f} s")

    async def _lose(self, victim: Server, comes: Callable[[Pair, Call], Awaitable[None]]) -> tuple[Call, float]:
        """The client's call, and the seconds from the kill to its end."""
        self._pair.reset()
        call = Call(self._pair.front, PATHS["completions"], self._body(700, 200) | {"stream": True})
        await call.send()
        reading = asyncio.create_task(call.read_all())
        async with asyncio.timeout(LIMIT_S):
            await comes(self._pair, call)
        killed_at = time.time()
        await asyncio.to_thread(victim.kill)
        await asyncio.wait([reading], timeout=LIMIT_S)
        call.close()
        return call, (call.ended_at or time.time()) - killed_at

    async def _freed(self, role: str, other: Side) -> None:
        started, limit_s = time.monotonic(), self._promises.free_within_s
        await other.settled()
        while (used := await other.used()) and time.monotonic() - started < limit_s:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
        took_s = time.monotonic() - started
        got = f"{used} left after {took_s:.1f} s" if used else f"all free by {took_s:.1f} s"
        self._add(f"{role} dead: the other side's blocks", f"free within {limit_s:g} s", got, not used)

    async def _refused_meanwhile(self, role: str) -> None:
        answer = await ask(self._pair.front, "completions", self._body(20, 4), NOTICED_WITHIN_S)
        good = answer.status in (502, 503) and has_code(answer)
        self._add(f"{role} dead: a new request", "502 or 503 with a code", _in_time(answer), good)

    # --- afterwards -----------------------------------------------------------------------------------------------

    async def _right_again(self, after: str, more: str = "") -> None:
        """The router sees a pair again, and the next request is answered as by the single server."""
        started = time.monotonic()
        while not await _ready(self._pair.front) and time.monotonic() - started < READY_WITHIN_S:  # noqa: ASYNC110
            await asyncio.sleep(0.2)
        body = self._body(50, 16)
        expected = await ask(self._single, "completions", body)
        answer = await ask(self._pair.front, "completions", body)
        if answer.stalled(expected):
            self._rows.stalled(answer.total_s)
        good = answer.outcome() == expected.outcome() and not answer.error
        got = f"the same text in {answer.total_s:.1f} s{more}" if good else f"{answer} instead of {expected}"
        self._add(f"{after}: the next request", "as the single server", got, good)

    def _body(self, length: int, most: int) -> dict[str, Any]:
        prompt = self._writer.ids(length)
        return {"model": MODEL, "prompt": prompt, "max_tokens": most, "temperature": 0, "ignore_eos": True}


async def _hand_off(prefill: str, body: dict[str, Any]) -> dict[str, Any]:
    """What prefill answers to the first leg, asked as a router asks."""
    leg = {**body, "max_tokens": 1, "kv_transfer_params": ASKS_PREFILL}
    async with httpx.AsyncClient(trust_env=False, timeout=LIMIT_S) as http:
        answer = await http.post(f"{prefill}{PATHS['completions']}", json=leg)
    params: dict[str, Any] = answer.raise_for_status().json()["kv_transfer_params"]
    return params


def other_engine(engine: str) -> str:
    """An engine's id that nobody has; as long as the true one."""
    return engine[:-1] + ("0" if engine[-1] != "0" else "1")


async def _streams(pair: Pair, call: Call) -> None:
    while call.tokens < 4 and not call.ended_at:  # noqa: ASYNC110  (it is read by another task)
        await asyncio.sleep(0.005)


async def _prefill_asked(pair: Pair, call: Call) -> None:
    await pair.prefill_gate.asked.wait()
    await asyncio.sleep(0.1)


async def _ready(front: str) -> bool:
    async with httpx.AsyncClient(trust_env=False, timeout=10.0) as http:
        return (await http.get(f"{front}/ready")).status_code == 200


def _refused(answer: Told) -> bool:
    return answer.status >= 400 and not answer.choices


def has_code(answer: Told) -> bool:
    """vLLM writes its status where a code belongs."""
    code = answer.error.partition(":")[0]
    return bool(code) and code != "None" and not code.isdigit()


def _in_time(answer: Told) -> str:
    return f"{answer} after {answer.total_s:.1f} s"
