"""What happens in one run, all of it drawn from the seed before it starts: fleet, requests, faults."""

from __future__ import annotations

from random import Random

import msgspec

from pdplane.core.ids import Room
from pdplane.core.layout import PARAMS, ROOMS
from pdplane.core.node import Limits

from .content import PAGE_SIZE
from .drawn import Plan, Request
from .params_patterns import PARAMS_PATTERN_NAMES, PARAMS_PATTERNS
from .params_plan import as_params
from .patterns import MIXED, PATTERN_NAMES, PATTERNS, SPAN_S, strikes

AGGREGATED = "a0"
POLICIES = ("early", "prefill_complete")
UNEQUAL = ((1, 2), (2, 1), (2, 4), (4, 1))
PARAMS_SHARE = 1 / 3
TP_SIZES = ((1, 1),) * 4 + ((2, 2), *UNEQUAL)


def plan(
    seed: int,
    *,
    pattern: str | None = None,
    fence: bool | None = None,
    policy: str | None = None,
    dialect: str | None = None,
) -> Plan:
    """The run of this seed. `pattern`, `fence`, `policy` and `dialect` override what the seed would have drawn.

    Several patterns may be joined by "+". Raises ValueError for an unknown one, and for what one dialect does not have.
    """
    rng = Random(f"plan {seed}")
    dialect = dialect or _dialect(seed, pattern, fence, policy)
    known, kinds = (PATTERN_NAMES, PATTERNS) if dialect == ROOMS else (PARAMS_PATTERN_NAMES, PARAMS_PATTERNS)
    if dialect not in (ROOMS, PARAMS):
        raise ValueError(f"there is no dialect {dialect!r}; choose {ROOMS} or {PARAMS}")
    if dialect == PARAMS and fence is False:
        raise ValueError("the params dialect reads into pages that its own side fences: it has no worlds without one")
    names = (*known, *(MIXED,) * 7)
    drawn = names[seed % len(names)]
    pattern = pattern or drawn
    patterns = tuple(pattern.split("+"))
    if unknown := [name for name in patterns if name not in known]:
        raise ValueError(f"there is no pattern {unknown[0]!r}; choose one of {', '.join(known)}")
    if MIXED in patterns:
        patterns = tuple(rng.sample(list(kinds), rng.randint(2, 4)))
    traits = frozenset(patterns)
    two = bool(traits & {"late_ranks"})
    prefills = tuple(f"p{i}" for i in range(2 if two else rng.choice((1, 1, 2))))
    decodes = tuple(f"d{i}" for i in range(rng.choice((1, 1, 2))))
    aggregated = (AGGREGATED,) if "aggregated" in traits or (pattern == MIXED and rng.random() < 0.2) else ()
    drawn_fence = rng.random() < (0.1 if traits & UNFENCED else 0.5)
    prefill_limits, decode_limits = _prefill_limits(rng, traits), _decode_limits(rng, traits)
    fleet = (list(prefills), list(decodes))
    made = Plan(
        seed=seed,
        pattern=pattern,
        patterns=patterns,
        fence=drawn_fence if fence is None else fence,
        teardown_proves=rng.random() < (0.1 if traits & UNFENCED else 0.3),
        policy=policy or _policy(rng, traits),
        tp=rng.choice(UNEQUAL if "rank_skew" in traits else TP_SIZES),
        dp=two or (len(prefills) > 1 and rng.random() < 0.5),
        follow_room=not two and rng.random() < 0.7,
        names_rank=not two and rng.random() < 0.5,
        aborts_again=rng.random() < (0.7 if traits & UNFENCED else 0.3),
        new_ports="registry_swap" in traits or rng.random() < 0.2,
        aggregated=aggregated,
        prefills=prefills,
        decodes=decodes,
        prefill_limits=prefill_limits,
        decode_limits=decode_limits,
        prefill_step=_prefill_step(rng, traits),
        delay_s=rng.choice(((0.0003, 0.004), (0.0003, 0.004), (0.01, 0.2))),
        hop_s=rng.choice(((0.0003, 0.004), (0.0003, 0.004), (0.005, 0.15))),
        router_tells=rng.random() < 0.7,
        retries=rng.choice((0, 1, 1, 2)),
        requests=_requests(rng, traits, min(prefill_limits.pages, decode_limits.pages) * PAGE_SIZE, bool(aggregated)),
        faults=strikes(rng, patterns, fleet, kinds),
    )
    return made if dialect == ROOMS else as_params(made)


def _dialect(seed: int, pattern: str | None, fence: bool | None, policy: str | None) -> str:
    """Every third seed or so speaks params, unless what is asked for is had in one dialect alone."""
    asked = set(pattern.split("+")) if pattern else set()
    if asked - set(PARAMS_PATTERN_NAMES) or fence is False or policy is not None:
        return ROOMS
    if asked - set(PATTERN_NAMES):
        return PARAMS
    return PARAMS if Random(f"dialect {seed}").random() < PARAMS_SHARE else ROOMS


def _policy(rng: Random, traits: frozenset[str]) -> str:
    if "hold_expiry" in traits:
        return "prefill_complete"
    return "early" if traits & {"busy_prefill", "lost_frames"} and rng.random() < 0.7 else rng.choice(POLICIES)


def _prefill_step(rng: Random, traits: frozenset[str]) -> float:
    if traits == {"calm"}:
        return 1.0
    return rng.choice((8.0, 40.0, 120.0) if "busy_prefill" in traits else (1.0, 1.0, 1.0, 8.0, 40.0, 120.0))


