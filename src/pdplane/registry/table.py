"""What the registry knows: where each rank of one prefill group listens, and which dp rank took which room. Sans-IO.

Ready means that every rank of the group is there, not that so many PUTs came. An instance that another has replaced
is retired: its late PUT is refused, so that a restarted prefill is never overwritten by its own past (rule 2).
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product

from msgspec import UNSET

from pdplane.core.ids import BadRoom, Rank, Room, parse_room
from pdplane.wire.registry import (
    FOLLOW_ROOM,
    PrefillRegistration,
    PrefillServerInfo,
    RankEndpoint,
    RankStatus,
    RegistryStatus,
)

MAX_RANKS = 65_536
MAX_RETIRED = 1_024
ROOM_TTL_S = 120.0
MAX_ROOMS = 1_000_000

_AGREED = (
    "attn_tp_size",
    "attn_cp_size",
    "dp_size",
    "pp_size",
    "page_size",
    "kv_cache_dtype",
    "dsv41_spec_layout",
    "decode_allocation_policy",
)


class RouteRefused(Exception):
    """`status` and the text of the answer."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class RouteTable:
    """The ranks of one prefill group. `epoch` rises with every change."""

    def __init__(self) -> None:
        self.epoch = 0
        self.instance: str | None = None
        self._group: PrefillRegistration | None = None
        self._cells: dict[Rank, PrefillRegistration] = {}
        self._retired: dict[str, None] = {}
        self._expected: frozenset[Rank] = frozenset()

    @property
    def registered(self) -> int:
        return len(self._cells)

    @property
    def ready(self) -> bool:
        return self._group is not None and len(self._cells) == len(self._expected)

    def register(self, rank: PrefillRegistration) -> None:
        """The first rank fixes the group's shape; the others must agree. A rank registered again moves."""
        _check_ranges(rank)
        if rank.pd_instance is not None and rank.pd_instance in self._retired:
            raise RouteRefused(409, f"instance {rank.pd_instance} was replaced by {self.instance}: it cannot come back")
        if rank.pd_instance is not None and self.instance not in (None, rank.pd_instance):
            self._retire()
        if self._group is None:
            self._found(rank)
        self._check_agrees(rank)
        if self._cells.get(rank.rank) != rank:
            self._cells[rank.rank] = rank
            self.epoch += 1
        self.instance = rank.pd_instance or self.instance

    def deregister(self, instance: str) -> int:
        """How many ranks left. The group's shape is forgotten with its last rank."""
        leaving = [rank for rank, cell in self._cells.items() if cell.pd_instance == instance]
        for rank in leaving:
            del self._cells[rank]
        if leaving:
            self.epoch += 1
        if not self._cells:
            self._forget()
        return len(leaving)

    def server_info(self) -> PrefillServerInfo:
        group = self._require_ready()
        return PrefillServerInfo(
            attn_tp_size=group.attn_tp_size,
            attn_cp_size=group.attn_cp_size,
            dp_size=group.dp_size,
            pp_size=group.pp_size,
            page_size=group.page_size,
            kv_cache_dtype=group.kv_cache_dtype,
            follow_bootstrap_room=group.load_balance_method == FOLLOW_ROOM,
            kv_layout=self._first("kv_layout") or UNSET,
            dsv41_spec_layout=group.dsv41_spec_layout if group.dsv41_spec_layout is not None else UNSET,
            enable_dsa_cache_layer_split=group.enable_dsa_cache_layer_split,
            enable_kv_cache_sharding=group.enable_kv_cache_sharding,
            decode_allocation_policy=group.decode_allocation_policy,
            prefill_http_port=self._http_port(),
        )

    def endpoint(self, rank: Rank) -> RankEndpoint:
        """Ready first, as SGLang has it: a group that is not whole has no ranks yet."""
        self._require_ready()
        cell = self._cells.get(rank)
        if cell is None:
            where = f"dp_rank={rank.dp} cp_rank={rank.cp} tp_rank={rank.tp} pp_rank={rank.pp}"
            raise RouteRefused(404, f"Bootstrap info not found for {where}")
        return RankEndpoint(cell.rank_ip, cell.rank_port)

    def check_dp_rank(self, dp_rank: int) -> None:
        """As far as the group is known."""
        if dp_rank < 0:
            raise RouteRefused(400, f"dp_rank {dp_rank} is negative")
        if self._group is not None and dp_rank >= self._group.dp_size:
            raise RouteRefused(400, f"dp_rank {dp_rank} is not a rank of dp_size {self._group.dp_size}")

    def status(self, rooms: int) -> RegistryStatus:
        """`rooms`: how many the room table holds."""
        cells = sorted(self._cells.items())
        return RegistryStatus(
            ready=self.ready,
            epoch=self.epoch,
            instance=self.instance,
            expected=len(self._expected),
            registered=[RankStatus(rank, cell.rank_ip, cell.rank_port, cell.pd_instance) for rank, cell in cells],
            missing=sorted(self._expected - self._cells.keys()),
            rooms=rooms,
        )

    def _found(self, rank: PrefillRegistration) -> None:
        self._group = rank
        sizes = (rank.dp_size, rank.attn_cp_size, rank.attn_tp_size, rank.pp_size)
        self._expected = frozenset(Rank(*place) for place in product(*map(range, sizes)))

    def _retire(self) -> None:
        assert self.instance is not None
        self._retired[self.instance] = None
        if len(self._retired) > MAX_RETIRED:
            del self._retired[next(iter(self._retired))]
        self._forget()

    def _forget(self) -> None:
        self._group = None
        self.instance = None
        self._cells.clear()
        self._expected = frozenset()

    def _check_agrees(self, rank: PrefillRegistration) -> None:
        assert self._group is not None
        for field in _AGREED:
            ours, theirs = getattr(self._group, field), getattr(rank, field)
            if ours != theirs:
                raise _disagrees(field, rank.rank, theirs, ours)
        layout = self._first("kv_layout")
        if None not in (layout, rank.kv_layout) and layout != rank.kv_layout:
            raise _disagrees("kv_layout", rank.rank, rank.kv_layout, layout)

    def _first(self, field: str) -> str | None:
        values = (getattr(cell, field) for cell in self._cells.values())
        return next((value for value in values if value is not None), None)

    def _http_port(self) -> int | None:
        ports = (cell.prefill_http_port for cell in self._cells.values())
        return next((port for port in ports if port is not None), None)

    def _require_ready(self) -> PrefillRegistration:
        if self._group is None or not self.ready:
            raise RouteRefused(503, f"Prefill server not fully registered yet ({self.registered} workers registered).")
        return self._group


