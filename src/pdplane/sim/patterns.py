"""The named patterns: which faults strike a fleet, and when. Patterns also shape its limits and requests (plan.py)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from random import Random

from .faults import (
    Crash,
    DrainWorker,
    Fault,
    Freeze,
    LostFrame,
    LostMoves,
    MissingRank,
    Partition,
    RegistryDown,
    Release,
    SessionLoss,
    SlowLink,
    SlowRank,
    SlowRegistry,
    SlowTransfer,
    StrayFrame,
    StuckMoves,
    WrongRow,
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
    lost: list[Fault] = [LostMoves(process=rng.choice(fleet[0]), at_s=_when(rng)) for _ in range(rng.randint(6, 24))]
    return lost + _slow_transfer(rng, fleet)


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


def _stuck_moves(rng: Random, fleet: Fleet) -> list[Fault]:
    """Now and then the session breaks while pages drain, or a side looks dead for a while."""
    faults: list[Fault] = [
        StuckMoves(process=name, at_s=_when(rng), for_s=rng.choice((6.0, 12.0, rng.uniform(31.0, 45.0))))
        for name in fleet[0]
    ]
    faults += [
        SessionLoss(prefill=rng.choice(fleet[0]), decode=rng.choice(fleet[1]), at_s=rng.uniform(4.0, 40.0))
        for _ in range(rng.choice((0, 4)))
    ]
    faults += [
        Freeze(process=rng.choice(fleet[0]), at_s=_when(rng), for_s=rng.uniform(2.2, 4.8))
        for _ in range(rng.randint(0, 3))
    ]
    return faults + (_freeze(rng, fleet[0] + fleet[1]) if rng.random() < 0.3 else [])


def _lost_frames(rng: Random, fleet: Fleet) -> list[Fault]:
    kinds = (*("announce", "grant", "failed") * 3, "abort", "ready", "success", "drained", "received")
    lost: list[Fault] = [
        LostFrame(
            prefill=rng.choice(fleet[0]),
            decode=rng.choice(fleet[1]),
            at_s=_when(rng),
            frame=rng.choice(kinds),
            whole=rng.random() < 0.4,
        )
        for _ in range(rng.randint(12, 36))
    ]
    return lost + (_slow_transfer(rng, fleet) if rng.random() < 0.5 else [])


def _mismatches(rng: Random, fleet: Fleet) -> list[Fault]:
    return [
        WrongRow(process=rng.choice(fleet[0]), at_s=_when(rng), wrong=rng.choice(("prompt", "token")))
        for _ in range(rng.randint(1, 6))
    ]


def _operator(rng: Random, fleet: Fleet) -> list[Fault]:
    releases: list[Fault] = [Release(process=name, at_s=at_s) for name in fleet[1] for at_s in (12.0, 25.0, 48.0)]
    return releases + _crash(rng, fleet[0], False) + _slow_transfer(rng, fleet)


def _registry_swap(rng: Random, fleet: Fleet) -> list[Fault]:
    """A restart behind a stable registry address, and a registry that does not know all ranks for a while."""
    missing: list[Fault] = [
        MissingRank(process=name, tp=rng.randrange(2), at_s=_when(rng), for_s=rng.uniform(0.5, 2.0))
        for name in fleet[0]
    ]
    return missing + _crash(rng, fleet[0], False)


def _other_weights(rng: Random, fleet: Fleet) -> list[Fault]:
    """A prefill comes back with another model, and once more with the one that it had."""
    name, at_s = rng.choice(fleet[0]), rng.uniform(0.5, 2.0)
    wrong = Crash(process=name, at_s=at_s, restart_after_s=rng.uniform(0.1, 0.5), weights="01")
    right_at_s = at_s + rng.uniform(1.0, 3.0)
    return [wrong, Crash(process=name, at_s=right_at_s, restart_after_s=rng.uniform(0.1, 0.5))]


def _late_ranks(rng: Random, fleet: Fleet) -> list[Fault]:
    return [
        SlowRegistry(process=name, at_s=_when(rng), for_s=rng.uniform(1.0, 4.0), extra_s=rng.uniform(0.05, 1.0))
        for name in fleet[0]
    ]


def _busy_prefill(rng: Random, fleet: Fleet) -> list[Fault]:
    """Rooms wait for their turn while sessions and decodes come and go."""
    chance = rng.random()
    if chance < 0.4:
        return _session_flaps(rng, fleet)
    return _crash(rng, fleet[1], False) if chance < 0.7 else []


def _rank_skew(rng: Random, fleet: Fleet) -> list[Fault]:
    """One link of several is slow, or flaps."""
    faults: list[Fault] = []
    for name in fleet[0]:
        tp = rng.randrange(4)
        extra_s = rng.uniform(0.05, rng.choice((0.5, 2.0)))
        faults.append(SlowRank(process=name, tp=tp, at_s=_when(rng), for_s=rng.uniform(1.0, 5.0), extra_s=extra_s))
        faults += [
            SessionLoss(prefill=name, decode=rng.choice(fleet[1]), at_s=_when(rng), tp=rng.randrange(4))
            for _ in range(rng.choice((0, 6)))
        ]
    return faults


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
    "stuck_moves": _stuck_moves,
    "lost_frames": _lost_frames,
    "mismatches": _mismatches,
    "operator": _operator,
    "registry_swap": _registry_swap,
    "other_weights": _other_weights,
    "late_ranks": _late_ranks,
    "rank_skew": _rank_skew,
    "hold_expiry": lambda rng, fleet: [],
    "retracts": lambda rng, fleet: [],
    "busy_prefill": _busy_prefill,
    "full_batch": lambda rng, fleet: [],
    "aggregated": lambda rng, fleet: _freeze(rng, ["a0"]) if rng.random() < 0.3 else [],
}
"""What strikes a fleet, by name. Patterns also shape the requests: see plan.py. ``mixed`` is several of these."""

MIXED = "mixed"
PATTERN_NAMES = (*PATTERNS, MIXED)


def strikes(
    rng: Random, patterns: tuple[str, ...], fleet: Fleet, kinds: Mapping[str, Strike] = PATTERNS
) -> tuple[Fault, ...]:
    """The faults of these patterns, in order of time."""
    faults = [fault for name in patterns for fault in kinds[name](rng, fleet)]
    return tuple(sorted(faults, key=lambda fault: fault.at_s))
