"""What every answer has in common: samples that fill up chunk by chunk, and the events or the body made of them."""

from __future__ import annotations

import time
from typing import Protocol

import msgspec
from msgspec import UNSET, UnsetType

from pdplane.core.ids import Rid
from pdplane.wire.openai import Usage, usage
from pdplane.wire.params import KVTransferParams

from ..engine import Token, Tokenizer
from ..service import Chunk

DONE = b"data: [DONE]\n\n"


class Heading(msgspec.Struct, kw_only=True):
    """What an answer says of its request. `rids` has one entry per sample, `prompt_tokens` one per prompt; `samples` is
    n. `single`: neither a batch nor n > 1. `token_texts`: /generate spells its tokens in logprob lists.
    `prompts`: their token ids, where the answer is to say them."""

    id: str
    model: str
    tokenizer: Tokenizer
    rids: list[Rid]
    prompt_tokens: list[int]
    samples: int
    logprobs: bool
    include_usage: bool
    single: bool
    token_texts: bool = False
    prompts: list[list[int]] | None = None
    created: int = msgspec.field(default_factory=lambda: int(time.time()))


class Sample:
    """One choice of an answer, so far."""

    def __init__(self, index: int, prompt_tokens: int) -> None:
        self.index = index
        self.prompt_tokens = prompt_tokens
        self.texts: list[str] = []
        self.tokens: list[Token] = []
        self.completion_tokens = 0
        self.cached_tokens = 0
        self.finish_reason: str | None = None
        self.matched_stop: str | int | None = None
        self.held: KVTransferParams | None = None
        self.begun = False

    def add(self, chunk: Chunk) -> None:
        self.begun = True
        self.texts.append(chunk.text)
        self.tokens.extend(chunk.tokens)
        self.completion_tokens = chunk.completion_tokens
        self.cached_tokens = chunk.cached_tokens
        self.finish_reason = chunk.finish_reason
        self.matched_stop = chunk.matched_stop
        self.held = chunk.held

    @property
    def text(self) -> str:
        return "".join(self.texts)


class Answer(Protocol):
    """One request's answer in one dialect. A chunk is first added; then either its events are written, or the body once
    all samples have ended."""

    samples: list[Sample]

    def __init__(self, heading: Heading) -> None: ...

    def events(self, sample: Sample, chunk: Chunk) -> list[bytes]:
        """Server-sent events for a chunk that has just been added; possibly none."""
        ...

    def closing(self) -> list[bytes]:
        """The events after the last chunk of all."""
        ...

    def body(self) -> bytes: ...


def samples_of(heading: Heading) -> list[Sample]:
    return [Sample(i, heading.prompt_tokens[i // heading.samples]) for i in range(len(heading.rids))]


def usage_of(heading: Heading, samples: list[Sample]) -> Usage:
    """A prompt counts once however many samples it has; its cached tokens are those that its first sample found."""
    return usage(
        sum(heading.prompt_tokens),
        sum(sample.completion_tokens for sample in samples),
        sum(sample.cached_tokens for sample in samples[:: heading.samples]),
    )


def held_of(samples: list[Sample]) -> KVTransferParams | UnsetType:
    """What prefill's answer names; it has one sample."""
    return samples[0].held or UNSET


def ids_of(heading: Heading, tokens: list[Token]) -> list[int] | UnsetType:
    return [token.id for token in tokens] if heading.prompts is not None else UNSET


def event(payload: msgspec.Struct) -> bytes:
    return b"data: " + msgspec.json.encode(payload) + b"\n\n"
