"""What happens in one run, all of it drawn from the seed before it starts: fleet, requests, faults."""

from __future__ import annotations

from random import Random

import msgspec

from pdplane.core.ids import Room
from pdplane.core.node import Limits

from .faults import (
    MIXED,
    PATTERN_NAMES,
    PATTERNS,
    SPAN_S,
    Crash,
    DrainWorker,
    Fault,
    Freeze,
    LostMoves,
    Partition,
    SlowTransfer,
    StrayFrame,
    strikes,
)


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One client request. Delays are on top of the network's.

    prompt: which prompt, so that two requests may share one. leaves_after_s: the client closes its connection.
    room_of: uses the room of that request (a router that mints badly). refused_at: the HTTP edge of that side turns
    the leg away. stops_at: it ends after so many tokens, if not before. breaks_at: the engine of that side fails on it.
    """

    number: int
    at_s: float
    prompt: int
    prompt_tokens: int
    max_new: int
    stops_at: int
    leaves_after_s: float | None
    deadline_s: float
    prefill_delay_s: float = 0.0
    decode_delay_s: float = 0.0
    room_of: int | None = None
    refused_at: str = ""
    breaks_at: str = ""
    priority: int = 0


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """`patterns` is what `pattern` stands for; `router_tells`: a leg's end at the router reaches the worker (many
    real routers never tell, and the protocol must do without). `prefill_step`: how much longer its engine's steps take.
    `delay_s`: the range of a frame's delay.
    """

    seed: int
    pattern: str
    patterns: tuple[str, ...]
    fence: bool
    prefills: tuple[str, ...]
    decodes: tuple[str, ...]
    prefill_limits: Limits
    decode_limits: Limits
    prefill_step: float
    delay_s: tuple[float, float]
    router_tells: bool
    retries: int
    requests: tuple[Request, ...]
    faults: tuple[Fault, ...]

    @property
    def calm_network(self) -> bool:
        """Nothing stands between a frame and its receiver."""
        quiet = (LostMoves, StrayFrame, SlowTransfer, DrainWorker)
        return all(isinstance(fault, quiet) for fault in self.faults)

    @property
    def trouble_s(self) -> float:
        """How long faults may hold up an end, at most."""
        held = [fault.for_s for fault in self.faults if isinstance(fault, Freeze)]
        down = [fault.restart_after_s for fault in self.faults if isinstance(fault, Crash)]
        cut = [fault.for_s for fault in self.faults if isinstance(fault, Partition)]
        return sum(held) + sum(down) + sum(cut) + (0.0 if self.calm_network else 20.0)

    @property
    def crashes(self) -> bool:
        return any(isinstance(fault, Crash) for fault in self.faults)


def plan(seed: int, *, pattern: str | None = None, fence: bool | None = None) -> Plan:
    """The run of this seed. `pattern` and `fence` override what the seed would have drawn.

    Several patterns may be joined by "+". Raises ValueError for an unknown one.
    """
    rng = Random(f"plan {seed}")
    names = (*PATTERN_NAMES, *(MIXED,) * 7)
    drawn = names[seed % len(names)]
    pattern = pattern or drawn
    patterns = tuple(pattern.split("+"))
    if unknown := [name for name in patterns if name not in PATTERN_NAMES]:
        raise ValueError(f"there is no pattern {unknown[0]!r}; choose one of {', '.join(PATTERN_NAMES)}")
    if MIXED in patterns:
        patterns = tuple(rng.sample(list(PATTERNS), rng.randint(2, 4)))
    prefills = tuple(f"p{i}" for i in range(rng.choice((1, 1, 2))))
    decodes = tuple(f"d{i}" for i in range(rng.choice((1, 1, 2))))
    drawn_fence = rng.random() < 0.5
    tight = "tight_pools" in patterns
    page_size = 4
    prefill_limits, decode_limits = (_limits(rng, tight, page_size) for _ in range(2))
    return Plan(
        seed=seed,
        pattern=pattern,
        patterns=patterns,
        fence=drawn_fence if fence is None else fence,
        prefills=prefills,
        decodes=decodes,
        prefill_limits=prefill_limits,
        decode_limits=decode_limits,
        prefill_step=1.0 if pattern == "calm" else rng.choice((1.0, 1.0, 1.0, 8.0, 40.0, 120.0)),
        delay_s=rng.choice(((0.0003, 0.004), (0.0003, 0.004), (0.01, 0.2))),
        router_tells=rng.random() < 0.7,
        retries=rng.choice((0, 1, 1, 2)),
        requests=_requests(rng, patterns, min(prefill_limits.pages, decode_limits.pages) * page_size),
        faults=strikes(rng, patterns, (list(prefills), list(decodes))),
    )


def _limits(rng: Random, tight: bool, page_size: int) -> Limits:
    pages = rng.randint(5, 9) if tight else rng.randint(12, 32)
    return Limits(pages=pages, page_size=page_size, max_running=rng.choice((1, 2, 4, 8)))


def _requests(rng: Random, patterns: tuple[str, ...], most_tokens: int) -> tuple[Request, ...]:
    calm = patterns == ("calm",)
    leaving = 0.0 if calm else 0.6 if {"cancels", "stray_frames"} & set(patterns) else 0.15
    second_wave = rng.random() < (0.8 if "ghost_writes" in patterns else 0.3)  # comes when drain limits have passed
    requests: list[Request] = []
    for number in range(rng.randint(12, 40)):
        prompt_tokens = rng.randint(1, min(24, most_tokens))
        if not calm and rng.random() < 0.03:
            prompt_tokens = most_tokens + rng.randint(1, 8)
        twin = rng.choice(requests) if requests and rng.random() < 0.2 else None
        duplicate = requests and "duplicate_rooms" in patterns and rng.random() < 0.4
        max_new = rng.choice((1, 2, 5, 12, 30))
        requests.append(
            Request(
                number=number,
                at_s=_arrival(rng, second_wave),
                prompt=twin.prompt if twin and not duplicate else number,
                prompt_tokens=twin.prompt_tokens if twin and not duplicate else prompt_tokens,
                max_new=max_new,
                stops_at=rng.randint(1, max_new) if rng.random() < 0.3 else max_new,
                leaves_after_s=rng.uniform(0.0, rng.choice((0.05, 0.3, 2.0))) if rng.random() < leaving else None,
                deadline_s=rng.uniform(0.05, 3.0) if not calm and rng.random() < 0.05 else 300.0,
                prefill_delay_s=_leg_delay(rng, patterns),
                decode_delay_s=_leg_delay(rng, patterns),
                room_of=rng.choice(requests).number if duplicate else None,
                refused_at=rng.choice(("prefill", "decode")) if not calm and rng.random() < 0.04 else "",
                breaks_at=rng.choice(("prefill", "decode")) if not calm and rng.random() < 0.03 else "",
                priority=rng.choice((0, 0, 0, 1, 5)),
            )
        )
    return tuple(requests)


def _arrival(rng: Random, second_wave: bool) -> float:
    """Spread out, or in bursts."""
    if second_wave and rng.random() < 0.4:
        return rng.uniform(30.0, 45.0)
    return rng.uniform(0.0, SPAN_S) if rng.random() < 0.7 else rng.choice((0.0, 1.0, 2.0))


def _leg_delay(rng: Random, patterns: tuple[str, ...]) -> float:
    often = 0.0 if patterns == ("calm",) else 0.5 if "late_legs" in patterns else 0.05
    return rng.uniform(0.0, rng.choice((0.3, 3.0, 14.0))) if rng.random() < often else 0.0


def mint_room(rng: Random) -> Room:
    return Room(rng.getrandbits(62) + 1)
