"""The engine contract: what a worker needs of whatever computes. Message-shaped, so that an engine can be a process.

The worker owns the pages, the engine only indexes into them. After the output that carries `finish` the engine
touches the request's pages no more: that output is the "own completion" proof (docs/protocol.md).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from pdplane.core.frames import TopLogprob
from pdplane.core.ids import PageId, Rid
from pdplane.core.layout import LayoutGroup


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """temperature 0 is greedy; top_k 0 and top_p 1.0 are off. The token at position i depends on (seed, i) alone
    (and the logits), so that both sides of a hand-off sample alike; seed None is replaced by a random one."""

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: bool = False
    top_logprobs: int = 0


class EngineRequest(msgspec.Struct, kw_only=True):
    """`computed` prompt tokens already have their KV in `pages` (a cached prefix: these pages are only read, also where
    the whole prompt is in them); `prior` are tokens sampled elsewhere (the row's).

    `prefill_only`: compute the prompt, sample one token, finish. Its output still says in `ended` whether that
    token ended the request under the real `sampling` ("stop", "length").
    """

    rid: Rid
    prompt: Sequence[int]
    sampling: Sampling
    pages: list[PageId]
    computed: int = 0
    prior: tuple[int, ...] = ()
    prefill_only: bool = False


class Token(msgspec.Struct, frozen=True):
    id: int
    logprob: float | None = None
    top: tuple[TopLogprob, ...] = ()


class StepOutput(msgspec.Struct):
    """What one step did for one request. `computed`: tokens (prompt and sampled) whose KV is now in the pages.

    finish: "stop" | "length" | "abort" | "error" (with `error`); a prefill_only request finishes with "length" and
    tells the real end, if any, in `ended`.
    """

    rid: Rid
    computed: int
    token: Token | None = None
    finish: str | None = None
    ended: str | None = None
    error: str = ""


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What the engine serves. `page_bytes` is the whole page over all layers and groups; eos ids stop generation."""

    name: str
    weights: str  # hex digest of the weights' identity
    tokenizer: str  # hex digest of the tokenizer
    vocab_size: int
    context_len: int
    page_size: int
    page_bytes: int
    kv_dtype: str
    groups: tuple[LayoutGroup, ...]
    eos_ids: tuple[int, ...]
    architecture: str


class Engine(Protocol):
    """Not thread-safe, but for `abort`. One thread calls the rest.

    `on_dropped`, where it is set, is called within `step` for a request that was aborted while it shared that step, as
    soon as the step touches its pages no more. No output of it follows.
    """

    model: ModelSpec
    on_dropped: Callable[[Rid], None] | None

    def sibling(self) -> Engine:
        """Another engine over the same weights, for pools and a thread of its own: one per data parallel rank."""
        ...

    def attach(self, pools: Sequence[memoryview | None], pages: int) -> None:
        """Use these pools, one per tensor parallel rank, each `pages` pages of core.slices.shard_bytes writable bytes,
        page-first; None for a rank that holds no heads. A page index means that page of every pool. Before the first
        `add`."""

    def add(self, request: EngineRequest) -> None:
        """Queue a request. Its pages hold at least the prompt."""

    def extend(self, rid: Rid, pages: Sequence[PageId]) -> None:
        """More pages for a running request; unknown rids are ignored."""

    def park(self, rid: Rid) -> bool:
        """Between two steps: this running request takes part in none until `resume`, and its pages are touched no more.
        False where it is not running any more (or was aborted)."""
        ...

    def resume(self, rid: Rid, pages: Sequence[PageId]) -> None:
        """A parked request goes on, its KV now in these pages. Unknown rids are ignored."""

    def abort(self, rid: Rid) -> bool:
        """From any thread. True: the running step, if any, is not at work on it; its pages are touched no more and no
        output follows. False: the running step lets go of it between two layers, and is cut there where nothing
        else shares it; `on_dropped` or its last output (finish "abort") says so. Unknown rids are ignored (False)."""
        ...

    def busy(self) -> bool:
        """True where `step` would do something."""

    def step(self) -> list[StepOutput]:
        """One step: a prefill chunk, or one token for every running request. A request whose next token has no page
        is left out of the step. Never raises for one request's sake: that request finishes with "error"."""
        ...


class TokenStream(Protocol):
    """Incremental detokenizer of one sample."""

    def push(self, token: int) -> str:
        """The text that is certain now ("" while inside a multi-byte character)."""
        ...

    def flush(self) -> str:
        """What is left at the end."""
        ...


class Tokenizer(Protocol):
    """Thread-safe."""

    vocab_size: int

    def encode(self, text: str, *, add_special: bool = True) -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...

    def token_text(self, token: int) -> str:
        """One token on its own, for logprobs; bytes that are no text become U+FFFD."""
        ...

    def token_bytes(self, token: int) -> bytes: ...

    def chat(self, messages: Sequence[dict[str, object]], *, add_generation_prompt: bool = True) -> list[int]:
        """Token ids of the rendered chat template. Raises ValueError with the template's message."""
        ...

    def stream(self, *, skip_special: bool = True) -> TokenStream:
        """`skip_special`: special tokens (end of text, chat marks) give no text."""
        ...
