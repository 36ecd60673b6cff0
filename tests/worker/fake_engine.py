"""A small engine by rule: the next token follows from all tokens before it, and every KV row says whose it is.

Every byte of a row follows from (position, token) and from where it belongs: group, layer, part and KV head. Before
each step of a request its pages are read back, on every tensor parallel rank, and held against its tokens: a page that
was lost, moved, taken from another request, sliced wrongly or written late ends the request with an error that names
the position. Right text out of this engine is therefore proof of right pages.
"""

from __future__ import annotations

import functools
import threading
from array import array
from collections.abc import Callable, Sequence
from hashlib import blake2b

import msgspec

from pdplane.core.frames import TopLogprob
from pdplane.core.ids import PageId, Rid
from pdplane.core.layout import LayoutGroup
from pdplane.core.slices import heads_of, shard_bytes
from pdplane.worker.engine import EngineRequest, ModelSpec, Sampling, StepOutput, Token

from .http_fakes import EOS

CHUNK = 8
LETTERS = b"abcdefghijklmnopqrstuvwxyz   \n\xc3"
HALF_CHARACTER = 0xC3
DIGEST_BYTES = 16


def spec(
    *,
    page_size: int = 4,
    row_bytes: int = 1024,
    context_len: int = 512,
    weights: str = "w0",
    heads: int = 4,
    groups: Sequence[LayoutGroup] = (),
) -> ModelSpec:
    """`groups`: the rows, in place of K|V rows of `row_bytes` on one layer with so many KV heads."""
    rows = tuple(groups) or (LayoutGroup("kv", row_bytes, (0,), "digest", parts=2, heads=heads),)
    return ModelSpec(
        name="tiny",
        weights=weights,
        tokenizer="bytes",
        vocab_size=257,
        context_len=context_len,
        page_size=page_size,
        page_bytes=shard_bytes(rows, page_size, 0, 1),
        kv_dtype="digest",
        groups=rows,
        eos_ids=(EOS,),
        architecture="rule",
    )


def next_token(tokens: Sequence[int], sampling: Sampling | None = None, produced: int = 0) -> Token:
    """The rule. Greedy, or of (seed, position) where there is a temperature; an end of text once in about 50."""
    seed = 0 if sampling is None or sampling.temperature == 0 else sampling.seed or 0
    number = int.from_bytes(_digest(b"next", seed.to_bytes(8, "little"), _packed(tokens)), "little")
    if tokens[-1] == HALF_CHARACTER:
        chosen = 0xA0 + number % 0x20
    elif number % 50 == 0 and produced >= (sampling.min_tokens if sampling else 0):
        chosen = EOS
    else:
        chosen = LETTERS[number % len(LETTERS)]
    if sampling is None or not sampling.logprobs:
        return Token(chosen)
    top = tuple(TopLogprob(65 + i, -1.0 - i) for i in range(sampling.top_logprobs))
    return Token(chosen, -(number % 1000) / 64, top)


def first_token(prompt: str) -> int:
    return next_token(list(prompt.encode())).id


class _Sequence(msgspec.Struct):
    request: EngineRequest
    tokens: list[int]
    pages: list[PageId]
    computed: int

    @property
    def produced(self) -> int:
        return len(self.tokens) - len(self.request.prompt)


