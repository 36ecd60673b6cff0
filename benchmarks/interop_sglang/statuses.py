"""What both registries are asked, in order, from empty; and where ours is meant to answer otherwise."""

from __future__ import annotations

import json
from typing import Any

import msgspec

MALFORMED = "malformed: theirs 500, ours 400"
CHECKED = "ours compares all facts of the ranks"
NAMED = "same status; ours names rank and both values"
OCCUPIED = "theirs counts PUTs, ours ranks that are there"
BOUNDED = "ours refuses what can be no room, no rank"
EARLIER = "malformed: theirs looks at readiness first"
WORDED = "same status, other words"
TYPED = "ours takes whole numbers only"
HEAD = "the status is a GET's; a HEAD has no body"

MAX_ROOM = 2**63 - 1


class Question(msgspec.Struct, frozen=True):
    """`theirs` and `ours`: the statuses that are due. `difference`: why they differ, or the bodies do; "" where nothing
    may."""

    name: str
    method: str
    path: str
    body: bytes = b""
    theirs: int = 200
    ours: int = 200
    difference: str = ""


class Scene(msgspec.Struct, frozen=True):
    """Questions to a pair of fresh registries."""

    name: str
    questions: tuple[Question, ...]


def route(dp: int | str, cp: int | str, tp: int | str, pp: int | str) -> str:
    return f"/route?prefill_dp_rank={dp}&prefill_cp_rank={cp}&target_tp_rank={tp}&target_pp_rank={pp}"


INFO, RANK = route(-1, -1, -1, -1), route(0, 0, 0, 0)

ALONE: dict[str, Any] = {
    "attn_tp_size": 1,
    "attn_tp_rank": 0,
    "attn_cp_size": 1,
    "attn_cp_rank": 0,
    "attn_dp_size": 1,
    "attn_dp_rank": 0,
    "pp_size": 1,
    "pp_rank": 0,
    "system_dp_size": 1,
    "system_dp_rank": 0,
    "rank_ip": "10.0.0.1",
    "rank_port": 4000,
    "page_size": 16,
    "kv_cache_dtype": "float32",
    "kv_layout": None,
    "dsv41_spec_layout": None,
    "load_balance_method": "follow_bootstrap_room",
    "enable_dsa_cache_layer_split": False,
    "enable_kv_cache_sharding": False,
    "prefill_http_port": 30000,
    "decode_allocation_policy": "early",
}


def get(name: str, path: str, status: int, ours: int = 0, difference: str = "") -> Question:
    return Question(name, "GET", path, b"", status, ours or status, difference)


def put(name: str, status: int = 200, ours: int = 0, difference: str = "", drop: str = "", **change: Any) -> Question:
    body = {key: value for key, value in {**ALONE, **change}.items() if key != drop}
    return Question(name, "PUT", "/route", json.dumps(body).encode(), status, ours or status, difference)


def post(name: str, path: str, body: object, status: int = 200, ours: int = 0, difference: str = "") -> Question:
    sent = body if isinstance(body, bytes) else json.dumps(body).encode()
    return Question(name, "POST", path, sent, status, ours or status, difference)


def take(name: str, room: object, dp: object, status: int = 200, ours: int = 0, difference: str = "") -> Question:
    return post(name, "/register_dp_rank", {"bootstrap_room": room, "dp_rank": dp}, status, ours, difference)


def rooms(name: str, asked: object, status: int = 200, ours: int = 0, difference: str = "") -> Question:
    return post(name, "/query_dp_ranks", {"bootstrap_rooms": asked}, status, ours, difference)


EMPTY = Scene(
    "nobody has registered",
    (
        get("health", "/health", 200),
        get("group", INFO, 503),
        get("a rank", RANK, 503),
        get("no inputs", "/route", 400),
        get("three of four inputs", RANK.rpartition("&")[0], 400),
        get("an empty input", route(0, 0, 0, ""), 400),
        get("an input that is no integer", route(0, 0, "x", 0), 503, 400, EARLIER),
        get("the first input is no integer", route("x", 0, 0, 0), 500, 400, MALFORMED),
        get("an unknown path", "/nowhere", 404),
        *(Question(f"{verb} /route", verb, "/route", b"", 405, 405) for verb in ("POST", "DELETE", "PATCH", "OPTIONS")),
        Question("HEAD /route", "HEAD", "/route", b"", 405, 405),
        Question("HEAD /health", "HEAD", "/health", b"", 200, 200, HEAD),
        Question("PUT /health", "PUT", "/health", b"", 405, 405),
        get("GET /register_dp_rank", "/register_dp_rank", 405),
        get("GET /query_dp_ranks", "/query_dp_ranks", 405),
        rooms("unknown rooms", [7, 8]),
        rooms("no rooms", []),
    ),
)

