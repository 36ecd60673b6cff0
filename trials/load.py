"""Load for trials: streams over prompts whose answers are known, what each client saw, and who must stay healthy."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import random
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))

from client import Call, get
from fleet import Fleet, Process
from prompts import Writer, log_uniform, tokenizer

PATH = "/v1/completions"
HANG_LIMIT_S = 60.0
HEALTH_LIMIT_S = 5.0


@dataclasses.dataclass(frozen=True)
class Known:
    """A prompt, and what an undisturbed fleet answers."""

    prompt: list[int]
    most: int
    text: str = ""
    finish: str = ""


@dataclasses.dataclass
class Asked:
    """One request of the load, as its client and the router saw it."""

    known: Known
    call: Call
    hung: bool = False
    attempts: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    received_at: float = 0.0  # by the router's record

    @property
    def whole(self) -> bool:
        return self.call.status == 200 and self.call.done and not self.call.error

    @property
    def code(self) -> str:
        return str(self.call.error.get("code", ""))

    def fault(self) -> str:
        """What no client may ever see, "" where all was well or the error is clear."""
        call = self.call
        name = f"request {call.headers.get('x-request-id', '?')}"
        if self.hung:
            return f"{name} had not ended after {HANG_LIMIT_S:g} s"
        if self.whole and (call.text, call.finish) != (self.known.text, self.known.finish):
            return f"{name}: {call.text!r} ({call.finish}) instead of {self.known.text!r} ({self.known.finish})"
        if not self.whole and not (self.code and call.error.get("message")):
            return f"{name} ended without a clear error: status {call.status} {call.broken} {call.body[:200]!r}"
        if not self.whole and not self.known.text.startswith(call.text):
            return f"{name}: the part before its error is {call.text!r}, of {self.known.text!r}"
        return ""

    def on(self, victim: Process, at: float) -> bool:
        """Whether the victim had a leg of it that was open at that time."""
        side = "decode" if victim.name.startswith("decode") else "prefill"
        for attempt in self.attempts:
            opened = self.received_at + (attempt["opened_s"] or 0.0)
            ended_s = attempt[f"{side}_ended_s"]
            if attempt[side] == victim.url and opened <= at and (ended_s is None or self.received_at + ended_s > at):
                return True
        return False

    def settled_after(self, at: float) -> float:
        """Seconds from then (or its start) until its client knew: an error, the end, or the bytes of another pair."""
        since = max(at, self.call.sent_at)
        knew = self.call.ended_at or float("inf")
        if self.call.first_byte_at > since and self.whole:
            knew = self.call.first_byte_at
        return max(0.0, knew - since)


class Load:
    """Streams without pause over the known prompts, until told to stop."""

    def __init__(self, url: str, known: list[Known], concurrency: int) -> None:
        self.asked: list[Asked] = []
        self._url = url
        self._next = itertools.cycle(known)
        self._stopping = False
        self._clients = [asyncio.create_task(self._client()) for _ in range(concurrency)]

    async def stop(self) -> None:
        """No new requests; those under way end by themselves."""
        self._stopping = True
        await asyncio.gather(*self._clients)
        for asked in self.asked:
            await look_up(self._url, asked)

    async def _client(self) -> None:
        while not self._stopping:
            asked = await ask(self._url, next(self._next), self.asked)
            if not asked.whole:
                await asyncio.sleep(0.2)


async def ask(url: str, known: Known, book: list[Asked] | None = None) -> Asked:
    body = {"prompt": known.prompt, "max_tokens": known.most, "temperature": 0, "stream": True, "ignore_eos": True}
    asked = Asked(known, Call(url, PATH, body))
    if book is not None:
        book.append(asked)
    try:
        async with asyncio.timeout(HANG_LIMIT_S):
            await asked.call.send()
            await asked.call.read_all()
    except TimeoutError:
        asked.hung = True
        asked.call.close()
    return asked


async def look_up(url: str, asked: Asked) -> None:
    request_id = asked.call.headers.get("x-request-id")
    if request_id:
        status, record = await get(url, f"/requests/{request_id}")
        if status == 200:
            asked.attempts, asked.received_at = record["attempts"], record["received_unix_s"]


async def learn(running: Fleet, wanted: list[Known]) -> list[Known]:
    """The same with the answers of the undisturbed fleet. Raises RuntimeError where one fails."""
    assert running.router is not None
    known = []
    for one in wanted:
        asked = await ask(running.router.url, one)
        if not asked.whole:
            told = f"{asked.call.status} {asked.call.error} {asked.call.broken}"
            raise RuntimeError(f"undisturbed, a request failed: {told}")
        known.append(dataclasses.replace(one, text=asked.call.text, finish=asked.call.finish))
    return known


def invent(count: int, longest: int, rng: random.Random) -> list[Known]:
    """Prompts of 16 to `longest` tokens for answers of 8 to 24."""
    writer = Writer(tokenizer(), rng, plain=True)
    return [Known(writer.ids(tokens), rng.randint(8, 24)) for tokens in log_uniform(count, 16, longest, rng)]


# --- what the processes say -------------------------------------------------------------------------------------------


class Health:
    """Looks at processes that nobody touches: they must answer /health with 200 all the time."""

    def __init__(self, processes: list[Process]) -> None:
        self._faults: dict[str, str] = {}
        self._looks = [asyncio.create_task(self._look(process)) for process in processes]

    async def stop(self) -> list[str]:
        for look in self._looks:
            look.cancel()
        await asyncio.gather(*self._looks, return_exceptions=True)
        return list(self._faults.values())

    async def _look(self, process: Process) -> None:
        while True:
            try:
                status, told = await get(process.url, "/health", HEALTH_LIMIT_S)
                wrong = "" if status == 200 else f"{status} {told}"
            except (OSError, TimeoutError, ValueError) as error:
                wrong = f"{type(error).__name__} {error}"
            if wrong:
                self._faults[process.name] = f"/health of {process.name}: {wrong}"
            await asyncio.sleep(0.5)


async def instances(running: Fleet) -> dict[str, str]:
    return {worker.url: (await get(worker.url, "/server_info"))[1]["instance"] for worker in running.workers}


async def seen_by_router(running: Fleet) -> dict[str, dict[str, Any]]:
    assert running.router is not None
    _, told = await get(running.router.url, "/workers")
    return {worker["url"]: worker for worker in told["workers"]}
