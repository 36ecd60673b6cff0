"""`pdplane explain`: one request's timeline, on the router and on both workers, and who holds what of it now."""

from __future__ import annotations

import argparse
import json
from typing import Any
from urllib.parse import quote

from pdplane.settings import BadSetting

from .http import add_router_arguments, client, get
from .status import held, quarantine

MEANINGS = {
    ("prefill", "Orphan"): "decode spoke first; its leg is awaited",
    ("prefill", "Waiting"): "leg in, no pages granted yet",
    ("prefill", "Ahead"): "computing before any pages are granted",
    ("prefill", "Held"): "computed; its pages wait for decode, for a limited time",
    ("prefill", "Bound"): "its one reader has come",
    ("prefill", "Released"): "its reader has what it came for, or nobody wants it",
    ("prefill", "Revoked"): "nobody will read it: its term is over, or it was named by an abort",
    ("prefill", "Armed"): "pages granted, waits for its turn",
    ("prefill", "Streaming"): "computing; full pages are moved as they come",
    ("prefill", "Flushing"): "computed; the last pages are under way",
    ("prefill", "Sent"): "every page is at decode",
    ("prefill", "Draining"): "answered; a step or a write still touches its pages",
    ("prefill", "Gone"): "nothing of it is left here",
    ("prefill", "finished"): "its own leg, after one token; how the request ended is decode's to say",
    ("prefill", "freed"): "let go: free, or kept in the prefix cache",
    ("decode", "Queued"): "prefill's route or session is not known yet",
    ("decode", "Announced"): "prefill was asked to compute; nothing is reserved before it has",
    ("decode", "Allocating"): "announced; waits for pages",
    ("decode", "Granted"): "pages reserved, prefill may write them",
    ("decode", "Success"): "every page landed and the row matches",
    ("decode", "Draining"): "answered; waits for proof that nobody writes its pages",
    ("decode", "Quarantine"): "the proof did not come in time",
    ("decode", "Gone"): "the hand-off is over",
    ("prefill", "WAITING"): "it waits for pages or a place",
    ("prefill", "RUNNING"): "the prompt is being computed",
    ("decode", "WAITING"): "its prefill is not known yet, or it waits for pages",
    ("decode", "WAITING_FOR_REMOTE_KVS"): "all its pages are reserved, and are being read",
    ("decode", "Reading"): "its pages are being read",
    ("decode", "Confirming"): "all have come; prefill is asked whether it held them all along",
    ("decode", "Salvaging"): "a head of them has come; prefill is asked the same of these",
    ("decode", "Ready"): "confirmed: they are what prefill computed",
    ("decode", "Recompute"): "confirmed up to the first page that did not come",
    ("decode", "Failed"): "nothing of it can be used",
    ("decode", "recompute"): "what could not be read is computed here",
    ("decode", "unconfirmed"): "what was read may be another's: nothing of it has left",
    ("decode", "retracted"): "its pages were wanted by others; its KV waits in host memory",
    ("decode", "restored"): "its KV is back in pages, bit for bit; it runs on",
    ("decode", "cut"): "it could not grow any further and ends with `length`",
    ("decode", "released"): "the engine has let go, its pages are free",
}


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "explain",
        help="show what happened to one request",
        description="Show one request's timeline on both sides. ID is the x-request-id of its answer, a rid, a room, "
        "or the label that the client gave.",
    )
    parser.add_argument("id", help="request id, rid, room or label")
    add_router_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print the records as JSON")
    parser.set_defaults(run=main)


def main(args: argparse.Namespace) -> int:
    path = "/requests/" + quote(args.id, safe="")
    with client(args.url, args.api_key) as router:
        status, record = get(router, path)
    if status != 200:
        message = record.get("error", {}).get("message", record) if isinstance(record, dict) else record
        raise BadSetting(f"{message}; the router keeps the last requests only")
    if "attempts" not in record:
        raise BadSetting(f"{args.url} is a worker; give the router's URL with --url: it knows both sides")
    legs = _legs(record)
    if args.json:
        print(json.dumps({"router": record, "legs": legs}, indent=2))
    else:
        print("\n".join(_story(record, legs)))
    return 0


def _legs(record: dict[str, Any]) -> list[dict[str, Any]]:
    """The workers' own records of every attempt's rids; a worker that does not answer is said to."""
    legs = []
    for attempt in record["attempts"]:
        for side in ("prefill", "decode"):
            url = attempt.get(side)
            if not url:
                continue
            rids = _rids(attempt, side)
            for sample, rid in enumerate(rids, attempt.get("sample", 0)):
                where = side if len(rids) == 1 and not sample else f"{side} {sample}"
                legs.append({"side": side, "where": where, "url": url, "rid": rid, **_ask(url, rid)})
    return legs


def _rids(attempt: dict[str, Any], side: str) -> list[str]:
    """Legs by room share their rids; legs in turn have one each."""
    handoff = attempt.get("handoff")
    return [handoff[f"{side}_rid"]] if handoff else attempt["rids"]


