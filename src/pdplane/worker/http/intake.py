"""From a body to generations: read, tokenise, hold against the limits, pair. Pure but for minted ids; any thread.

Everything that would be wrong on every role is judged before anything that is this role's, so that bad input gets the
same answer wherever it is sent.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from pdplane.core.errors import Cause, Refused
from pdplane.core.frames import PromptId
from pdplane.wire.body import decode_object, invalid
from pdplane.wire.generate import read_generate
from pdplane.wire.legs import LegFields
from pdplane.wire.openai import read_chat, read_completion
from pdplane.wire.params import FIELD as KV_PARAMS
from pdplane.wire.sampling import Ask

from ..engine import Sampling
from ..prompt import page_keys, prompt_id
from ..service import Generation, Service
from .answers import Answer, Heading
from .chat import ChatAnswer
from .completions import CompletionAnswer
from .generate import GenerateAnswer
from .legs import Legs
from .pairing import SampleName
from .prompts import Prompt, check_length, check_text, conversation, tokens_of

MAX_SAMPLES_AT_ONCE = 1024


class Job(msgspec.Struct):
    """A request ready to be submitted, and how its answer is written. `generations` are prompt-major."""

    request_id: str
    generations: list[Generation]
    answer: Answer
    stream: bool


class _Wanted(msgspec.Struct):
    prompts: list[Prompt]
    asks: list[Ask]  # one per prompt
    fields: LegFields
    stream: bool
    answer: type[Answer]
    include_usage: bool = False
    single: bool = True
    token_texts: bool = False
    token_ids: bool = False


class _Known(NamedTuple):
    """A prompt that may be served; its samples share it."""

    ids: list[int]
    id: PromptId
    page_keys: tuple[bytes, ...]


def read_job(endpoint: str, body: bytes, request_id: str | None, service: Service, legs: Legs) -> Job:
    """Raises Refused (400, 404). `endpoint`: "chat" | "completions" | "generate". `request_id`: the client's."""
    wanted = _READERS[endpoint](decode_object(body), service)
    if (reused := legs.prompt(endpoint, wanted.fields)) is not None:
        wanted.prompts = [Prompt(f"{KV_PARAMS}.prompt_token_ids", reused)]
    _check_count(len(wanted.prompts), wanted.asks[0].n)
    prompts = [_known(prompt, service) for prompt in wanted.prompts]
    samplings = [_sampling(ask, len(known.ids), service) for ask, known in zip(wanted.asks, prompts, strict=True)]
    n, fields = wanted.asks[0].n, wanted.fields
    named = legs.name(fields, len(prompts) * n, request_id)
    generations = [
        _generation(i, name, named.request_id, prompts[i // n], samplings[i // n], wanted.asks[i // n], i % n)
        for i, name in enumerate(named.samples)
    ]
    for generation in generations:
        generation.priority = fields.priority or 0
    legs.bind(endpoint, fields, generations, stream=wanted.stream)
    heading = Heading(
        id=named.request_id,
        model=service.model_name,
        tokenizer=service.tokenizer,
        rids=[generation.rid for generation in generations],
        prompt_tokens=[len(known.ids) for known in prompts],
        samples=n,
        logprobs=wanted.asks[0].logprobs,
        include_usage=wanted.include_usage,
        single=wanted.single and n == 1,
        token_texts=wanted.token_texts,
        prompts=[known.ids for known in prompts] if wanted.token_ids else None,
    )
    return Job(named.request_id, generations, wanted.answer(heading), wanted.stream)


def _chat(raw: dict[str, object], service: Service) -> _Wanted:
    request = read_chat(raw)
    _check_model(request.model, service)
    ask = request.ask()
    prompt = conversation(request.turns(), add_generation_prompt=request.add_generation_prompt is not False)
    return _Wanted(
        [prompt],
        [ask],
        request,
        bool(request.stream),
        ChatAnswer,
        request.include_usage,
        token_ids=bool(request.return_token_ids),
    )


def _completions(raw: dict[str, object], service: Service) -> _Wanted:
    request = read_completion(raw)
    _check_model(request.model, service)
    ask = request.ask()
    given = request.prompts()
    prompts = [Prompt("prompt", item, index if len(given) > 1 else None) for index, item in enumerate(given)]
    asks = [ask] * len(prompts)
    return _Wanted(
        prompts,
        asks,
        request,
        bool(request.stream),
        CompletionAnswer,
        request.include_usage,
        token_ids=bool(request.return_token_ids),
    )


def _generate(raw: dict[str, object], service: Service) -> _Wanted:
    request = read_generate(raw)
    given = request.prompts()
    name = "input_ids" if request.text is None else "text"
    prompts = [Prompt(name, item, None if request.single else index) for index, item in enumerate(given)]
    asks = request.asks(len(prompts))
    return _Wanted(
        prompts,
        asks,
        request,
        bool(request.stream),
        GenerateAnswer,
        single=request.single,
        token_texts=bool(request.return_text_in_logprobs),
    )


_READERS = {"chat": _chat, "completions": _completions, "generate": _generate}


def _check_model(model: str | None, service: Service) -> None:
    if model is not None and model != service.model_name:
        message = f"the model {model!r} does not exist here; this worker serves {service.model_name!r}"
        raise Refused(Cause("model_not_found", message, 404, param="model"))


def _check_count(prompts: int, n: int) -> None:
    if prompts * n > MAX_SAMPLES_AT_ONCE:
        message = (
            f"{prompts} prompts x n={n} is {prompts * n} samples, over the limit of {MAX_SAMPLES_AT_ONCE}; send fewer"
        )
        raise invalid(message, "n" if n > 1 else "prompt", code="too_many_samples")


def _known(prompt: Prompt, service: Service) -> _Known:
    check_text(prompt, service)
    ids = tokens_of(prompt, service.tokenizer, service.vocab_size)
    check_length(prompt, len(ids), service)
    return _Known(ids, prompt_id(ids), page_keys(ids, service.key_page_size) if service.key_page_size else ())


def _sampling(ask: Ask, prompt_tokens: int, service: Service) -> Sampling:
    """`max_tokens` is clipped to what the context leaves."""
    bad = [token for token in ask.stop_token_ids if not 0 <= token < service.vocab_size]
    if bad:
        raise invalid(
            f"stop_token_ids: {bad[0]} is outside the vocabulary of {service.vocab_size} tokens", "stop_token_ids"
        )
    room_left = service.context_len - prompt_tokens
    max_tokens = room_left if ask.max_tokens is None else min(ask.max_tokens, room_left)
    return Sampling(
        max_tokens=max_tokens,
        min_tokens=min(ask.min_tokens, max_tokens),
        temperature=ask.temperature,
        top_p=ask.top_p,
        top_k=ask.top_k,
        seed=ask.seed,
        stop_token_ids=ask.stop_token_ids,
        ignore_eos=ask.ignore_eos,
        logprobs=ask.logprobs,
        top_logprobs=ask.top_logprobs,
    )


def _generation(
    index: int, name: SampleName, request_id: str, prompt: _Known, sampling: Sampling, ask: Ask, sample: int
) -> Generation:
    """Sample k of a seeded request has the seed + k: the same on both legs, another for every sample."""
    if sampling.seed is not None and sample:
        sampling = msgspec.structs.replace(sampling, seed=(sampling.seed + sample) % 2**63)
    return Generation(
        rid=name.rid,
        request_id=request_id,
        prompt=prompt.ids,
        prompt_id=prompt.id,
        page_keys=prompt.page_keys,
        sampling=sampling,
        stop=ask.stop,
        room=name.room,
        bootstrap_host=name.host,
        bootstrap_port=name.port,
        index=index,
        skip_special_tokens=ask.skip_special_tokens,
        include_stop_str=ask.include_stop_str,
    )
