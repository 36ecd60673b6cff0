"""The data parallel ranks that a request names, and the policy under which its pair was made."""

from __future__ import annotations

from typing import NamedTuple

from pdplane.wire.body import invalid
from pdplane.wire.legs import LegFields


class Ranks(NamedTuple):
    """`own`: of this worker. `prefill`: of the peer that computes, on decode legs. None: not named."""

    own: int | None = None
    prefill: int | None = None


def named_ranks(fields: LegFields, role: str) -> Ranks:
    """Raises Refused (400): negative, or two names that contradict each other. A prefill is itself the prefill whose
    rank is named, so that one body can serve both legs."""
    own, prefill = fields.own_rank(), fields.prefill_rank()
    if role == "decode":
        return Ranks(own, prefill)
    if role != "prefill" or prefill is None:
        return Ranks(own)
    if own is not None and own != prefill:
        message = f"disagg_prefill_dp_rank {prefill} contradicts routed_dp_rank {own}: both name this prefill's rank"
        raise invalid(message, "disagg_prefill_dp_rank", code="rank_contradiction")
    return Ranks(prefill)


def check_policy(told: str | None, own: str) -> None:
    """Raises Refused (400) naming both, where a leg was paired under another policy than this worker's."""
    if told is not None and told != own:
        message = (
            f"decode_allocation_policy is {told!r} in the request and {own!r} at this worker; start prefill and decode "
            "with the same --decode-allocation-policy"
        )
        raise invalid(message, "decode_allocation_policy", code="policy_mismatch")
