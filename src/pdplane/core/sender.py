"""Prefill's side of one room: applies SENDER of core/table.py, keeps the pages, the writes outstanding and the row.

Success must not overtake the bytes: SUCCESS goes out when the last write is visible at decode. DRAINED goes out when
nothing of ours can still write: no step of the engine touches the pages and no write is outstanding.
"""

from __future__ import annotations

from typing import Protocol, TypedDict

from .effects import AbortEngine, AnswerRow, CancelMoves, MovePages
from .errors import Cause
from .events import LegArrived
from .frames import Abort, Announce, Drained, Failed, Frame, Grant, Row, Success
from .ids import NO_GRANT, GrantNo, Instance, MoveNo, PageId, Rank, Rid, Room
from .layout import pages_for
from .node import Node
from .pages import Owner, Page
from .table import SA, SE, SENDER, KVPoll, S, sender_poll


class Desk(Protocol):
    """What a sender needs of its node beside the outbox and the ledger."""

    instance: Instance
    rank: Rank

    @property
    def node(self) -> Node: ...

    def next_move(self, sender: Sender) -> MoveNo: ...

    def session_up(self, peer: Instance) -> bool: ...

    def send(self, peer: Instance, frame: Frame) -> bool: ...

    def settled(self, sender: Sender) -> None:
        """The machine has moved: clocks and queues follow."""
        ...


class _Identity(TypedDict):
    """Rule 2, as keyword arguments of a room frame."""

    room: Room
    grant: GrantNo
    src: Instance
    dst: Instance
    rank: Rank


