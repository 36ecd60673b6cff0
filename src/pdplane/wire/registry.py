"""Bodies of the bootstrap registry: SGLang's routes, with names and defaults as it has them, and our own under /v1.

SGLang's client expands the server info into a constructor: that body must never gain a key. What is ours in the PUT
body is prefixed `pd_`; SGLang's registry ignores it.
"""

from __future__ import annotations

from typing import Literal, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from pdplane.core.ids import Rank, Shape

Policy = Literal["early", "prefill_complete"]
FOLLOW_ROOM = "follow_bootstrap_room"
MAX_RANKS = 4096  # of one group, and so along each of its axes
MAX_ROOMS_PER_CALL = 4096

T = TypeVar("T")


class BadBody(ValueError):
    """A JSON body that is not what the route takes; the message names the field."""


class PrefillRegistration(msgspec.Struct, frozen=True, kw_only=True):
    """PUT /route: one prefill rank says where it is and what its group looks like. pd_ttl_s: seconds of silence after
    which it is gone; left out, it stays until it leaves."""

    attn_tp_size: int
    attn_tp_rank: int
    attn_cp_size: int
    attn_cp_rank: int
    attn_dp_size: int
    attn_dp_rank: int
    pp_size: int
    pp_rank: int
    system_dp_size: int
    system_dp_rank: int
    rank_ip: str
    rank_port: int
    page_size: int
    kv_cache_dtype: str | None
    kv_layout: str | None = None
    dsv41_spec_layout: dict[str, object] | None = None
    load_balance_method: str = FOLLOW_ROOM
    enable_dsa_cache_layer_split: bool = False
    enable_kv_cache_sharding: bool = False
    prefill_http_port: int | None = None
    decode_allocation_policy: Policy = "early"
    pd_instance: str | None = None
    pd_ttl_s: float | None = None

    @property
    def dp_size(self) -> int:
        return self.attn_dp_size if self.system_dp_size == 1 else self.system_dp_size

    @property
    def rank(self) -> Rank:
        dp = self.attn_dp_rank if self.system_dp_size == 1 else self.system_dp_rank
        return Rank(dp, self.attn_cp_rank, self.attn_tp_rank, self.pp_rank)


def registration_of(
    rank: Rank,
    shape: Shape,
    rank_ip: str,
    rank_port: int,
    *,
    page_size: int,
    kv_cache_dtype: str | None,
    load_balance_method: str = FOLLOW_ROOM,
    prefill_http_port: int | None = None,
    decode_allocation_policy: Policy = "early",
    pd_instance: str | None = None,
    pd_ttl_s: float | None = None,
) -> PrefillRegistration:
    """What `rank` of a group of this shape says: its data parallel groups are those of one server."""
    return PrefillRegistration(
        attn_tp_size=shape.tp,
        attn_tp_rank=rank.tp,
        attn_cp_size=shape.cp,
        attn_cp_rank=rank.cp,
        attn_dp_size=shape.dp,
        attn_dp_rank=rank.dp,
        pp_size=shape.pp,
        pp_rank=rank.pp,
        system_dp_size=1,
        system_dp_rank=0,
        rank_ip=rank_ip,
        rank_port=rank_port,
        page_size=page_size,
        kv_cache_dtype=kv_cache_dtype,
        load_balance_method=load_balance_method,
        prefill_http_port=prefill_http_port,
        decode_allocation_policy=decode_allocation_policy,
        pd_instance=pd_instance,
        pd_ttl_s=pd_ttl_s,
    )


class PrefillServerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """GET /route with four -1. The two layouts are left out where unset; the last six are the client's own fields."""

    attn_tp_size: int
    attn_cp_size: int
    dp_size: int
    pp_size: int
    page_size: int | None
    kv_cache_dtype: str | None
    follow_bootstrap_room: bool = True
    kv_layout: str | UnsetType | None = UNSET
    dsv41_spec_layout: dict[str, object] | UnsetType | None = UNSET
    enable_dsa_cache_layer_split: bool = False
    enable_kv_cache_sharding: bool = False
    decode_allocation_policy: str = "early"
    prefill_http_port: int | None = None
    target_tp_rank: int | None = None
    target_tp_ranks: list[int] | None = None
    target_cp_ranks: list[int] | None = None
    target_pp_ranks: list[int] | None = None
    required_dst_info_num: int | None = None
    required_prefill_response_num: int | None = None


class RankEndpoint(msgspec.Struct, frozen=True):
    """GET /route with a coordinate."""

    rank_ip: str
    rank_port: int


class RegisterDpRank(msgspec.Struct, frozen=True):
    bootstrap_room: int
    dp_rank: int


class QueryDpRanks(msgspec.Struct, frozen=True):
    """Its answer maps decimal room strings to ranks; unknown rooms are left out."""

    bootstrap_rooms: list[int]


class RegisterDpRanks(msgspec.Struct, frozen=True):
    """POST /v1/dp_ranks: many rooms in one call, all of them or none."""

    rooms: list[RegisterDpRank]


class RankStatus(msgspec.Struct, frozen=True):
    """`expires_in_s`: if nothing is heard of it until then; null where it stays until it leaves."""

    rank: Rank
    rank_ip: str
    rank_port: int
    instance: str | None
    expires_in_s: float | None = None


class RefusedRank(msgspec.Struct, frozen=True):
    """A rank that the group could not take; `reason` names field and both values."""

    rank: Rank
    instance: str | None
    reason: str
    ago_s: float


class RegistryStatus(msgspec.Struct, frozen=True):
    """GET /v1/registry. `expected` is 0 while nobody has registered; `epoch` rises with every change of the table.

    group: what the first rank said of its group, also while ranks are missing. expired: which of the missing ranks were
    there and fell silent. refused: who did not fit, the latest first.
    """

    ready: bool
    epoch: int
    instance: str | None
    expected: int
    registered: list[RankStatus]
    missing: list[Rank]
    rooms: int
    expired: list[Rank] = []
    refused: list[RefusedRank] = []
    group: PrefillServerInfo | None = None


class Deregister(msgspec.Struct, frozen=True):
    """DELETE /v1/route: every rank of this instance leaves; null: every rank that named none."""

    pd_instance: str | None


class Removed(msgspec.Struct, frozen=True):
    removed: int


def encode(body: object) -> bytes:
    return msgspec.json.encode(body)


def decode(kind: type[T], body: bytes | bytearray) -> T:
    """`body` as `kind`; unknown keys are ignored, integers may come as text, as SGLang's registry takes them."""
    try:
        return msgspec.json.decode(body, type=kind, strict=False)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadBody(f"{kind.__name__}: {error}") from None
