"""`make trial-field`: field cases as real processes, beside what the tests show of them with fake engines.

One verdict a line, named by its case; exit code 1 where one fails. Under 4 minutes. What other trials and benchmarks
run is not run again: `--list` says which case is shown where.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))

import field_answers
import field_cancel
import field_limits
from fleet import Fleet, fleet
from idle import errors_logged, wait_idle
from verdicts import Verdicts

SHOWN = {
    "H01": "here; bench-cancel (a short prompt behind an abandoned one)",
    "H02": "here; tests/worker/test_fleet_cancel.py, tests/router/test_router_cancel.py",
    "H03": "trials/transfer.py",
    "H04": "trials/drain.py; tests/worker/test_fleet_change.py (KV dtype too)",
    "H05": "trials/drain.py; tests/worker/test_fleet_change.py",
    "H06": "here; bench-equality (max_tokens 1); tests/worker/test_fleet_answers.py",
    "H07": "here; bench-equality (stop text, stop id); tests/worker/test_fleet_answers.py",
    "H08": "here; tests/worker/test_fleet_answers.py, tests/worker/test_fleet_cancel.py",
    "H09": "here; tests/worker/test_fleet_answers.py, tests/worker/test_fleet_bad_input.py",
    "H10": "here; tests/worker/test_fleet_bad_input.py, tests/router/test_router_compatibility.py",
    "H11": "here; tests/router/test_router_failures.py (all codes)",
    "H12": "here; tests/router/test_router_failures.py, tests/router/test_router_bans.py",
    "H13": "here",
    "H14": "here; tests/worker/test_fleet_rooms.py",
    "H15": "here; tests/worker/test_fleet_pages.py, tests/worker/test_http_answers.py",
    "H17": "trials/drain.py",
    "H18": "here; tests/router/test_router_cancel.py",
    "H19": "here; tests/worker/test_fleet_topology.py, tests/router/test_router_ranks.py",
    "H20": "here; tests/worker/test_fleet_bad_input.py (every kind)",
}

Part = Callable[[Fleet, Verdicts, random.Random], Coroutine[None, None, None]]
INVARIANT = "--batch-invariant"


def pair(verdicts: Verdicts, rng: random.Random) -> None:
    """One pair and one aggregated worker, the yardstick."""
    args = (INVARIANT, "--pool-mb", "384")
    parts: list[Part] = [field_answers.run, field_cancel.one_pair]
    with fleet(1, 1, 1, worker_args=args, prefill_args=("--max-running", "1")) as running:
        _run(running, "1P1D", parts, verdicts, rng)


def tags(verdicts: Verdicts, rng: random.Random) -> None:
    """Two pairs with pools a few requests wide."""
    args = (INVARIANT, "--pool-mb", "14", "--reserve-tokens", "0", "--max-running", "8")
    with fleet(2, 2, worker_args=args) as running:
        _run(running, "2P2D, small pools", [field_cancel.tagged], verdicts, rng)


def ranks(verdicts: Verdicts, rng: random.Random) -> None:
    args = (INVARIANT, "--pool-mb", "48")
    with fleet(1, 1, 1, worker_args=args, prefill_args=("--dp", "2"), decode_args=("--dp", "4")) as running:
        _run(running, "dp 2 to dp 4", [field_limits.ranks], verdicts, rng)


def limits(verdicts: Verdicts, rng: random.Random) -> None:
    """Each side once the smaller one."""
    for small in ("prefill", "decode"):
        sizes = {side: ("--pool-mb", "6" if side == small else "24") for side in ("prefill", "decode")}
        with fleet(
            1, 1, 1, worker_args=(INVARIANT,), prefill_args=sizes["prefill"], decode_args=sizes["decode"]
        ) as running:
            _run(running, f"{small} the smaller", [field_limits.capacity], verdicts, rng)


def busy(verdicts: Verdicts, rng: random.Random) -> None:
    """Workers that answer 429 because they are full, and one that is gone."""
    with fleet(2, 2, worker_args=(INVARIANT, "--pool-mb", "96")) as running:
        _run(running, "2P2D", [field_limits.busy_and_gone], verdicts, rng)


PARTS = {"pair": pair, "tags": tags, "ranks": ranks, "limits": limits, "busy": busy}


def _run(running: Fleet, name: str, parts: list[Part], verdicts: Verdicts, rng: random.Random) -> None:
    print(f"--- {name}", flush=True)
    for part in parts:
        asyncio.run(part(running, verdicts, rng))
    _, left = wait_idle(running, 5.0)
    verdicts.none(f"{name}: all figures are back", left)
    verdicts.none(f"{name}: nothing was logged as an error", errors_logged(running.all))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="[all]")
    parser.add_argument("--list", action="store_true", help="say where each case is shown, and end")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    if options.list:
        print("\n".join(f"{case}  {where}" for case, where in SHOWN.items()))
        return 0
    verdicts = Verdicts()
    for name in options.parts:
        PARTS[name](verdicts, random.Random(options.seed))
    return verdicts.end()


if __name__ == "__main__":
    sys.exit(main())
