"""`pdplane sim` and `pdplane replay`: the production core under seeded faults, on virtual time."""

from __future__ import annotations

import argparse


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    many = commands.add_parser(
        "sim",
        help="simulate fleets under faults",
        description="Run whole fleets of the production core under seeded faults and check every order and page.",
    )
    many.add_argument("--seeds", type=_at_least_one, default=2000, help="how many worlds [2000]")
    many.add_argument("--start", type=int, default=0, help="first seed [0]")
    many.add_argument("--pattern", default=None, help="one fault pattern (or several, joined by +)")
    _add_dialect(many)
    many.add_argument("--jobs", type=_at_least_one, default=2, help="processes [2]")
    many.add_argument("--no-broken", action="store_true", help="leave out the broken variants that must be caught")
    many.add_argument(
        "--coverage", action="store_true", help="say which cells of the state tables were reached, and which never"
    )
    many.set_defaults(run=run_many)
    one = commands.add_parser(
        "replay",
        help="replay one simulated world",
        description="Replay one seed and print its trace, one line per event.",
    )
    one.add_argument("seed", type=int)
    one.add_argument("--pattern", default=None)
    _add_dialect(one)
    one.add_argument("--broken", default=None, help="run a broken variant of the core")
    one.set_defaults(run=replay)


def _add_dialect(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--dialect", choices=("rooms", "params"), default=None, help="worlds of this dialect alone [what each draws]"
    )


def run_many(args: argparse.Namespace) -> int:
    from pdplane.sim.run import sim_main

    return sim_main(
        args.seeds,
        start=args.start,
        pattern=args.pattern,
        dialect=args.dialect,
        jobs=args.jobs,
        broken=not args.no_broken,
        coverage=args.coverage,
    )


def replay(args: argparse.Namespace) -> int:
    from pdplane.sim.run import replay_main

    return replay_main(args.seed, pattern=args.pattern, dialect=args.dialect, broken=args.broken)


def _at_least_one(text: str) -> int:
    """No worlds, no verdict: a run over nothing must not say that all rules held."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is too little; give 1 or more")
    return number
