"""What one registration must be in itself, and what all of a group must have in common. Sans-IO."""

from __future__ import annotations

import math
from collections.abc import Iterable

from pdplane.core.ids import Rank
from pdplane.wire.registry import MAX_RANKS, PrefillRegistration

from .refused import RouteRefused

MAX_PAGE_SIZE = 2**20
MAX_TEXT = 512

_TEXTS = ("rank_ip", "kv_cache_dtype", "kv_layout", "load_balance_method", "pd_instance")
_COMMON = (
    "attn_tp_size",
    "attn_cp_size",
    "dp_size",
    "pp_size",
    "page_size",
    "kv_cache_dtype",
    "dsv41_spec_layout",
    "decode_allocation_policy",
)


def check_ranges(rank: PrefillRegistration) -> None:
    """Raises RouteRefused (400) for what no rank can be."""
    for axis, position, size in (
        ("attn_tp", rank.attn_tp_rank, rank.attn_tp_size),
        ("attn_cp", rank.attn_cp_rank, rank.attn_cp_size),
        ("attn_dp", rank.attn_dp_rank, rank.attn_dp_size),
        ("pp", rank.pp_rank, rank.pp_size),
        ("system_dp", rank.system_dp_rank, rank.system_dp_size),
    ):
        if size < 1 or not 0 <= position < size:
            raise RouteRefused(400, f"{axis}_rank {position} is not a rank of {axis}_size {size}")
    ranks = rank.dp_size * rank.attn_cp_size * rank.attn_tp_size * rank.pp_size
    if ranks > MAX_RANKS:
        raise RouteRefused(400, f"a group of {ranks} ranks: the most is {MAX_RANKS}")
    if not 1 <= rank.rank_port <= 65_535 or not rank.rank_ip:
        raise RouteRefused(400, f"{rank.rank_ip!r}:{rank.rank_port} is no address of a rank")
    if not 1 <= rank.page_size <= MAX_PAGE_SIZE:
        raise RouteRefused(400, f"page_size {rank.page_size} is not from 1 to {MAX_PAGE_SIZE}")
    if rank.pd_instance == "":
        raise RouteRefused(400, "pd_instance is empty: leave it out or name the instance")
    if rank.pd_ttl_s is not None and not 0 < rank.pd_ttl_s < math.inf:
        raise RouteRefused(400, f"pd_ttl_s {rank.pd_ttl_s:g} is no number of seconds over 0: leave it out or give one")
    for name in _TEXTS:
        if len(text := getattr(rank, name) or "") > MAX_TEXT:
            raise RouteRefused(400, f"{name} has {len(text)} characters: the most is {MAX_TEXT}")


def check_agrees(
    rank: PrefillRegistration, founder: PrefillRegistration, others: Iterable[PrefillRegistration]
) -> None:
    """Raises RouteRefused (400) naming both values where `rank` differs from the first of its group, or, in the layout,
    which only some ranks name, from any."""
    for field in _COMMON:
        ours, theirs = getattr(founder, field), getattr(rank, field)
        if ours != theirs:
            raise _disagrees(field, rank.rank, theirs, ours)
    layout = next((other.kv_layout for other in others if other.kv_layout is not None), None)
    if None not in (layout, rank.kv_layout) and layout != rank.kv_layout:
        raise _disagrees("kv_layout", rank.rank, rank.kv_layout, layout)


def _disagrees(field: str, rank: Rank, theirs: object, ours: object) -> RouteRefused:
    return RouteRefused(
        400,
        f"{field} of rank {rank} is {theirs!r}, the group registered {ours!r}: start all ranks of one prefill alike, "
        "or deregister the old ones",
    )
