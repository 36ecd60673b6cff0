"""`make bench-cancel`: requests dropped in every phase, and how soon their pages are free, on each transport.

With a live peer: a reference run first; then the storm, by closed connections and by abort calls; then every figure
must be back at its idle value within a second of the last drop, no ledger alarmed, the reference prompts answered as
before, and p99 from disconnect to free pages within the aim. With a frozen and with a killed peer: each page accounted
for at every look, and back when the peer is, by itself or by the operator's verb. Exit code 1 where any of it fails.
The times of the storm come from the workers' own records. A storm asks nothing new after 75 s, so that all transports
together take 6 minutes or so.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time

import peers
import storm
from fleet import fleet
from matrix import TRANSPORTS

WORKER_ARGS = ("--batch-invariant", "--pool-mb", "384")
FEW_ARGS = ("--max-running", "2")
"""Few places and pages: queues form at prefill, for decode's pages and for its batch."""

EVERY_PAGE_MOVES = ("--no-prefix-cache",)
"""At decode: what prefill has in its cache moves all at once, and is not there already."""

QUICK_REQUESTS = 40


def main() -> int:
    options = _parser().parse_args()
    requests = min(options.requests, QUICK_REQUESTS) if options.quick else options.requests
    started = time.monotonic()
    storms: dict[str, storm.Result] = {}
    rows: list[peers.Row] = []
    for transport in options.transports:
        if "live" in options.peers:
            print(f"\n--- {transport}, live peer", flush=True)
            storms[transport] = _storm(transport, requests, options.concurrency, random.Random(options.seed))
        if "lost" in options.peers:
            print(f"\n--- {transport}, peer frozen and killed", flush=True)
            rows += _peers(transport, random.Random(options.seed))
            print("\n".join(peers.table([row for row in rows if row.transport == transport])), flush=True)
    _print_tables(storms, rows)
    faults = [f"{transport}: {fault}" for transport, result in storms.items() for fault in result.faults]
    faults += [f"{row.transport}, {row.peer} {row.how}: {fault}" for row in rows for fault in row.faults]
    for fault in faults:
        print(f"FAULT: {fault}")
    print(f"violations: {len(faults) or 'none'}; {time.monotonic() - started:.0f} s")
    return 1 if faults else 0


def _storm(transport: str, requests: int, concurrency: int, rng: random.Random) -> storm.Result:
    worker_args = (*WORKER_ARGS, "--transport", transport)
    with fleet(1, 1, worker_args=worker_args, prefill_args=FEW_ARGS, decode_args=FEW_ARGS) as running:
        return asyncio.run(storm.live(running, requests, concurrency, rng))


def _peers(transport: str, rng: random.Random) -> list[peers.Row]:
    worker_args = (*peers.WORKER_ARGS, "--transport", transport)
    with fleet(1, 1, worker_args=worker_args, decode_args=EVERY_PAGE_MOVES) as running:
        return asyncio.run(peers.faults(running, transport, rng))


def _print_tables(storms: dict[str, storm.Result], rows: list[peers.Row]) -> None:
    print("\nlive peer: from disconnect to pages reusable, p99, ms; all figures idle after the last drop, ms")
    print(f"{'transport':10}{'prefill':>9}{'decode':>9}{'aim':>6}{'idle':>7}")
    for transport, result in storms.items():
        p99 = "".join(f"{result.p99_s[side] * 1000:9.0f}" for side in storm.SIDES)
        print(f"{transport:10}{p99}{storm.AIM_S * 1000:6.0f}{result.idle_s * 1000:7.0f}")
    print("\nlost peer: pages of the live side")
    print("\n".join(peers.table(rows)))
    for row in rows:
        for alarm in row.alarms:
            print(f"  alarm, {row.transport}, {row.peer} {row.how}: {alarm}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=200, help="how many are dropped with a live peer [200]")
    parser.add_argument("--concurrency", type=int, default=12, help="how many are in flight at once [12]")
    parser.add_argument("--quick", action="store_true", help=f"at most {QUICK_REQUESTS} requests")
    parser.add_argument("--transports", nargs="+", choices=TRANSPORTS, default=TRANSPORTS, help="[all]")
    parser.add_argument("--peers", nargs="+", choices=("live", "lost"), default=("live", "lost"), help="[both]")
    parser.add_argument("--seed", type=int, default=1)
    return parser


if __name__ == "__main__":
    sys.exit(main())
