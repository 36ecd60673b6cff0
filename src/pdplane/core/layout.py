"""What two pools must agree on before bytes cross between them, and the refusal that names both values.

A layout is data: groups of rows, each with the layers that have them. A page is `page_size` tokens of every
group; page numbers are shared by all groups of a pool.
"""

from __future__ import annotations

import msgspec

from .errors import Cause

PROTOCOL_VERSION = 1


class LayoutGroup(msgspec.Struct, frozen=True):
    """Rows of one kind. `row_bytes` is one token's row on one layer; `layers` lists the layers that have it."""

    name: str
    row_bytes: int
    layers: tuple[int, ...]
    dtype: str


class Stamp(msgspec.Struct, frozen=True):
    """The layout stamp of one worker: two workers may pair only where all of it is equal, limits apart."""

    model: str  # served model name
    weights: str  # digest of the weights' identity (config and tensor index), hex
    tokenizer: str  # digest of the tokenizer, hex
    page_size: int  # tokens
    page_bytes: int
    kv_dtype: str
    groups: tuple[LayoutGroup, ...]
    policy: str = "early"  # decode allocation policy
    protocol: int = PROTOCOL_VERSION

    @property
    def token_bytes(self) -> int:
        return self.page_bytes // self.page_size


def pages_for(tokens: int, page_size: int) -> int:
    """Pages that hold `tokens` tokens."""
    return -(-tokens // page_size)


def mismatch(prefill: Stamp, decode: Stamp) -> Cause | None:
    """Why this pair may not exchange pages, naming field and both values; None where it may."""
    for field in Stamp.__struct_fields__:
        ours, theirs = getattr(prefill, field), getattr(decode, field)
        if ours != theirs:
            return Cause(
                "incompatible",
                f"{field} differs: prefill has {_short(ours)}, decode has {_short(theirs)}; "
                "start both with the same model, page size, KV dtype and policy",
                503,
            )
    return None


def _short(value: object) -> str:
    if isinstance(value, tuple):
        return ", ".join(f"{g.name}:{g.row_bytes} B x {len(g.layers)} layers" for g in value)
    return repr(value)
