"""A small engine by rule: the next token follows from all tokens before it, and every KV row says whose it is.

A row is a digest of (position, token). Before each step of a request its pages are read back and held against its
tokens: a page that was lost, moved, taken from another request or written late ends the request with an error that
names the position. Right text out of this engine is therefore proof of right pages.
"""

from __future__ import annotations

import functools
import threading
from array import array
from collections.abc import Sequence
from hashlib import blake2b

import msgspec

from pdplane.core.frames import TopLogprob
from pdplane.core.ids import PageId, Rid
from pdplane.core.layout import LayoutGroup
from pdplane.worker.engine import EngineRequest, ModelSpec, Sampling, StepOutput, Token

from .http_fakes import EOS

CHUNK = 8
LETTERS = b"abcdefghijklmnopqrstuvwxyz   \n\xc3"
HALF_CHARACTER = 0xC3


def spec(*, page_size: int = 4, row_bytes: int = 1024, context_len: int = 512, weights: str = "w0") -> ModelSpec:
    return ModelSpec(
        name="tiny",
        weights=weights,
        tokenizer="bytes",
        vocab_size=257,
        context_len=context_len,
        page_size=page_size,
        page_bytes=page_size * row_bytes,
        kv_dtype="digest",
        groups=(LayoutGroup("kv", row_bytes, (0,), "digest"),),
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
    the next step. `break_rid`: requests whose rid begins so end with an error of their own."""

    def __init__(self, model: ModelSpec | None = None) -> None:
        self.model = model or spec()
        self.fail: list[Exception] = []
        self.break_rid = ""
        self.added: list[Rid] = []
        self._allow: int | None = None
        self._held: dict[Rid, _Sequence] = {}
        self._aborted: set[Rid] = set()
        self._changed = threading.Condition()
        self._pool = memoryview(b"")

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

    def attach(self, pool: memoryview, pages: int) -> None:
        self._pool = pool

    def add(self, request: EngineRequest) -> None:
        tokens = [*request.prompt, *request.prior]
        self._held[request.rid] = _Sequence(request, tokens, list(request.pages), request.computed)
        self.added.append(request.rid)

    def extend(self, rid: Rid, pages: Sequence[PageId]) -> None:
        if sequence := self._held.get(rid):
            sequence.pages.extend(pages)

    def abort(self, rid: Rid) -> bool:
        with self._changed:
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
            self._row(sequence, position)[:] = row(position, sequence.tokens[position])
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
            if bytes(self._row(sequence, position)) != row(position, sequence.tokens[position]):
                return f"KV of position {position} is not that of this request"
        return ""

    def _row(self, sequence: _Sequence, position: int) -> memoryview:
        size = self.model.page_size
        row_bytes = self.model.page_bytes // size
        start = sequence.pages[position // size] * self.model.page_bytes + position % size * row_bytes
        return self._pool[start : start + ROW_BYTES]


ROW_BYTES = 16


@functools.lru_cache(maxsize=1 << 16)
def row(position: int, token: int) -> bytes:
    return _digest(b"row", position.to_bytes(4, "little"), token.to_bytes(2, "little"))


def _packed(tokens: Sequence[int]) -> bytes:
    return array("H", tokens).tobytes()


def _digest(*parts: bytes) -> bytes:
    return blake2b(b"|".join(parts), digest_size=ROW_BYTES).digest()
