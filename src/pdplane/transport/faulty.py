"""A mover and a landing that misbehave by a seeded record of faults, around any transport.

Nothing here sleeps or has a thread: what is held waits until a call releases it. Which moves are hit depends on the
seed and on their ordinal alone. However it misbehaves, a faulty mover keeps the contract's promise: each move completes
exactly once, and a teardown or a close ends also what is held.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterable, Sequence

import msgspec

from pdplane.core.frames import DataEndpoint
from pdplane.core.ids import GrantNo, Instance, MoveNo, PageId, Seat
from pdplane.core.slices import Slice

from .checksum import Verifier
from .contract import LandedCallback, Landing, Mover, Pair, QuietCallback, WroteCallback
from .landing_table import Claim, Verdict
from .pool import PagePool

REFUSED = "injected: refused before sending"
LOST = "injected: the answer was lost"


class Picks(msgspec.Struct, frozen=True):
    """Which ones of a sequence: those with these ordinals (0 is the first), and any other with these odds (0 to 1)."""

    at: tuple[int, ...] = ()
    odds: float = 0.0


NONE = Picks()
ALL = Picks(odds=1.0)


class MoverFaults(msgspec.Struct, frozen=True, kw_only=True):
    """By the ordinal of the move. hold: not begun before `release_moves`. refuse: fails before anything is sent.
    repeat: sent twice. lose: what has landed is reported as failed. delay: its completion waits for
    `release_completions`. swap: its completion comes after the next one, or at the release."""

    seed: int = 0
    hold: Picks = NONE
    refuse: Picks = NONE
    repeat: Picks = NONE
    lose: Picks = NONE
    delay: Picks = NONE
    swap: Picks = NONE


class LandingFaults(msgspec.Struct, frozen=True, kw_only=True):
    """corrupt, by the ordinal of the frame: one byte of it is wrong in the pool, before checksums are looked at.
    delay_landed, by the ordinal of the report: it waits for `release_landed`. delay_quiet, by the ordinal of the
    revoked grant: `revoke` says "later", and that is not before `release_quiet`."""

    seed: int = 0
    corrupt: Picks = NONE
    delay_landed: Picks = NONE
    delay_quiet: Picks = NONE


class _Draw:
    """One fault's own sequence, whatever is drawn for the others."""

    def __init__(self, picks: Picks, seed: int, name: str) -> None:
        self._picks = picks
        self.random = random.Random(f"{name} of {seed}")
        self._next = 0

    def hit(self) -> bool:
        ordinal, self._next = self._next, self._next + 1
        drawn = self.random.random() < self._picks.odds
        return drawn or ordinal in self._picks.at


class _Move:
    """One move and its faults. `ends`: completions that the transport still owes for it. `calm`: no more faults."""

    def __init__(
        self, number: MoveNo, grant: GrantNo, peer: Seat, pairs: Sequence[Pair], hits: dict[str, bool]
    ) -> None:
        self.number = number
        self.grant = grant
        self.peer = peer
        self.pairs = tuple(pairs)
        self.hits = hits
        self.ends = 2 if hits["repeat"] else 1
        self.error = ""
        self.calm = False


