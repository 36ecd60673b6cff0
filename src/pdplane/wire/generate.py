"""SGLang's /generate: one prompt or a batch, native sampling names, answers with `meta_info`."""

from __future__ import annotations

import msgspec
from msgspec import UNSET, UnsetType

from . import sampling
from .body import convert, invalid, join, refuse_unsupported
from .legs import LegFields
from .openai import prompts_of
from .sampling import MAX_TOP_LOGPROBS, NOT_SAMPLED, Ask

DEFAULT_NEW_TOKENS = 128

UNSUPPORTED: dict[str, tuple[object, ...]] = {
    "input_embeds": (),
    "image_data": ([],),
    "video_data": ([],),
    "audio_data": ([],),
    "modalities": ([], ["text"]),
    "lora_path": (),
    "session_params": (),
    "logprob_start_len": (-1,),
    "token_ids_logprob": (),
    "return_hidden_states": (False,),
    "custom_logit_processor": (),
}


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    n: int | None = None
    max_new_tokens: int | None = None
    min_new_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    sampling_seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    no_stop_trim: bool | None = None


class GenerateRequest(LegFields, frozen=True, kw_only=True):
    text: str | list[str] | None = None
    input_ids: list[int | list[int]] | None = None
    sampling_params: dict[str, object] | list[dict[str, object]] | None = None
    return_logprob: bool | None = None
    top_logprobs_num: int | None = None
    return_text_in_logprobs: bool | None = None
    stream: bool | None = None

    @property
    def single(self) -> bool:
        """One prompt that is not wrapped in a list: the answer is then an object, not a list."""
        if self.text is not None:
            return isinstance(self.text, str)
        return bool(self.input_ids) and isinstance((self.input_ids or [0])[0], int)

    def prompts(self) -> list[str | list[int]]:
        """One entry per prompt. Raises Refused (400) unless exactly one of text and input_ids has something."""
        if (self.text is None) == (self.input_ids is None):
            found = "neither" if self.text is None else "both"
            raise invalid(f"give text or input_ids, got {found}", "text", code="missing_required_parameter")
        if self.text is not None:
            return prompts_of(self.text, "text")
        return prompts_of(self.input_ids or [], "input_ids")

    def asks(self, prompts: int) -> list[Ask]:
        """The sampling of each prompt. Raises Refused (400)."""
        given = self.sampling_params
        if not isinstance(given, list):
            return [self._ask(given or {}, "sampling_params")] * prompts
        if len(given) != prompts:
            raise invalid(f"sampling_params has {len(given)} entries for {prompts} prompts", "sampling_params")
        asks = [self._ask(params, f"sampling_params[{i}]") for i, params in enumerate(given)]
        if len({ask.n for ask in asks}) > 1:
            raise invalid("sampling_params must have one n for the whole batch", "sampling_params")
        return asks

    def _ask(self, raw: dict[str, object], at: str) -> Ask:
        params = convert(raw, SamplingParams, at)
        refuse_unsupported(raw, NOT_SAMPLED, at)
        top = sampling.whole(self.top_logprobs_num, 0, MAX_TOP_LOGPROBS, "top_logprobs_num") or 0
        return _ask(params, at, logprobs=bool(self.return_logprob), top_logprobs=top if self.return_logprob else 0)


def read_generate(raw: dict[str, object]) -> GenerateRequest:
    """Raises Refused (400): a wrong type, or a field that is not served."""
    request = convert(raw, GenerateRequest)
    refuse_unsupported(raw, UNSUPPORTED)
    return request


def _ask(params: SamplingParams, at: str, *, logprobs: bool, top_logprobs: int) -> Ask:
    limit = sampling.whole(params.max_new_tokens, 1, None, join(at, "max_new_tokens"))
    limit = DEFAULT_NEW_TOKENS if limit is None else limit
    seed = params.seed if params.sampling_seed is None else params.sampling_seed
    least = sampling.min_tokens(params.min_new_tokens, limit, join(at, "min_new_tokens"), "max_new_tokens")
    return Ask(
        n=sampling.samples(params.n, join(at, "n")),
        max_tokens=limit,
        min_tokens=least,
        temperature=sampling.temperature(params.temperature, join(at, "temperature")),
        top_p=sampling.top_p(params.top_p, join(at, "top_p")),
        top_k=sampling.top_k(params.top_k, join(at, "top_k")),
        seed=sampling.seed(seed, join(at, "seed")),
        stop=sampling.stop_strings(params.stop, join(at, "stop")),
        stop_token_ids=tuple(params.stop_token_ids or ()),
        ignore_eos=bool(params.ignore_eos),
        logprobs=logprobs,
        top_logprobs=top_logprobs,
        skip_special_tokens=params.skip_special_tokens is not False,
        include_stop_str=bool(params.no_stop_trim),
    )


# --- answers --------------------------------------------------------------------------------------------------

Spelled = tuple[float | None, int, str | None]
"""A token of a logprob list: (logprob, id, text or null)."""


class FinishReason(msgspec.Struct, frozen=True, kw_only=True):
    type: str
    matched: str | int | UnsetType | None = UNSET
    length: int | UnsetType = UNSET
    message: str | UnsetType = UNSET


class MetaInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Totals so far. The logprob lists are there where they were asked for; a prompt's own are not computed."""

    id: str
    finish_reason: FinishReason | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    input_token_logprobs: list[Spelled] | UnsetType = UNSET
    output_token_logprobs: list[Spelled] | UnsetType = UNSET
    input_top_logprobs: list[list[Spelled]] | UnsetType = UNSET
    output_top_logprobs: list[list[Spelled]] | UnsetType = UNSET


class Generated(msgspec.Struct, frozen=True, kw_only=True):
    """An answer, or a stream's event: text and ids are the whole so far. `index` in batches' streams."""

    text: str
    output_ids: list[int]
    meta_info: MetaInfo
    index: int | UnsetType = UNSET


def finish_reason(kind: str, completion_tokens: int, matched: str | int | None) -> FinishReason:
    if kind == "length":
        return FinishReason(type=kind, length=completion_tokens)
    if kind == "stop":
        return FinishReason(type=kind, matched=matched)
    return FinishReason(type=kind, message="the request was aborted")