def _ask(url: str, rid: str) -> dict[str, Any]:
    """What the worker there knows of `rid`, and what is in quarantine because of it."""
    try:
        with client(url, timeout_s=3.0) as worker:
            status, told = get(worker, "/requests/" + quote(rid, safe=""))
            if status != 200:
                return {"missing": "this worker knows nothing of it"}
            _, info = get(worker, "/server_info")
    except BadSetting as error:
        return {"missing": str(error)}
    return {"record": told["legs"][0], "quarantined": [one for one in info.get("quarantined", ()) if _is_of(one, rid)]}


def _is_of(quarantined: dict[str, Any], rid: str) -> bool:
    return rid in (quarantined.get("rid"), quarantined.get("owner"))


def _story(record: dict[str, Any], legs: list[dict[str, Any]]) -> list[str]:
    zero = record["received_unix_s"]
    lines = [
        f"request {record['request_id']}  {record['path']}  verdict {record['verdict']}  status {record['status']}"
    ]
    if record.get("label"):
        lines.append(f"label {record['label']}")
    if record.get("cause"):
        lines.append(f"cause {record['cause']['code']} ({record['cause']['side']}): {record['cause']['message']}")
    for attempt in record["attempts"]:
        ranks = ", ".join(str(rank) for rank in attempt.get("prefill_ranks", ()))
        at = f" (dp rank {ranks})" if ranks else ""
        lines.append(
            f"attempt {attempt['attempt']}: prefill {attempt['prefill']}{at}, decode {attempt['decode']}, "
            f"{_by(attempt)}"
        )
    lines += ["", f"{'ms':>10}  {'where':<10} what"]
    events = [*_router_events(record), *(event for leg in legs for event in _leg_events(leg, zero))]
    lines += [f"{at * 1000:>10.1f}  {where:<10} {what}" for at, where, what in sorted(events, key=lambda e: e[0])]
    lines.append("")
    for leg in legs:
        lines += [_holding(leg), *_grants(leg)]
    return lines


def _by(attempt: dict[str, Any]) -> str:
    """What its legs pair by."""
    handoff = attempt.get("handoff")
    if not handoff:
        return "room " + ", ".join(str(room) for room in attempt["rooms"])
    if handoff.get("hold") is None:
        return "no hand-off"
    release = f", {handoff['release']}" if handoff.get("release") else ""
    return f"hold {handoff['hold']} of {handoff['request_id']}{release}"


def _router_events(record: dict[str, Any]) -> list[tuple[float, str, str]]:
    events = [(0.0, "router", "request received")]
    for attempt in record["attempts"]:
        named = (
            ("opened_s", "both legs sent"),
            ("prefill_ended_s", "prefill's leg ended"),
            ("first_byte_s", "first byte to the client"),
            ("decode_ended_s", "decode's leg ended"),
        )
        handoff = attempt.get("handoff") or {}
        if handoff:
            named = (("opened_s", "prefill's leg sent"), *named[1:])
        in_turn = (("answered_s", "prefill has answered"), ("decode_opened_s", "decode's leg sent"))
        events += [(attempt[key], "router", what) for key, what in named if attempt.get(key) is not None]
        events += [(handoff[key], "router", what) for key, what in in_turn if handoff.get(key) is not None]
    if record.get("finished_s") is not None:
        events.append((record["finished_s"], "router", f"verdict {record['verdict']}"))
    return events


def _leg_events(leg: dict[str, Any], zero: float) -> list[tuple[float, str, str]]:
    told = leg.get("record")
    if told is None:
        return []
    start = told["started_unix_s"] - zero
    return [(start + entry["at_s"], leg["where"], _words(leg["side"], entry)) for entry in told["entries"]]


def _words(side: str, entry: dict[str, Any]) -> str:
    """The state, and what it means where its name alone does not say it."""
    meaning = MEANINGS.get((side, entry["state"]), "")
    detail = entry["detail"]
    return f"{entry['state']}{meaning and f' ({meaning})'}{detail and f': {detail}'}"


def _holding(leg: dict[str, Any]) -> str:
    if "missing" in leg:
        return f"{leg['side']:<8} {leg['url']} rid {leg['rid']}: {leg['missing']}"
    held = leg["record"]["held_pages"]
    what = ", ".join(f"{count} pages {state}" for state, count in held.items()) or "nothing"
    return f"{leg['side']:<8} {leg['url']} instance {leg['record']['instance']} rid {leg['rid']}: holds {what}"


def _grants(leg: dict[str, Any]) -> list[str]:
    """The grants of a leg as its worker knows them, each with its links; what is held; and what is in quarantine."""
    lines = [f"  {held(one)}" for one in leg.get("record", {}).get("holds", ())]
    for grant in leg.get("record", {}).get("grants", ()):
        kept = ", ".join(f"{count} {state}" for state, count in grant.get("held_pages", {}).items()) or "none held"
        lines.append(f"  grant {grant['grant']} of instance {grant['instance']}: {grant['pages']} pages, {kept} here")
        lines += [f"    link {_link(link)}" for link in grant.get("links", ())]
    return lines + [f"  {quarantine(one, leg['url'])}" for one in leg.get("quarantined", ())]


def _link(link: dict[str, Any]) -> str:
    by = f" by {link['transport']}" if link.get("transport") else ""
    part = f", {link['page_bytes']} bytes of each page" if link.get("page_bytes") else ""
    return f"{link['here']} with {link['there']}{by}{part}"
