"""`make trial-kill`: prefill killed, decode killed, prefill frozen and thawed, each under load, on 2P2D.

What must hold in each step: every client of the victim gets a clear error or is served by another pair within 12 s,
nobody hangs, every text that was delivered is the one of an undisturbed run, and afterwards all pages are accounted
for, the router's loads are 0, the restarted worker serves, and no other worker was touched. Exit code 1 otherwise.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import itertools
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))

from client import Call, get
from fleet import Fleet, Process, fleet
from idle import errors_logged, wait_idle
from prompts import Writer, log_uniform, tokenizer

PATH = "/v1/completions"
FAULT_LIMIT_S = 12.0
HANG_LIMIT_S = 60.0
IDLE_LIMIT_S = 15.0
HEALTH_LIMIT_S = 5.0
FROZEN_S = 12.0
WARM_UP_S = 3.0
AFTER_S = 4.0
WORKER_ARGS = ("--batch-invariant", "--max-running", "8", "--pool-mb", "256")


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
            await _look_up(self._url, asked)

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


async def _look_up(url: str, asked: Asked) -> None:
    request_id = asked.call.headers.get("x-request-id")
    if request_id:
        status, record = await get(url, f"/requests/{request_id}")
        if status == 200:
            asked.attempts, asked.received_at = record["attempts"], record["received_unix_s"]


# --- the steps --------------------------------------------------------------------------------------------------------

Act = Callable[[Fleet, Process], Awaitable[None]]


async def kill_and_restart(running: Fleet, victim: Process) -> None:
    """kill -9; back on the same ports after a while; returns once the router knows the successor."""
    before = await instances(running)
    await asyncio.to_thread(victim.kill)
    await asyncio.sleep(WARM_UP_S)
    victim.start()
    await asyncio.to_thread(victim.wait_ready)
    until = time.monotonic() + FAULT_LIMIT_S
    while time.monotonic() < until:
        seen = (await seen_by_router(running))[victim.url]
        if seen["ready"] and seen["instance"] not in ("", before[victim.url]):
            return
        await asyncio.sleep(0.1)
    raise RuntimeError(f"the router does not take {victim.name} back into service")


async def freeze_and_thaw(running: Fleet, victim: Process) -> None:
    victim.send(signal.SIGSTOP)
    try:
        await asyncio.sleep(FROZEN_S)
    finally:
        victim.send(signal.SIGCONT)
    await asyncio.to_thread(victim.wait_ready)


async def step(
    running: Fleet, title: str, victim: Process, act: Act, known: list[Known], concurrency: int
) -> list[str]:
    """Load, the fault, load on, quiet; prints what happened and returns what was wrong."""
    assert running.router is not None
    before = await instances(running)
    load = Load(running.router.url, known, concurrency)
    health = Health([process for process in running.all if process is not victim])
    await asyncio.sleep(WARM_UP_S)
    await at_work(running, victim)
    at = time.time()
    await act(running, victim)
    back_s = time.time() - at
    served = (await seen_by_router(running))[victim.url]["requests"]
    await asyncio.sleep(max(AFTER_S, FAULT_LIMIT_S - back_s))
    await load.stop()
    served = (await seen_by_router(running))[victim.url]["requests"] - served
    idle_s, left = await asyncio.to_thread(wait_idle, running, IDLE_LIMIT_S)
    faults = [f"not idle after {idle_s:.0f} s: {what}" for what in left]
    faults += [fault for asked in load.asked if (fault := asked.fault())]
    faults += _late(load.asked, victim, at)
    if not served:
        faults.append(f"{victim.name} was not used after it came back")
    after = await instances(running)
    untouched = [worker for worker in running.workers if worker is not victim]
    faults += [f"{w.name} was restarted" for w in untouched if before[w.url] != after[w.url]]
    faults += await health.stop()
    faults += [f"{w.name} has ended" for w in running.all if w.popen is not None and w.popen.poll() is not None]
    _print(title, load.asked, victim, at, back_s, served, idle_s)
    return [f"{title}: {fault}" for fault in faults]


def _late(asked: list[Asked], victim: Process, at: float) -> list[str]:
    """Who waited too long: clients of the victim, and whoever failed or came later."""
    return [
        f"request {one.call.headers.get('x-request-id', '?')} knew only after {one.settled_after(at):.1f} s"
        for one in asked
        if (one.on(victim, at) or not one.whole or len(one.attempts) > 1) and one.settled_after(at) > FAULT_LIMIT_S
    ]


def _print(
    title: str, asked: list[Asked], victim: Process, at: float, back_s: float, served: int, idle_s: float
) -> None:
    hit = [one for one in asked if one.on(victim, at)]
    failed = [one for one in asked if not one.whole]
    retried = [one for one in asked if one.whole and len(one.attempts) > 1]
    codes = Counter(one.code or "none" for one in failed)
    slowest = max((one.settled_after(at) for one in (*hit, *failed, *retried)), default=0.0)
    right = sum(one.whole and not one.fault() for one in asked)
    print(f"\n{title}")
    rows = (
        ("requests", f"{len(asked)}, {right} whole and right, {len(failed)} with an error, {len(retried)} retried"),
        ("of the victim, in flight", f"{len(hit)}, {sum(one.whole for one in hit)} of them served even so"),
        ("errors", ", ".join(f"{code} {count}" for code, count in codes.items()) or "none"),
        ("slowest to know", f"{slowest:.1f} s (limit {FAULT_LIMIT_S:g} s)"),
        ("victim back in service", f"{back_s:.1f} s after the fault, {served} requests since"),
        ("all figures idle", f"{idle_s:.1f} s after the last request"),
    )
    for name, value in rows:
        print(f"  {name:26}{value}")
    sys.stdout.flush()


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


async def at_work(running: Fleet, victim: Process) -> None:
    """Returns when the victim has requests to lose."""
    for _ in range(500):
        if (await seen_by_router(running))[victim.url]["load"] >= 2:
            return
        await asyncio.sleep(0.02)


async def instances(running: Fleet) -> dict[str, str]:
    return {worker.url: (await get(worker.url, "/server_info"))[1]["instance"] for worker in running.workers}


async def seen_by_router(running: Fleet) -> dict[str, dict[str, Any]]:
    assert running.router is not None
    _, told = await get(running.router.url, "/workers")
    return {worker["url"]: worker for worker in told["workers"]}


# --- the trial --------------------------------------------------------------------------------------------------------


async def trial(running: Fleet, prompts: int, concurrency: int, rng: random.Random) -> list[str]:
    assert running.router is not None
    writer = Writer(tokenizer(), rng, plain=True)
    wanted = [Known(writer.ids(tokens), rng.randint(8, 24)) for tokens in log_uniform(prompts, 16, 300, rng)]
    known: list[Known] = []
    for known_one in wanted:
        asked = await ask(running.router.url, known_one)
        if not asked.whole:
            return [f"undisturbed, a request failed: {asked.call.status} {asked.call.error} {asked.call.broken}"]
        known.append(dataclasses.replace(known_one, text=asked.call.text, finish=asked.call.finish))
    print(f"{prompts} prompts known from an undisturbed run; {concurrency} streams at a time from here on", flush=True)
    prefill, decode = running.prefills[0], running.decodes[0]
    faults = await step(running, "kill -9 of a prefill", prefill, kill_and_restart, known, concurrency)
    faults += await step(running, "kill -9 of a decode", decode, kill_and_restart, known, concurrency)
    title = f"SIGSTOP of a prefill for {FROZEN_S:g} s"
    faults += await step(running, title, running.prefills[1], freeze_and_thaw, known, concurrency)
    return faults + errors_logged(running)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=16, help="distinct prompts [16]")
    parser.add_argument("--concurrency", type=int, default=8, help="streams at a time [8]")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    started = time.monotonic()
    with fleet(2, 2, worker_args=WORKER_ARGS) as running:
        faults = asyncio.run(trial(running, options.prompts, options.concurrency, random.Random(options.seed)))
        if faults:
            for process in running.all:
                print(f"--- {process.name}, last lines\n{process.tail(8)}")
    for fault in faults:
        print(f"FAULT: {fault}")
    print(f"\nviolations: {len(faults) or 'none'}, {time.monotonic() - started:.0f} s")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
