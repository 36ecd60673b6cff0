"""Prompts as token ids, held against the vocabulary, the model's context and this worker's pool."""

from __future__ import annotations

from typing import NamedTuple

from pdplane.core.errors import Refused, bad_request
from pdplane.wire.body import invalid

from ..engine import Tokenizer
from ..service import Service

PROBE_CHARACTERS = 16  # per token of context: far more than texts have, so that a text that is probed is surely long


class Conversation(NamedTuple):
    turns: list[dict[str, object]]
    add_generation_prompt: bool


class Prompt(NamedTuple):
    """`field` is what messages call it; `place` its index, where the request has several."""

    field: str
    content: str | list[int] | Conversation
    place: int | None = None

    @property
    def name(self) -> str:
        return self.field if self.place is None else f"{self.field}[{self.place}]"


def conversation(turns: list[dict[str, object]], *, add_generation_prompt: bool) -> Prompt:
    return Prompt("messages", Conversation(turns, add_generation_prompt))


def tokens_of(prompt: Prompt, tokenizer: Tokenizer, vocab_size: int) -> list[int]:
    """The ids of `prompt`, at least one. Raises Refused (400): an id outside the vocabulary, a template's error."""
    content = prompt.content
    if isinstance(content, str):
        ids = tokenizer.encode(content)
    elif isinstance(content, Conversation):
        ids = _render(content, tokenizer)
    else:
        ids = content
        _check_vocabulary(prompt, ids, vocab_size)
    if not ids:
        raise invalid(f"{prompt.name} has no tokens", prompt.name)
    return ids


def check_text(prompt: Prompt, service: Service) -> None:
    """Raises Refused (400) for a text so long that a first part of it is over the context already: it need not be
    tokenised whole to be refused."""
    probe = service.context_len * PROBE_CHARACTERS
    for text in _texts(prompt.content):
        if len(text) > probe:
            tokens = len(service.tokenizer.encode(text[:probe]))
            if tokens >= service.context_len:
                raise _too_long(prompt, f"over {tokens}", service)


def check_length(prompt: Prompt, tokens: int, service: Service) -> None:
    """Raises Refused (400) naming length, limit and side, before anything is allocated."""
    if tokens >= service.context_len:
        raise _too_long(prompt, str(tokens), service)
    if tokens > service.max_prompt_tokens:
        message = (
            f"{prompt.name} has {tokens} tokens; the {service.role} worker can hold {service.max_prompt_tokens} of one "
            "prompt. Shorten it, or give the worker a larger KV pool"
        )
        raise Refused(bad_request(message, code="prompt_too_long", param=prompt.name, side=service.role))


def _too_long(prompt: Prompt, tokens: str, service: Service) -> Refused:
    message = (
        f"{prompt.name} has {tokens} tokens; the model's context is {service.context_len} tokens and one is needed "
        "for the answer. Shorten the prompt"
    )
    return Refused(bad_request(message, code="context_length_exceeded", param=prompt.name, side=service.role))


def _texts(content: str | list[int] | Conversation) -> list[str]:
    if isinstance(content, Conversation):
        return [str(turn["content"]) for turn in content.turns]
    return [content] if isinstance(content, str) else []


def _render(content: Conversation, tokenizer: Tokenizer) -> list[int]:
    try:
        return tokenizer.chat(content.turns, add_generation_prompt=content.add_generation_prompt)
    except ValueError as error:
        raise invalid(f"the chat template refused the messages: {error}", "messages", code="template_error") from None


def _check_vocabulary(prompt: Prompt, ids: list[int], vocab_size: int) -> None:
    if min(ids) < 0 or max(ids) >= vocab_size:
        place, bad = next((i, token) for i, token in enumerate(ids) if not 0 <= token < vocab_size)
        name = f"{prompt.name}[{place}]"
        raise invalid(f"{name}: token id {bad} is outside the vocabulary of {vocab_size} tokens", prompt.name)
