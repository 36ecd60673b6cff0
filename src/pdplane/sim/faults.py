"""Faults as typed records with units; patterns.py makes named patterns of them.

Names of processes are those of the fleet: ``p0``, ``p1`` prefill, ``d0``, ``d1`` decode. All times are virtual seconds.
"""

from __future__ import annotations

import msgspec

WEIGHTS = "00"


class Crash(msgspec.Struct, frozen=True, kw_only=True):
    """kill -9. A successor, another instance on the same address, comes up `restart_after_s` later. `ghosts`: what the
    process had posted may still land, up to `ghost_within_s` later. `weights`: what the successor serves; all others
    serve WEIGHTS."""

    process: str
    at_s: float
    restart_after_s: float
    ghosts: bool = False
    ghost_within_s: float = 60.0
    weights: str = WEIGHTS


class Freeze(msgspec.Struct, frozen=True, kw_only=True):
    """SIGSTOP, and SIGCONT after `for_s`. Sockets stay open; a one-sided fabric goes on writing."""

    process: str
    at_s: float
    for_s: float


class Partition(msgspec.Struct, frozen=True, kw_only=True):
    """What `src` sends to `dst` is held back, as TCP holds it; `both`: the other way too."""

    src: str
    dst: str
    at_s: float
    for_s: float
    both: bool


class SessionLoss(msgspec.Struct, frozen=True, kw_only=True):
    """The control connections between two processes break; what is under way is lost. Each end notices for itself.
    `tp`: those of that tensor parallel rank of prefill alone."""

    prefill: str
    decode: str
    at_s: float
    tp: int | None = None


class LostFrame(msgspec.Struct, frozen=True, kw_only=True):
    """The session breaks as the next frame of this kind leaves, at the first chance after `at_s`: it is lost with it.
    `frame`: a room frame's name, in small letters. `whole`: all sessions of the two processes break."""

    prefill: str
    decode: str
    at_s: float
    frame: str
    whole: bool = False


class SlowLink(msgspec.Struct, frozen=True, kw_only=True):
    """Frames between two processes take `extra_s` longer."""

    src: str
    dst: str
    at_s: float
    for_s: float
    extra_s: float


class SlowTransfer(msgspec.Struct, frozen=True, kw_only=True):
    """Moves of one prefill take `extra_s` longer."""

    process: str
    at_s: float
    for_s: float
    extra_s: float


class SlowRank(msgspec.Struct, frozen=True, kw_only=True):
    """Moves and frames of one tensor parallel rank of a prefill take `extra_s` longer: its links lag behind the others'
    of the same rooms."""

    process: str
    tp: int
    at_s: float
    for_s: float
    extra_s: float


class StuckMoves(msgspec.Struct, frozen=True, kw_only=True):
    """Moves of one prefill that are posted before `at_s` + `for_s` and under way after `at_s` return only then: longer
    than drain limits."""

    process: str
    at_s: float
    for_s: float


class LostMoves(msgspec.Struct, frozen=True, kw_only=True):
    """Every move of one prefill that is under way at `at_s` completes with an error. Some are lost, some have landed
    when that is said, and some land after it: they lay in a socket's buffer."""

    process: str
    at_s: float


class WrongRow(msgspec.Struct, frozen=True, kw_only=True):
    """The next SUCCESS of this prefill, on one link, speaks of another prompt (`wrong` "prompt") or of another first
    token than its other links do ("token")."""

    process: str
    at_s: float
    wrong: str


class RegistryDown(msgspec.Struct, frozen=True, kw_only=True):
    """The registry of one prefill refuses connections."""

    process: str
    at_s: float
    for_s: float


class SlowRegistry(msgspec.Struct, frozen=True, kw_only=True):
    """The registry of one prefill takes `extra_s` longer to answer."""

    process: str
    at_s: float
    for_s: float
    extra_s: float


class MissingRank(msgspec.Struct, frozen=True, kw_only=True):
    """The registry of one prefill, or of its group, does not name this tensor parallel rank of it."""

    process: str
    tp: int
    at_s: float
    for_s: float


class StrayFrame(msgspec.Struct, frozen=True, kw_only=True):
    """A DRAINED or SUCCESS turns up on the session of a room that waits for just that, from an earlier process or for
    another grant. Strikes at the first chance after `at_s`."""

    decode: str
    at_s: float
    kind: str  # "drained" | "success"
    wrong: str  # "grant" | "instance"


class DrainWorker(msgspec.Struct, frozen=True, kw_only=True):
    """An operator drains a worker: no new rooms."""

    process: str
    at_s: float


class Release(msgspec.Struct, frozen=True, kw_only=True):
    """An operator gives back what this decode has in quarantine, having made sure that no write is under way to it."""

    process: str
    at_s: float


Fault = (
    Crash
    | DrainWorker
    | Freeze
    | LostFrame
    | LostMoves
    | MissingRank
    | Partition
    | RegistryDown
    | Release
    | SessionLoss
    | SlowLink
    | SlowRank
    | SlowRegistry
    | SlowTransfer
    | StrayFrame
    | StuckMoves
    | WrongRow
)