BAD_BODIES = Scene(
    "malformed bodies",
    (
        Question("PUT of no JSON", "PUT", "/route", b"{", 500, 400, MALFORMED),
        Question("PUT of nothing", "PUT", "/route", b"", 500, 400, MALFORMED),
        Question("PUT of a list", "PUT", "/route", b"[]", 500, 400, MALFORMED),
        *(
            put(f"PUT without {key}", 500, 400, MALFORMED, drop=key)
            for key in ("attn_tp_size", "attn_dp_rank", "pp_rank", "system_dp_size", "rank_ip", "kv_cache_dtype")
        ),
        put("PUT of page_size null", 500, 400, MALFORMED, page_size=None),
        put("PUT of rank_port x", 500, 400, MALFORMED, rank_port="x"),
        put("PUT of an unknown policy", 200, 400, BOUNDED, decode_allocation_policy="late"),
        post("rank of a room, no JSON", "/register_dp_rank", b"{", 500, 400, MALFORMED),
        post("rank of a room, no rank", "/register_dp_rank", {"bootstrap_room": 7}, 500, 400, MALFORMED),
        take("rank of room x", "x", 0, 500, 400, MALFORMED),
        take("rank of a fractional room", 7.5, 0, 200, 400, TYPED),
        take("rank of room 0", 0, 0, 200, 400, BOUNDED),
        take("rank of a negative room", -1, 0, 200, 400, BOUNDED),
        take("rank of a room over 63 bits", 2**63, 0, 200, 400, BOUNDED),
        take("rank -1 of a room", 7, -1, 200, 400, BOUNDED),
        rooms("rooms that are no list", 7, 500, 400, MALFORMED),
        rooms("rooms that are no integers", ["x"], 500, 400, MALFORMED),
        post("rooms, no key", "/query_dp_ranks", {}, 500, 400, MALFORMED),
        post("a body over 1 MiB", "/query_dp_ranks", b'{"bootstrap_rooms":[]}'.ljust((1 << 20) + 1), 413, 413, WORDED),
    ),
)

WHOLE = Scene(
    "a group of one",
    (
        put("PUT"),
        get("group", INFO, 200),
        get("the rank", RANK, 200),
        *(
            get(f"rank {place}", route(*place), 404)
            for place in ((0, 0, 9, 0), (1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 0, 1), (-1, -1, 0, -1))
        ),
        get("an input that is no integer", route(0, 0, "x", 0), 500, 400, MALFORMED),
        get("an input of a fraction", route(0, 0, "1.5", 0), 500, 400, MALFORMED),
        put("PUT again, elsewhere", rank_port=4001),
        get("the rank that moved", RANK, 200),
        put("PUT with our own keys", pd_instance="p-1", pd_ttl_s=60),
        put("PUT with unknown keys", from_a_later_version=[1]),
        put("PUT of numbers as text", rank_port="4002"),
        get("the rank of a port as text", RANK, 200),
    ),
)

TWO_TP = {"attn_tp_size": 2}
PARTIAL = Scene(
    "tp 2, one rank and then the other",
    (
        put("PUT of tp 0", **TWO_TP),
        get("group, half", INFO, 503),
        get("the rank that is there", RANK, 503),
        put("PUT of tp 1", **TWO_TP, attn_tp_rank=1, rank_port=4001),
        get("group, whole", INFO, 200),
        *(get(f"tp {tp}", route(0, 0, tp, 0), 200) for tp in (0, 1)),
        get("tp 2", route(0, 0, 2, 0), 404),
    ),
)

TWICE = Scene(
    "tp 2, one rank twice",
    (
        put("PUT of tp 0", **TWO_TP),
        put("PUT of tp 0 again", **TWO_TP),
        get("group", INFO, 200, 503, OCCUPIED),
        get("tp 0", RANK, 200, 503, OCCUPIED),
        get("tp 1", route(0, 0, 1, 0), 404, 503, OCCUPIED),
    ),
)


