"""`make trial-kill`: prefill killed, decode killed, prefill frozen and thawed, each under load, on 2P2D.

What must hold in each step: every client of the victim gets a clear error or is served by another pair within 12 s,
nobody hangs, every text that was delivered is the one of an undisturbed run, and afterwards all pages are accounted
for, the router's loads are 0, the restarted worker serves, and no other worker was touched. Exit code 1 otherwise.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))

from fleet import Fleet, Process, fleet
from idle import errors_logged, wait_idle
from load import Asked, Health, Known, Load, instances, invent, learn, seen_by_router

FAULT_LIMIT_S = 12.0
IDLE_LIMIT_S = 15.0
FROZEN_S = 12.0
WARM_UP_S = 3.0
AFTER_S = 4.0
WORKER_ARGS = ("--batch-invariant", "--max-running", "8", "--pool-mb", "256", "--no-prefix-cache")
"""The load asks the same prompts again and again: cached, they would leave prefill nothing to do."""


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
    if not any(one.on(victim, at) for one in load.asked):
        faults.append(f"{victim.name} had nothing in flight: this step has shown nothing")
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


async def at_work(running: Fleet, victim: Process) -> None:
    """Returns when the victim has requests to lose."""
    for _ in range(500):
        if (await seen_by_router(running))[victim.url]["load"] >= 2:
            return
        await asyncio.sleep(0.02)


# --- the trial --------------------------------------------------------------------------------------------------------


async def trial(running: Fleet, prompts: int, concurrency: int, rng: random.Random) -> list[str]:
    known = await learn(running, invent(prompts, 300, rng))
    print(f"{prompts} prompts known from an undisturbed run; {concurrency} streams at a time from here on", flush=True)
    prefill, decode = running.prefills[0], running.decodes[0]
    faults = await step(running, "kill -9 of a prefill", prefill, kill_and_restart, known, concurrency)
    faults += await step(running, "kill -9 of a decode", decode, kill_and_restart, known, concurrency)
    title = f"SIGSTOP of a prefill for {FROZEN_S:g} s"
    faults += await step(running, title, running.prefills[1], freeze_and_thaw, known, concurrency)
    return faults + errors_logged(running.all)


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
