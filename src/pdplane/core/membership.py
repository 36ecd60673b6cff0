"""Who serves which prefill: registries, their rank endpoints, and the sessions with each of them.

What a registry said is trusted only while the sessions it led to are up; whoever comes when one is not asks anew.
That is how a restart on the same address, or on another one behind the same registry, is noticed (I18).

A room belongs to one data parallel rank of its prefill: the one its leg names, or room % dp, or what prefill has
written into its registry. It is worked out once, here, and what was named must not contradict it (I21).

In the params dialect the place of the room is taken by a request's serial number, and that of the registry by what
prefill has answered: `look_up` is told who must be found anew, and `known` tells it as a registry would.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

import msgspec

from .dialler import Dialler, DState
from .effects import Effect, Lane, LookUp, LookUpRank
from .errors import Cause, bad_request, unavailable
from .events import ControlEndpoint, RankKnown, RouteKnown
from .frames import Beat
from .ids import ConnId, Instance, Link, Rank, Room, Shape, dp_of
from .layout import unrunnable
from .session import Identity, Notice, SessionTimes
from .slices import pairs, shard_bytes

LOOK_AGAIN_S = 1.0  # at a route, while rooms wait for a rank that prefill has not written
ASK_AGAIN_S = 0.05  # for a room's dp rank that prefill has not written yet


K = TypeVar("K", bound=int)  # what waits for lanes: a room, or a request's serial number


class Want(msgspec.Struct):
    """A room that waits for its lanes. `named`: the dp rank its leg names; `dp`: the one it has, once that is known."""

    named: int | None
    dp: int | None = None
    ask_at: float | None = None


class PrefillGroup(msgspec.Struct, Generic[K]):
    """One prefill instance group as its registry describes it; `shape` None until it has."""

    address: str
    shape: Shape | None = None
    follow_room: bool = True
    endpoints: dict[Rank, ControlEndpoint] = {}
    looking: bool = False
    looked_at: float = 0.0
    waiting: dict[K, Want] = {}
    pairs: dict[int, tuple[tuple[Rank, Rank], ...]] = {}  # by dp rank, worked out once per answer


class Membership(Generic[K]):
    """Groups by registry address, diallers by endpoint and rank of ours. `teller`: who says where ranks are, in words
    that an address follows."""

    def __init__(
        self,
        me: Identity,
        times: SessionTimes,
        out: list[Effect],
        beat: Callable[[], Beat],
        look_up: Callable[[str], None] | None = None,
        teller: str = "the registry at",
    ) -> None:
        self.groups: dict[str, PrefillGroup[K]] = {}
        self._teller = teller
        self._ask = look_up or (lambda address: out.append(LookUp(address)))
        self.diallers: dict[tuple[ControlEndpoint, Rank], Dialler] = {}
        self._me, self._times, self._out, self._beat = me, times, out, beat
        self._of_conn: dict[ConnId, Dialler] = {}  # learnt on the way, checked at use
        self._of_link: dict[Link, Dialler] = {}

    # --- rooms ------------------------------------------------------------------------------------------------------

    def seek(self, address: str, room: K, named: int | None, now: float) -> tuple[Lane, ...] | Cause | None:
        """The lanes for `room` where all their sessions are up; a Cause where they are and it cannot be had there all
        the same; None where the room waits now (ready, known, failed or refused will name it)."""
        group = self.groups.setdefault(address, PrefillGroup(address))
        want = Want(named)
        cause = None
        if group.shape is not None and not group.looking:
            cause = self._place(group, room, want, now)
            if want.dp is not None and (lanes := self._lanes(group, want.dp)):
                return cause or lanes
        group.waiting[room] = want
        if not group.looking and (cause or want.dp is not None or not self._vouched(group)):
            self._look_up(group)
        return None

    def _vouched(self, group: PrefillGroup[K]) -> bool:
        """A session that the last answer led to is up: what the answer said of the group still stands."""
        named = set(group.endpoints.values())
        return any(dialler.up for (at, _), dialler in self.diallers.items() if at in named)

    def _look_up(self, group: PrefillGroup[K]) -> None:
        """What was said before counts no more: whoever waits is placed anew by the answer."""
        group.looking = True
        self._ask(group.address)

    def known(self, route: RouteKnown, now: float) -> list[tuple[K, Cause]]:
        """The registry has answered; returns the rooms that cannot be had there."""
        group = self.groups.get(route.address)
        if group is None or not group.looking:
            return []
        group.looking, group.looked_at = False, now
        group.shape, group.follow_room, group.endpoints = route.shape, route.follow_room, dict(route.ranks)
        group.pairs.clear()
        self._forget_idle()
        bad = [(room, cause) for room, want in group.waiting.items() if (cause := self._place(group, room, want, now))]
        for room, _ in bad:
            del group.waiting[room]
        self._want_sessions(group, now)
        return bad

    def rank_known(self, answer: RankKnown, now: float) -> Cause | None:
        """The registry has said which dp rank `answer.room` has, or that it does not know yet."""
        group = self.groups.get(answer.address)
        key: K = answer.room  # type: ignore[assignment]  # only rooms are asked for
        want = group.waiting.get(key) if group else None
        if group is None or want is None or want.dp is not None:
            return None
        if answer.dp_rank is None:
            want.ask_at = now + ASK_AGAIN_S
            if not group.looking and not self._vouched(group) and now >= group.looked_at + LOOK_AGAIN_S:
                self._look_up(group)
            return None
        want.dp, want.ask_at = answer.dp_rank, None
        if group.looking:
            return None  # the answer will say what it is worth
        if cause := self._place(group, key, want, now):
            del group.waiting[key]
            return cause
        if not self._lanes(group, want.dp):
            self._look_up(group)
        return None

    def failed(self, address: str) -> list[K]:
        """The rooms whose route there is none."""
        group = self.groups.pop(address, None)  # clients name addresses without end
        return [] if group is None else self._take(group, list(group.waiting))

    def ready(self) -> list[tuple[K, tuple[Lane, ...] | Cause]]:
        """Rooms whose sessions have all come up, taken out of waiting: with their lanes, or why there are none."""
        found: list[tuple[K, tuple[Lane, ...] | Cause]] = []
        for group in self.groups.values():
            if not group.waiting or group.looking or group.shape is None:
                continue
            for dp in sorted({want.dp for want in group.waiting.values() if want.dp is not None}):
                if met := self._lanes(group, dp) or self._disunited(group, dp):
                    rooms = [room for room, want in group.waiting.items() if want.dp == dp]
                    found += [(room, met) for room in self._take(group, rooms)]
        return found

    def refused(self, dialler: Dialler) -> list[K]:
        """Rooms that waited for this session, which will not be."""
        rooms = []
        for group in self.groups.values():
            if group.looking or group.shape is None:
                continue
            for dp in {want.dp for want in group.waiting.values() if want.dp is not None}:
                if dialler in self._diallers(group, dp):
                    rooms += self._take(group, [room for room, want in group.waiting.items() if want.dp == dp])
        return rooms

    def forget(self, room: K) -> None:
        for group in self.groups.values():
            group.waiting.pop(room, None)

    # --- sessions ---------------------------------------------------------------------------------------------------

    def want_waiting(self, now: float) -> None:
        """Rooms that still wait keep their diallers dialling."""
        for group in self.groups.values():
            if group.waiting and not group.looking:
                self._want_sessions(group, now)

    def met(self, dialler: Dialler) -> None:
        """It is up. Where the same seat was met under another address before, that session has ended: the newest wins
        at prefill; and both addresses stand for this one from now on."""
        for key, other in self.diallers.items():
            if other is not dialler and other.link == dialler.link:
                other.give_way()
                self.diallers[key] = dialler

    def gone(self, instance: Instance) -> None:
        """One of its links has run out of grace: none of the others is trusted any longer."""
        for dialler in self.diallers.values():
            if dialler.bound and dialler.bound.instance == instance:
                dialler.give_up()

    def conn(self, link: Link) -> ConnId | None:
        """The connection to exactly this instance, if its session is up. Never the successor's."""
        dialler = self._of_link.get(link)
        if dialler is None or dialler.link != link or not dialler.up:
            ups = (dialler for dialler in self.diallers.values() if dialler.up)
            self._of_link = {link_up: dialler for dialler in ups if (link_up := dialler.link)}
            dialler = self._of_link.get(link)
        return dialler.conn if dialler else None

    def links_up(self) -> Iterator[Link]:
        """Of all sessions that are up."""
        return (link for dialler in self.diallers.values() if dialler.up and (link := dialler.link))

    def by_conn(self, conn: ConnId) -> Dialler | None:
        dialler = self._of_conn.get(conn)
        if dialler is None or dialler.conn != conn:
            self._of_conn = {dialler.conn: dialler for dialler in self.diallers.values() if dialler.conn}
            dialler = self._of_conn.get(conn)
        return dialler

    def tick(self, now: float) -> list[tuple[Dialler, Notice]]:
        self._ask_again(now)
        diallers = dict.fromkeys(self.diallers.values())
        return [(dialler, notice) for dialler in diallers for notice in dialler.tick(now)]

    def next_due(self) -> float | None:
        due = [at for dialler in self.diallers.values() if (at := dialler.next_due()) is not None]
        wants = (want for group in self.groups.values() for want in group.waiting.values())
        due += [want.ask_at for want in wants if want.ask_at is not None]
        return min(due, default=None)

    def sessions(self) -> int:
        return sum(dialler.up for dialler in set(self.diallers.values()))

    # --- inside -----------------------------------------------------------------------------------------------------

    def _place(self, group: PrefillGroup[K], room: K, want: Want, now: float) -> Cause | None:
        """Settles the room's dp rank as far as it can be; a Cause where what was named cannot be."""
        assert group.shape is not None
        if cause := unrunnable(group.shape, "prefill"):
            return cause
        if want.named is not None and not 0 <= want.named < group.shape.dp:
            return _no_such_rank(want.named, group)
        if not group.follow_room:
            want.dp = 0 if group.shape.dp == 1 else want.dp if want.named is None else want.named
            if want.dp is None:
                want.ask_at = now
                return None
            return self._missing(group, want.dp) if 0 <= want.dp < group.shape.dp else _no_such_rank(want.dp, group)
        want.dp = dp_of(Room(room), group.shape.dp)
        if want.named not in (None, want.dp):
            text = f"disagg_prefill_dp_rank {want.named} contradicts room {room}, which is rank {want.dp}'s"
            remedy = f"of {group.shape.dp} there; leave the rank out, or take a room that is {want.named} modulo it"
            return bad_request(
                f"{text} {remedy}", code="rank_contradiction", param="disagg_prefill_dp_rank", side="decode"
            )
        return self._missing(group, want.dp)

    def _missing(self, group: PrefillGroup[K], dp: int) -> Cause | None:
        """A route that lacks a rank which holds some of our pages: half a prompt must never pass for a whole one."""
        lacking = [str(source) for source, _ in self._pairs(group, dp) if source not in group.endpoints]
        if not lacking:
            return None
        text = f"{self._teller} {group.address} names no endpoint for prefill rank {', '.join(lacking)}"
        return unavailable("prefill_not_ready", f"{text}; wait for all ranks of the prefill", side="prefill")

    def _ask_again(self, now: float) -> None:
        for group in self.groups.values():
            for room, want in group.waiting.items():
                if want.ask_at is not None and now >= want.ask_at:
                    want.ask_at = None
                    self._out.append(LookUpRank(group.address, Room(room)))

    def _pairs(self, group: PrefillGroup[K], dp: int) -> tuple[tuple[Rank, Rank], ...]:
        """The links to that dp rank, as (prefill's rank, ours); ranks that hold nothing for us are left out."""
        assert group.shape is not None
        if dp not in group.pairs:
            stamp, me = self._me.stamp, self._me
            group.pairs[dp] = pairs(stamp.groups, stamp.page_size, group.shape, me.shape, (dp, me.dp))
        return group.pairs[dp]

    def _diallers(self, group: PrefillGroup[K], dp: int) -> list[Dialler]:
        keys = [(group.endpoints.get(source), here) for source, here in self._pairs(group, dp)]
        return [dialler for at, here in keys if at is not None and (dialler := self.diallers.get((at, here)))]

    def _want_sessions(self, group: PrefillGroup[K], now: float) -> None:
        for dp in {want.dp for want in group.waiting.values()} - {None}:
            assert dp is not None
            for source, here in self._pairs(group, dp):
                self._dialler((group.endpoints[source], here)).want(now)

    def _dialler(self, key: tuple[ControlEndpoint, Rank]) -> Dialler:
        known = self.diallers.get(key)
        if known is None or (known.endpoint != key[0] and not known.up):
            known = self.diallers[key] = Dialler(*key, self._me, self._times, self._out, self._beat)
        return known

    def _disunited(self, group: PrefillGroup[K], dp: int) -> Cause | None:
        """Every session that the route names is up, and they are not one instance's, or not with the ranks it names."""
        wanted, found = self._pairs(group, dp), self._diallers(group, dp)
        if not wanted or len(found) != len(wanted) or not all(dialler.up for dialler in found):
            return None
        who = ", ".join(f"{dialler.endpoint} is {dialler.bound}" for dialler in dict.fromkeys(found))
        text = f"the ranks that {self._teller} {group.address} names are not one prefill's: {who}"
        shapes = {dialler.up_as.shape for dialler in found if dialler.up_as} - {group.shape}
        if shapes:
            text = f"{self._teller} {group.address} says {group.shape}, the prefill itself {shapes.pop()}"
        return unavailable("prefill_not_ready", f"{text}; wait until all of its ranks are there", side="prefill")

    def _lanes(self, group: PrefillGroup[K], dp: int) -> tuple[Lane, ...]:
        """() unless every session is up, with the rank that was meant, all of them with one instance, and that is of
        the shape by which the links were worked out: the registry may speak of the life before."""
        wanted = self._pairs(group, dp)
        ups = [dialler.up_as for dialler in self._diallers(group, dp) if dialler.up and dialler.up_as]
        met = tuple((up.link.there.rank, up.link.here) for up in ups)
        if not wanted or met != wanted or len({up.link.there.instance for up in ups}) != 1:
            return ()
        if any(up.shape != group.shape for up in ups):
            return ()
        lanes = tuple(Lane(up.link, up.endpoint.kind, up.slice, up.protocol) for up in ups)
        self._assert_whole(lanes)
        return lanes

    def _assert_whole(self, lanes: tuple[Lane, ...]) -> None:
        """O3 before all else: what the lanes bring together is every byte of a page on every rank of ours."""
        me, stamp = self._me, self._me.stamp
        for here in me.ranks:
            brought = sum(lane.slice.size_bytes for lane in lanes if lane.link.here == here)
            size = shard_bytes(stamp.groups, stamp.page_size, here.tp, me.shape.tp)
            assert brought == size, f"the lanes bring {brought} of {size} bytes of a page to rank {here}"

    def _forget_idle(self) -> None:
        """Endpoints that no registry names any more, once nobody is bound there: a prefill may come back on new ports
        without end."""
        named = {endpoint for group in self.groups.values() for endpoint in group.endpoints.values()}
        for key, dialler in list(self.diallers.items()):
            if key[0] not in named and dialler.state is DState.IDLE:
                del self.diallers[key]

    @staticmethod
    def _take(group: PrefillGroup[K], rooms: list[K]) -> list[K]:
        for room in rooms:
            group.waiting.pop(room, None)
        return rooms


def _no_such_rank(rank: int, group: PrefillGroup[K]) -> Cause:
    assert group.shape is not None
    text = f"the prefill at {group.address} has data parallel ranks 0 to {group.shape.dp - 1}, and no {rank}"
    return bad_request(text, code="no_such_rank", param="disagg_prefill_dp_rank", side="decode")
