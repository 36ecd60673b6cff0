"""Runs seeds, many at a time, and says what a person wants to know."""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext

import msgspec

from .broken import BROKEN, variant
from .checkers import Violation
from .coverage import FOREIGN, ByPattern, Reached, report, watching
from .drawn import Plan
from .plan import plan
from .trace import Trace
from .world import SimWorld


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """`violation` "" means that every rule held. `verdicts`: how the requests ended, by cause code ("ok" for whole
    answers). `lines`: the trace, where it was asked for; `reached`: what coverage.py counts, where that was."""

    seed: int
    pattern: str
    dialect: str
    fence: bool
    violation: str = ""
    requests: int = 0
    events: int = 0
    virtual_s: float = 0.0
    verdicts: dict[str, int] = {}
    lines: list[str] = []
    reached: dict[str, int] = {}


def run_seed(
    seed: int,
    *,
    pattern: str | None = None,
    broken: str | None = None,
    fence: bool | None = None,
    dialect: str | None = None,
    trace: bool = False,
    coverage: bool = False,
) -> Outcome:
    """One run. `broken` names a variant of the core in broken.py. Raises ValueError for an unknown name."""
    drawn = plan(seed, pattern=pattern, fence=fence, dialect=dialect)
    return run_plan(drawn, broken=broken, trace=trace, coverage=coverage)


def run_plan(drawn: Plan, *, broken: str | None = None, trace: bool = False, coverage: bool = False) -> Outcome:
    """One run of this very plan."""
    log = Trace(trace)
    reached: Reached = Counter()
    with variant(broken), watching(reached) if coverage else nullcontext():
        world = SimWorld(drawn, log, reached if coverage else None)
        violation = ""
        try:
            world.run()
        except Violation as found:
            violation = str(found)
        except Exception as error:  # the core's own asserts are checkers too
            violation = f"exception: {type(error).__name__}: {error} ({_where(error)})"
    reached[FOREIGN] += world.pages.foreign
    if violation:
        world.say("VIOLATION", violation)
    for process in world.every_process:
        for pool in process.pools:
            if pool is not None:
                pool.close()
    verdicts = Counter(c.verdict.code if c.verdict else "ok" for c in world.router.clients.values() if c.done)
    return Outcome(
        seed=drawn.seed,
        pattern=drawn.pattern,
        dialect=drawn.dialect,
        fence=drawn.fence,
        violation=violation,
        requests=len(drawn.requests),
        events=world.events,
        virtual_s=world.now,
        verdicts=dict(sorted(verdicts.items())),
        lines=log.lines,
        reached=dict(reached) if coverage else {},
    )


def _where(error: BaseException) -> str:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{os.path.basename(frame.filename)}:{frame.lineno} in {frame.name}"


class Asked(msgspec.Struct, frozen=True):
    """What all seeds of a batch have in common."""

    pattern: str | None = None
    fence: bool | None = None
    dialect: str | None = None
    coverage: bool = False


def _chunk(seeds: Sequence[int], asked: Asked) -> list[Outcome]:
    given = (asked.pattern, asked.fence, asked.dialect, asked.coverage)
    pattern, fence, dialect, coverage = given
    return [run_seed(seed, pattern=pattern, fence=fence, dialect=dialect, coverage=coverage) for seed in seeds]


def run_many(
    count: int,
    start: int = 0,
    jobs: int = 2,
    progress: Callable[[int, int], None] | None = None,
    *,
    pattern: str | None = None,
    fence: bool | None = None,
    dialect: str | None = None,
    coverage: bool = False,
) -> list[Outcome]:
    """Seeds `start` to `start + count - 1`, in order. `progress(done, count)` is called now and then."""
    seeds = range(start, start + count)
    chunks = [seeds[i : i + 20] for i in range(0, count, 20)]
    outcomes: list[Outcome] = []
    for part in _parts(chunks, jobs, Asked(pattern, fence, dialect, coverage)):
        outcomes += part
        if progress:
            progress(len(outcomes), count)
    return outcomes


def _parts(chunks: Sequence[Sequence[int]], jobs: int, asked: Asked) -> Iterator[list[Outcome]]:
    if jobs <= 1 or len(chunks) <= 1:
        yield from (_chunk(chunk, asked) for chunk in chunks)
        return
    with ProcessPoolExecutor(jobs) as pool:
        yield from pool.map(_chunk, chunks, [asked] * len(chunks))


def reached_by_pattern(outcomes: Sequence[Outcome]) -> ByPattern:
    by_pattern: ByPattern = {}
    for outcome in outcomes:
        by_pattern.setdefault((outcome.dialect, outcome.pattern), Counter()).update(outcome.reached)
    return by_pattern


class Caught(msgspec.Struct, frozen=True):
    """What became of a broken variant: the first seed whose checkers see it, None where none does."""

    name: str
    seed: int | None
    violation: str


