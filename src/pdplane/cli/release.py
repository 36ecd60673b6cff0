"""`pdplane release`: quarantined pages are given back without a proof, on an operator's word."""

from __future__ import annotations

import argparse
import sys

from .http import add_admin_arguments, client, say

WARNING = (
    "UNPROVEN: nothing has shown that no write can still land in these pages. If the peer that was granted them is "
    "alive, one that lands now is in another request's text, unseen."
)


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "release",
        help="free quarantined pages without a proof",
        description="Give back a decode worker's quarantined pages of one grant although the proof that nobody writes "
        "them has not come. Make sure first that the peer named as their holder is gone for good. `pdplane status` and "
        "`pdplane explain` name instance, grant and holder.",
        epilog="example: pdplane release http://10.0.0.2:8200 --instance 5f2c9a0be1d37748 --grant 17",
    )
    parser.add_argument("url", metavar="URL", help="the decode worker's own URL, as `pdplane status` shows it")
    parser.add_argument("--instance", required=True, help="the decode instance that granted the pages")
    parser.add_argument("--grant", required=True, type=int, help="the grant's number at that instance")
    add_admin_arguments(parser)
    parser.set_defaults(run=main)


def main(args: argparse.Namespace) -> int:
    """0: pages were freed. 1: there was nothing to free."""
    with client(args.url, args.admin_key) as worker:
        pages = say(worker, "/release", {"instance": args.instance, "grant": args.grant})["released"]
    what = f"grant {args.grant} of instance {args.instance} at {args.url}"
    if not pages:
        print(f"nothing was freed: {what} has no pages in quarantine; `pdplane status` shows what there is")
        return 1
    print(f"freed {pages} page{'s' if pages != 1 else ''} of {what}")
    print(WARNING, file=sys.stderr)
    return 0
