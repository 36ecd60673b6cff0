"""`pdplane status`: who is there, who is out and why, and who holds what."""

from __future__ import annotations

import argparse
import json
from typing import Any

from pdplane.core.layout import PARAMS
from pdplane.settings import BadSetting

from .http import add_router_arguments, client, get

INDENT = " " * 13


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "status",
        help="show a running fleet",
        description="Show the workers behind a router: shape, policy, transports, load by rank, health, bans with the "
        "time they have left, why one is out, and the pages of each pool.",
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
        print("\n".join(_lines(worker)))
    return 0 if status == 200 else 1


def _server_info(url: str) -> dict[str, Any] | None:
    try:
        with client(url, timeout_s=2.0) as worker:
            status, body = get(worker, "/server_info")
            return body if status == 200 else None
    except BadSetting:
        return None


def _lines(worker: dict[str, Any]) -> list[str]:
    return [
        _first(worker),
        *(INDENT + text for text in [*_seen_by_router(worker), *_said_by_itself(worker)]),
    ]


def _first(worker: dict[str, Any]) -> str:
    """As the router sees it: where, how loaded, whether in service."""
    load = str(worker.get("load", 0))
    if worker.get("rank_load"):
        load += f" ({'+'.join(map(str, worker['rank_load']))} by dp rank)"
    state = f"OUT: {worker['reason']}" if worker.get("reason") else "in service"
    return f"  {worker['role']:<10} {worker['url']:<28} load {load:<4} {state}"


def _seen_by_router(worker: dict[str, Any]) -> list[str]:
    lines = []
    if ban := worker.get("ban"):
        left = f"for {ban['left_s']:.1f} s more" if ban["state"] == "banned" else f"until {ban['state']}"
        lines.append(f"others preferred {left}: {ban['why']}")
    elif worker.get("avoided"):
        lines.append(f"others preferred for a moment: {worker['avoided']}")
    if not worker.get("reason"):  # otherwise they are named in it
        lines += [f"does not fit {clash['with']}: {clash['why']}" for clash in worker.get("incompatible", [])]
    return lines


def _said_by_itself(worker: dict[str, Any]) -> list[str]:
    """Only ours say most of it; another engine's /server_info says less, and is not asked for more."""
    told, lines = worker["server_info"] or {}, []
    traits = [*_shape(told.get("shape") or {}), *_hand_off(told)]
    if "instance" in told:
        lines.append(", ".join([f"instance {told['instance']}", str(told.get("model", "")), *traits]))
    figures = told.get("figures") or {}
    if figures:
        pages = ", ".join(f"{count} {state}" for state, count in figures.get("pages", {}).items() if count)
        lines.append(f"jobs {figures.get('jobs', 0)}, pages {pages}")
    lines += [held(one) for one in told.get("holds", [])]
    lines += [refused(one) for one in told.get("refused_sessions", [])]
    lines += [quarantine(one, worker["url"]) for one in told.get("quarantined", [])]
    lines += [f"ALARM {alarm}" for alarm in told.get("alarms", [])]
    return lines


def _hand_off(told: dict[str, Any]) -> list[str]:
    """How it hands over, or takes over. In params prefill always computes first, and has no policy."""
    policy, lease = told.get("decode_allocation_policy"), None
    if told.get("dialect") == PARAMS and told["role"] == "decode":
        policy = told.get("kv_load_failure_policy")
    elif told.get("dialect") == PARAMS:
        policy, lease = None, f"{told.get('lease_s')} s"
    named = {"dialect": told.get("dialect"), "policy": policy, "transports": told.get("transports"), "lease": lease}
    return [word for name, value in named.items() for word in _words(name, value)]


def _shape(shape: dict[str, int]) -> list[str]:
    """dp and tp always, the axes that are seldom there only where they are."""
    shown = [f"{axis} {size}" for axis, size in shape.items() if axis in ("dp", "tp") or size != 1]
    return [", ".join(shown)] if shown else []


def _words(name: str, value: object) -> list[str]:
    if not value:
        return []
    return [f"{name} {', '.join(map(str, value)) if isinstance(value, list) else value}"]


def refused(one: dict[str, Any]) -> str:
    """A peer with which this worker has no session; the message ends with the remedy."""
    return f"REFUSED {one['peer'] or 'a stranger'} {one.get('ago_s', 0):.0f} s ago: {one['message']}"


def held(one: dict[str, Any]) -> str:
    """KV that prefill keeps for a reader; `pdplane release --hold` lets go of it."""
    reader = f"read by {one['consumer']}" if one.get("consumer") else "nobody has asked for it"
    return f"hold {one['hold']} of {one['rid']}: {one['pages']} pages, {one['lease_left_s']:.1f} s left, {reader}"


def quarantine(one: dict[str, Any], url: str) -> str:
    """Pages without an end in sight: whose proof is missing, and the call that gives them back without one."""
    named = [f"{name} {one[name]}" for name in ("rid", "room", "grant") if one.get(name) is not None]
    text = f"QUARANTINE {one.get('pages', '?')} pages of {', '.join(named) or one.get('owner', '?')}"
    if one.get("no_proof_from"):
        text += f", no proof from {', '.join(one['no_proof_from'])}"
    if one.get("grant") is None:
        return text
    return f"{text}; `pdplane release {url} --instance {one['instance']} --grant {one['grant']}` frees them unproven"
