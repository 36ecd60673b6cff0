"""Which ranks of a prefill group one decode rank pairs with, and how many must answer: SGLang's mapping, as data.

Tensor parallel: the smaller side's rank faces `larger // smaller` ranks of the other. Rows that every rank holds whole
(MLA) come from the first of them; the others are dummies, which are told of the room, are granted nothing, and owe no
proof. Context parallel: all of prefill's ranks where all of them send, else the first. Pipeline parallel: the same
stage where both sides have as many, else every stage, since each has other layers.
"""

from __future__ import annotations

from itertools import product

import msgspec

from .errors import Cause
from .ids import Rank, Shape


class KvSpread(msgspec.Struct, frozen=True):
    """How KV lies over a prefill's ranks. mla: rows without heads, whole on every tensor parallel rank. sharded: each
    rank has some of the pages (so no rank can be left out). all_cp: every context parallel rank sends, be it by setting
    or since each has other layers."""

    mla: bool = False
    sharded: bool = False
    all_cp: bool = False


PLAIN = KvSpread()


class Target(msgspec.Struct, frozen=True):
    rank: Rank
    dummy: bool = False


class RankMap(msgspec.Struct, frozen=True):
    """One decode rank's prefill ranks, in the order in which they are looked up and told: by cp, by tp, and pipeline
    stages from the last to the first, since the last is ready last.

    required_dst_info_num: decode ranks from which each target hears before it may write.
    required_prefill_response_num: distinct prefill ranks that must say success.
    """

    targets: tuple[Target, ...]
    required_dst_info_num: int
    required_prefill_response_num: int

    @property
    def real(self) -> tuple[Rank, ...]:
        return tuple(target.rank for target in self.targets if not target.dummy)


def ranks_of(shape: Shape) -> tuple[Rank, ...]:
    """Every rank of a group, in the order of RankMap."""
    last_stage_first = range(shape.pp - 1, -1, -1)
    return tuple(
        Rank(dp, cp, tp, pp)
        for dp, cp, tp, pp in product(range(shape.dp), range(shape.cp), range(shape.tp), last_stage_first)
    )


def contradiction(
    prefill: Shape, decode: Shape, spread: KvSpread = PLAIN, *, one_rank_only: bool = False
) -> Cause | None:
    """Why groups of these shapes cannot be paired, naming both values; None where they can. `one_rank_only`: prefill
    may have one rank per dp group, which is SGLang's rule for prefill_complete and none of ours."""
    if decode.cp != 1:
        return _apart("cp", prefill.cp, decode.cp, "start decode with cp 1")
    if decode.pp not in (1, prefill.pp):
        return _apart("pp", prefill.pp, decode.pp, "start decode with pp 1 or with prefill's")
    if _sharded_over_tp(prefill, spread) and prefill.tp != decode.tp:
        return _apart("tp", prefill.tp, decode.tp, "MLA pages that are sharded over tp need the same tp on both sides")
    if max(prefill.tp, decode.tp) % min(prefill.tp, decode.tp):
        return _apart("tp", prefill.tp, decode.tp, "start both so that one is a multiple of the other")
    if one_rank_only and (prefill.cp, prefill.tp, prefill.pp) != (1, 1, 1):
        have = f"tp {prefill.tp}, cp {prefill.cp}, pp {prefill.pp}"
        text = f"prefill_complete needs a prefill of tp 1, cp 1, pp 1 and this one has {have}; use policy early"
        return Cause("incompatible", text, 503)
    return None


def map_ranks(prefill: Shape, decode: Shape, here: Rank, dp: int, spread: KvSpread = PLAIN) -> RankMap:
    """The prefill ranks of data parallel group `dp` that decode's rank `here` pairs with. The shapes must not
    contradict each other (`contradiction`)."""
    tps, first_only, dst_infos, responses = _over_tp(prefill, decode, here.tp, spread)
    all_cp = prefill.cp > 1 and (spread.all_cp or spread.sharded)
    cps = range(prefill.cp) if all_cp else range(1)
    stages = (here.pp,) if prefill.pp == decode.pp else tuple(range(prefill.pp - 1, -1, -1))
    targets = tuple(
        Target(Rank(dp, cp, tp, pp), dummy=first_only and tp != tps[0]) for cp, tp, pp in product(cps, tps, stages)
    )
    return RankMap(targets, dst_infos, responses * len(cps) * len(stages))


def _over_tp(prefill: Shape, decode: Shape, tp: int, spread: KvSpread) -> tuple[range, bool, int, int]:
    """(prefill's tp ranks, only the first of them is real, dst infos, responses)."""
    if _sharded_over_tp(prefill, spread):
        return range(prefill.tp), False, decode.tp, prefill.tp
    if decode.tp >= prefill.tp:
        ratio = decode.tp // prefill.tp
        return range(tp // ratio, tp // ratio + 1), spread.mla, ratio, 1
    ratio = prefill.tp // decode.tp
    return range(tp * ratio, (tp + 1) * ratio), spread.mla, 1, 1 if spread.mla else ratio


def _sharded_over_tp(prefill: Shape, spread: KvSpread) -> bool:
    return spread.mla and spread.sharded and prefill.cp == 1


def _apart(axis: str, prefill: int, decode: int, remedy: str) -> Cause:
    text = f"{axis} sizes do not go together: prefill has {prefill}, decode has {decode}; {remedy}"
    return Cause("incompatible", text, 503)
