"""What the params dialect makes of a drawn world: leases, what clients and routers do with a handle, and gaps."""

from __future__ import annotations

from random import Random

import msgspec

from pdplane.core.layout import EARLY, PARAMS

from .drawn import Plan, Request

LEASES_S = (30.0, 30.0, 3.0, 1.0)
SHORT_LEASES_S = (0.5, 1.0, 3.0)
SHORTEST_LEASES_S = SHORT_LEASES_S[:2]
SHORT = frozenset({"hold_expiry", "lost_renewals", "late_reads", "full_decode", "half_loads"})
GAPS = frozenset({"between_hops", "hold_expiry", "restarts_between", "lost_renewals"})
TAMPERS = ("blocks", "digest", "hold", "instance")
FULL_TOKENS = 60
ABANDONED_S = 20.0  # longer than any client waits here


def as_params(drawn: Plan) -> Plan:
    """The same fleet and the same clients, hand-offs by lease and handle. Pages are placed by their receiver."""
    rng = Random(f"params {drawn.seed}")
    traits = frozenset(drawn.patterns)
    calm = traits == {"calm"}
    lease_s = _lease_s(rng, traits)
    prefill_limits = msgspec.structs.replace(drawn.prefill_limits, hold_term_s=lease_s)
    if "late_reads" in traits:  # so that what is given back is used again soon
        prefill_limits = msgspec.structs.replace(prefill_limits, pages=min(8, drawn.prefill_limits.pages))
    decode_limits = msgspec.structs.replace(
        drawn.decode_limits, recompute=rng.random() < (0.9 if "half_loads" in traits else 0.5)
    )
    if "full_decode" in traits:
        decode_limits = msgspec.structs.replace(decode_limits, max_running=1, reserve_tokens=0)
    return msgspec.structs.replace(
        drawn,
        dialect=PARAMS,
        fence=True,
        policy=EARLY,
        prefill_limits=prefill_limits,
        decode_limits=decode_limits,
        router_tells=drawn.router_tells and "full_decode" not in traits,
        requests=tuple(_request(rng, traits, request, lease_s) for request in drawn.requests),
        lease_margin_s=0.0 if calm or rng.random() < 0.5 else min(0.2, lease_s / 4),
    )


def _lease_s(rng: Random, traits: frozenset[str]) -> float:
    if traits == {"calm"}:
        return LEASES_S[0]
    if "late_reads" in traits:  # a read outlasts its lease
        return rng.choice(SHORTEST_LEASES_S)
    return rng.choice(SHORT_LEASES_S if traits & SHORT else LEASES_S)


def _request(rng: Random, traits: frozenset[str], request: Request, lease_s: float) -> Request:
    calm = traits == {"calm"}
    changes: dict[str, object] = {"room_of": None, "wrong_rank": False}
    if traits & GAPS and rng.random() < 0.5:
        changes["decode_delay_s"] = rng.uniform(0.0, rng.choice((0.2, 1.0, min(4.5, 1.5 * lease_s))))
    if "between_hops" in traits and rng.random() < 0.6:
        changes["leaves_after_s"] = rng.uniform(0.0, 1.0)
    if "half_loads" in traits and rng.random() < 0.4:
        changes["leaves_after_s"] = rng.uniform(0.1, 3.0)
    if "full_decode" in traits:
        changes |= _long_or_abandoned(rng)
    elif not calm and not request.aggregated:
        changes |= _misuse(rng, traits)
    return msgspec.structs.replace(request, **changes)


def _long_or_abandoned(rng: Random) -> dict[str, object]:
    """Decode keeps many holds waiting, and renewed; of those behind them some have nobody to renew them (I24)."""
    if rng.random() < 0.3:
        return {"at_s": rng.uniform(0.0, 1.5), "decode_delay_s": ABANDONED_S, "leaves_after_s": rng.uniform(0.5, 2.0)}
    return {"at_s": rng.uniform(0.0, 1.0), "max_new": FULL_TOKENS, "stops_at": FULL_TOKENS, "leaves_after_s": None}


def _misuse(rng: Random, traits: frozenset[str]) -> dict[str, object]:
    """What clients and routers do with a handle that they should not."""
    if rng.random() < (0.6 if "replays" in traits else 0.03):
        longest = rng.choice((0.0, 0.05, 1.0, 4.0))
        return {"replays": rng.choice(("sent", "ended")), "replay_delay_s": rng.uniform(0.0, longest)}
    if rng.random() < (0.5 if "tampered" in traits else 0.02):
        return {"tampers": rng.choice(TAMPERS)}
    return {}
