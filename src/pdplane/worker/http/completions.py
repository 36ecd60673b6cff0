"""Text completions as answers."""

from __future__ import annotations

import msgspec
from msgspec import UNSET, UnsetType

from pdplane.wire.openai import Completion, CompletionChoice, CompletionLogprobs, Usage

from ..engine import Token, Tokenizer
from ..service import Chunk
from .answers import DONE, Heading, Sample, event, held_of, ids_of, samples_of, usage_of

_CONTINUATION = 0b10


class CompletionAnswer:
    def __init__(self, heading: Heading) -> None:
        self._heading = heading
        self.samples = samples_of(heading)
        self._offsets = [0] * len(self.samples)
        self._greeted = [False] * len(self.samples)

    def events(self, sample: Sample, chunk: Chunk) -> list[bytes]:
        logprobs, ids = self._logprobs(sample.index, chunk.tokens), ids_of(self._heading, chunk.tokens)
        if not chunk.text and not ids and logprobs is None and chunk.finish_reason is None:
            return []
        greeted, self._greeted[sample.index] = self._greeted[sample.index], True
        choice = CompletionChoice(
            index=sample.index,
            text=chunk.text,
            logprobs=logprobs,
            finish_reason=chunk.finish_reason,
            matched_stop=UNSET if chunk.finish_reason is None else chunk.matched_stop,
            prompt_token_ids=UNSET if greeted else self._prompt(sample),
            token_ids=ids,
        )
        return [event(self._completion([choice], None))]

    def closing(self) -> list[bytes]:
        if not self._heading.include_usage:
            return [DONE]
        return [event(self._completion([], usage_of(self._heading, self.samples))), DONE]

    def body(self) -> bytes:
        completion = self._completion([self._choice(sample) for sample in self.samples], None)
        usage, held = usage_of(self._heading, self.samples), held_of(self.samples)
        return msgspec.json.encode(msgspec.structs.replace(completion, usage=usage, kv_transfer_params=held))

    def _prompt(self, sample: Sample) -> list[int] | UnsetType:
        prompts = self._heading.prompts
        return UNSET if prompts is None else prompts[sample.index // self._heading.samples]

    def _choice(self, sample: Sample) -> CompletionChoice:
        return CompletionChoice(
            index=sample.index,
            text=sample.text,
            logprobs=self._logprobs(sample.index, sample.tokens),
            finish_reason=sample.finish_reason,
            matched_stop=sample.matched_stop,
            prompt_token_ids=self._prompt(sample),
            token_ids=ids_of(self._heading, sample.tokens),
        )

    def _completion(self, choices: list[CompletionChoice], usage: Usage | None) -> Completion:
        return Completion(
            id=self._heading.id,
            created=self._heading.created,
            model=self._heading.model,
            choices=choices,
            usage=usage if self._heading.include_usage else UNSET,
        )

    def _logprobs(self, index: int, tokens: list[Token]) -> CompletionLogprobs | None:
        if not self._heading.logprobs:
            return None
        tokenizer = self._heading.tokenizer
        offsets = []
        for token in tokens:
            offsets.append(self._offsets[index])
            self._offsets[index] += _characters(tokenizer.token_bytes(token.id))
        return CompletionLogprobs(
            tokens=[_spelled(token.id, tokenizer) for token in tokens],
            token_logprobs=[token.logprob for token in tokens],
            top_logprobs=[_top(token, tokenizer) for token in tokens],
            text_offset=offsets,
        )


def _top(token: Token, tokenizer: Tokenizer) -> dict[str, float]:
    """The likeliest tokens, and the sampled one where it is not among them."""
    top = {_spelled(item.token, tokenizer): item.logprob for item in token.top}
    if token.logprob is not None:
        top.setdefault(_spelled(token.id, tokenizer), token.logprob)
    return top


def _spelled(token: int, tokenizer: Tokenizer) -> str:
    """Its text; a token that is no whole text is told apart by its bytes."""
    text = tokenizer.token_text(token)
    if "\ufffd" not in text:
        return text
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in tokenizer.token_bytes(token))


def _characters(utf8: bytes) -> int:
    """Characters that begin in these bytes."""
    return sum(byte >> 6 != _CONTINUATION for byte in utf8)
