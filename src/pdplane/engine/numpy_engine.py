"""The default engine: continuous batching and chunked prefill over the caller's pages, on one thread."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Many

import numpy as np

from pdplane.core.ids import PageId, Rid
from pdplane.core.layout import LayoutGroup
from pdplane.core.slices import shard_bytes
from pdplane.worker.engine import EngineRequest, ModelSpec, StepOutput

from .model import CHUNK, DecodeRow, Interrupted, LlamaModel
from .paged import PagedKV, page_bytes
from .safetensors_file import Array
from .sampler import BadLogits, sample
from .sequence import Sequence

OnLogits = Callable[[Rid, int, Array], None]
"""(rid, position of the token to be sampled, raw logits): what the self-test looks at."""


def spec_of(model: LlamaModel, *, name: str, weights: str, tokenizer: str, page_size: int) -> ModelSpec:
    config = model.config
    group = LayoutGroup(
        "kv", 2 * 4 * config.kv_row, tuple(range(config.layers)), "float32", parts=2, heads=config.kv_heads
    )
    return ModelSpec(
        name=name,
        weights=weights,
        tokenizer=tokenizer,
        vocab_size=config.vocab_size,
        context_len=config.context_len,
        page_size=page_size,
        page_bytes=page_bytes(config, page_size),
        kv_dtype="float32",
        groups=(group,),
        eos_ids=config.eos_ids,
        architecture=config.architecture,
    )


class NumpyEngine:
    """Implements worker.engine.Engine. While prompts wait and requests run, chunks and decode steps alternate."""

    def __init__(self, model: LlamaModel, spec: ModelSpec) -> None:
        self.model = spec
        self.on_logits: OnLogits | None = None
        self.on_dropped: Callable[[Rid], None] | None = None
        self._llama = model
        self._kv: PagedKV | None = None
        self._live: dict[Rid, Sequence] = {}
        self._prefills: deque[Sequence] = deque()
        self._running: list[Sequence] = []
        self._parked: dict[Rid, Sequence] = {}
        self._refused: list[StepOutput] = []
        self._lock = threading.Lock()  # guards all of the above and below: abort comes from any thread
        self._stepping: frozenset[Rid] = frozenset()  # what the running step is at work on
        self._aborted: set[Rid] = set()  # among these
        self._decode_next = False

    def sibling(self) -> NumpyEngine:
        """The two share nothing that changes."""
        return NumpyEngine(self._llama, self.model)

    def attach(self, pools: Many[memoryview | None], pages: int) -> None:
        """ValueError names a pool that does not fit its rank."""
        self._kv = PagedKV(pools, pages, self._llama.config, self.model.page_size)

    def add(self, request: EngineRequest) -> None:
        """What cannot run finishes with "error" in the next step. ValueError for a rid that is live."""
        assert self._kv is not None, "attach comes before add"
        sequence = Sequence(request)
        with self._lock:
            if sequence.rid in self._live:
                raise ValueError(f"request {sequence.rid} is already in the engine")
            refusal = sequence.refusal(self.model, self._kv.pages)
            if refusal:
                self._refused.append(sequence.output(finish="error", error=refusal))
                return
            self._live[sequence.rid] = sequence
            if sequence.in_prefill:
                self._prefills.append(sequence)
            else:
                self._running.append(sequence)

    def extend(self, rid: Rid, pages: Many[PageId]) -> None:
        sequence = self._live.get(rid)
        if sequence is not None:
            sequence.pages.extend(pages)

    def park(self, rid: Rid) -> bool:
        with self._lock:
            sequence = next((row for row in self._running if row.rid == rid), None)
            if sequence is None or rid in self._aborted:
                return False
            assert rid not in self._stepping, "park comes between two steps"
            self._running.remove(sequence)
            self._parked[rid] = sequence
            return True

    def resume(self, rid: Rid, pages: Many[PageId]) -> None:
        with self._lock:
            sequence = self._parked.pop(rid, None)
            if sequence is None:
                return
            assert len(pages) * self.model.page_size >= sequence.computed, "its KV does not fit into these pages"
            sequence.pages = list(pages)
            self._running.append(sequence)

    def abort(self, rid: Rid) -> bool:
        with self._lock:
            sequence = self._live.get(rid)
            if sequence is None:
                return False
            if rid in self._stepping:
                self._aborted.add(rid)
                return False
            self._remove(sequence)
            return True

    def busy(self) -> bool:
        with self._lock:
            return bool(self._refused or self._prefills or self._ready())

    def step(self) -> list[StepOutput]:
        outputs, self._refused = self._refused, []
        prefill, rows = self._choose()
        try:
            if prefill:
                self._prefill(rows[0], outputs)
            elif rows:
                self._decode(rows, outputs)
        except Exception:
            self._refused = outputs + self._end()  # the next step says them
            raise
        return outputs + self._end()

    def _choose(self) -> tuple[bool, list[Sequence]]:
        """(a chunk of a prompt?, what this step is at work on: until its end, their pages are)."""
        with self._lock:
            ready = self._ready()
            prefill = bool(self._prefills) and not (ready and self._decode_next)
            rows = [self._prefills[0]] if prefill else ready
            self._decode_next = prefill
            self._stepping = frozenset(row.rid for row in rows)
            return prefill, rows

    def _end(self) -> list[StepOutput]:
        """The step is over: the last outputs of what was aborted during it."""
        with self._lock:
            aborted = [self._live[rid] for rid in self._aborted if rid in self._live]
            self._aborted.clear()
            self._stepping = frozenset()
            for sequence in aborted:
                self._remove(sequence)
        return [sequence.output(finish="abort") for sequence in aborted]

    def _ready(self) -> list[Sequence]:
        """Running requests whose next token has a page (or that end without one). Under the lock."""
        return [row for row in self._running if row.has_page(self.model.page_size) or row.end(self.model)]

    def _remove(self, sequence: Sequence) -> None:
        """Under the lock."""
        self._live.pop(sequence.rid, None)
        self._aborted.discard(sequence.rid)
        self._parked.pop(sequence.rid, None)
        if sequence in self._running:
            self._running.remove(sequence)
        if sequence in self._prefills:
            self._prefills.remove(sequence)

    def _all_aborted(self, rows: Iterable[Sequence]) -> bool:
        return bool(self._aborted) and all(row.rid in self._aborted for row in rows)

    def _let_go(self, rows: Many[Sequence], dropped: set[int]) -> bool:
        """Between two layers of a step that `rows` share: those aborted leave it, by number into `dropped`. True where
        nobody is left."""
        if not self._aborted:
            return False
        if self._all_aborted(row for number, row in enumerate(rows) if number not in dropped):
            return True
        if self.on_dropped is None:
            return False
        with self._lock:
            gone = [number for number, row in enumerate(rows) if row.rid in self._aborted]
            self._stepping -= {rows[number].rid for number in gone}
            for number in gone:
                self._remove(rows[number])
        dropped.update(gone)
        for number in gone:
            self.on_dropped(rows[number].rid)
        return False

    def _prefill(self, sequence: Sequence, outputs: list[StepOutput]) -> None:
        """One chunk of the prompt; after the last one its first token. Adds to `outputs`."""
        assert self._kv is not None
        prompt, computed = sequence.prompt, sequence.computed
        first = min(computed, len(prompt) - 1)
        begin = first - first % CHUNK
        end = min(len(prompt), begin + CHUNK)
        start = begin if self._llama.fixed else first
        try:
            hidden = self._llama.prefill(
                self._kv,
                prompt[start:end],
                start,
                max(computed, start),
                sequence.pages,
                lambda: self._all_aborted((sequence,)),
            )
        except Interrupted:
            return
        sequence.computed = end
        if end < len(prompt):
            outputs.append(sequence.output())
            return
        with self._lock:
            self._prefills.remove(sequence)
            self._running.append(sequence)
        outputs.append(self._sampled(sequence, self._llama.logits(hidden[None])[0]))

    def _decode(self, ready: list[Sequence], outputs: list[StepOutput]) -> None:
        """One token for each. Adds to `outputs` one by one: what has ended is said, even if the step fails later."""
        assert self._kv is not None
        over = [row for row in ready if row.end(self.model)]  # ended by its prior tokens
        outputs += [self._finished(row, row.output(finish=row.end(self.model))) for row in over]
        rows = [row for row in ready if row not in over]
        if not rows:
            return
        inputs = [DecodeRow(row.generated[row.computed - len(row.prompt)], row.computed, row.pages) for row in rows]
        dropped: set[int] = set()
        try:
            hidden = self._llama.decode(self._kv, inputs, lambda: self._let_go(rows, dropped), dropped)
        except Interrupted:
            return
        logits = self._llama.logits(hidden)
        for number, row in enumerate(rows):
            if number in dropped:
                continue
            row.computed += 1
            behind = row.computed < row.length
            outputs.append(row.output() if behind else self._sampled(row, logits[number]))

    def _sampled(self, sequence: Sequence, logits: Array) -> StepOutput:
        """Samples the next token, and ends the request where it ends."""
        if self.on_logits is not None:
            self.on_logits(sequence.rid, sequence.length, logits.copy())
        try:
            token = sample(logits, sequence.sampling, sequence.seed, sequence.length, sequence.banned(self.model))
        except BadLogits as error:
            return self._finished(sequence, sequence.output(finish="error", error=str(error)))
        sequence.generated.append(token.id)
        end = sequence.end(self.model)
        if sequence.request.prefill_only:
            return self._finished(sequence, sequence.output(token, finish="length", ended=end))
        output = sequence.output(token, finish=end)
        return self._finished(sequence, output) if end else output

    def _finished(self, sequence: Sequence, output: StepOutput) -> StepOutput:
        with self._lock:
            self._remove(sequence)
        return output


def pool_bytes(spec: ModelSpec, pages: int, rank: int = 0, ranks: int = 1) -> np.ndarray:
    """One rank's pool [pages, bytes of its page] in plain memory, for tests and the self-test."""
    return np.zeros((pages, shard_bytes(spec.groups, spec.page_size, rank, ranks)), np.uint8)


def attach_pools(engine: NumpyEngine, pages: int, ranks: int = 1) -> list[np.ndarray]:
    """Gives `engine` pools of plain memory; returns them, that of a rank without heads with pages of no bytes."""
    pools = [pool_bytes(engine.model, pages, rank, ranks) for rank in range(ranks)]
    engine.attach([pool.data.cast("B") if pool.size else None for pool in pools], pages)
    return pools
