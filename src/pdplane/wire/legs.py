"""What a router writes into a leg of a pair beside the client's own fields, in SGLang's names.

The fields that may come as lists, one entry per sample, are judged where the number of samples is known. The ranks are
scalars: they hold for every sample of the request.
"""

from __future__ import annotations

import msgspec

from .body import invalid


class LegFields(msgspec.Struct, frozen=True, kw_only=True):
    """`routed_dp_rank` and its older name `data_parallel_rank` pin the rank of the worker that reads this;
    `disagg_prefill_dp_rank` is the prefill's. `decode_allocation_policy` is the one under which the pair was made.
    `kv_transfer_params` are the params dialect's (params.py)."""

    rid: object = None
    bootstrap_host: object = None
    bootstrap_port: object = None
    bootstrap_room: object = None
    routed_dp_rank: int | None = None
    data_parallel_rank: int | None = None
    disagg_prefill_dp_rank: int | None = None
    decode_allocation_policy: str | None = None
    priority: int | None = None
    kv_transfer_params: object = None

    def own_rank(self) -> int | None:
        """The rank that is pinned here, by either name. Raises Refused (400): negative, or two of them."""
        newer = _rank(self.routed_dp_rank, "routed_dp_rank")
        older = _rank(self.data_parallel_rank, "data_parallel_rank")
        if newer is not None and older is not None and newer != older:
            message = f"data_parallel_rank {older} contradicts routed_dp_rank {newer}; they are one thing, send one"
            raise invalid(message, "data_parallel_rank", code="rank_contradiction")
        return older if newer is None else newer

    def prefill_rank(self) -> int | None:
        """Raises Refused (400) where it is negative."""
        return _rank(self.disagg_prefill_dp_rank, "disagg_prefill_dp_rank")


def _rank(value: int | None, name: str) -> int | None:
    if value is not None and value < 0:
        raise invalid(f"{name} must be a rank from 0 upwards, got {value}", name)
    return value
