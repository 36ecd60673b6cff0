"""`make trial-transfer`: a prefill is killed while its slowed transfers run, on 2P1D.

Pages go by tcp through a forwarder that lets through a few MB a second. What must hold: requests of the other prefill
are untouched; those of the victim are served by another pair before any byte was sent, or end with a clear error,
within the time in which a silent peer counts as gone; decode's health never fails; all pages come back; the prefill
serves again when it is back. One verdict a line; exit code 1 where one fails. About a minute.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))

from client import get
from fleet import Fleet, fleet, free_ports
from idle import errors_logged, wait_idle
from load import Asked, Health, Known, ask, learn, look_up, seen_by_router
from prompts import Writer, tokenizer
from throttle import Throttle
from verdicts import Verdicts

DECODE_HOST, NAMED_HOST = "127.0.0.1", "127.0.0.2"
"""Decode listens on the first; peers are told the second, where the forwarder listens on the same port."""

BEAT_S, SILENT_S, GRACE_S = 1.0, 2.0, 1.0
KNOW_LIMIT_S = 2 * BEAT_S + 1.0
"""A killed process closes its connections; nobody has to wait for its silence."""

BYTES_PER_S = 5_000_000
PROMPT_TOKENS, NEW_TOKENS, REQUESTS = 160, 24, 8
WORKER_ARGS = (
    *("--batch-invariant", "--transport", "tcp", "--pool-mb", "192", "--no-prefix-cache", "--max-running", "8"),
    *("--beat-s", str(BEAT_S), "--silent-s", str(SILENT_S), "--grace-s", str(GRACE_S)),
)


async def trial(running: Fleet, data_port: int, verdicts: Verdicts, rng: random.Random) -> None:
    assert running.router is not None
    url, victim, [decode] = running.router.url, running.prefills[0], running.decodes
    writer = Writer(tokenizer(), rng, plain=True)
    async with Throttle(NAMED_HOST, data_port, DECODE_HOST, data_port) as throttle:
        wanted = [Known(writer.ids(PROMPT_TOKENS), NEW_TOKENS) for _ in range(REQUESTS)]
        known = await learn(running, wanted)
        verdicts.say("pages go through the forwarder", throttle.passed > 0, f"{throttle.passed:,} bytes")
        throttle.bytes_per_s = BYTES_PER_S
        health = Health([decode, running.prefills[1], running.router])
        asked: list[Asked] = []
        tasks = [asyncio.create_task(ask(url, one, asked)) for one in known]
        moving = await _until_moving(running)
        verdicts.say("the victim is killed while its pages move", moving > 0, f"{moving} pages of it on their way")
        at = time.time()
        await asyncio.to_thread(victim.kill)
        await asyncio.gather(*tasks)
        throttle.bytes_per_s = 0
        for one in asked:
            await look_up(url, one)
        _judge(asked, running, at, verdicts)
        victim.start()
        await asyncio.to_thread(victim.wait_ready)
        waited_s, left = await asyncio.to_thread(wait_idle, running, 10.0)
        verdicts.none(f"all pages are back, {waited_s:.1f} s after the last request", left)
        verdicts.none("the health of decode, router and the other prefill never failed", await health.stop())
        verdicts.say("the victim serves when it is back", await _serves(running, known))
        verdicts.none("nothing of it was logged as an error", errors_logged(running.all))


async def _until_moving(running: Fleet) -> int:
    """How many pages of the victim are on their way when both prefills have some that are."""
    for _ in range(2_000):
        counts = []
        for prefill in running.prefills:
            _, told = await get(prefill.url, "/server_info")
            counts.append(int(told["figures"]["pages"]["sending"]))
        if all(counts):
            return counts[0]
        await asyncio.sleep(0.01)
    return 0


def _judge(asked: list[Asked], running: Fleet, at: float, verdicts: Verdicts) -> None:
    """Which requests ended how, and how fast."""
    victim = running.prefills[0]
    hit = [one for one in asked if one.on(victim, at)]
    others = [one for one in asked if one not in hit]
    served = [one for one in hit if one.whole]
    retried = [one for one in served if len(one.attempts) > 1]
    failed = [one for one in hit if not one.whole]
    for one in asked:
        where = " then ".join(attempt["prefill"].rpartition(":")[2] for attempt in one.attempts)
        knew = f"knew after {one.settled_after(at):.1f} s" if one in hit else "not of the victim"
        print(f"       {one.call.headers.get('x-request-id', '?')}: {one.code or 'whole'}, prefill {where}, {knew}")
    verdicts.say("some requests were on each prefill", bool(hit) and bool(others), f"{len(hit)} and {len(others)}")
    broken = [one.fault() or one.code or one.call.broken for one in others if not one.whole or one.fault()]
    retried_others = [f"{len(one.attempts)} attempts" for one in others if len(one.attempts) != 1]
    verdicts.none("requests of the other prefill are untouched", broken + retried_others)
    verdicts.none(
        f"those of the victim: {len(retried)} served by another pair, {len(failed)} with a clear error, none hangs",
        [fault for one in hit if (fault := one.fault())],
    )
    rooms = [room for one in hit for attempt in one.attempts for room in attempt["rooms"]]
    verdicts.say("every attempt has a room of its own", len(rooms) == len(set(rooms)), f"{len(rooms)} rooms")
    slow = max((one.settled_after(at) for one in failed), default=0.0)
    again = max((_second_opened(one) - at for one in retried), default=0.0)
    known_s = max(slow, again)
    verdicts.say(f"known within {KNOW_LIMIT_S:g} s", known_s <= KNOW_LIMIT_S, f"{known_s:.1f} s")


def _second_opened(one: Asked) -> float:
    """When the attempt that followed the victim's was opened."""
    return one.received_at + float(one.attempts[1]["opened_s"])


async def _serves(running: Fleet, known: list[Known]) -> bool:
    assert running.router is not None
    url, victim = running.router.url, running.prefills[0].url
    before = (await seen_by_router(running))[victim]["requests"]
    for _ in range(60):
        if any(one.fault() or not one.whole for one in await asyncio.gather(*(ask(url, one) for one in known[:2]))):
            return False
        if (await seen_by_router(running))[victim]["requests"] > before:
            return True
        await asyncio.sleep(0.2)
    return False


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    verdicts = Verdicts()
    data_port = free_ports(40)[-1]  # well behind those that the fleet takes
    decode_args = ("--data-port", str(data_port), "--advertise-host", NAMED_HOST)
    with fleet(2, 1, worker_args=WORKER_ARGS, decode_args=decode_args) as running:
        asyncio.run(trial(running, data_port, verdicts, random.Random(options.seed)))
    return verdicts.end()


if __name__ == "__main__":
    sys.exit(main())
