"""The `pdplane` command. Each subcommand is a module here; what it needs is imported when it runs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from pdplane import __version__
from pdplane.settings import BadSetting

from . import chat, drain, explain, incidents, model, registry, release, router, sim, status, up, worker

COMMANDS = (up, worker, router, registry, model, status, chat, explain, drain, release, sim, incidents)

EPILOG = """\
first steps:
  pdplane model install          fetch and prepare the embedded model, once
  pdplane up                     one prefill, one decode and the router on loopback
  pdplane chat                   talk to it
  pdplane explain REQUEST_ID     what happened to a request, on both sides
"""


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="pdplane",
        description="Prefill/decode disaggregated LLM serving: router, registry, workers and their hand-off.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument("--version", action="version", version=f"pdplane {__version__}")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in COMMANDS:
        command.add_to(commands)
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """0: done. 1: it failed. 2: the user can mend it, and the message says how. 130: interrupted."""
    args = parser().parse_args(argv)
    try:
        return int(args.run(args))
    except BadSetting as error:
        print(f"pdplane {args.command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        return 0
