"""One client request and its attempts: who is asked, who is told, who may still answer. Sans-IO.

A request is tried on one pair of workers at a time. An attempt is two legs, prefill and decode, under fresh names. The
machine is told what happened to the legs and to the client, and returns the effects that its shell (the router, or the
simulator) carries out at once and in order. It has no clock: a deadline is an event.

An attempt has one of two shapes. In the rooms dialect both legs leave together. In the params dialect they leave one
after the other (`in_turn`): prefill answers first and then *holds* the KV, under a lease and for one consumer; decode's
leg leaves with that answer, and what proves that the hold was taken is decode's own first byte.

How to drive it::

    machine = RequestAttempts(retries=1)
    effects = machine.pair_chosen(prefill, decode)   # or no_pair(cause); Choose asks for one of the two again
    ... prefill_done, prefill_failed, decode_first_byte, decode_done, decode_failed   (each with its attempt number)
    # in turn: pair_chosen(prefill, decode, in_turn=True), and prefill_done(attempt, held=True)
    ... cancel(cause)         client gone, abort call, deadline
    ... drain_limit()         the answer is out, but prefill's leg still hangs

What it guarantees, whatever the order of events:

- The first terminal failure of either leg ends the other one, at once: its connection is closed *and* it is aborted
  by a call, since a worker may not see the close (I06, I08, I11).
- Every leg that was opened is released exactly once (I25): prefill's load ends with prefill's leg, not with decode's.
- A hold is let go exactly once: taken by decode, or released by `ReleaseHold` on every way out between prefill's
  answer and decode's first byte, be it that decode refused or was not reached, that the client left, or the clock
  (I06). No hold ever has a second consumer: a retry begins with another leg at prefill (I12).
- One verdict, with its first cause (rule 1). A prefill that fails or hangs after decode's first byte changes nothing:
  decode is the authority then (PROTOCOL 4).
- A retry happens only before the first byte to the client, only for failures where it is safe, on a pair without the
  worker to blame, with a new attempt number (so: new room, new rids). Never more than `retries` of them, apart
  from connections that had gone stale while idle, which speak about no worker.
- An event of another attempt, or after the end, is counted in `late` and changes nothing.

Per-chunk forwarding bypasses the machine: after `Forward` the shell passes bytes on until the leg ends.
"""

from __future__ import annotations

from typing import Final, Literal

import msgspec

from .errors import CLIENT_CLOSED, Cause

Side = Literal["prefill", "decode"]
PREFILL: Final = "prefill"
DECODE: Final = "decode"
NOBODY: Final = "nobody"
HANDOFF: Final = "handoff"

STALE_LIMIT = 2  # one side's idle connections, then the other's
BUSY = frozenset({429, 503})
_SAFE = frozenset({429, 500, 502, 503})


def retry_safe(status: int, said: bool | None = None) -> bool:
    """Whether an answer of `status` may be tried again elsewhere; `said` is the worker's own word, where it gave one.

    A 4xx other than 429 speaks about the request, so it never is. 504 is a spent deadline.
    """
    if status < 500 and status != 429:
        return False
    return status in _SAFE if said is None else said


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """How a leg failed. `cause.retryable` decides about a retry.

    answered: the worker said so itself, and is done with the attempt; otherwise (refused, reset, garbled) it may still
    be at work and is aborted like the other leg. blames: the side whose worker a retry must avoid, "" the side that
    failed, "nobody" for a stale connection, "handoff" for a hold that was lost: that costs a retry and no worker is
    avoided. reply: the worker's own answer, opaque here, to be passed on verbatim.
    """

    cause: Cause
    answered: bool = True
    blames: str = ""
    reply: object = None


class Choose(msgspec.Struct, frozen=True):
    """Choose a pair without these workers for the next attempt; answer by `pair_chosen` or `no_pair`."""

    excluded: frozenset[str]


class Open(msgspec.Struct, frozen=True):
    """Open both legs of the pair just chosen, both now, under a fresh room and fresh rids; count their load."""

    attempt: int


class OpenLeg(msgspec.Struct, frozen=True):
    """Open this leg of the pair alone, now, under a fresh id; count its load. Decode's carries prefill's answer."""

    side: Side
    attempt: int


class ReleaseHold(msgspec.Struct, frozen=True):
    """Tell prefill to let go what it holds for this attempt: decode has not taken it, and never will. The legs are
    closed by then. At most once per hold."""

    cause: Cause


class EndLeg(msgspec.Struct, frozen=True):
    """Close this leg's connection and POST its abort call (unless nothing was ever sent on it)."""

    side: Side
    cause: Cause


class Release(msgspec.Struct, frozen=True):
    """This leg's load ends. Exactly once per leg opened."""

    side: Side


class Forward(msgspec.Struct, frozen=True):
    """Decode's head and bytes go to the client, from here on without asking. No retry any more."""