def run_broken(names: Sequence[str] | None = None) -> list[Caught]:
    """Each broken variant, from seed 0 up to its stated number of seeds."""
    return [_catch(name) for name in names or BROKEN]


def _catch(name: str) -> Caught:
    fault = BROKEN[name]
    for seed in range(fault.within_seeds):
        outcome = run_seed(seed, broken=name, pattern=fault.pattern, fence=fault.fence, dialect=fault.dialect)
        if outcome.violation:
            return Caught(name, seed, outcome.violation)
    return Caught(name, None, "")


# --- for the command line -------------------------------------------------------------------------------------------


def sim_main(
    seeds: int,
    *,
    start: int = 0,
    jobs: int = 2,
    pattern: str | None = None,
    fence: bool | None = None,
    dialect: str | None = None,
    broken: bool = True,
    coverage: bool = False,
) -> int:
    """`seeds` runs of the core as it is, then the broken variants. 0 where all rules held and all variants were
    caught. `coverage`: says what the runs have reached, and what not."""
    began = time.monotonic()

    def show(done: int, of: int) -> None:
        if sys.stderr.isatty():
            rate = done / (time.monotonic() - began)
            print(f"\r{done}/{of} seeds, {rate:.1f}/s", end="", file=sys.stderr, flush=True)

    try:
        outcomes = run_many(seeds, start, jobs, show, pattern=pattern, fence=fence, dialect=dialect, coverage=coverage)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    if sys.stderr.isatty():
        print(file=sys.stderr)
    _report(outcomes, time.monotonic() - began)
    if coverage:
        print("\n".join(report(reached_by_pattern(outcomes))))
    bad = [outcome for outcome in outcomes if outcome.violation]
    options = "".join(f" --{name} {value}" for name, value in (("dialect", dialect), ("pattern", pattern)) if value)
    return 1 if _report_bad(bad, options) + (_report_broken(dialect) if broken else 0) else 0


def _report(outcomes: Sequence[Outcome], took_s: float) -> None:
    verdicts: Counter[str] = Counter()
    for outcome in outcomes:
        verdicts.update(outcome.verdicts)
    requests, events = sum(o.requests for o in outcomes), sum(o.events for o in outcomes)
    hours = sum(o.virtual_s for o in outcomes) / 3600
    print(f"{len(outcomes)} seeds in {took_s:.1f} s ({len(outcomes) / max(took_s, 1e-9):.1f}/s): {requests} requests,")
    print(f"{events} events, {hours:.1f} hours of virtual time")
    for (dialect, name), count in sorted(Counter((o.dialect, o.pattern) for o in outcomes).items()):
        failed = sum(bool(o.violation) for o in outcomes if (o.dialect, o.pattern) == (dialect, name))
        print(f"  {dialect:<6} {name:<16} {count:>5} seeds  {failed or 'no'} violation{'' if failed == 1 else 's'}")
    print("ends: " + ", ".join(f"{code} {count}" for code, count in verdicts.most_common()))


def _report_bad(bad: Sequence[Outcome], options: str) -> int:
    for outcome in bad[:10]:
        print(f"seed {outcome.seed} ({outcome.dialect}, {outcome.pattern}): {outcome.violation}")
        print(f"  pdplane replay {outcome.seed}{options}")
    if len(bad) > 10:
        print(f"... and {len(bad) - 10} more")
    if not bad:
        print("zero violations")
    return len(bad)


def _report_broken(dialect: str | None) -> int:
    print("seeded faults, each of which must be caught:")
    missed = 0
    for caught in run_broken([name for name, fault in BROKEN.items() if dialect in (None, fault.dialect)]):
        if caught.seed is None:
            missed += 1
            print(f"  {caught.name:<24} NOT CAUGHT within {BROKEN[caught.name].within_seeds} seeds")
        else:
            print(f"  {caught.name:<24} seed {caught.seed:<4} {caught.violation}")
    return missed


def replay_main(
    seed: int,
    *,
    pattern: str | None = None,
    fence: bool | None = None,
    dialect: str | None = None,
    broken: str | None = None,
    tail: int | None = None,
) -> int:
    """Prints the trace of one seed (its last `tail` lines), and the violation if there is one."""
    try:
        outcome = run_seed(seed, pattern=pattern, fence=fence, dialect=dialect, broken=broken, trace=True)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    for line in outcome.lines[-tail:] if tail else outcome.lines:
        print(line)
    fabric = "with a local fence" if outcome.fence else "one-sided, no fence"
    print(f"seed {seed}, dialect {outcome.dialect}, pattern {outcome.pattern}, transport {fabric}", end="")
    print(f", {outcome.events} events")
    print(f"VIOLATION {outcome.violation}" if outcome.violation else f"all rules held; ends: {outcome.verdicts}")
    return 1 if outcome.violation else 0
