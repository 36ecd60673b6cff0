"""`make trial-drain`: workers that leave gently, come back with other values, and come late.

Drain: by SIGTERM and by the operator's verb, on a decode and on a prefill, with streams running and new work all the
time: unready at once, no new pairs, running streams whole and right, exit code 0, no 5xx for new work; with a grace
shorter than the streams they end with an explicit error event. Return: a prefill comes back on its ports with another
page size and is refused before any token, named by everyone; with the old one it serves, its decode untouched. Late:
router and decode are there first, then one of a prefill's two ranks, then both. One verdict a line; exit code 1 where
one fails. About 3 minutes.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))

from arrivals import late_ranks, other_page_size
from client import get
from fleet import Fleet, Process, fleet
from idle import errors_logged, wait_idle
from load import Asked, Known, Load, ask, invent, learn, seen_by_router
from prompts import Writer, tokenizer
from verdicts import Verdicts

WORKER_ARGS = ("--batch-invariant", "--max-running", "8", "--pool-mb", "192", "--no-prefix-cache")
STREAM_TOKENS = 160
UNREADY_LIMIT_S = 1.0
END_LIMIT_S = 90.0
STREAMS = 8


async def leave_in_service(running: Fleet, verdicts: Verdicts, rng: random.Random) -> None:
    """Streams end by themselves: each side, each way."""
    known, long = await _learn(running, rng)
    for victim in (running.decodes[0], running.prefills[0]):
        for way, act in (("SIGTERM", _sigterm), ("the drain verb", _drain_verb)):
            await _leave(running, victim, f"{way}, {victim.name}", act, known, long, verdicts)
            victim.start()
            await asyncio.to_thread(victim.wait_ready)
            verdicts.say(f"{way}, {victim.name}: serves after a restart", await _serves(running, victim, known))


async def leave_in_haste(running: Fleet, verdicts: Verdicts, rng: random.Random) -> None:
    """A grace shorter than the streams."""
    known, long = await _learn(running, rng)
    victim = running.decodes[0]
    name = f"SIGTERM with a short grace, {victim.name}"
    await _leave(running, victim, name, _sigterm, known, long, verdicts, cut=True)


async def _learn(running: Fleet, rng: random.Random) -> tuple[list[Known], list[Known]]:
    """(what new work asks, what the long streams ask)"""
    writer = Writer(tokenizer(), rng, plain=True)
    long = [Known(writer.ids(24), STREAM_TOKENS) for _ in range(2)]
    return await learn(running, invent(6, 60, rng)), await learn(running, long)


async def _leave(
    running: Fleet,
    victim: Process,
    name: str,
    act: Callable[[Process], None],
    known: list[Known],
    long: list[Known],
    verdicts: Verdicts,
    *,
    cut: bool = False,
) -> None:
    assert running.router is not None
    streams: list[Asked] = []
    tasks = [asyncio.create_task(ask(running.router.url, long[i % len(long)], streams)) for i in range(STREAMS)]
    await _running(streams)
    load = Load(running.router.url, known, 3)
    await asyncio.sleep(1.0)
    asked_at = time.time()
    await asyncio.to_thread(act, victim)
    at = time.monotonic()
    unready_s = await _until_unready(victim, at)
    verdicts.say(f"{name}: unready at once", unready_s <= UNREADY_LIMIT_S, f"after {unready_s * 1000:.0f} ms")
    await asyncio.sleep(3.0)  # a look of the router's
    opened = (await seen_by_router(running))[victim.url]["requests"]
    await asyncio.gather(*tasks)
    ended = await asyncio.to_thread(_exit_code, victim, at + END_LIMIT_S - time.monotonic())
    after = (await seen_by_router(running))[victim.url]["requests"]
    await load.stop()
    verdicts.say(f"{name}: no new pairs", after == opened, f"{opened} legs when the router knew, {after} at the end")
    before, new = ([one for one in load.asked if (one.call.sent_at >= asked_at) is is_new] for is_new in (False, True))
    _running_ones(name, streams + before, cut, verdicts)
    left = next((line for line in reversed(victim.tail(50).splitlines()) if "left" in line), "nothing said")
    verdicts.say(f"{name}: exit code 0, and what is left is said", ended == 0 and "left" in left, f"{ended}, {left!r}")
    bad = [f"{one.call.status} {one.call.error or one.call.broken}" for one in new if not one.whole]
    wrong = [fault for one in new if one.whole and (fault := one.fault())]
    verdicts.none(f"{name}: {len(new)} new requests, each whole and right, no 5xx", bad + wrong)


def _running_ones(name: str, streams: list[Asked], cut: bool, verdicts: Verdicts) -> None:
    faults = [fault for one in streams if (fault := one.fault())]
    whole = sum(one.whole for one in streams)
    ended = [one for one in streams if not one.whole]
    if not cut:
        verdicts.none(
            f"{name}: {whole} of {len(streams)} running requests whole and right", faults + [one.code for one in ended]
        )
        return
    codes = sorted({one.code for one in ended})
    explicit = ended and all(one.code and not one.call.broken for one in ended)
    verdicts.say(
        f"{name}: what is cut ends with an error event, not a reset", bool(explicit) and not faults, codes + faults
    )


async def _running(streams: list[Asked]) -> None:
    """Until every stream has brought text."""
    for _ in range(1_000):
        if len(streams) == STREAMS and all(one.call.tokens > 1 for one in streams):
            return
        await asyncio.sleep(0.02)
    raise RuntimeError("the streams do not run")


async def _until_unready(victim: Process, at: float) -> float:
    """Seconds until /health is no 200: the process says that it drains, or it is gone already."""
    while time.monotonic() - at < END_LIMIT_S:
        try:
            status, told = await get(victim.url, "/health")
        except (OSError, TimeoutError, ValueError):
            return time.monotonic() - at
        if status == 503 and told["draining"]:
            return time.monotonic() - at
        await asyncio.sleep(0.01)
    return float("inf")


def _exit_code(victim: Process, limit_s: float) -> int | str:
    assert victim.popen is not None
    try:
        return victim.popen.wait(max(limit_s, 1.0))
    except subprocess.TimeoutExpired:
        return "still running"


def _sigterm(victim: Process) -> None:
    victim.send(signal.SIGTERM)


def _drain_verb(victim: Process) -> None:
    """As an operator does it."""
    command = [sys.executable, "-m", "pdplane", "drain", victim.url, "--reason", "trial"]
    subprocess.run(command, check=True, capture_output=True, timeout=20.0)


async def _serves(running: Fleet, victim: Process, known: list[Known]) -> bool:
    """The router gives it work again, and the answers are right."""
    assert running.router is not None
    before = (await seen_by_router(running))[victim.url]["requests"]
    for _ in range(100):
        asked = await asyncio.gather(*(ask(running.router.url, one) for one in known[:3]))
        if any(one.fault() for one in asked):
            return False
        if (await seen_by_router(running))[victim.url]["requests"] > before:
            return True
        await asyncio.sleep(0.2)
    return False


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = ("service", "haste", "return", "late")
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts, help="[all]")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    verdicts, rng = Verdicts(), random.Random(options.seed)
    for part, grace_s, trial in (("service", "60", leave_in_service), ("haste", "1", leave_in_haste)):
        if part in options.parts:
            with fleet(2, 2, worker_args=(*WORKER_ARGS, "--shutdown-s", grace_s)) as running:
                asyncio.run(trial(running, verdicts, rng))
                if part == "service":
                    _, left = wait_idle(running, 5.0)
                    verdicts.none("the fleet is idle afterwards", left + errors_logged(running.all))
    if "return" in options.parts:
        other_page_size(verdicts, rng)
    if "late" in options.parts:
        late_ranks(verdicts, rng)
    return verdicts.end()


if __name__ == "__main__":
    sys.exit(main())