class Reply(msgspec.Struct, frozen=True):
    """Nothing has reached the client: answer with `failure.reply` where there is one, else with its cause."""

    failure: Failure


class Break(msgspec.Struct, frozen=True):
    """Bytes have reached the client: end its answer visibly (an error event, or a cut)."""

    cause: Cause


class Finish(msgspec.Struct, frozen=True):
    """The verdict, once: None is a whole answer. Prefill's leg may still be draining."""

    cause: Cause | None


class Done(msgspec.Struct, frozen=True):
    """Nothing of the request is left: no leg, no load. The last effect, once."""


Effect = Choose | Open | OpenLeg | ReleaseHold | EndLeg | Release | Forward | Reply | Break | Finish | Done
Effects = tuple[Effect, ...]

# What a request without trouble needs is made once.
_NOTHING: Effects = ()
_OPEN: Effects = (Open(0),)
_FORWARD: Effects = (Forward(),)
_RELEASE_PREFILL: Final = Release(PREFILL)
_RELEASE_DECODE: Final = Release(DECODE)
_DONE: Final = Done()
_PREFILL_DONE: Effects = (_RELEASE_PREFILL,)
_PREFILL_DONE_LAST: Effects = (_RELEASE_PREFILL, _DONE)
_DECODE_DONE: Effects = (_RELEASE_DECODE, Finish(None))
_DECODE_DONE_LAST: Effects = (_RELEASE_DECODE, Finish(None), _DONE)

# Phases: choosing a pair; a leg open and no byte of decode's answer passed on yet; bytes flow; answer out but prefill's
# leg open; over.
CHOOSING, HELD, STREAMING, DRAINING, OVER = range(5)
PHASE_NAMES = ("choosing", "held", "streaming", "draining", "over")


