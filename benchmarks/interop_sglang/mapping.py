"""SGLang's rank mapping and ours, for every small shape."""

from __future__ import annotations

from itertools import product
from typing import Any

from peer_process import Peer, axes
from report import Row

from pdplane.core.ids import Rank, Shape
from pdplane.core.topology import KvSpread, contradiction, map_ranks

PREFILLS = [Shape(1, cp, tp, pp) for cp, tp, pp in product((1, 2, 4), (1, 2, 4, 8), (1, 2, 4))]
DECODES = [Shape(1, 1, tp, pp) for tp, pp in product((1, 2, 4, 8), (1, 2, 4))]
SPREADS = [KvSpread(*flags) for flags in product((False, True), repeat=3)]

PART = "tp 1 to 8, cp and pp 1 to 4, with and without MLA, sharding, all-CP transfer"

Case = tuple[Shape, Shape, Rank, KvSpread]


async def compare_maps(peer: Peer) -> list[Row]:
    cases: list[Case] = [
        (prefill, decode, Rank(tp=tp, pp=pp), spread)
        for prefill, decode, spread in product(PREFILLS, DECODES, SPREADS)
        for tp, pp in product(range(decode.tp), range(decode.pp))
    ]
    theirs = (await peer.do("map", cases=[_told(case) for case in cases]))["maps"]
    wrong = [case for case, found in zip(cases, theirs, strict=True) if found != _ours(case)]
    refused = sum(found is None for found in theirs)
    name = f"{len(cases)} shapes and ranks, {refused} of them refused by both"
    whole = Row(f"{name}; {PART}", "all", f"{len(cases)}", f"{len(cases) - len(wrong)}", not wrong)
    return [whole, *(Row("not alike", str(case), "", "", False) for case in wrong[:10])]


def _told(case: Case) -> dict[str, Any]:
    prefill, decode, rank, spread = case
    shapes = {"prefill": axes(prefill), "decode": axes(decode), "rank": axes(rank)}
    return {**shapes, "mla": spread.mla, "sharded": spread.sharded, "all_cp": spread.all_cp}


def _ours(case: Case) -> dict[str, Any] | None:
    """In SGLang's words."""
    prefill, decode, rank, spread = case
    if contradiction(prefill, decode, spread) is not None:
        return None
    found = map_ranks(prefill, decode, rank, 0, spread)
    tps = sorted({target.rank.tp for target in found.targets})
    all_real = spread.mla and spread.sharded and prefill.cp == 1
    return {
        "target_tp_rank": None if all_real else tps[0],
        "target_tp_ranks": tps,
        "target_cp_ranks": sorted({target.rank.cp for target in found.targets}),
        "target_pp_ranks": sorted({target.rank.pp for target in found.targets}),
        "required_dst_info_num": found.required_dst_info_num,
        "required_prefill_response_num": found.required_prefill_response_num,
    }
