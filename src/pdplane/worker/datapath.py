"""The data plane of one dp group: who moves pages at prefill, who takes them at decode, one for each of its pools and
kinds of transport.

Effects of the core that speak of links and grants end here; what the transports report goes back as events, from their
own threads, by `post`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pdplane.core.effects import (
    ArmGrant,
    CancelMoves,
    ConnectData,
    DisarmGrant,
    Effect,
    MovePages,
    RevokeGrant,
    Teardown,
)
from pdplane.core.events import Event, GrantQuiet, MoveDone, PagesLanded, TornDown
from pdplane.core.frames import DataEndpoint
from pdplane.core.ids import GrantNo, Instance, Link, MoveNo, PageId, Rank, Seat
from pdplane.transport.contract import LandedCallback, Landing, Mover, Pairs, QuietCallback, WroteCallback
from pdplane.transport.pool import PagePool

Post = Callable[[Event], None]
Offers = tuple[tuple[DataEndpoint, ...], ...]
"""Of each tensor parallel rank, by preference; () where it has no pool."""

MakeMover = Callable[[str, Seat, PagePool, WroteCallback], tuple[Mover, DataEndpoint]]
"""(kind, us, pool, done) -> a mover, and what it can send by."""

MakeLanding = Callable[[str, Seat, PagePool, LandedCallback, QuietCallback], Landing]
"""(kind, us, pool, landed, quiet)."""


class Movers:
    """Prefill's end."""

    def __init__(
        self,
        instance: Instance,
        dp: int,
        pools: Sequence[PagePool | None],
        kinds: Sequence[str],
        make: MakeMover,
        post: Post,
    ) -> None:
        self._movers: dict[tuple[int, str], Mover] = {}
        self._kinds: dict[Link, str] = {}
        self._post = post
        try:
            self.offers = _offers(
                instance, dp, pools, lambda seat, pool: [self._make(make, kind, seat, pool) for kind in kinds]
            )
        except BaseException:
            self.close()
            raise

    def _make(self, make: MakeMover, kind: str, seat: Seat, pool: PagePool) -> DataEndpoint:
        self._movers[seat.rank.tp, kind], offer = make(kind, seat, pool, self._done)
        return offer

    def do(self, effect: Effect) -> list[Event] | None:
        """What is true at once; None where the effect is none of ours."""
        match effect:
            case ConnectData(link, endpoint, slice_):
                self._kinds[link] = endpoint.kind
                self._movers[link.here.tp, endpoint.kind].connect(link.there, endpoint, slice_)
            case MovePages(move, grant, link, src, dst):
                if (mover := self._of(link)) is None:
                    return [MoveDone(move, f"{link} is not connected")]
                mover.move(move, grant, link.there, Pairs(src, dst))
            case CancelMoves(grant, link):
                if mover := self._of(link):
                    mover.cancel(grant, link.there)
            case Teardown(peer):
                self._teardown(peer)
            case _:
                return None
        return []

    def kind_of(self, link: Link) -> str:
        """By which transport this link's pages go; "" before it is connected."""
        return self._kinds.get(link, "")

    def close(self) -> None:
        for mover in self._movers.values():
            mover.close()

    def _of(self, link: Link) -> Mover | None:
        return self._movers.get((link.here.tp, self.kind_of(link)))

    def _teardown(self, peer: Instance) -> None:
        for mover in self._movers.values():
            mover.teardown(peer)
        for link in [link for link in self._kinds if link.there.instance == peer]:
            del self._kinds[link]

    def _done(self, move: MoveNo, error: str) -> None:
        self._post(MoveDone(move, error))


class Landings:
    """Decode's end. `fenced`: the kinds whose local fence is a proof."""

    def __init__(
        self,
        instance: Instance,
        dp: int,
        pools: Sequence[PagePool | None],
        kinds: Sequence[str],
        make: MakeLanding,
        post: Post,
    ) -> None:
        self._landings: dict[tuple[int, str], Landing] = {}
        self._post = post
        try:
            self.offers = _offers(
                instance, dp, pools, lambda seat, pool: [self._make(make, kind, seat, pool) for kind in kinds]
            )
        except BaseException:
            self.close()
            raise
        self.fenced = frozenset(kind for (_, kind), one in self._landings.items() if one.capabilities.fence)

    def _make(self, make: MakeLanding, kind: str, seat: Seat, pool: PagePool) -> DataEndpoint:
        here = seat.rank

        def landed(grant: GrantNo, there: Seat, pages: Sequence[PageId]) -> None:
            self._post(PagesLanded(grant, Link(here, there), tuple(pages)))

        def quiet(grant: GrantNo) -> None:
            self._post(GrantQuiet(grant, here, kind))

        landing = self._landings[here.tp, kind] = make(kind, seat, pool, landed, quiet)
        return landing.endpoint

    def do(self, effect: Effect) -> list[Event] | None:
        """What is true at once; None where the effect is none of ours."""
        match effect:
            case ArmGrant(grant, pages, lanes):
                for lane in lanes:
                    landing = self._landings[lane.link.here.tp, lane.kind]
                    landing.arm(grant, lane.link.there, pages, lane.slice)
            case RevokeGrant(grant, here, kind):
                if self._landings[here.tp, kind].revoke(grant):
                    return [GrantQuiet(grant, here, kind)]
            case DisarmGrant(grant, here, kind):
                self._landings[here.tp, kind].disarm(grant)
            case Teardown(peer, upto):
                cut = [landing.teardown(peer) for landing in self._landings.values()]
                return [TornDown(peer, upto)] if all(cut) else []
            case _:
                return None
        return []

    @property
    def tcp_ports(self) -> list[int]:
        return [endpoint.port for offers in self.offers for endpoint in offers if endpoint.kind == "tcp"]

    @property
    def bad_frames(self) -> int:
        """Frames that no prefill of ours sends, over all landings that count them."""
        return sum(getattr(landing, "bad_frames", 0) for landing in self._landings.values())

    def close(self) -> None:
        for landing in self._landings.values():
            landing.close()


def _offers(
    instance: Instance,
    dp: int,
    pools: Sequence[PagePool | None],
    of_rank: Callable[[Seat, PagePool], Sequence[DataEndpoint]],
) -> Offers:
    return tuple(
        () if pool is None else tuple(of_rank(Seat(instance, Rank(dp=dp, tp=tp)), pool))
        for tp, pool in enumerate(pools)
    )
