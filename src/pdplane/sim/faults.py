"""Faults as typed records with units, and the named patterns that are made of them.

Names of processes are those of the fleet: ``p0``, ``p1`` prefill, ``d0``, ``d1`` decode. All times are virtual seconds.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import msgspec


class Crash(msgspec.Struct, frozen=True, kw_only=True):
    """kill -9. A successor, another instance on the same address, comes up `restart_after_s` later. `ghosts`: what the
    process had posted may still land, up to `ghost_within_s` later."""

    process: str
    at_s: float
    restart_after_s: float
    ghosts: bool = False
    ghost_within_s: float = 60.0


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
    """The control connections between two processes break; what is under way is lost. Each end notices for itself."""

    prefill: str
    decode: str
    at_s: float


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


class LostMoves(msgspec.Struct, frozen=True, kw_only=True):
    """Every move of one prefill that is under way at `at_s` completes with an error; half of them land all the same."""

    process: str
    at_s: float


class RegistryDown(msgspec.Struct, frozen=True, kw_only=True):
    """The registry of one prefill refuses connections."""

    process: str
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


Fault = (
    Crash
    | DrainWorker
    | Freeze
    | LostMoves
    | Partition
    | RegistryDown
    | SessionLoss
    | SlowLink
    | SlowTransfer
    | StrayFrame
)

SPAN_S = 6.0  # requests arrive, and faults strike, within this time

Fleet = tuple[list[str], list[str]]  # prefill names, decode names


def _when(rng: Random) -> float:
    return rng.uniform(0.0, SPAN_S)


def _session_flaps(rng: Random, fleet: Fleet) -> list[Fault]:
    return [
        SessionLoss(prefill=rng.choice(fleet[0]), decode=rng.choice(fleet[1]), at_s=_when(rng))
        for _ in range(rng.choice((3, 10, 40)))
    ]


def _partitions(rng: Random, fleet: Fleet) -> list[Fault]:
    faults: list[Fault] = []
    for _ in range(rng.randint(1, 3)):
        ends = [rng.choice(fleet[0]), rng.choice(fleet[1])]
        rng.shuffle(ends)
        length = rng.choice((0.3, 3.0, 6.0, 9.0, 15.0, 45.0))
        faults.append(
            Partition(
                src=ends[0], dst=ends[1], at_s=_when(rng), for_s=rng.uniform(0.2, length), both=rng.random() < 0.5
            )
        )
    return faults


def _slow_links(rng: Random, fleet: Fleet) -> list[Fault]:
    faults: list[Fault] = []
    for _ in range(rng.randint(1, 3)):
        ends = [rng.choice(fleet[0]), rng.choice(fleet[1])]
        rng.shuffle(ends)
        extra_s = rng.uniform(0.05, 1.5)
        faults.append(SlowLink(src=ends[0], dst=ends[1], at_s=_when(rng), for_s=rng.uniform(1.0, 5.0), extra_s=extra_s))
    return faults


def _crash(rng: Random, names: list[str], ghosts: bool) -> list[Fault]:
    return [
        Crash(process=rng.choice(names), at_s=_when(rng), restart_after_s=rng.uniform(0.1, 5.0), ghosts=ghosts)
        for _ in range(rng.randint(1, 2))
    ]


def _freeze(rng: Random, names: list[str]) -> list[Fault]:
    return [
        Freeze(process=rng.choice(names), at_s=_when(rng), for_s=rng.uniform(0.5, rng.choice((3.0, 9.0, 20.0, 50.0))))
        for _ in range(rng.randint(1, 2))
    ]


def _slow_transfer(rng: Random, fleet: Fleet) -> list[Fault]:
    faults: list[Fault] = []
    for name in fleet[0]:
        extra_s = rng.uniform(0.1, rng.choice((0.5, 3.0, 3.0, 40.0)))
        faults.append(SlowTransfer(process=name, at_s=_when(rng), for_s=rng.uniform(1.0, 6.0), extra_s=extra_s))
    return faults


def _lost_moves(rng: Random, fleet: Fleet) -> list[Fault]:
    return [LostMoves(process=rng.choice(fleet[0]), at_s=_when(rng)) for _ in range(rng.randint(3, 12))]


def _registry_down(rng: Random, fleet: Fleet) -> list[Fault]:
    down: list[Fault] = [
        RegistryDown(process=name, at_s=rng.uniform(0.0, 2.0), for_s=rng.uniform(0.5, 5.0)) for name in fleet[0]
    ]
    return down + (_crash(rng, fleet[0], False) if rng.random() < 0.3 else [])


def _stray_frames(rng: Random, fleet: Fleet) -> list[Fault]:
    strays: list[Fault] = [
        StrayFrame(
            decode=rng.choice(fleet[1]),
            at_s=_when(rng),
            kind=rng.choice(("drained", "success")),
            wrong=rng.choice(("grant", "instance")),
        )
        for _ in range(rng.randint(10, 30))
    ]
    return strays + _slow_transfer(rng, fleet)


Strike = Callable[[Random, Fleet], list[Fault]]

PATTERNS: dict[str, Strike] = {
    "calm": lambda rng, fleet: [],
    "cancels": lambda rng, fleet: [],
    "session_flaps": _session_flaps,
    "partitions": _partitions,
    "slow_links": _slow_links,
    "crash_prefill": lambda rng, fleet: _crash(rng, fleet[0], False),
    "crash_decode": lambda rng, fleet: _crash(rng, fleet[1], False),
    "freeze_prefill": lambda rng, fleet: _freeze(rng, fleet[0]),
    "freeze_decode": lambda rng, fleet: _freeze(rng, fleet[1]),
    "ghost_writes": lambda rng, fleet: _crash(rng, fleet[0], True) + _slow_transfer(rng, fleet),
    "slow_transfer": _slow_transfer,
    "lost_moves": _lost_moves,
    "tight_pools": lambda rng, fleet: [],
    "duplicate_rooms": lambda rng, fleet: [],
    "late_legs": lambda rng, fleet: [],
    "registry_down": _registry_down,
    "stray_frames": _stray_frames,
    "draining": lambda rng, fleet: [DrainWorker(process=rng.choice(fleet[0] + fleet[1]), at_s=_when(rng))],
}
"""What strikes a fleet, by name. Patterns also shape the requests: see plan.py. ``mixed`` is several of these."""

MIXED = "mixed"
PATTERN_NAMES = (*PATTERNS, MIXED)


def strikes(rng: Random, patterns: tuple[str, ...], fleet: Fleet) -> tuple[Fault, ...]:
    """The faults of these patterns, in order of time."""
    faults = [fault for name in patterns for fault in PATTERNS[name](rng, fleet)]
    return tuple(sorted(faults, key=lambda fault: fault.at_s))