class RuleEngine:
    """Implements worker.engine.Engine. `allow` holds it: that many more steps, None for no limit. `fail` is raised by
    the next step. `break_rid`: requests whose rid begins so end with an error of their own. `siblings`: those that it
    was asked for."""

    on_dropped: Callable[[Rid], None] | None = None

    def __init__(self, model: ModelSpec | None = None) -> None:
        self.model = model or spec()
        self.fail: list[Exception] = []
        self.break_rid = ""
        self.added: list[Rid] = []
        self._allow: int | None = None
        self.siblings: list[RuleEngine] = []
        self._held: dict[Rid, _Sequence] = {}
        self._parked: dict[Rid, _Sequence] = {}
        self._aborted: set[Rid] = set()
        self._changed = threading.Condition()
        self._shards: list[_Shard] = []

    # --- for tests, from any thread ---

    @property
    def allow(self) -> int | None:
        return self._allow

    @allow.setter
    def allow(self, steps: int | None) -> None:
        with self._changed:
            self._allow = steps
            self._changed.notify_all()

    def holds(self, computed: int = 0) -> bool:
        """Whether some request in here has come at least so far."""
        return any(sequence.computed >= computed for sequence in list(self._held.values()))

    # --- Engine ---

    def sibling(self) -> RuleEngine:
        self.siblings.append(RuleEngine(self.model))
        return self.siblings[-1]

    def attach(self, pools: Sequence[memoryview | None], pages: int) -> None:
        shards = [_Shard(self.model, pool, pages, rank, len(pools)) for rank, pool in enumerate(pools)]
        self._shards = [shard for shard in shards if shard.page_bytes]

    def add(self, request: EngineRequest) -> None:
        tokens = [*request.prompt, *request.prior]
        self._held[request.rid] = _Sequence(request, tokens, list(request.pages), request.computed)
        self.added.append(request.rid)

    def extend(self, rid: Rid, pages: Sequence[PageId]) -> None:
        if sequence := self._held.get(rid):
            sequence.pages.extend(pages)

    def park(self, rid: Rid) -> bool:
        with self._changed:
            sequence = self._held.get(rid)
            if sequence is None or rid in self._aborted or sequence.computed < len(sequence.request.prompt):
                return False
            self._parked[rid] = self._held.pop(rid)
            return True

    def resume(self, rid: Rid, pages: Sequence[PageId]) -> None:
        with self._changed:
            if sequence := self._parked.pop(rid, None):
                sequence.pages = list(pages)
                self._held[rid] = sequence

    def abort(self, rid: Rid) -> bool:
        with self._changed:
            if self._parked.pop(rid, None):
                return True
            if rid in self._held:
                self._aborted.add(rid)
                self._changed.notify_all()
        return False

    def busy(self) -> bool:
        return bool(self._held)

    def step(self) -> list[StepOutput]:
        with self._changed:
            self._changed.wait_for(lambda: self._allow != 0 or bool(self._aborted), timeout=0.05)
            aborted, self._aborted = self._aborted, set()
            allowed = self._allow != 0
        outputs = [self._end(sequence, "abort") for rid in aborted if (sequence := self._held.get(rid))]
        if not allowed:
            return outputs
        if self.fail:
            raise self.fail.pop(0)
        done = [output for sequence in list(self._held.values()) for output in self._advance(sequence)]
        with self._changed:
            if done and self._allow:
                self._allow -= 1
            elif not done:
                self._changed.wait(0.001)  # for a page, or for an end
        return outputs + done

    # --- one request ---

    def _advance(self, sequence: _Sequence) -> list[StepOutput]:
        if self.break_rid and sequence.request.rid.startswith(self.break_rid):
            return [self._end(sequence, "error", error="broken by the test")]
        if fault := self._fault(sequence):
            return [self._end(sequence, "error", error=fault)]
        left = len(sequence.tokens) - sequence.computed
        take = min(left, CHUNK)
        if len(sequence.pages) * self.model.page_size < sequence.computed + take:
            return []  # no page yet
        for position in range(sequence.computed, sequence.computed + take):
            page, slot = self._place(sequence, position)
            for shard in self._shards:
                shard.write(page, slot, position, sequence.tokens[position])
        sequence.computed += take
        if take < left:
            return [StepOutput(sequence.request.rid, sequence.computed)]
        return [self._sample(sequence)]

    def _sample(self, sequence: _Sequence) -> StepOutput:
        request = sequence.request
        token = next_token(sequence.tokens, request.sampling, sequence.produced)
        sequence.tokens.append(token.id)
        end = self._end_of(sequence, token.id)
        if request.prefill_only:
            return self._end(sequence, "length", token=token, ended=end)
        if end is not None:
            return self._end(sequence, end, token=token)
        return StepOutput(request.rid, sequence.computed, token=token)

    def _end_of(self, sequence: _Sequence, token: int) -> str | None:
        sampling = sequence.request.sampling
        stops = sampling.stop_token_ids if sampling.ignore_eos else (*sampling.stop_token_ids, EOS)
        if token in stops and sequence.produced > sampling.min_tokens - 1:
            return "stop"
        return "length" if sequence.produced >= sampling.max_tokens else None

    def _end(self, sequence: _Sequence, finish: str, **more: object) -> StepOutput:
        del self._held[sequence.request.rid]
        return StepOutput(sequence.request.rid, sequence.computed, finish=finish, **more)  # type: ignore[arg-type]

    def _fault(self, sequence: _Sequence) -> str:
        for position in range(sequence.computed):
            page, slot = self._place(sequence, position)
            for shard in self._shards:
                if not shard.holds(page, slot, position, sequence.tokens[position]):
                    return f"KV of position {position} on rank {shard.rank} is not that of this request"
        return ""

    def _place(self, sequence: _Sequence, position: int) -> tuple[PageId, int]:
        return sequence.pages[position // self.model.page_size], position % self.model.page_size


class _Run(msgspec.Struct, frozen=True):
    """Where the rows of one part of one layer begin in a page of one rank, and what is in them."""

    at: int
    size: int  # of a token's row
    heads: tuple[int, ...]  # -1: a whole row, which every rank has
    head_bytes: int
    name: str


class _Shard:
    """One rank's pool, whose rows are by group, layer, part, token and head."""

    def __init__(self, model: ModelSpec, pool: memoryview | None, pages: int, rank: int, ranks: int) -> None:
        self.rank = rank
        self.page_bytes = shard_bytes(model.groups, model.page_size, rank, ranks)
        assert (pool is None) == (self.page_bytes == 0), f"rank {rank} of {ranks}: a pool where there are heads"
        assert pool is None or pool.nbytes >= pages * self.page_bytes, (
            f"rank {rank} of {ranks}: a pool that is too small"
        )
        self._pool = pool
        self._runs: list[_Run] = []
        at = 0
        for group in model.groups:
            heads = tuple(heads_of(group.heads, rank, ranks)) if group.heads else (-1,)
            head_bytes = group.row_bytes // group.parts // (group.heads or 1)
            for layer in group.layers:
                for part in range(group.parts):
                    name = f"{group.name}.{layer}.{part}"
                    self._runs.append(_Run(at, head_bytes * len(heads), heads, head_bytes, name))
                    at += model.page_size * head_bytes * len(heads)

    def write(self, page: PageId, slot: int, position: int, token: int) -> None:
        for run in self._runs:
            self._row(run, page, slot)[:] = row(run, position, token)

    def holds(self, page: PageId, slot: int, position: int, token: int) -> bool:
        return all(bytes(self._row(run, page, slot)) == row(run, position, token) for run in self._runs)

    def _row(self, run: _Run, page: PageId, slot: int) -> memoryview:
        assert self._pool is not None
        start = page * self.page_bytes + run.at + slot * run.size
        return self._pool[start : start + run.size]


@functools.lru_cache(maxsize=1 << 15)
def row(run: _Run, position: int, token: int) -> bytes:
    where = (position.to_bytes(4, "little"), token.to_bytes(2, "little"), run.name.encode())
    blocks = (_digest(b"row", *where, str(head).encode()) for head in run.heads)
    return b"".join((block * -(-run.head_bytes // DIGEST_BYTES))[: run.head_bytes] for block in blocks)


def _packed(tokens: Sequence[int]) -> bytes:
    return array("H", tokens).tobytes()


def _digest(*parts: bytes) -> bytes:
    return blake2b(b"|".join(parts), digest_size=DIGEST_BYTES).digest()
