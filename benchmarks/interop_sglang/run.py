"""SGLang 0.5.23 at our registry, and our client at SGLang's: its own classes, in an environment of their own.

    python benchmarks/interop_sglang/run.py [--peer .interop-sglang-venv/bin/python] [--verbose]

Three parts: the same questions to both registries, statuses and bodies compared; SGLang's prefill and decode managers,
senders and receivers against our registry; our registration and lookup against SGLang's registry. And SGLang's rank
mapping against ours, for every small shape. Exit 1 where something differs that is not said to.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path

from at_ours import sglangs_at_ours
from at_sglangs import ours_at_sglangs
from both import compare
from mapping import compare_maps
from peer_process import HOW, running_peer
from report import print_rows

ROOT = Path(__file__).resolve().parents[2]


BOTH, CHECKED, MAPPED = ("SGLang", "ours"), ("due", "found"), ("of", "alike")
PARTS = (
    ("The same questions to both registries", BOTH, compare),
    ("SGLang's classes at our registry", CHECKED, sglangs_at_ours),
    ("Our client at SGLang's registry", CHECKED, ours_at_sglangs),
    ("Rank mapping", MAPPED, compare_maps),
)


async def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", type=Path, default=ROOT / ".interop-sglang-venv/bin/python")
    parser.add_argument("--verbose", action="store_true", help="every row, not only those that differ")
    options = parser.parse_args()
    if not options.peer.exists():
        print(f"{options.peer} is missing. {HOW}", file=sys.stderr)
        return 1
    checks = failed = 0
    async with running_peer(options.peer) as peer:
        for title, columns, part in PARTS:
            rows = await part(peer)
            checks += len(rows)
            failed += print_rows(title, columns, rows, verbose=options.verbose)
    print(f"\n{checks} checks, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
