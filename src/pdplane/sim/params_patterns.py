"""The named patterns of the params dialect: what strikes any fleet, and what strikes a hand-off by lease and handle."""

from __future__ import annotations

from random import Random

from .faults import (
    Crash,
    Fault,
    Freeze,
    LostFrame,
    LostMoves,
    Partition,
    SessionLoss,
    SlowLink,
    SlowTransfer,
    StrayFrame,
)
from .patterns import MIXED, PATTERNS, SPAN_S, Fleet, Strike

ROOMS_ALONE = frozenset({"duplicate_rooms", "registry_down", "registry_swap", "late_ranks"})
"""There is no room, and no registry: a handle says where its prefill is."""
FRAMES = ("read", "confirm", "confirmed", "release", "renew", "renewed", "readfailed")


def _when(rng: Random) -> float:
    return rng.uniform(0.0, SPAN_S)


def _lost_frames(rng: Random, fleet: Fleet) -> list[Fault]:
    kinds = (*("read", "confirm", "confirmed") * 3, *FRAMES)
    return [_lost(rng, fleet, rng.choice(kinds)) for _ in range(rng.randint(12, 36))]


def _lost(rng: Random, fleet: Fleet, frame: str) -> LostFrame:
    prefill, decode = rng.choice(fleet[0]), rng.choice(fleet[1])
    return LostFrame(prefill=prefill, decode=decode, at_s=_when(rng), frame=frame, whole=rng.random() < 0.4)


def _slow_reads(rng: Random, fleet: Fleet, most_s: float) -> list[Fault]:
    return [
        SlowTransfer(process=name, at_s=_when(rng), for_s=rng.uniform(2.0, 6.0), extra_s=rng.uniform(0.2, most_s))
        for name in fleet[0]
    ]


def _lost_renewals(rng: Random, fleet: Fleet) -> list[Fault]:
    """Renewals go down with their session, are held back, or come when the lease has ended."""
    faults: list[Fault] = [_lost(rng, fleet, rng.choice(("renew", "renewed"))) for _ in range(rng.randint(4, 16))]
    for prefill in fleet[0]:
        decode = rng.choice(fleet[1])
        if rng.random() < 0.5:
            held = rng.uniform(0.5, 4.0)
            faults.append(Partition(src=decode, dst=prefill, at_s=_when(rng), for_s=held, both=rng.random() < 0.3))
        else:
            extra_s = rng.uniform(0.3, 1.8)
            faults.append(SlowLink(src=decode, dst=prefill, at_s=_when(rng), for_s=4.0, extra_s=extra_s))
    return faults + _slow_reads(rng, fleet, 3.0)


def _late_reads(rng: Random, fleet: Fleet) -> list[Fault]:
    """Reads outlast their lease: its renewals stop, and what is read may be another's by then (I23). Word of its end
    comes late, too."""
    faults: list[Fault] = [
        SlowTransfer(process=name, at_s=0.0, for_s=SPAN_S, extra_s=rng.uniform(0.5, 2.0)) for name in fleet[0]
    ]
    for decode in fleet[1]:
        faults += [
            Freeze(process=decode, at_s=_when(rng), for_s=rng.uniform(0.5, 4.5)) for _ in range(rng.randint(0, 2))
        ]
        for prefill in fleet[0]:
            at_s, extra_s = rng.uniform(0.0, 3.0), rng.uniform(0.5, 1.9)
            if rng.random() < 0.8:
                faults.append(SlowLink(src=decode, dst=prefill, at_s=at_s, for_s=3.0, extra_s=extra_s))
            if rng.random() < 0.8:
                faults.append(SlowLink(src=prefill, dst=decode, at_s=at_s, for_s=3.0, extra_s=extra_s))
    return faults


def _half_loads(rng: Random, fleet: Fleet) -> list[Fault]:
    """Moves break off in their middle, and whoever asks what of it is good waits for the answer, or in vain."""
    faults: list[Fault] = [LostMoves(process=rng.choice(fleet[0]), at_s=_when(rng)) for _ in range(rng.randint(20, 50))]
    for prefill in fleet[0]:
        faults.append(SlowTransfer(process=prefill, at_s=0.0, for_s=SPAN_S, extra_s=rng.uniform(0.1, 0.6)))
        extra_s, decode = rng.uniform(0.1, 0.6), rng.choice(fleet[1])
        faults.append(SlowLink(src=decode, dst=prefill, at_s=_when(rng), for_s=5.0, extra_s=extra_s))
    chance = rng.random()
    if chance < 0.4:
        faults += [_lost(rng, fleet, "confirm") for _ in range(rng.randint(2, 8))]
    elif chance < 0.7:
        faults.append(Crash(process=rng.choice(fleet[0]), at_s=_when(rng), restart_after_s=rng.uniform(0.1, 5.0)))
    return faults


def _restarts_between(rng: Random, fleet: Fleet) -> list[Fault]:
    """Somebody else is at prefill's address when decode comes with what was answered there; or decode has gone."""
    names = fleet[0] if rng.random() < 0.7 else fleet[1]
    return [
        Crash(process=rng.choice(names), at_s=_when(rng), restart_after_s=rng.uniform(0.05, 1.0))
        for _ in range(rng.randint(1, 3))
    ]


def _stray_frames(rng: Random, fleet: Fleet) -> list[Fault]:
    strays: list[Fault] = [
        StrayFrame(
            decode=rng.choice(fleet[1]), at_s=_when(rng), kind="confirmed", wrong=rng.choice(("grant", "instance"))
        )
        for _ in range(rng.randint(10, 30))
    ]
    return strays + _slow_reads(rng, fleet, 2.0)


def _replays(rng: Random, fleet: Fleet) -> list[Fault]:
    return _slow_reads(rng, fleet, 1.0) if rng.random() < 0.5 else []


def _session_loss(rng: Random, fleet: Fleet) -> list[Fault]:
    return [
        SessionLoss(prefill=rng.choice(fleet[0]), decode=rng.choice(fleet[1]), at_s=_when(rng))
        for _ in range(rng.choice((0, 0, 5)))
    ]


PARAMS_PATTERNS: dict[str, Strike] = {
    **{name: strike for name, strike in PATTERNS.items() if name not in ROOMS_ALONE},
    "stray_frames": _stray_frames,
    "lost_frames": _lost_frames,
    "mismatches": lambda rng, fleet: [],
    "between_hops": _session_loss,
    "replays": _replays,
    "tampered": lambda rng, fleet: [],
    "lost_renewals": _lost_renewals,
    "late_reads": _late_reads,
    "restarts_between": _restarts_between,
    "full_decode": lambda rng, fleet: [],
    "half_loads": _half_loads,
}
PARAMS_PATTERN_NAMES = (*PARAMS_PATTERNS, MIXED)
