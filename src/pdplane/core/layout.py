"""What two pools must agree on before bytes cross between them, and the refusal that names both values.

A layout is data: groups of rows, each with the layers that have them. A page is `page_size` tokens of every
group; page numbers are shared by all groups of a pool.

Workers of protocol N and N-1 pair. Protocol 1 compares every field of a stamp that it knows with its own by ==, also
`protocol`, and ignores fields that it does not know. So what it knows stays as it was, and what came later has fields
of its own, with defaults that are true of protocol 1.
"""

from __future__ import annotations

import msgspec

from .errors import Cause
from .ids import Shape

PROTOCOL_VERSION = 3
EARLY = "early"
PREFILL_COMPLETE = "prefill_complete"
ROOMS = "rooms"
PARAMS = "params"
PREFIX_PROTOCOL = 3  # from here on a grant may say that decode has the prompt's head already
OLDEST_PROTOCOL = 1  # still spoken: one rank, policy early, tcp
MOST_SHOWN = 400  # characters of one side's value in a refusal


class LayoutGroup(msgspec.Struct, frozen=True):
    """Rows of one kind. `row_bytes` is one token's row on one layer, over all ranks; `layers` lists the layers that
    have it. `heads`: how many heads a row's parts are made of, which tensor parallel ranks share among them; 0: each
    rank holds whole rows (MLA). `parts`: K and V are two parts, each with all its tokens together.

    In a page, group after group, a rank's bytes are [layers][parts][page_size][its heads].
    """

    name: str
    row_bytes: int
    layers: tuple[int, ...]
    dtype: str
    parts: int = 1
    heads: int = 0

    @property
    def shape(self) -> tuple[str, int, tuple[int, ...], str]:
        """What protocol 1 knew of it."""
        return self.name, self.row_bytes, self.layers, self.dtype


class Stamp(msgspec.Struct, frozen=True):
    """The layout stamp of one worker: two workers may pair only where all of it is equal, limits apart."""

    model: str  # served model name
    weights: str  # digest of the weights' identity (config and tensor index), hex
    tokenizer: str  # digest of the tokenizer, hex
    page_size: int  # tokens
    page_bytes: int
    kv_dtype: str
    groups: tuple[LayoutGroup, ...]
    policy: str = EARLY  # decode allocation policy
    protocol: int = OLDEST_PROTOCOL  # protocol 1 wants its own number here: what is spoken stands below
    protocol_min: int = OLDEST_PROTOCOL
    protocol_max: int = OLDEST_PROTOCOL  # a worker says PROTOCOL_VERSION; who says nothing is of protocol 1
    dialect: str = ROOMS  # who says nothing is of protocol 2 or 1, which know no other

    @property
    def token_bytes(self) -> int:
        return self.page_bytes // self.page_size