def _prefill_limits(rng: Random, traits: frozenset[str]) -> Limits:
    drawn = _limits(rng, tight="tight_pools" in traits)
    if "hold_expiry" in traits:
        return msgspec.structs.replace(drawn, hold_term_s=rng.choice((0.5, 1.0, 3.0)))
    if "busy_prefill" in traits:
        return msgspec.structs.replace(drawn, max_running=1)
    if "calm" in traits:  # every request is answered: no term is so short that a full decode lets it end
        return msgspec.structs.replace(drawn, hold_term_s=30.0)
    return drawn


def _decode_limits(rng: Random, traits: frozenset[str]) -> Limits:
    drawn = _limits(rng, tight=bool(traits & {"tight_pools", "hold_expiry"}))
    if traits & UNFENCED:
        drawn = msgspec.structs.replace(drawn, drain_limit_s=rng.choice((2.0, 2.0, 30.0)))
    if "retracts" in traits:
        return msgspec.structs.replace(drawn, pages=rng.randint(7, 12), max_running=8, reserve_tokens=0)
    if "full_batch" in traits:
        return msgspec.structs.replace(drawn, max_running=1, reserve_tokens=0)
    return drawn


def _limits(rng: Random, tight: bool) -> Limits:
    return Limits(
        pages=rng.randint(5, 9) if tight else rng.randint(12, 32),
        page_size=PAGE_SIZE,
        max_running=rng.choice((1, 2, 4, 8)),
        drain_limit_s=rng.choice((30.0, 30.0, 2.0)),
        hold_term_s=rng.choice((30.0, 30.0, 3.0)),
        held_pages=rng.choice((0, 0, 4)),
        prefix_cache=rng.random() < 0.7,
        reserve_tokens=rng.choice((0, 8, 512)),
    )


LEAVING = {
    "cancels": 0.6,
    "stray_frames": 0.6,
    "full_batch": 0.8,
    "busy_prefill": 0.4,
    "hold_expiry": 0.4,
    "stuck_moves": 0.4,
    "operator": 0.4,
    "lost_frames": 0.3,
}
LENGTHS = (1, 2, 5, 12, 30)
UNFENCED = frozenset({"stuck_moves", "operator"})  # made for draining and quarantine
LONG = frozenset({"retracts", "full_batch", "hold_expiry"})


def _requests(rng: Random, traits: frozenset[str], most_tokens: int, aggregated: bool) -> tuple[Request, ...]:
    calm = traits == {"calm"}
    leaving = 0.0 if calm else max(LEAVING.get(trait, 0.15) for trait in traits)
    past_limits = bool(traits & {"ghost_writes", "stuck_moves"})
    second_wave = rng.random() < (0.8 if past_limits else 0.3)
    requests: list[Request] = []
    for number in range(rng.randint(12, 40)):
        prompt_tokens = rng.randint(1, min(24, most_tokens))
        if not calm and rng.random() < 0.03:
            prompt_tokens = most_tokens + rng.randint(1, 8)
        twin = rng.choice(requests) if requests and rng.random() < 0.2 else None
        duplicate = requests and "duplicate_rooms" in traits and rng.random() < 0.4
        alone = aggregated and rng.random() < 0.4
        max_new = rng.choice((12, 30, 30, 60) if traits & LONG else LENGTHS)
        requests.append(
            Request(
                number=number,
                at_s=_arrival(rng, second_wave),
                prompt=twin.prompt if twin and not duplicate else number,
                prompt_tokens=twin.prompt_tokens if twin and not duplicate else prompt_tokens,
                max_new=max_new,
                stops_at=rng.randint(1, max_new) if rng.random() < 0.3 else max_new,
                leaves_after_s=rng.uniform(0.0, rng.choice((0.05, 0.3, 2.0, 4.0))) if rng.random() < leaving else None,
                deadline_s=rng.uniform(0.05, 3.0) if not calm and rng.random() < 0.05 else 300.0,
                prefill_delay_s=_leg_delay(rng, traits),
                decode_delay_s=_leg_delay(rng, traits),
                room_of=rng.choice(requests).number if duplicate and not alone else None,
                refused_at=rng.choice(("prefill", "decode")) if not calm and rng.random() < 0.04 else "",
                breaks_at=rng.choice(("prefill", "decode")) if not calm and rng.random() < 0.03 else "",
                priority=rng.choice((0, 0, 0, 1, 5)),
                family=twin.family if twin and not duplicate else rng.randrange(3),
                family_tokens=twin.family_tokens if twin and not duplicate else rng.choice((0, 4, 9, 16)),
                prompts_differ=not alone and rng.random() < (0.3 if "mismatches" in traits else 0.0),
                wrong_rank=not alone and rng.random() < (0.2 if traits & {"mismatches", "late_ranks"} else 0.0),
                aggregated=alone,
            )
        )
    return tuple(requests)


def _arrival(rng: Random, second_wave: bool) -> float:
    """Spread out, or in bursts."""
    if second_wave and rng.random() < 0.4:
        return rng.uniform(30.0, 45.0)
    return rng.uniform(0.0, SPAN_S) if rng.random() < 0.7 else rng.choice((0.0, 1.0, 2.0))


def _leg_delay(rng: Random, traits: frozenset[str]) -> float:
    often = 0.0 if traits == {"calm"} else 0.5 if traits & {"late_legs", "late_ranks", "lost_frames"} else 0.05
    return rng.uniform(0.0, rng.choice((0.3, 3.0, 14.0))) if rng.random() < often else 0.0


def mint_room(rng: Random) -> Room:
    return Room(rng.getrandbits(62) + 1)
