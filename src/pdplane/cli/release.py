"""`pdplane release`: quarantined pages are given back without a proof, on an operator's word; or prefill lets go of
what it holds for a reader that will not come, which needs none.
"""

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
        help="free quarantined pages without a proof, or held ones",
        description="Give back a decode worker's quarantined pages of one grant although the proof that nobody writes "
        "them has not come. Make sure first that the peer named as their holder is gone for good. `pdplane status` and "
        "`pdplane explain` name instance, grant and holder. With --hold, a prefill worker of dialect params lets go of "
        "the KV that it holds for a reader: that is safe, a reader that comes after all is refused.",
        epilog="example: pdplane release http://10.0.0.2:8200 --instance 5f2c9a0be1d37748 --grant 17",
    )
    parser.add_argument("url", metavar="URL", help="the worker's own URL, as `pdplane status` shows it")
    parser.add_argument("--instance", help="the decode instance that granted the pages")
    parser.add_argument("--grant", type=int, help="the grant's number at that instance")
    parser.add_argument(
        "--hold", action="append", metavar="RID", help="what prefill holds, by its rid; may be repeated"
    )
    add_admin_arguments(parser)
    parser.set_defaults(run=main, complain=parser.error)


def main(args: argparse.Namespace) -> int:
    """0: pages were freed. 1: there was nothing to free."""
    by_grant = args.instance is not None and args.grant is not None
    if by_grant == bool(args.hold) or (args.hold and (args.instance or args.grant)):
        args.complain("give --instance and --grant (quarantined pages of a decode), or --hold (what a prefill holds)")
    return _holds(args) if args.hold else _grant(args)


def _holds(args: argparse.Namespace) -> int:
    with client(args.url, args.admin_key) as worker:
        told = say(worker, "/v1/kv/release", {"request_ids": args.hold})
    for rid in told["released"]:
        print(f"released: {rid} at {args.url}")
    for rid in told["unknown"]:
        print(f"nothing is held for {rid} at {args.url}; `pdplane status` shows what is")
    return 0 if told["released"] else 1


def _grant(args: argparse.Namespace) -> int:
    with client(args.url, args.admin_key) as worker:
        pages = say(worker, "/release", {"instance": args.instance, "grant": args.grant})["released"]
    what = f"grant {args.grant} of instance {args.instance} at {args.url}"
    if not pages:
        print(f"nothing was freed: {what} has no pages in quarantine; `pdplane status` shows what there is")
        return 1
    print(f"freed {pages} page{'s' if pages != 1 else ''} of {what}")
    print(WARNING, file=sys.stderr)
    return 0
