"""Chat completions as answers."""

from __future__ import annotations

import msgspec
from msgspec import UNSET, UnsetType

from pdplane.wire.openai import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatLogprob,
    ChatLogprobs,
    ChatMessage,
    Delta,
    TopLogprob,
    Usage,
)

from ..engine import Token, Tokenizer
from ..service import Chunk
from .answers import DONE, Heading, Sample, event, held_of, ids_of, samples_of, usage_of


class ChatAnswer:
    def __init__(self, heading: Heading) -> None:
        self._heading = heading
        self.samples = samples_of(heading)
        self._greeted: set[int] = set()

    def events(self, sample: Sample, chunk: Chunk) -> list[bytes]:
        """The role with a choice's first chunk, then text, then the finish reason in an event of its own."""
        events = []
        if sample.index not in self._greeted:
            self._greeted.add(sample.index)
            greeting = ChatChunkChoice(index=sample.index, delta=Delta(role="assistant", content=""))
            events.append(self._event(greeting, prompt=self._prompt()))
        logprobs, ids = self._logprobs(chunk.tokens), ids_of(self._heading, chunk.tokens)
        if chunk.text or ids or logprobs is not None:
            delta = Delta(content=chunk.text)
            choice = ChatChunkChoice(index=sample.index, delta=delta, logprobs=logprobs, token_ids=ids)
            events.append(self._event(choice))
        if chunk.finish_reason is not None:
            last = ChatChunkChoice(
                index=sample.index,
                delta=Delta(),
                finish_reason=chunk.finish_reason,
                matched_stop=chunk.matched_stop,
            )
            events.append(self._event(last))
        return events

    def closing(self) -> list[bytes]:
        if not self._heading.include_usage:
            return [DONE]
        return [self._event(None, usage_of(self._heading, self.samples)), DONE]

    def body(self) -> bytes:
        return msgspec.json.encode(
            ChatCompletion(
                id=self._heading.id,
                created=self._heading.created,
                model=self._heading.model,
                choices=[self._choice(sample) for sample in self.samples],
                usage=usage_of(self._heading, self.samples),
                prompt_token_ids=self._prompt(),
                kv_transfer_params=held_of(self.samples),
            )
        )

    def _prompt(self) -> list[int] | UnsetType:
        return self._heading.prompts[0] if self._heading.prompts else UNSET

    def _choice(self, sample: Sample) -> ChatChoice:
        return ChatChoice(
            index=sample.index,
            message=ChatMessage(content=sample.text),
            logprobs=self._logprobs(sample.tokens) or (ChatLogprobs(content=[]) if self._heading.logprobs else None),
            finish_reason=sample.finish_reason,
            matched_stop=sample.matched_stop,
            token_ids=ids_of(self._heading, sample.tokens),
        )

    def _event(
        self, choice: ChatChunkChoice | None, usage: Usage | None = None, prompt: list[int] | UnsetType = UNSET
    ) -> bytes:
        return event(
            ChatChunk(
                id=self._heading.id,
                created=self._heading.created,
                model=self._heading.model,
                choices=[] if choice is None else [choice],
                usage=usage if self._heading.include_usage else UNSET,
                prompt_token_ids=prompt,
            )
        )

    def _logprobs(self, tokens: list[Token]) -> ChatLogprobs | None:
        if not self._heading.logprobs or not tokens:
            return None
        return ChatLogprobs(content=[_logprob(token, self._heading.tokenizer) for token in tokens])


def _logprob(token: Token, tokenizer: Tokenizer) -> ChatLogprob:
    return ChatLogprob(
        token=tokenizer.token_text(token.id),
        logprob=token.logprob,
        bytes=list(tokenizer.token_bytes(token.id)),
        top_logprobs=[
            TopLogprob(
                token=tokenizer.token_text(top.token), logprob=top.logprob, bytes=list(tokenizer.token_bytes(top.token))
            )
            for top in token.top
        ],
    )
