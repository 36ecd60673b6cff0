"""OpenAI's chat and text completions: requests as they come, checked, and answers as its clients read them.

A router's fields (legs.py) ride on both.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from . import sampling
from .body import convert, invalid, refuse_unsupported
from .legs import LegFields
from .params import KVTransferParams
from .sampling import MAX_TOP_LOGPROBS, NOT_SAMPLED, Ask

COMPLETION_DEFAULT_TOKENS = 16
MAX_COMPLETION_LOGPROBS = 5

_TEXT_ONLY: dict[str, tuple[object, ...]] = {
    "response_format": ({"type": "text"},),
    "best_of": (1,),
    "suffix": ("",),
    "echo": (False,),
    "prompt_embeds": (),
}
_CHAT_ONLY: dict[str, tuple[object, ...]] = {
    "response_format": ({"type": "text"},),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True,),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": ([], ["text"]),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "reasoning_effort": ("none",),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "documents": ([],),
    "store": (False,),
    "echo": (False,),
    "best_of": (1,),
}
UNSUPPORTED_IN_CHAT = NOT_SAMPLED | _CHAT_ONLY
UNSUPPORTED_IN_COMPLETIONS = NOT_SAMPLED | _TEXT_ONLY


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True):
    include_usage: bool | None = None


class _Request(LegFields, frozen=True, kw_only=True):
    model: str | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    min_tokens: int | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    no_stop_trim: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    return_token_ids: bool | None = None

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)


class Part(msgspec.Struct, frozen=True, kw_only=True):
    type: str
    text: str | None = None


class Message(msgspec.Struct, frozen=True, kw_only=True):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[Part] | None = None
    name: str | None = None
    tool_calls: list[object] | None = None
    function_call: object = None


class ChatRequest(_Request, frozen=True, kw_only=True):
    messages: list[Message]
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None

    def ask(self) -> Ask:
        """The sampling asked for. Raises Refused (400) naming the field out of range."""
        top = sampling.whole(self.top_logprobs, 0, MAX_TOP_LOGPROBS, "top_logprobs") or 0
        if top and not self.logprobs:
            raise invalid("top_logprobs needs logprobs: true", "top_logprobs")
        return _ask(self, logprobs=bool(self.logprobs), top_logprobs=top, default_tokens=None)

    def turns(self) -> list[dict[str, object]]:
        """The messages as a chat template reads them: `developer` is `system`, text parts are joined by newlines."""
        if not self.messages:
            raise invalid("messages must hold at least one message", "messages")
        return [_turn(message, f"messages[{i}]") for i, message in enumerate(self.messages)]


class CompletionRequest(_Request, frozen=True, kw_only=True):
    prompt: str | list[str | int | list[int]]
    logprobs: int | None = None

    def ask(self) -> Ask:
        """The sampling asked for. Raises Refused (400) naming the field out of range."""
        top = sampling.whole(self.logprobs, 0, MAX_COMPLETION_LOGPROBS, "logprobs")
        return _ask(self, logprobs=top is not None, top_logprobs=top or 0, default_tokens=COMPLETION_DEFAULT_TOKENS)

    def prompts(self) -> list[str | list[int]]:
        """One entry per prompt: text, or token ids. Raises Refused (400) where there is none or kinds are mixed."""
        return prompts_of(self.prompt, "prompt")


def read_chat(raw: dict[str, object]) -> ChatRequest:
    """Raises Refused (400): a wrong type, or a field that is not served."""
    request = convert(raw, ChatRequest)
    refuse_unsupported(raw, UNSUPPORTED_IN_CHAT)
    _check_stream(request)
    return request


def read_completion(raw: dict[str, object]) -> CompletionRequest:
    """Raises Refused (400): a wrong type, or a field that is not served."""
    request = convert(raw, CompletionRequest)
    refuse_unsupported(raw, UNSUPPORTED_IN_COMPLETIONS)
    _check_stream(request)
    return request


def prompts_of(value: str | Sequence[str | int | list[int]], param: str) -> list[str | list[int]]:
    """The prompts in the four forms that OpenAI has: a text, texts, ids, lists of ids."""
    if isinstance(value, str):
        return [_full(value, param)]
    kinds = {type(item) for item in value}
    if kinds == {int}:
        return [[item for item in value if isinstance(item, int)]]
    if len(kinds) > 1:
        raise invalid(f"{param} must hold texts, token ids or lists of token ids, not a mixture", param)
    if not value:
        raise invalid(f"{param} must not be empty", param)
    return [_full(item, f"{param}[{i}]") for i, item in enumerate(value) if not isinstance(item, int)]


def _full(item: str | list[int], param: str) -> str | list[int]:
    if not item:
        raise invalid(f"{param} must not be empty", param)
    return item


def _check_stream(request: _Request) -> None:
    if request.stream_options is not None and not request.stream:
        raise invalid("stream_options is only allowed where stream is true", "stream_options")


def _ask(request: _Request, *, logprobs: bool, top_logprobs: int, default_tokens: int | None) -> Ask:
    sampling.whole(request.max_tokens, 1, None, "max_tokens")
    sampling.whole(request.max_completion_tokens, 1, None, "max_completion_tokens")
    limit = request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens
    limit = default_tokens if limit is None else limit
    return Ask(
        n=sampling.samples(request.n, "n"),
        max_tokens=limit,
        min_tokens=sampling.min_tokens(request.min_tokens, limit, "min_tokens", "max_tokens"),
        temperature=sampling.temperature(request.temperature, "temperature"),
        top_p=sampling.top_p(request.top_p, "top_p"),
        top_k=sampling.top_k(request.top_k, "top_k"),
        seed=sampling.seed(request.seed, "seed"),
        stop=sampling.stop_strings(request.stop, "stop"),
        stop_token_ids=tuple(request.stop_token_ids or ()),
        ignore_eos=bool(request.ignore_eos),
        logprobs=logprobs,
        top_logprobs=top_logprobs,
        skip_special_tokens=request.skip_special_tokens is not False,
        include_stop_str=bool(request.include_stop_str_in_output or request.no_stop_trim),
    )


def _turn(message: Message, at: str) -> dict[str, object]:
    if message.tool_calls or message.function_call:
        name = "tool_calls" if message.tool_calls else "function_call"
        raise invalid(f"{at}.{name}: tools are not supported", f"{at}.{name}", code="unsupported_parameter")
    if message.content is None and message.role != "assistant":
        raise invalid(f"{at}.content is missing", f"{at}.content", code="missing_required_parameter")
    role = "system" if message.role == "developer" else message.role
    turn: dict[str, object] = {"role": role, "content": _content(message.content, at)}
    return turn if message.name is None else turn | {"name": message.name}


def _content(content: str | list[Part] | None, at: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(_part(part, f"{at}.content[{i}]") for i, part in enumerate(content))


def _part(part: Part, at: str) -> str:
    if part.type != "text":
        raise invalid(
            f"{at}.type {part.type!r} is not supported; send text", f"{at}.type", code="unsupported_parameter"
        )
    if part.text is None:
        raise invalid(f"{at}.text is missing", f"{at}.text", code="missing_required_parameter")
    return part.text


# --- answers --------------------------------------------------------------------------------------------------


class PromptDetails(msgspec.Struct, frozen=True):
    cached_tokens: int = 0


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails


class TopLogprob(msgspec.Struct, frozen=True, kw_only=True):
    token: str
    logprob: float | None
    bytes: list[int] | None


class ChatLogprob(TopLogprob, frozen=True, kw_only=True):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    content: list[ChatLogprob]
    refusal: None = None


class ChatMessage(msgspec.Struct, frozen=True, kw_only=True):
    role: str = "assistant"
    content: str
    refusal: None = None


class ChatChoice(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None
    matched_stop: str | int | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(msgspec.Struct, frozen=True, kw_only=True):
    """Token ids where they were asked for (vLLM's return_token_ids); kv_transfer_params at prefill (params dialect)."""

    id: str
    object: str = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | UnsetType = UNSET
    kv_transfer_params: KVTransferParams | UnsetType = UNSET


class Delta(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    role: str | None = None
    content: str | None = None


class ChatChunkChoice(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    matched_stop: str | int | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET


class ChatChunk(msgspec.Struct, frozen=True, kw_only=True):
    """`usage` is absent unless it was asked for; then null in all events but the last."""

    id: str
    object: str = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class CompletionLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """Parallel lists; `text_offset` counts characters of the completion."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class CompletionChoice(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    matched_stop: str | int | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """An answer, and a stream's event alike. `usage` as in ChatChunk."""

    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET
    kv_transfer_params: KVTransferParams | UnsetType = UNSET


class Model(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: str = "model"
    created: int = 0
    owned_by: str = "pdplane"
    root: str
    max_model_len: int


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    object: str = "list"
    data: list[Model]


def usage(prompt: int, completion: int, cached: int) -> Usage:
    return Usage(
        prompt_tokens=prompt,
        completion_tokens=completion,
        total_tokens=prompt + completion,
        prompt_tokens_details=PromptDetails(cached),
    )