class FaultyMover:
    """contract.Mover around another. A move that is refused completes inside the call."""

    def __init__(self, build: Callable[[WroteCallback], Mover], on_wrote: WroteCallback, faults: MoverFaults) -> None:
        """`build` makes the mover, with the callback that it is given."""
        self._on_wrote = on_wrote
        self._draws = {
            name: _Draw(getattr(faults, name), faults.seed, name) for name in faults.__struct_fields__ if name != "seed"
        }
        self._lock = threading.Lock()
        self._open: dict[MoveNo, _Move] = {}  # not completed towards the owner
        self._posted: dict[MoveNo, _Move] = {}  # by the numbers that the transport knows
        self._held: list[_Move] = []
        self._late: list[_Move] = []
        self._swapped: list[_Move] = []
        self._repeats = 0
        self._closed = False
        self.inner = build(self._wrote)
        self.capabilities = self.inner.capabilities

    def connect(self, peer: Seat, endpoint: DataEndpoint, slice_: Slice) -> None:
        self.inner.connect(peer, endpoint, slice_)

    def move(self, number: MoveNo, grant: GrantNo, peer: Seat, pairs: Sequence[Pair]) -> None:
        hits = {name: draw.hit() and not self._closed for name, draw in self._draws.items()}
        move = _Move(number, grant, peer, pairs, hits)
        with self._lock:
            self._open[number] = move
            if hits["hold"]:
                self._held.append(move)
        if hits["refuse"] and not hits["hold"]:
            self._deliver(move, REFUSED)
        elif not hits["hold"]:
            self._post(move)

    def cancel(self, grant: GrantNo, peer: Seat) -> None:
        for move in self._take_held(lambda move: move.grant == grant and move.peer == peer):
            self._deliver(move, "cancelled")
        self.inner.cancel(grant, peer)

    def teardown(self, peer: Instance) -> None:
        self._end_held(lambda move: move.peer.instance == peer, "torn down")
        self.inner.teardown(peer)

    def close(self) -> None:
        self._closed = True
        self._end_held(lambda move: True, "the mover was closed")
        self.inner.close()

    # --- for who injects ---

    @property
    def held(self) -> int:
        """Moves that wait for `release_moves`."""
        return len(self._held)

    def release_moves(self, count: int | None = None) -> None:
        """The first `count` held moves begin, or all."""
        with self._lock:
            released, self._held = self._held[:count], self._held[count:] if count is not None else []
        for move in released:
            if move.hits["refuse"]:
                self._deliver(move, REFUSED)
            else:
                self._post_late(move)

    def release_completions(self) -> None:
        with self._lock:
            released, self._late, self._swapped = [*self._late, *self._swapped], [], []
        for move in released:
            self._deliver(move, move.error)

    # --- towards the transport ---

    def _post(self, move: _Move) -> None:
        """IndexError, RuntimeError as the transport's: nothing is posted then."""
        numbers = [move.number]
        with self._lock:
            if move.hits["repeat"]:
                self._repeats += 1
                numbers.append(MoveNo(-self._repeats))
            self._posted.update(dict.fromkeys(numbers, move))
        try:
            for number in numbers:
                self.inner.move(number, move.grant, move.peer, move.pairs)
        except BaseException:
            with self._lock:
                self._open.pop(move.number, None)
                for number in numbers:
                    self._posted.pop(number, None)
            raise

    def _post_late(self, move: _Move) -> None:
        try:
            self._post(move)
        except (IndexError, RuntimeError) as error:
            self._on_wrote(move.number, str(error))

    def _wrote(self, number: MoveNo, error: str) -> None:
        with self._lock:
            move = self._posted.pop(number, None)
            if move is None:
                return
            if number == move.number:
                move.error = error
            move.ends -= 1
            if move.ends:
                return
            if move.hits["lose"] and not move.error:
                move.error = LOST
            waiting = self._waiting_room(move)
            if waiting is not None:
                waiting.append(move)
                return
        self._deliver(move, move.error)

    def _waiting_room(self, move: _Move) -> list[_Move] | None:
        if move.calm:
            return None
        return self._late if move.hits["delay"] else self._swapped if move.hits["swap"] else None

    # --- towards the owner ---

    def _deliver(self, move: _Move, error: str) -> None:
        with self._lock:
            if self._open.pop(move.number, None) is None:
                return
            swapped, self._swapped = self._swapped, []
        self._on_wrote(move.number, error)
        for other in swapped:
            self._deliver(other, other.error)

    def _take_held(self, wanted: Callable[[_Move], bool]) -> list[_Move]:
        with self._lock:
            taken = [move for move in self._held if wanted(move)]
            self._held = [move for move in self._held if not wanted(move)]
        return taken

    def _end_held(self, wanted: Callable[[_Move], bool], error: str) -> None:
        """What was held of these moves, or of their completions, ends now; the transport ends the others, promptly."""
        for move in self._take_held(wanted):
            self._deliver(move, error)
        with self._lock:
            for move in self._open.values():
                move.calm = move.calm or wanted(move)
            done = [move for move in (*self._late, *self._swapped) if wanted(move)]
            self._late = [move for move in self._late if not wanted(move)]
            self._swapped = [move for move in self._swapped if not wanted(move)]
        for move in done:
            self._deliver(move, move.error or error)


