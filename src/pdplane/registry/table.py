"""What the registry knows: where each rank of one prefill group listens. Sans-IO.

Ready means that every rank of the group is there, not that so many PUTs came. An instance that another has replaced
is retired: its late PUT is refused, so that a restarted prefill is never overwritten by its own past (rule 2). A rank
that said how long it may be silent is dropped when it was silent for longer; the group's shape stays known, so that
the answer names who is missing.
"""

from __future__ import annotations

import math
from itertools import product

from msgspec import UNSET

from pdplane.core.ids import Rank
from pdplane.wire.registry import (
    FOLLOW_ROOM,
    PrefillRegistration,
    PrefillServerInfo,
    RankEndpoint,
    RankStatus,
    RegistryStatus,
)

from .agreement import check_agrees, check_ranges
from .refused import RefusedRanks, RouteRefused

MAX_RETIRED = 1_024


class RouteTable:
    """The ranks of one prefill group. `epoch` rises with every change. `expire_s`: how long a rank may be silent that
    did not say so itself; 0 for ever, since SGLang's ranks register once."""

    def __init__(self, expire_s: float = 0.0) -> None:
        self.epoch = 0
        self.instance: str | None = None
        self.next_expiry = math.inf
        self._expire_s = expire_s
        self._group: PrefillRegistration | None = None
        self._cells: dict[Rank, PrefillRegistration] = {}
        self._until: dict[Rank, float] = {}
        self._expired: set[Rank] = set()
        self._expected: frozenset[Rank] = frozenset()
        self._retired: dict[str, None] = {}
        self._refused = RefusedRanks()

    @property
    def registered(self) -> int:
        return len(self._cells)

    @property
    def ready(self) -> bool:
        return self._group is not None and len(self._cells) == len(self._expected)

    # --- prefill's side ---

    def register(self, rank: PrefillRegistration, now: float) -> None:
        """The first rank fixes the group's shape; the others must agree. A rank registered again moves. Raises
        RouteRefused, and remembers why."""
        check_ranges(rank)
        try:
            self._admit(rank)
        except RouteRefused as refused:
            self._refused.add(rank, str(refused), now)
            raise
        self._refused.forget(rank)
        self._expired.discard(rank.rank)
        self._keep_until(rank, now)
        if self._cells.get(rank.rank) != rank:
            self._cells[rank.rank] = rank
            self.epoch += 1
        self.instance = rank.pd_instance or self.instance

    def deregister(self, instance: str | None) -> int:
        """How many ranks left; None: those that named no instance. The group's shape goes with its last rank."""
        leaving = [rank for rank, cell in self._cells.items() if cell.pd_instance == instance]
        self._drop(leaving)
        if not self._cells:
            self._forget()
        return len(leaving)

    def expire(self, now: float) -> None:
        """Drops the ranks that were silent for too long."""
        if now < self.next_expiry:
            return
        silent = [rank for rank, until in self._until.items() if until <= now]
        self._expired.update(silent)
        self._drop(silent)
        self.next_expiry = min(self._until.values(), default=math.inf)

    # --- decode's side ---

    def server_info(self) -> PrefillServerInfo:
        return self._info(self._require_ready())

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

    def status(self, rooms: int, now: float) -> RegistryStatus:
        """`rooms`: how many the room table holds."""
        return RegistryStatus(
            ready=self.ready,
            epoch=self.epoch,
            instance=self.instance,
            expected=len(self._expected),
            registered=[self._rank_status(rank, now) for rank in sorted(self._cells)],
            missing=sorted(self._expected - self._cells.keys()),
            rooms=rooms,
            expired=sorted(self._expired),
            refused=self._refused.latest_first(now),
            group=None if self._group is None else self._info(self._group),
        )

    # --- inside ---

    def _admit(self, rank: PrefillRegistration) -> None:
        if rank.pd_instance is not None and rank.pd_instance in self._retired:
            raise RouteRefused(409, f"instance {rank.pd_instance} was replaced by {self.instance}: it cannot come back")
        if rank.pd_instance is not None and self.instance not in (None, rank.pd_instance):
            self._retire()
        if self._group is None or not self._cells:
            self._found(rank)
        assert self._group is not None
        check_agrees(rank, self._group, self._cells.values())

    def _found(self, rank: PrefillRegistration) -> None:
        """The group anew: nobody is left of the old one, if there was one."""
        instance = self.instance
        self._forget()
        self._group, self.instance = rank, instance
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
        self._expected = frozenset()
        self._cells.clear()
        self._until.clear()
        self._expired.clear()
        self._refused.clear()

    def _drop(self, ranks: list[Rank]) -> None:
        for rank in ranks:
            del self._cells[rank]
            self._until.pop(rank, None)
        if ranks:
            self.epoch += 1

    def _keep_until(self, rank: PrefillRegistration, now: float) -> None:
        ttl_s = self._expire_s if rank.pd_ttl_s is None else rank.pd_ttl_s
        if ttl_s > 0:
            self._until[rank.rank] = now + ttl_s
            self.next_expiry = min(self.next_expiry, now + ttl_s)
        else:
            self._until.pop(rank.rank, None)

    def _rank_status(self, rank: Rank, now: float) -> RankStatus:
        cell, until = self._cells[rank], self._until.get(rank)
        expires_in_s = None if until is None else round(until - now, 3)
        return RankStatus(rank, cell.rank_ip, cell.rank_port, cell.pd_instance, expires_in_s)

    def _info(self, group: PrefillRegistration) -> PrefillServerInfo:
        return PrefillServerInfo(
            attn_tp_size=group.attn_tp_size,
            attn_cp_size=group.attn_cp_size,
            dp_size=group.dp_size,
            pp_size=group.pp_size,
            page_size=group.page_size,
            kv_cache_dtype=group.kv_cache_dtype,
            follow_bootstrap_room=group.load_balance_method == FOLLOW_ROOM,
            kv_layout=self._layout() or UNSET,
            dsv41_spec_layout=group.dsv41_spec_layout if group.dsv41_spec_layout is not None else UNSET,
            enable_dsa_cache_layer_split=group.enable_dsa_cache_layer_split,
            enable_kv_cache_sharding=group.enable_kv_cache_sharding,
            decode_allocation_policy=group.decode_allocation_policy,
            prefill_http_port=self._http_port(),
        )

    def _layout(self) -> str | None:
        layouts = (cell.kv_layout for cell in self._cells.values())
        return next((layout for layout in layouts if layout is not None), None)

    def _http_port(self) -> int | None:
        ports = (cell.prefill_http_port for cell in self._cells.values())
        return next((port for port in ports if port is not None), None)

    def _require_ready(self) -> PrefillRegistration:
        if self._group is None or not self.ready:
            raise RouteRefused(503, f"Prefill server not fully registered yet ({self.registered} workers registered).")
        return self._group
