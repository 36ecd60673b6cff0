"""Which fleets the equality run compares, what each is given to answer, and about how long that takes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

TRANSPORTS = ("shm", "shm_push", "tcp")
POLICIES = ("early", "prefill_complete")
PARAMS = "params"

START_S, PREFILL_TOKENS_PER_S, STEP_S, TILE = 6.0, 200.0, 0.06, 8
"""Of batch-invariant workers on two cores that nobody else uses; a decode step has up to TILE rows at the same cost."""


@dataclasses.dataclass(frozen=True)
class Side:
    """How the workers of one role are split."""

    tp: int = 1
    dp: int = 1

    def __str__(self) -> str:
        return f"dp {self.dp}" if self.dp > 1 else f"tp {self.tp}"

    @property
    def flags(self) -> tuple[str, ...]:
        return ("--tp", str(self.tp), "--dp", str(self.dp))


@dataclasses.dataclass(frozen=True)
class Cell:
    """One fleet and one set of requests. `asks`: prompts, edges or tight. `policy`: of rooms, or `params`."""

    asks: str
    prefill: Side = Side()
    decode: Side = Side()
    transport: str = "shm"
    policy: str = "early"
    prefills: int = 1
    decodes: int = 1
    concurrency: int = 16
    prefix_cache: bool = True

    def __str__(self) -> str:
        shape = f"{self.prefills}P{self.decodes}D {self.prefill} -> {self.decode}"
        how = self.policy if self.prefix_cache else f"{self.policy}, no cache"
        return f"{self.asks:8}{shape:22}{self.transport:10}{how:18}at {self.concurrency}"

    @property
    def worker_args(self) -> tuple[str, ...]:
        """Of both roles. One transport alone: there is nothing to fall back on."""
        cache = () if self.prefix_cache else ("--no-prefix-cache",)
        how = ("--dialect", PARAMS) if self.policy == PARAMS else ("--decode-allocation-policy", self.policy)
        return ("--batch-invariant", "--transport", self.transport, *how, *cache)


@dataclasses.dataclass(frozen=True)
class Matrix:
    """`prompts` requests of 1 to `longest` tokens; `edges`: page counts around which prompts end. `generate`: fleets
    serve /generate too."""

    cells: Sequence[Cell]
    prompts: int
    longest: int
    edges: tuple[int, ...]
    generate: bool = True


PAIRS = (
    (Side(tp=1), Side(tp=2)),
    (Side(tp=2), Side(tp=1)),
    (Side(tp=2), Side(tp=4)),
    (Side(tp=4), Side(tp=1)),
    (Side(dp=2), Side(dp=4)),
)
ONE_GROUP = PAIRS[:4]
"""Where it is known which cache a prompt meets and which pool it fills."""


def product() -> list[Cell]:
    """Everything with everything."""
    prompts = [
        Cell("prompts", *pair, transport, policy) for pair in PAIRS for transport in TRANSPORTS for policy in POLICIES
    ]
    return [*prompts, *special(ONE_GROUP)]


def cover() -> list[Cell]:
    """Every pair meets every transport and both policies, and so does every transport."""
    prompts = [
        Cell("prompts", *pair, transport, POLICIES[(i + j) % len(POLICIES)])
        for i, pair in enumerate(PAIRS)
        for j, transport in enumerate(TRANSPORTS)
    ]
    return [*prompts, *special(ONE_GROUP)]


def special(pairs: Sequence[tuple[Side, Side]]) -> list[Cell]:
    """Page edges, then pools too small for what is asked, by turns over transports and policies."""
    edges = [
        Cell("edges", *pair, _turn(TRANSPORTS, i), _turn(POLICIES, i), concurrency=8) for i, pair in enumerate(pairs)
    ]
    tight = [
        Cell("tight", *pair, _turn(TRANSPORTS, i + 1), _turn(POLICIES, i + 1), concurrency=10)
        for i, pair in enumerate(pairs)
    ]
    return [*edges, *tight]


def _turn(names: Sequence[str], place: int) -> str:
    return names[place % len(names)]


QUICK = (
    Cell("prompts", concurrency=1),
    Cell("prompts", transport="tcp"),
    Cell("prompts", prefills=2, decodes=2),
    Cell("prompts", Side(tp=2), Side(tp=4), "shm_push", "prefill_complete"),
    Cell("edges", Side(tp=1), Side(tp=2), "tcp", concurrency=8),
    Cell("tight", policy="prefill_complete", concurrency=10),
)

PULLED = (
    Cell("prompts", policy=PARAMS, concurrency=1),
    Cell("prompts", transport="tcp", policy=PARAMS),
    Cell("prompts", policy=PARAMS, prefills=2, decodes=2),
    Cell("prompts", transport="tcp", policy=PARAMS, prefills=2, decodes=2),
    Cell("prompts", policy=PARAMS, prefix_cache=False),
    Cell("prompts", transport="tcp", policy=PARAMS, prefills=2, decodes=2, prefix_cache=False),
    Cell("prompts", Side(tp=1), Side(tp=2), policy=PARAMS),
    Cell("prompts", Side(tp=2), Side(tp=1), "tcp", PARAMS),
    Cell("prompts", Side(tp=2), Side(tp=4), policy=PARAMS),
    Cell("prompts", Side(dp=2), Side(dp=2), policy=PARAMS),
    Cell("edges", policy=PARAMS, concurrency=8),
    Cell("edges", transport="tcp", policy=PARAMS, concurrency=8),
    Cell("edges", policy=PARAMS, concurrency=8, prefix_cache=False),
    Cell("edges", Side(tp=1), Side(tp=2), policy=PARAMS, concurrency=8),
    Cell("tight", policy=PARAMS, concurrency=10),
    Cell("tight", transport="tcp", policy=PARAMS, concurrency=10),
)
"""The params dialect: every transport that decode can pull by, the prefix cache on and off."""

MATRICES = {
    "params": Matrix(PULLED, 60, 256, (1, 4, 15), generate=False),
    "quick": Matrix(QUICK, 16, 1_000, (1, 4)),
    "full": Matrix(cover(), 60, 256, (1, 4, 15)),
    "product": Matrix(product(), 60, 256, (1, 4, 15)),
}


def expected_s(prompt_tokens: int, new_tokens: int, concurrency: int) -> float:
    """About how long a fleet of one pair takes from its start to its end."""
    return START_S + prompt_tokens / PREFILL_TOKENS_PER_S + new_tokens * STEP_S / min(concurrency, TILE)