class Sender:
    """One room at prefill. `peer` is the decode instance that spoke first of it; another one is a duplicate."""

    def __init__(self, room: Room, arrived_at: float, desk: Desk) -> None:
        self.room = room
        self.arrived_at = arrived_at
        self.state = S.NEW
        self.leg: LegArrived | None = None
        self.peer: Instance | None = None
        self.grant: Grant | None = None
        self._named = NO_GRANT  # by an ABORT whose GRANT was lost on the way: DRAINED proves for that number
        self.pages: tuple[PageId, ...] = ()
        self.moved = 0  # pages handed to the transport
        self.computed = 0  # tokens
        self.outstanding: set[MoveNo] = set()
        self.in_engine = False
        self.quarantined = False
        self.row: Row | None = None
        self.cause: Cause | None = None
        self._desk = desk
        self._node = desk.node

    @property
    def rid(self) -> Rid | None:
        return self.leg.rid if self.leg else None

    @property
    def grant_no(self) -> GrantNo:
        return self.grant.grant if self.grant else self._named

    @property
    def poll(self) -> KVPoll:
        return sender_poll(self.state, wrote=self.moved > 0, failed=self.cause is not None)

    def apply(self, event: SE, *, cause: Cause | None = None) -> None:
        """One cell of the table. `cause`: why, for events that end the room; the first one stays."""
        step = SENDER.get((self.state, event))
        if step is None:
            self._node.count("late", f"{self.state}/{event}")
            return
        was, (self.state, actions) = self.state, step
        if cause is not None and self.state in (S.DRAINING, S.GONE):
            if self.cause is None and was is not S.SENT:
                self.cause = cause
            else:
                self._node.count("late_verdict", cause.code)
        if was is not self.state and self.rid:
            self._node.note(self.rid, self.room, self.state, str(cause) if cause else "")
        for action in actions:
            self._act(action)
        self._desk.settled(self)
        self._derive()

    # --- what edge, peer, engine and transport report ---------------------------------------------------------------

    def leg_in(self, leg: LegArrived) -> None:
        self.leg = leg
        self.apply(SE.LEG_WITH_GRANT if self.grant else SE.LEG)
        self._check()

    def announced(self, frame: Announce) -> None:
        self.peer = frame.src
        self.apply(SE.ANNOUNCE)

    def granted(self, frame: Grant) -> None:
        self.peer = frame.src
        self.grant = self.grant or frame
        self.apply(SE.GRANT)
        self._check()

    def aborted(self, frame: Abort) -> None:
        self.peer = frame.src
        self._named = frame.grant
        self.apply(SE.ABORT, cause=frame.cause)

    def start(self, pages: tuple[PageId, ...]) -> None:
        """Its turn: `pages`, as many as granted, are `computing` in the ledger."""
        self.pages = pages
        self.in_engine = True
        self.apply(SE.START)

    def chunk(self, tokens: int) -> None:
        self.computed = tokens
        if self.state is S.STREAMING:
            self.apply(SE.CHUNK)

    def sampled(self, row: Row) -> None:
        self.row = row
        self.computed = row.prompt_tokens
        self.apply(SE.COMPUTED)

    def released(self, error: str) -> None:
        """The engine touches the pages no more."""
        self.in_engine = False
        if self.state is S.STREAMING:
            cause = Cause("engine_error", error or "the engine gave the prompt up", 500, retryable=True, side="prefill")
            self.apply(SE.CANCEL, cause=cause)
        self._derive()

    def move_done(self, move: MoveNo, error: str) -> None:
        self.outstanding.discard(move)
        if error and self.state in (S.STREAMING, S.FLUSHING):
            text = f"moving pages to {self.peer} failed: {error}"
            self.apply(SE.WRITE_ERR, cause=Cause("transfer_failed", text, 502, retryable=True, side="prefill"))
        self._derive()

    def resume(self) -> None:
        """The session is up again: writes that waited for it go out."""
        if self.state in (S.STREAMING, S.FLUSHING):
            self._move(whole=self.state is S.FLUSHING)
            self._derive()

    # --- table plumbing ---------------------------------------------------------------------------------------------

    def _derive(self) -> None:
        if self.state is S.FLUSHING and not self.outstanding and self.moved == len(self.pages) and not self.in_engine:
            self.apply(SE.WRITES_DONE)
        elif self.state is S.DRAINING and not self.outstanding and not self.in_engine:
            self.apply(SE.QUIET)

    def _check(self) -> None:
        """The leg's prompt against the grant's: both sides must speak of the same tokens."""
        if self.state is not S.ARMED:
            return
        assert self.leg is not None
        assert self.grant is not None
        ours, theirs = self.leg.prompt, self.grant.prompt
        need = pages_for(ours.tokens, self._node.limits.page_size)
        if ours != theirs:
            text = (
                f"the legs carry different prompts: prefill {ours.digest.hex()} of {ours.tokens} tokens, "
                f"decode {theirs.digest.hex()} of {theirs.tokens} tokens"
            )
        elif len(self.grant.pages) != need:
            text = f"decode granted {len(self.grant.pages)} pages for {ours.tokens} tokens, which need {need}"
        else:
            return
        self.apply(SE.CANCEL, cause=Cause("prompt_mismatch", text, 500, side="prefill"))

    def _act(self, action: SA) -> None:
        match action:
            case SA.MOVE_FULL:
                self._move(whole=False)
            case SA.MOVE_REST:
                self._move(whole=True)
            case SA.SUCCESS:
                self._success()
            case SA.FAILED:
                cause = self.cause or Cause("finished", f"room {self.room} is over", 409, side="prefill")
                self._tell(Failed, cause=cause)
            case SA.DRAINED:
                self._tell(Drained)
            case SA.STOP:
                self._stop()
            case SA.FREE if self.pages:
                assert self.leg is not None
                self._node.ledger.free(self.pages, self._owner)
                self._node.note(self.leg.rid, self.room, "freed", f"{len(self.pages)} pages")
                self.pages = ()
            case SA.QUARANTINE:
                self._quarantine()
            case SA.ANSWER if self.leg:
                assert self.cause is not None
                self._node.answer_failed(self.leg.rid, self.room, self.cause)
            case SA.ANSWER_SENT:
                assert self.leg is not None
                assert self.row is not None
                self._node.out.append(AnswerRow(self.leg.rid, self.row))
            case _:
                pass  # clocks, queue and tombstone are the node's, by `settled`

    @property
    def _owner(self) -> Owner:
        assert self.leg is not None
        return Owner(self.leg.rid)

    def _move(self, *, whole: bool) -> None:
        """Posts what is computed and not yet moved; nothing new while the session is down (PROTOCOL 4)."""
        assert self.grant is not None
        assert self.peer is not None
        full = min(self.computed // self._node.limits.page_size, len(self.pages))
        ready = len(self.pages) if whole else full
        if ready <= self.moved or not self._desk.session_up(self.peer):
            return
        src, dst = self.pages[self.moved : ready], self.grant.pages[self.moved : ready]
        number = self._desk.next_move(self)
        self._node.ledger.shift(src, self._owner, Page.COMPUTING, Page.SENDING)
        if not self.moved and self.rid:
            self._node.note(self.rid, self.room, "moving")
        self.outstanding.add(number)
        self.moved = ready
        self._node.out.append(MovePages(number, self.grant_no, self.peer, src, dst))

    def _stop(self) -> None:
        """Engine and queued writes are told; what runs, runs out. Pages drain."""
        assert self.peer is not None
        if self.in_engine:
            assert self.leg is not None
            self._node.out.append(AbortEngine(self.leg.rid))
        self._node.out.append(CancelMoves(self.grant_no, self.peer))
        ledger, owner = self._node.ledger, self._owner
        ledger.shift(self.pages[: self.moved], owner, Page.SENDING, Page.DRAINING)
        ledger.shift(self.pages[self.moved :], owner, Page.COMPUTING, Page.DRAINING)

    def _quarantine(self) -> None:
        self.quarantined = True
        self._node.ledger.shift(self.pages, self._owner, Page.DRAINING, Page.QUARANTINED)
        what = "a step of the engine" if self.in_engine else f"{len(self.outstanding)} writes to {self.peer}"
        self._node.alarm(f"room {self.room}: {len(self.pages)} pages quarantined at prefill, {what} never returned")

    def _success(self) -> None:
        assert self.row is not None
        if self.peer is not None:
            self._desk.send(self.peer, Success(**self._identity(self.peer), row=self.row))

    def _tell(self, kind: type[Failed] | type[Drained], *, cause: Cause | None = None) -> None:
        if self.peer is None:
            return
        identity = self._identity(self.peer)
        if kind is Failed:
            assert cause is not None
            self._desk.send(self.peer, Failed(**identity, cause=cause))
        else:
            self._desk.send(self.peer, Drained(**identity))

    def _identity(self, peer: Instance) -> _Identity:
        return _Identity(room=self.room, grant=self.grant_no, src=self._desk.instance, dst=peer, rank=self._desk.rank)
