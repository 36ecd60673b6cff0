"""What a client may ask of the sampler, free of dialect, with the ranges that every edge checks alike."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from .body import invalid

MAX_SAMPLES = 128
MAX_STOPS = 16
MAX_TOP_LOGPROBS = 20
_SEED_LIMIT = 2**63

NOT_SAMPLED: dict[str, tuple[object, ...]] = {
    "logit_bias": ({},),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "min_p": (0,),
    "use_beam_search": (False,),
    "stop_regex": ("", []),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "regex": (),
    "ebnf": (),
    "json_schema": (),
    "structural_tag": (),
    "structured_outputs": ({},),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "logits_processors": ([],),
    "custom_logit_processor": (),
    "custom_params": ({},),
    "truncate_prompt_tokens": (),
    "prompt_logprobs": (),
    "lora_path": (),
    "return_hidden_states": (False,),
}
"""Sampling fields of either dialect that no worker serves, with the values that ask for nothing."""


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """Sampling as asked for. `max_tokens` None takes the endpoint's default. top_k 0 is off, as in the engine."""

    n: int = 1
    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: bool = False
    top_logprobs: int = 0
    skip_special_tokens: bool = True
    include_stop_str: bool = False


def whole(value: int | None, low: int, high: int | None, param: str) -> int | None:
    """`value` where it lies in low..high (None: no upper bound). Raises Refused (400)."""
    if value is not None and (value < low or (high is not None and value > high)):
        raise invalid(f"{param} must be {_span(low, high)}, got {value}", param)
    return value


def samples(value: int | None, param: str) -> int:
    n = whole(value, 1, MAX_SAMPLES, param)
    return 1 if n is None else n


def temperature(value: float | None, param: str) -> float:
    if value is None:
        return 1.0
    if not 0 <= value <= 2:
        raise invalid(f"{param} must be between 0 and 2, got {value:g}", param)
    return value


def top_p(value: float | None, param: str) -> float:
    if value is None:
        return 1.0
    if not 0 < value <= 1 or math.isnan(value):
        raise invalid(f"{param} must be over 0 and at most 1, got {value:g}", param)
    return value


def top_k(value: int | None, param: str) -> int:
    """The engine's top_k: 0 for the -1 with which clients switch it off."""
    if value is None or value == -1:
        return 0
    if value < 1:
        raise invalid(f"{param} must be -1 (off) or at least 1, got {value}", param)
    return value


def seed(value: int | None, param: str) -> int | None:
    """A seed as an unsigned 63-bit number; negative ones fold over."""
    if value is None:
        return None
    if not -_SEED_LIMIT <= value < _SEED_LIMIT:
        raise invalid(f"{param} must fit in 64 bits with sign, got {value}", param)
    return value % _SEED_LIMIT


def stop_strings(value: str | Sequence[str] | None, param: str) -> tuple[str, ...]:
    stops = () if value is None else (value,) if isinstance(value, str) else tuple(value)
    if len(stops) > MAX_STOPS:
        raise invalid(f"{param} takes at most {MAX_STOPS} strings, got {len(stops)}", param)
    if "" in stops:
        raise invalid(f"{param} must not be or hold an empty string", param)
    return stops


def min_tokens(value: int | None, maximum: int | None, param: str, max_param: str) -> int:
    least = whole(value, 0, None, param) or 0
    if maximum is not None and least > maximum:
        raise invalid(f"{param} {least} is over {max_param} {maximum}", param)
    return least


def _span(low: int, high: int | None) -> str:
    return f"at least {low}" if high is None else f"between {low} and {high}"
