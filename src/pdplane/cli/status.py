"""`pdplane status`: who is there, who is out and why, and who holds what."""

from __future__ import annotations

import argparse
import json
from typing import Any

from pdplane.settings import BadSetting

from .http import add_router_arguments, client, get


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "status",
        help="show a running fleet",
        description="Show the workers behind a router: load, health, why one is out, and the pages of each pool.",
    )
    add_router_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    parser.set_defaults(run=main)


def main(args: argparse.Namespace) -> int:
    """0 where at least one whole pair serves, else 1."""
    with client(args.url, args.api_key) as router:
        status, ready = get(router, "/ready")
        found, workers = get(router, "/workers")
    if found != 200:
        raise BadSetting(f"{args.url} has no /workers: is it a router? Give the router's URL with --url")
    told = [{**worker, "server_info": _server_info(worker["url"])} for worker in workers["workers"]]
    if args.json:
        print(json.dumps({"ready": status == 200, "why": ready, "workers": told}, indent=2))
        return 0 if status == 200 else 1
    print(f"router {args.url}: " + ("ready" if status == 200 else f"not ready: {ready['missing']}"))
    for worker in told:
        print(_line(worker))
    return 0 if status == 200 else 1


def _server_info(url: str) -> dict[str, Any] | None:
    try:
        with client(url, timeout_s=2.0) as worker:
            status, body = get(worker, "/server_info")
            return body if status == 200 else None
    except BadSetting:
        return None


def _line(worker: dict[str, Any]) -> str:
    out = f"  {worker['role']:<10} {worker['url']:<28} load {worker.get('load', 0):<4}"
    out += "in service" if not worker.get("reason") else f"OUT: {worker['reason']}"
    told = worker["server_info"]
    if told:
        figures = told["figures"]
        held = {state: count for state, count in figures["pages"].items() if count}
        out += "\n" + " " * 13 + f"instance {told['instance']}, {told['model']}, jobs {figures['jobs']}, pages "
        out += ", ".join(f"{count} {state}" for state, count in held.items())
        for alarm in told["alarms"]:
            out += f"\n             ALARM {alarm}"
    return out