class RoomTable:
    """room -> dp rank, each entry for one to two `ttl_s`, as long as there is space: two generations, of which the
    older is dropped whole when the younger is `ttl_s` old, or full."""

    def __init__(self, now: float, *, ttl_s: float = ROOM_TTL_S, capacity: int = MAX_ROOMS) -> None:
        self._ttl_s = ttl_s
        self._per_generation = max(1, capacity // 2)
        self._born = now
        self._young: dict[int, int] = {}
        self._old: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def put(self, room: Room, dp_rank: int, now: float) -> None:
        self.expire(now)
        if len(self._young) >= self._per_generation and room not in self._young:
            self._turn(now)
        self._old.pop(room, None)
        self._young[room] = dp_rank

    def find(self, rooms: Iterable[int], now: float) -> dict[str, int]:
        """By decimal room; unknown and expired rooms are left out."""
        self.expire(now)
        found = {}
        for room in rooms:
            dp_rank = self._young.get(room, self._old.get(room))
            if dp_rank is not None:
                found[str(room)] = dp_rank
        return found

    def expire(self, now: float) -> None:
        while now - self._born >= self._ttl_s and (self._young or self._old):
            self._turn(self._born + self._ttl_s)
        if not self._young and not self._old:
            self._born = max(self._born, now)

    def _turn(self, now: float) -> None:
        self._old, self._young = self._young, {}
        self._born = now


def room_of(value: int) -> Room:
    try:
        return parse_room(value)
    except BadRoom as error:
        raise RouteRefused(400, str(error)) from None


def _check_ranges(rank: PrefillRegistration) -> None:
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
    if rank.page_size < 1:
        raise RouteRefused(400, f"page_size {rank.page_size} is not at least 1")
    if rank.pd_instance == "":
        raise RouteRefused(400, "pd_instance is empty: leave it out or name the instance")


def _disagrees(field: str, rank: Rank, theirs: object, ours: object) -> RouteRefused:
    return RouteRefused(
        400,
        f"{field} of rank {rank} is {theirs!r}, the group registered {ours!r}: start all ranks of one prefill alike, "
        "or deregister the old ones",
    )
