"""`pdplane incidents`: faults of real systems as scenarios, under the rules that had the hole and under ours."""

from __future__ import annotations

import argparse


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "incidents",
        help="replay faults of real systems, with the hole and without",
        description="Run faults that real systems have had as small simulated worlds (docs/incidents.md tells them). "
        "With the rules that had the hole each must break a rule that the simulator checks; with ours none may.",
        epilog="example: pdplane incidents I12 I23",
    )
    parser.add_argument("number", nargs="*", metavar="NUMBER", help="which, I04 say [all]")
    parser.set_defaults(run=main)


def main(args: argparse.Namespace) -> int:
    """0: every verdict is as it should be. 1: one is not. 2: there is no such incident."""
    from pdplane.sim.incidents.table import incidents_main

    return incidents_main(args.number)
