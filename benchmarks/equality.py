"""Does the hand-off change anything? Greedy answers through pairs beside those of one aggregated worker.

    python benchmarks/equality.py [--prompts 60] [--quick] [--seed 1] [--fleets 1P1D,2P2D] [--concurrency 1,16]

All workers run batch-invariant. First the aggregated worker answers alone, one request after the other; then each
fleet answers the same requests at each concurrency. Text, finish reason, matched stop, usage and, where the dialect
shows them, token ids must be equal, and the fleet must be back at its idle figures. Exit status 1 where it is not so.
Measured on two cores that others used too: 11 minutes, and under 3 with --quick.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import sys
import time

import msgspec
from asking import Outcome, ask, client
from cases import Case, finish_bodies, make_cases, mix
from fleet import Fleet, fleet
from idle import wait_idle

WORKER_ARGS = ("--batch-invariant",)
PROMPTS, QUICK_PROMPTS = 60, 12
IDLE_LIMIT_S = 5.0
PROGRESS_S = 15.0


def main() -> int:
    options = _parser().parse_args()
    count = min(options.prompts, QUICK_PROMPTS) if options.quick else options.prompts
    cases = make_cases(count, options.seed)
    started = time.monotonic()
    expected = reference(cases)
    verdicts = [
        good
        for prefill, decode in options.fleets
        for good in compare(cases, expected, prefill, decode, options.concurrency)
    ]
    print(f"{sum(verdicts)} of {len(verdicts)} cells equal and idle; {time.monotonic() - started:.0f} s")
    return 0 if all(verdicts) else 1


def reference(cases: list[Case]) -> list[Outcome]:
    """What one aggregated worker answers, sequentially."""
    with fleet(prefill=0, decode=0, aggregated=1, worker_args=WORKER_ARGS) as made:
        url = made.workers[0].url

        async def run() -> list[Outcome]:
            async with client(1) as http:
                await finish_bodies(cases, http, url)
                print("\n".join(mix(cases)), flush=True)
                return await answers(cases, url, 1, "aggregated")

        expected = asyncio.run(run())
        _, left = wait_idle(made, IDLE_LIMIT_S)
    failed = [f"{case}: {outcome}" for case, outcome in zip(cases, expected, strict=True) if outcome.error]
    if failed or left:
        raise SystemExit("the aggregated worker is no reference:\n" + "\n".join(failed + left))
    return expected


def compare(
    cases: list[Case], expected: list[Outcome], prefill: int, decode: int, concurrencies: list[int]
) -> list[bool]:
    """One verdict for each concurrency: all equal, and idle afterwards."""
    name = f"{prefill}P{decode}D"
    with fleet(prefill, decode, worker_args=WORKER_ARGS) as made:
        assert made.router is not None
        return [_cell(made, made.router.url, cases, expected, name, number) for number in concurrencies]


def _cell(made: Fleet, url: str, cases: list[Case], expected: list[Outcome], name: str, concurrency: int) -> bool:
    title = f"{name} concurrency {concurrency}"
    started = time.monotonic()
    got = asyncio.run(answers(cases, url, concurrency, title))
    took = time.monotonic() - started
    waited, left = wait_idle(made, IDLE_LIMIT_S)
    wrong = [place for place, outcome in enumerate(got) if outcome != expected[place]]
    print(f"{title}: {len(cases) - len(wrong)} of {len(cases)} equal ({took:.0f} s)")
    for place in wrong:
        print(difference(cases[place], expected[place], got[place]))
    print(f"  idle after {waited:.2f} s" if not left else "  NOT IDLE:\n    " + "\n    ".join(left), flush=True)
    return not wrong and not left


async def answers(cases: list[Case], url: str, concurrency: int, title: str) -> list[Outcome]:
    """Outcomes in the order of `cases`, with progress on stderr."""
    outcomes: dict[int, Outcome] = {}
    waiting = list(reversed(cases))
    said = started = time.monotonic()

    async def one_by_one() -> None:
        nonlocal said
        while waiting:
            case = waiting.pop()
            outcomes[case.number] = (await ask(http, url, case.endpoint, case.body)).outcome
            if time.monotonic() - said > PROGRESS_S:
                said = time.monotonic()
                print(f"  {title}: {len(outcomes)}/{len(cases)} after {said - started:.0f} s", file=sys.stderr)

    async with client(concurrency) as http, asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(one_by_one())
    return [outcomes[case.number] for case in cases]


def difference(case: Case, expected: Outcome, got: Outcome) -> str:
    """Every field that differs, in full."""
    pairs = zip(Outcome.__struct_fields__, msgspec.structs.astuple(expected), msgspec.structs.astuple(got), strict=True)
    lines = [f"    {name}: aggregated {ours!r}, pair {theirs!r}" for name, ours, theirs in pairs if ours != theirs]
    return f"  DIFFERENT {case}\n" + "\n".join(lines)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=PROMPTS, help=f"how many [{PROMPTS}]")
    parser.add_argument("--quick", action="store_true", help=f"at most {QUICK_PROMPTS} prompts")
    parser.add_argument("--seed", type=int, default=1, help="of prompts and mix [1]")
    parser.add_argument("--fleets", type=_fleets, default="1P1D,2P2D", help="[1P1D,2P2D]")
    parser.add_argument("--concurrency", type=_numbers, default="1,16", help="[1,16]")
    return parser


def _fleets(text: str) -> list[tuple[int, int]]:
    shapes = [re.fullmatch(r"(\d+)P(\d+)D", item) for item in text.split(",")]
    if not all(shapes):
        raise argparse.ArgumentTypeError(f"{text!r} is not like 1P1D,2P2D")
    return [(int(shape[1]), int(shape[2])) for shape in shapes if shape]


def _numbers(text: str) -> list[int]:
    return [int(item) for item in text.split(",")]


if __name__ == "__main__":
    raise SystemExit(main())
