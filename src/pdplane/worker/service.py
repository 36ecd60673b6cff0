"""The seam between a worker's HTTP edge and its role: generations go in, streams of chunks come out.

The edge parses, validates and formats; the role (prefill, decode, aggregated) pairs, admits and computes. The edge
knows nothing of rooms but their number, the role nothing of OpenAI's JSON.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import msgspec

from pdplane.core.errors import Cause, Refused
from pdplane.core.frames import PromptId
from pdplane.core.ids import Rid, Room
from pdplane.wire.params import HandOff, KVTransferParams

from .engine import Sampling, Token, Tokenizer


class Generation(msgspec.Struct, kw_only=True):
    """One sample of one prompt, validated. `room` and the bootstrap address only on the legs of a pair.

    `index` is its place in a batch, for messages. `deadline_s` is time left from now. `dp_rank`: the data parallel rank
    of this worker that the request names; `prefill_dp_rank`: that of the prefill (decode legs only); both only where
    named. `page_keys`: of the prompt's full pages, where the service wants them. `hand_off`: what is to be read for it
    (decode legs of the params dialect).
    """

    rid: Rid
    request_id: str
    prompt: list[int]
    prompt_id: PromptId
    sampling: Sampling
    stop: tuple[str, ...] = ()
    room: Room | None = None
    dp_rank: int | None = None
    prefill_dp_rank: int | None = None
    priority: int = 0
    bootstrap_host: str = ""
    bootstrap_port: int | None = None
    hand_off: HandOff | None = None
    deadline_s: float = 300.0
    index: int = 0
    page_keys: tuple[bytes, ...] = ()
    skip_special_tokens: bool = True
    include_stop_str: bool = False


class Chunk(msgspec.Struct, kw_only=True):
    """A piece of a sample: text and the tokens behind it. The last one carries `finish_reason`.

    `prompt_tokens`, `completion_tokens` and `cached_tokens` are totals so far. `held`: prefill's answer in the params
    dialect, what decode is to be given.
    """

    text: str
    tokens: list[Token]
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    finish_reason: str | None = None
    matched_stop: str | int | None = None
    held: KVTransferParams | None = None


class Stream:
    """One sample's chunks, in order, on the loop's thread. Ends after a chunk with a finish reason, or raises Refused.

    Leaving early (`close`) is a cancel and calls `on_close` once; a stream that has ended ignores it. `unheard`:
    whoever read it left before its answer was written, though the role may have said its last word.
    """

    def __init__(
        self,
        rid: Rid,
        on_close: Callable[[Rid, Cause], None],
        on_unheard: Callable[[Rid, Cause], None] | None = None,
    ) -> None:
        self.rid = rid
        self._on_close = on_close
        self._on_unheard = on_unheard
        self._queue: asyncio.Queue[Chunk | Cause] = asyncio.Queue()
        self._ended = False  # nothing more is taken from the role
        self._read_all = False  # nothing more is there to be read
        self.refusal: Cause | None = None

    @property
    def ended(self) -> bool:
        """The role has said its last word (it may not have been read yet)."""
        return self._ended

    def push(self, chunk: Chunk) -> None:
        if not self._ended:
            self._ended = chunk.finish_reason is not None
            self._queue.put_nowait(chunk)

    def fail(self, cause: Cause) -> None:
        if not self._ended:
            self._ended = True
            self.refusal = cause
            self._queue.put_nowait(cause)

    def close(self, cause: Cause) -> None:
        if not self._ended:
            self._ended = True
            self._on_close(self.rid, cause)

    def unheard(self, cause: Cause) -> None:
        if self._ended and self._on_unheard is not None:
            self._on_unheard(self.rid, cause)
        self.close(cause)

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> Chunk:
        if self._read_all:
            raise StopAsyncIteration
        item = await self._queue.get()
        if isinstance(item, Cause):
            self._read_all = True
            raise Refused(item)
        self._read_all = item.finish_reason is not None
        return item


class Service(Protocol):
    """A worker's role, as its HTTP edge sees it. All calls on the loop's thread; none blocks."""

    role: str  # "prefill" | "decode" | "aggregated"
    dialect: str  # "rooms" | "params"
    model_name: str
    tokenizer: Tokenizer
    context_len: int
    vocab_size: int
    max_prompt_tokens: int  # what this worker's pool can hold of one prompt
    key_page_size: int  # tokens per page of which it wants keys; 0: it wants none
    default_bootstrap_port: int | None
    policy: str  # decode allocation policy

    @property
    def live(self) -> int:
        """Requests under way."""
        ...

    def submit(self, batch: Sequence[Generation]) -> list[Stream]:
        """All of the batch or none: raises Refused (400 over a limit, 409 duplicate room, 429 busy, 503 draining)."""
        ...

    def abort(self, rid: str, room: int | None = None, cause: Cause | None = None) -> int:
        """Exact rid (of an attempt, or the request's id, which names all of its samples); how many were ended."""
        ...

    def abort_all(self) -> int: ...

    def drain(self, reason: str) -> None:
        """No new requests from now on; what runs finishes. Readiness says so at once. Idempotent."""

    def release(self, instance: str, grant: int) -> int:
        """An operator gives back the quarantined pages of this grant of this (decode) instance without a proof: how
        many pages are free again, 0 where there is nothing quarantined under it. Logged as unproven."""
        ...

    def record(self, key: str) -> dict[str, Any] | None:
        """The request record by rid, request id or room; None where unknown."""
        ...

    def server_info(self) -> dict[str, Any]: ...

    def metrics_text(self) -> str: ...

    def health(self) -> tuple[bool, dict[str, Any]]:
        """(healthy, facts): live, ready and progressing are three answers among the facts."""
        ...