def pages_for(tokens: int, page_size: int) -> int:
    """Pages that hold `tokens` tokens."""
    return -(-tokens // page_size)


def mismatch(prefill: Stamp, decode: Stamp) -> Cause | None:
    """Why this pair may not exchange pages, naming what differs, both values and the remedy; None where it may."""
    if prefill.protocol_max < decode.protocol_min or decode.protocol_max < prefill.protocol_min:
        return _unfit("protocol", _spoken(prefill), _spoken(decode))
    for field in _COMPARED:
        ours, theirs = getattr(prefill, field), getattr(decode, field)
        if ours != theirs:
            return _unfit(field, repr(ours), repr(theirs))
    return _groups_differ(prefill, decode)


def misfit(prefill: Stamp, prefill_shape: Shape, decode: Stamp, decode_shape: Shape, spoken: int) -> Cause | None:
    """Why a prefill and a decode group may not pair over sessions of protocol `spoken`; None where they may. The whole
    rule, as both ends of a session and the router ask it; by which transport is apart from it."""
    return (
        mismatch(prefill, decode)
        or too_old(spoken, prefill_shape)
        or too_old(spoken, decode_shape)
        or unrunnable(prefill_shape, "prefill")
        or unrunnable(decode_shape, "decode")
    )


def too_old(protocol: int, shape: Shape) -> Cause | None:
    """Why a session that speaks `protocol` cannot serve a side of this shape: protocol 1 takes every page as whole."""
    if protocol >= 2 or shape.tp == shape.cp == shape.pp == 1:
        return None
    text = f"the session speaks protocol {protocol}, which knows no parts of pages, and one side has {shape}"
    return Cause("incompatible", f"{text}; run the same release on both sides, or one rank", 503, retryable=True)


def unrunnable(shape: Shape, side: str) -> Cause | None:
    """Context and pipeline parallel ranks hold parts of a prompt's pages that workers here neither send nor take."""
    if shape.cp == shape.pp == 1:
        return None
    text = f"{side} has {shape}: workers here run data and tensor parallel ranks only"
    return Cause(
        "incompatible",
        f"{text}; start it with one context and one pipeline parallel rank",
        503,
        retryable=True,
        side=side,
    )


_REMEDIES = {
    "protocol": "run releases on both sides that are at most one protocol version apart",
    "model": "serve the same model on both sides, with the same --served-model-name",
    "weights": "load the same weights on both sides: the same files, under --model",
    "tokenizer": "give both sides the same tokenizer files, beside the model's weights",
    "kv_dtype": "start both sides with the same KV dtype",
    "page_size": "give both sides the same --page-size",
    "dialect": "give both sides the same --dialect",
    "policy": "give both sides the same --decode-allocation-policy",
    "groups": "start both sides with the same model and KV layout",
    "page_bytes": "start both sides with the same model and KV layout",
}
_COMPARED = ("model", "weights", "tokenizer", "kv_dtype", "page_size", "dialect", "policy", "page_bytes")


def _unfit(what: str, ours: str, theirs: str) -> Cause:
    text = f"{what} differs: prefill has {_cut(ours)}, decode has {_cut(theirs)}; {_REMEDIES[what]}"
    return Cause("incompatible", text, 503, retryable=True)


def _cut(value: str) -> str:
    """A peer's stamp may say anything, at any length."""
    return value if len(value) <= MOST_SHOWN else f"{value[:MOST_SHOWN]}... ({len(value)} characters)"


def _spoken(stamp: Stamp) -> str:
    return f"{stamp.protocol_min} to {stamp.protocol_max}"


def _groups_differ(prefill: Stamp, decode: Stamp) -> Cause | None:
    """Names the groups that differ, in order. Heads and parts only count where both sides know of them."""
    known = min(prefill.protocol_max, decode.protocol_max) >= 2
    ours, theirs = ([_described(group, known) for group in side.groups] for side in (prefill, decode))
    if ours == theirs:
        return None
    only_ours, only_theirs = [o for o in ours if o not in theirs], [t for t in theirs if t not in ours]
    if not only_ours and not only_theirs:  # the same in another order, or one twice
        only_ours, only_theirs = ours, theirs
    return _unfit("groups", " and ".join(only_ours) or "no other", " and ".join(only_theirs) or "no other")


def _described(group: LayoutGroup, known: bool) -> str:
    """All that counts of a group, so that two groups are equal where this is."""
    split = f" of {group.parts} parts and {group.heads} heads" if known else ""
    rows = f"rows of {group.row_bytes} B{split} ({group.dtype!r})"
    return f"{group.name!r}: {rows} on {len(group.layers)} layers ({_runs(group.layers)})"


def _runs(layers: tuple[int, ...]) -> str:
    """0-3,5,7-9; in the order given."""
    runs: list[list[int]] = []
    for layer in layers:
        if runs and layer == runs[-1][-1] + 1:
            runs[-1][1:] = [layer]
        else:
            runs.append([layer])
    return ",".join("-".join(map(str, run)) for run in runs)