class _Tampering(Verifier):
    """Flips one bit of a frame that is all in the pool, then looks at it."""

    def __init__(self, pool: PagePool, draw: _Draw) -> None:
        super().__init__(pool)
        self._draw = draw

    def verdict(self, claim: Claim, digest: int | None) -> Verdict:
        if self._draw.hit():
            span = self._draw.random.choice(claim.slice.spans)
            run, byte = self._draw.random.randrange(span.count), self._draw.random.randrange(span.run)
            page = self.pool.page(self._draw.random.choice(claim.pages))
            page[span.dst + run * span.dst_step + byte] ^= 1 << self._draw.random.randrange(8)
        return super().verdict(claim, digest)


class FaultyLanding:
    """contract.Landing around another."""

    def __init__(
        self,
        build: Callable[[LandedCallback, QuietCallback, Verifier], Landing],
        pool: PagePool,
        on_landed: LandedCallback,
        on_quiet: QuietCallback,
        faults: LandingFaults,
    ) -> None:
        """`build` makes the landing into `pool`, with the callbacks and the verifier that it is given."""
        self._on_landed = on_landed
        self._on_quiet = on_quiet
        self._delay_landed = _Draw(faults.delay_landed, faults.seed, "delay_landed")
        self._delay_quiet = _Draw(faults.delay_quiet, faults.seed, "delay_quiet")
        self._lock = threading.Lock()
        self._late: list[tuple[GrantNo, Seat, Sequence[PageId]]] = []
        self._armed: set[GrantNo] = set()  # and not revoked yet
        self._owed: dict[GrantNo, bool] = {}  # revoked, and told "later" by us: is it quiet in truth?
        tampering = _Tampering(pool, _Draw(faults.corrupt, faults.seed, "corrupt"))
        self.inner = build(self._landed, self._quiet, tampering)
        self.capabilities = self.inner.capabilities
        self.endpoint = self.inner.endpoint

    def arm(self, grant: GrantNo, peer: Seat, pages: Sequence[PageId], slice_: Slice) -> None:
        self.inner.arm(grant, peer, pages, slice_)
        self._armed.add(grant)

    def revoke(self, grant: GrantNo) -> bool:
        first = grant in self._armed
        self._armed.discard(grant)
        with self._lock:
            if first and self._delay_quiet.hit():
                self._owed[grant] = False
        quiet = self.inner.revoke(grant)
        with self._lock:
            if grant not in self._owed:
                return quiet
            self._owed[grant] = self._owed[grant] or quiet
            return False

    def disarm(self, grant: GrantNo) -> None:
        self._armed.discard(grant)
        self.inner.disarm(grant)

    def teardown(self, peer: Instance) -> bool:
        return self.inner.teardown(peer)

    def close(self) -> None:
        self.inner.close()

    # --- for who injects ---

    def release_landed(self) -> None:
        with self._lock:
            late, self._late = self._late, []
        for grant, peer, pages in late:
            self._on_landed(grant, peer, pages)

    def release_quiet(self) -> None:
        """What is quiet in truth is told now, the rest as it becomes so."""
        with self._lock:
            owed, self._owed = self._owed, {}
        self._tell_quiet(grant for grant, quiet in owed.items() if quiet)

    # --- from the transport ---

    def _landed(self, grant: GrantNo, peer: Seat, pages: Sequence[PageId]) -> None:
        with self._lock:
            if self._delay_landed.hit():
                self._late.append((grant, peer, pages))
                return
        self._on_landed(grant, peer, pages)

    def _quiet(self, grant: GrantNo) -> None:
        with self._lock:
            if grant in self._owed:
                self._owed[grant] = True
                return
        self._on_quiet(grant)

    def _tell_quiet(self, grants: Iterable[GrantNo]) -> None:
        for grant in grants:
            self._on_quiet(grant)
