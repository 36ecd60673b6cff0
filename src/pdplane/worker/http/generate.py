"""SGLang's /generate as answers: events carry the whole so far, as its clients expect."""

from __future__ import annotations

import msgspec
from msgspec import UNSET

from pdplane.wire.generate import FinishReason, Generated, MetaInfo, Spelled, finish_reason

from ..engine import Token
from ..service import Chunk
from .answers import DONE, Heading, Sample, event, samples_of


class GenerateAnswer:
    def __init__(self, heading: Heading) -> None:
        self._heading = heading
        self.samples = samples_of(heading)

    def events(self, sample: Sample, chunk: Chunk) -> list[bytes]:
        if not chunk.text and not chunk.tokens and chunk.finish_reason is None:
            return []
        generated = self._generated(sample)
        if not self._heading.single:
            generated = msgspec.structs.replace(generated, index=sample.index)
        return [event(generated)]

    def closing(self) -> list[bytes]:
        return [DONE]

    def body(self) -> bytes:
        generated = [self._generated(sample) for sample in self.samples]
        return msgspec.json.encode(generated[0] if self._heading.single else generated)

    def _generated(self, sample: Sample) -> Generated:
        asked = self._heading.logprobs
        meta = MetaInfo(
            id=self._heading.rids[sample.index],
            finish_reason=_reason(sample),
            prompt_tokens=sample.prompt_tokens,
            completion_tokens=sample.completion_tokens,
            cached_tokens=sample.cached_tokens,
            input_token_logprobs=[] if asked else UNSET,
            output_token_logprobs=[self._spelled(t.logprob, t.id) for t in sample.tokens] if asked else UNSET,
            input_top_logprobs=[] if asked else UNSET,
            output_top_logprobs=[self._top(token) for token in sample.tokens] if asked else UNSET,
        )
        return Generated(text=sample.text, output_ids=[token.id for token in sample.tokens], meta_info=meta)

    def _top(self, token: Token) -> list[Spelled]:
        return [self._spelled(top.logprob, top.token) for top in token.top]

    def _spelled(self, logprob: float | None, token: int) -> Spelled:
        text = self._heading.tokenizer.token_text(token) if self._heading.token_texts else None
        return (logprob, token, text)


def _reason(sample: Sample) -> FinishReason | None:
    if sample.finish_reason is None:
        return None
    return finish_reason(sample.finish_reason, sample.completion_tokens, sample.matched_stop)