class RequestAttempts(msgspec.Struct, gc=False, eq=False):
    """The machine of one request; see the module's words. Not thread-safe. Only `retries` is for the caller to set.

    `attempt` counts from 0; `cause` is the verdict's.
    """

    retries: int = 1
    phase: int = CHOOSING
    attempt: int = 0
    prefill: str | None = None
    decode: str = ""
    cause: Cause | None = None
    late: int = 0
    _spent: int = 0
    _stale: int = 0
    _excluded: frozenset[str] = frozenset()
    _last: Failure | None = None
    _prefill_open: bool = False
    _decode_open: bool = False
    _in_turn: bool = False
    _held: bool = False  # prefill's answer named a hold, and nobody has taken it yet

    @property
    def over(self) -> bool:
        return self.phase == OVER

    @property
    def failure(self) -> Failure | None:
        """Why the attempt before this one failed."""
        return self._last

    # --- choosing ---------------------------------------------------------------------------------------------

    def pair_chosen(self, prefill: str | None, decode: str, in_turn: bool = False) -> Effects:
        """Workers by name. `prefill` None: a worker that does both, on the decode leg alone. `in_turn`: prefill's leg
        first, decode's once prefill has answered."""
        if self.phase != CHOOSING:
            return self._late()
        self.phase = HELD
        self.prefill, self.decode = prefill, decode
        self._prefill_open = prefill is not None
        if in_turn and prefill is not None:
            self._in_turn = True
            return (OpenLeg(PREFILL, self.attempt),)
        self._decode_open = True
        return _OPEN if self.attempt == 0 else (Open(self.attempt),)

    def no_pair(self, cause: Cause) -> Effects:
        """Nobody is left to ask: the failure before is the answer, where there was one."""
        if self.phase != CHOOSING:
            return self._late()
        failure = self._last or Failure(cause=cause)
        return self._over((Reply(failure),), failure.cause)

    # --- prefill's leg ----------------------------------------------------------------------------------------

    def prefill_done(self, attempt: int, held: bool = False) -> Effects:
        """Its 2xx answer was read to the end. In turn: decode is next; `held`: prefill keeps the KV for it."""
        if attempt != self.attempt or not self._prefill_open:
            return self._late()
        self._prefill_open = False
        if self._in_turn:
            self._held, self._decode_open = held, True
            return (_RELEASE_PREFILL, OpenLeg(DECODE, attempt))
        if self.phase == DRAINING:
            self.phase = OVER
            return _PREFILL_DONE_LAST
        return _PREFILL_DONE

    def prefill_failed(self, attempt: int, failure: Failure, held: bool = False) -> Effects:
        """`held`: it answered, and holds what cannot be used (its lease is too short, say)."""
        if attempt != self.attempt or not self._prefill_open:
            return self._late()
        if self.phase == HELD:
            self._held = held
            return self._attempt_failed(PREFILL, failure)
        effects = self.prefill_done(attempt)  # decode has what it needs: its bytes are the proof
        return effects if failure.answered else (EndLeg(PREFILL, failure.cause), *effects)

    def drain_limit(self) -> Effects:
        """The answer is out and prefill's leg has had time enough: end it."""
        if self.phase != DRAINING:
            return self._late()
        self.phase = OVER
        cause = Cause("drained_too_long", "prefill's leg did not end after decode's answer had", side=PREFILL)
        return (*self._end_legs(cause), _DONE)

    # --- decode's leg -----------------------------------------------------------------------------------------

    def decode_first_byte(self, attempt: int) -> Effects:
        """The first byte of the body of a 2xx answer. The head before it was held (retry ends here)."""
        if attempt != self.attempt or self.phase != HELD or not self._decode_open:
            return self._late()
        self.phase = STREAMING
        self._held = False  # decode answers only once it has taken the hold, or has no use for it
        return _FORWARD

    def decode_done(self, attempt: int) -> Effects:
        """Its 2xx answer is complete; an empty one counts as its own first byte."""
        if attempt != self.attempt or not self._decode_open:
            return self._late()
        forward = _FORWARD if self.phase == HELD else _NOTHING
        self._decode_open = self._held = False
        self.phase = DRAINING if self._prefill_open else OVER
        return forward + (_DECODE_DONE if self._prefill_open else _DECODE_DONE_LAST)

    def decode_failed(self, attempt: int, failure: Failure) -> Effects:
        if attempt != self.attempt or not self._decode_open:
            return self._late()
        if self.phase == HELD:
            return self._attempt_failed(DECODE, failure)
        self._decode_open = False
        effects: list[Effect] = [] if failure.answered else [EndLeg(DECODE, failure.cause)]
        effects += (_RELEASE_DECODE, *self._end_legs(failure.cause), Break(failure.cause))
        return self._over(tuple(effects), failure.cause)

    # --- the client and the clock -------------------------------------------------------------------------------

    def cancel(self, cause: Cause) -> Effects:
        """The client left (`client_left`: nobody to answer), an abort call, or the deadline."""
        if self.phase >= DRAINING:
            return self._late()
        streaming = self.phase == STREAMING
        effects = self._end_legs(cause)
        if cause.code != "client_left":
            effects.append(Break(cause) if streaming else Reply(Failure(cause=cause)))
        return self._over(tuple(effects), cause)

    # --- inside -------------------------------------------------------------------------------------------------

    def _attempt_failed(self, side: Side, failure: Failure) -> Effects:
        effects: list[Effect] = [] if failure.answered else [EndLeg(side, failure.cause)]
        if side == PREFILL:
            self._prefill_open = False
            effects.append(_RELEASE_PREFILL)
        else:
            self._decode_open = False
            effects.append(_RELEASE_DECODE)
        effects += self._end_legs(_closed_with(side, failure.cause))
        self._last = failure
        if not failure.cause.retryable or not self._may_retry(failure):
            return self._over((*effects, Reply(failure)), failure.cause)
        self._exclude(failure.blames or side)
        self.attempt += 1
        self._in_turn = False
        self.phase = CHOOSING
        return (*effects, Choose(self._excluded))

    def _may_retry(self, failure: Failure) -> bool:
        """A connection that had gone stale says nothing of the worker: it costs no retry, and cannot go on for ever."""
        if failure.blames == NOBODY and self._stale < STALE_LIMIT:
            self._stale += 1
            return True
        self._spent += 1
        return self._spent <= self.retries

    def _exclude(self, blamed: str) -> None:
        worker = {PREFILL: self.prefill, DECODE: self.decode}.get(blamed)
        if worker is not None:
            self._excluded |= {worker}

    def _end_legs(self, cause: Cause) -> list[Effect]:
        """Every leg still open is ended, then released; then the hold is, which no leg can take any more."""
        effects: list[Effect] = []
        if self._prefill_open:
            self._prefill_open = False
            effects += (EndLeg(PREFILL, cause), _RELEASE_PREFILL)
        if self._decode_open:
            self._decode_open = False
            effects += (EndLeg(DECODE, cause), _RELEASE_DECODE)
        if self._held:
            self._held = False
            effects.append(ReleaseHold(cause))
        return effects

    def _over(self, effects: Effects, cause: Cause) -> Effects:
        assert not self._prefill_open, "a verdict with prefill's leg left open"
        assert not self._decode_open, "a verdict with decode's leg left open"
        assert not self._held, "a verdict with a hold left at prefill"
        self.phase = OVER
        self.cause = cause
        return (*effects, Finish(cause), _DONE)

    def _late(self) -> Effects:
        self.late += 1
        return _NOTHING


def _closed_with(side: Side, cause: Cause) -> Cause:
    """What the other leg ends with, when `side` failed by `cause`."""
    return Cause("peer_leg_closed", f"the {side} leg ended first: {cause.message}", CLIENT_CLOSED, side=side)
