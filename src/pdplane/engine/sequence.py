"""One request inside the engine: what is known of its tokens, how far its KV is, and when it ends."""

from __future__ import annotations

import secrets

from pdplane.core.layout import pages_for
from pdplane.worker.engine import EngineRequest, ModelSpec, StepOutput, Token


class Sequence:
    """`computed` tokens have their KV in the pages. In prefill until the whole prompt has and a token is there."""

    def __init__(self, request: EngineRequest) -> None:
        self.request = request
        self.rid = request.rid
        self.sampling = request.sampling
        self.prompt = list(request.prompt)
        self.generated = list(request.prior)
        self.pages = list(request.pages)
        self.computed = request.computed
        self.seed = secrets.randbits(63) if request.sampling.seed is None else request.sampling.seed

    @property
    def in_prefill(self) -> bool:
        return self.computed < len(self.prompt) or not self.generated

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.generated)

    def has_page(self, page_size: int) -> bool:
        """The next token's KV has somewhere to go."""
        return self.computed < len(self.pages) * page_size

    def refusal(self, model: ModelSpec, pool_pages: int) -> str:
        """Why it cannot run, or ""."""
        if not self.prompt:
            return "the prompt is empty"
        if len(self.prompt) > model.context_len:
            return f"the prompt has {len(self.prompt)} tokens, the model's context is {model.context_len}"
        for token in (*self.prompt, *self.generated):
            if not 0 <= token < model.vocab_size:
                return f"token id {token} is outside the vocabulary of {model.vocab_size}"
        for page in self.pages:
            if not 0 <= page < pool_pages:
                return f"page {page} is outside the pool of {pool_pages} pages"
        if len(self.pages) < pages_for(len(self.prompt), model.page_size):
            return f"{len(self.pages)} pages of {model.page_size} cannot hold a prompt of {len(self.prompt)} tokens"
        if not 0 <= self.computed <= self.length:
            return f"{self.computed} computed tokens of {self.length}"
        if self.generated and self.computed not in (len(self.prompt), self.length - 1):
            return f"prior tokens need the prompt's KV, but {self.computed} of {len(self.prompt)} tokens have theirs"
        return ""

    def banned(self, model: ModelSpec) -> tuple[int, ...]:
        """Tokens that would end it before min_tokens."""
        if len(self.generated) >= self.sampling.min_tokens:
            return ()
        return tuple(token for token in self._stops(model) if 0 <= token < model.vocab_size)

    def end(self, model: ModelSpec) -> str | None:
        """Why it ends after its newest token: "stop", "length" or None."""
        if self.generated and self.generated[-1] in self._stops(model):
            return "stop"
        if len(self.generated) >= self.sampling.max_tokens or self.length >= model.context_len:
            return "length"
        return None

    def output(self, token: Token | None = None, **end: str | None) -> StepOutput:
        return StepOutput(
            self.rid,
            self.computed,
            token,
            finish=end.get("finish"),
            ended=end.get("ended"),
            error=end.get("error") or "",
        )

    def _stops(self, model: ModelSpec) -> set[int]:
        stops = set(self.sampling.stop_token_ids)
        return stops if self.sampling.ignore_eos else stops | set(model.eos_ids)
