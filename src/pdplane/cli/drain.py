"""`pdplane drain`: a worker takes nothing new, and what runs on it finishes."""

from __future__ import annotations

import argparse

from .http import add_admin_arguments, client, say


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "drain",
        help="take a worker out of service gently",
        description="Tell a worker to take no new requests; what runs on it finishes, and then its process ends with "
        "exit code 0. It cannot be taken back: start the worker again.",
        epilog="example: pdplane drain http://10.0.0.2:8200 --reason 'new kernel'",
    )
    parser.add_argument("url", metavar="URL", help="the worker's own URL, as `pdplane status` shows it")
    parser.add_argument("--reason", default="", help="what its peers, the router and the records are told")
    add_admin_arguments(parser)
    parser.set_defaults(run=main)


def main(args: argparse.Namespace) -> int:
    """0: it drains."""
    with client(args.url, args.admin_key) as worker:
        told = say(worker, "/drain", {"reason": args.reason} if args.reason else {})
    live = told["live"]
    rest = "nothing runs on it" if not live else f"{live} request{'s' if live != 1 else ''} on it may finish"
    print(f"{args.url} drains: it takes nothing new, {rest}")
    return 0