def _group(name: str, sizes: dict[str, int], axes: dict[str, str]) -> Scene:
    """Every rank registers; every rank is found. `axes`: what the two axes of the query are called in the PUT."""
    dp_name, tp_name = axes["dp"], axes["tp"]
    places = [(dp, tp) for dp in range(sizes["dp"]) for tp in range(sizes["tp"])]
    fixed = {f"{dp_name}_size": sizes["dp"], f"{tp_name}_size": sizes["tp"]}
    ranks = [
        put(f"PUT {dp}, {tp}", **fixed, **{f"{dp_name}_rank": dp, f"{tp_name}_rank": tp}, rank_port=4000 + 10 * dp + tp)
        for dp, tp in places
    ]
    found = [get(f"rank {dp}, {tp}", route(dp, 0, tp, 0), 200) for dp, tp in places]
    early = get("group, but one", INFO, 503)
    return Scene(name, (*ranks[:-1], early, ranks[-1], get("group", INFO, 200), *found))


POLICIES = Scene(
    "policies and other facts",
    (
        put("PUT of prefill_complete", **TWO_TP, decode_allocation_policy="prefill_complete"),
        put("PUT of early beside it", 400, 400, NAMED, **TWO_TP, attn_tp_rank=1),
        put("PUT without a policy", 400, 400, NAMED, drop="decode_allocation_policy", **TWO_TP, attn_tp_rank=1),
        put(
            *("PUT of another spec layout", 400, 400, NAMED),
            **{**TWO_TP, "attn_tp_rank": 1, "decode_allocation_policy": "prefill_complete"},
            dsv41_spec_layout={"num_draft_tokens": 2},
        ),
        put("PUT of prefill_complete too", **TWO_TP, attn_tp_rank=1, decode_allocation_policy="prefill_complete"),
        get("group", INFO, 200),
    ),
)

DISAGREE = Scene(
    "ranks that disagree in what only ours compares",
    (
        put("PUT of tp 0", **TWO_TP),
        *(
            put(f"PUT of {key} {value!r}", 200, 400, CHECKED, **{**TWO_TP, "attn_tp_rank": 1, key: value})
            for key, value in (("page_size", 32), ("kv_cache_dtype", "bfloat16"), ("pp_size", 2), ("attn_tp_size", 4))
        ),
        put("PUT of a rank beyond its size", 200, 400, BOUNDED, **TWO_TP, attn_tp_rank=2),
    ),
)

LAYOUTS = Scene(
    "layouts and flags",
    (
        put(
            "PUT of all that is optional",
            kv_layout="packed",
            dsv41_spec_layout={"num_draft_tokens": 2},
            enable_dsa_cache_layer_split=True,
            enable_kv_cache_sharding=True,
            prefill_http_port=None,
        ),
        get("group", INFO, 200),
    ),
)

LEAST = Scene(
    "what SGLang's defaults are for",
    (
        Question(
            "PUT of the required keys",
            "PUT",
            "/route",
            json.dumps({key: value for key, value in list(ALONE.items())[:14]}).encode(),
        ),
        get("group", INFO, 200),
    ),
)


def _balanced(method: str) -> Scene:
    return Scene(f"load_balance_method {method}", (put("PUT", load_balance_method=method), get("group", INFO, 200)))


ROOMS = Scene(
    "rooms of dp 2",
    (
        *(put(f"PUT of dp {dp}", attn_dp_size=2, attn_dp_rank=dp, load_balance_method="round_robin") for dp in (0, 1)),
        take("rank 1 of room 7", 7, 1),
        take("rank 0 of the largest room", MAX_ROOM, 0),
        take("a room as text", "9", "1"),
        rooms("known and unknown rooms", [7, 8, MAX_ROOM, 9]),
        rooms("rooms as text", ["7", "8"]),
        take("room 7 moves", 7, 0),
        rooms("the room that moved", [7]),
        take("a rank that dp 2 has not", 10, 2, 200, 400, BOUNDED),
    ),
)

DATA_PARALLEL = {"dp": "attn_dp", "tp": "attn_tp"}
SCENES = (
    *(EMPTY, BAD_BODIES, WHOLE, PARTIAL, TWICE),
    _group("dp 2, tp 1", {"dp": 2, "tp": 1}, DATA_PARALLEL),
    _group("dp 2, tp 2", {"dp": 2, "tp": 2}, DATA_PARALLEL),
    _group("dp 2 of the system, tp 2", {"dp": 2, "tp": 2}, {"dp": "system_dp", "tp": "attn_tp"}),
    *(POLICIES, DISAGREE, LAYOUTS, LEAST),
    *(_balanced(method) for method in ("follow_bootstrap_room", "round_robin", "total_requests", "auto")),
    ROOMS,
)
