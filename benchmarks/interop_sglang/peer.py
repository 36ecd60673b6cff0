"""SGLang's side of the comparison: takes commands as JSON lines, answers each with one. Runs in SGLang's environment.

{"do": "serve", "port": 9000}                                  its registry, on loopback
{"do": "register", "port": .., "shape": {..}, "ranks": [..]}   a real prefill manager each -> their ports
{"do": "resolve", "port": .., "shape": {..}, "rank": {..}}     a real decode manager and receiver -> what they learn
{"do": "take", "port": .., "rooms": [..], ..}                  a real sender a room, which registers its dp rank
{"do": "ask_rooms", "port": .., "rooms": [..]}                 -> room -> dp rank
{"do": "map", "cases": [..]}                                   its rank mapping of each case
"""

from __future__ import annotations

import json
import logging
import sys
import types
from typing import Any

import sglang_classes as sglang
from sglang_classes import conn

KEPT: list[Any] = []  # servers and managers live as long as this process
AXES = ("dp", "cp", "tp", "pp")
MAPPED = (
    *("target_tp_rank", "target_tp_ranks", "target_cp_ranks", "target_pp_ranks"),
    *("required_dst_info_num", "required_prefill_response_num"),
)


def serve(port: int) -> dict[str, Any]:
    KEPT.append(sglang.BootstrapServer("127.0.0.1", port))
    return {}


def register(port: int, shape: dict[str, int], ranks: list[dict[str, int]], **more: Any) -> dict[str, Any]:
    ports = []
    for rank in ranks:
        sglang.set_context(port, shape, rank, more)
        manager = sglang.make_manager("prefill", rank, shape["tp"], more)
        KEPT.append(manager)
        ports.append(manager.rank_port)
    return {"ports": ports}


def resolve(port: int, shape: dict[str, int], rank: dict[str, int], dp: int, room: int, **more: Any) -> dict[str, Any]:
    """One decode rank asks for prefill's dp rank `dp`."""
    address = f"127.0.0.1:{port}"
    sglang.set_context(port, shape, rank, more)
    manager = sglang.make_manager("decode", rank, shape["tp"], more)
    KEPT.append(manager)
    try:
        known = manager.try_ensure_parallel_info(address)
    except RuntimeError as error:
        return {"known": False, "raised": str(error)}
    if not known:
        return {"known": False, "raised": ""}
    receiver = sglang.Receiver(manager, address, room)
    receiver._register_kv_args = lambda: True  # the transfer backend's
    receiver.init(dp)
    info = manager.prefill_info_table[address]
    found = getattr(receiver, "bootstrap_infos", None) or []
    return {
        "known": True,
        "status": int(manager.check_status(room)),
        "reason": manager.failure_records.get(room),
        "endpoints": [[each["rank_ip"], each["rank_port"]] for each in found],
        "follow_bootstrap_room": info.follow_bootstrap_room,
        "dp_size": info.dp_size,
    }


def take(port: int, shape: dict[str, int], rank: dict[str, int], rooms: list[int], **more: Any) -> dict[str, Any]:
    """The rooms are registered by real senders of a manager that has registered itself."""
    sglang.set_context(port, shape, rank, more)
    manager = next(
        each for each in KEPT if getattr(each, "attn_dp_rank", None) == rank["dp"] and each.bootstrap_port == port
    )
    for room in rooms:
        sglang.Sender(manager, f"127.0.0.1:{port}", room)
    return {"statuses": [int(manager.check_status(room)) for room in rooms]}


def ask_rooms(port: int, rooms: list[int]) -> dict[str, Any]:
    return {"ranks": sglang.Receiver.query_prefill_dp_ranks(f"127.0.0.1:{port}", rooms)}


def map_ranks(cases: list[dict[str, Any]]) -> dict[str, Any]:
    return {"maps": [_mapped(**case) for case in cases]}


def _mapped(
    prefill: dict[str, int], decode: dict[str, int], rank: dict[str, int], mla: bool, sharded: bool, all_cp: bool
) -> dict[str, Any] | None:
    """None where SGLang's own assertions refuse the pair."""
    info = conn.PrefillServerInfo(
        *(prefill["tp"], prefill["cp"], prefill["dp"], prefill["pp"], 16, "float32", True),
        enable_kv_cache_sharding=sharded,
    )
    decoder = types.SimpleNamespace(
        is_mla_backend=mla,
        is_hybrid_mla_backend=False,
        enable_all_cp_ranks_for_transfer=all_cp,
        kv_args=types.SimpleNamespace(engine_rank=rank["tp"]),
        attn_tp_size=decode["tp"],
        attn_cp_size=decode["cp"],
        attn_cp_rank=rank["cp"],
        pp_size=decode["pp"],
        pp_rank=rank["pp"],
    )
    try:
        conn.CommonKVManager._resolve_rank_mapping(decoder, info)
    except AssertionError:
        return None
    return {name: getattr(info, name) for name in MAPPED}


COMMANDS = {
    "serve": serve,
    "register": register,
    "resolve": resolve,
    "take": take,
    "ask_rooms": ask_rooms,
    "map": map_ranks,
}


def main() -> None:
    logging.disable(logging.CRITICAL)  # what it logs, the answers say
    answers, sys.stdout = sys.stdout, sys.stderr
    print("{}", file=answers, flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        try:
            answer = COMMANDS[command.pop("do")](**command)
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)


main()
