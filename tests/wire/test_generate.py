"""SGLang's /generate read into what the sampler is asked, and the shape of its answers."""

from __future__ import annotations

import msgspec
import pytest

from pdplane.core.errors import Refused
from pdplane.wire.generate import Generated, MetaInfo, finish_reason, read_generate
from pdplane.wire.sampling import Ask


def test_a_bare_request_asks_for_sglangs_default() -> None:
    assert read_generate({"text": "x"}).asks(1) == [Ask(max_tokens=128)]


def test_native_names_arrive() -> None:
    params = {
        "max_new_tokens": 5,
        "min_new_tokens": 1,
        "temperature": 0,
        "top_k": -1,
        "sampling_seed": 9,
        "stop": ["a", "b"],
        "no_stop_trim": True,
    }
    [asked] = read_generate({"text": "x", "sampling_params": params}).asks(1)
    assert asked == Ask(max_tokens=5, min_tokens=1, temperature=0.0, seed=9, stop=("a", "b"), include_stop_str=True)


def test_each_prompt_may_have_its_own_params() -> None:
    request = read_generate({"text": ["x", "y"], "sampling_params": [{"max_new_tokens": 1}, {"max_new_tokens": 2}]})
    assert [asked.max_tokens for asked in request.asks(2)] == [1, 2]


@pytest.mark.parametrize(
    ("body", "single"),
    [
        ({"text": "x"}, True),
        ({"text": ["x"]}, False),
        ({"input_ids": [1, 2]}, True),
        ({"input_ids": [[1, 2]]}, False),
    ],
)
def test_one_prompt_is_single_unless_wrapped(body: dict[str, object], single: bool) -> None:
    assert read_generate(body).single is single


def test_top_logprobs_count_only_where_logprobs_are_asked_for() -> None:
    request = {"text": "x", "top_logprobs_num": 3}
    assert read_generate(request).asks(1)[0].top_logprobs == 0
    assert read_generate(request | {"return_logprob": True}).asks(1)[0].top_logprobs == 3


def test_an_unserved_field_is_named_with_its_place() -> None:
    with pytest.raises(Refused) as refused:
        read_generate({"text": ["x", "y"], "sampling_params": [{}, {"min_p": 0.5}]}).asks(2)
    assert refused.value.cause.param == "sampling_params[1].min_p"


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("stop", b'{"type":"stop","matched":7}'),
        ("length", b'{"type":"length","length":3}'),
        ("abort", b'{"type":"abort","message":"the request was aborted"}'),
    ],
)
def test_finish_reasons_are_objects(kind: str, expected: bytes) -> None:
    assert msgspec.json.encode(finish_reason(kind, 3, 7)) == expected


def test_golden_bytes_of_an_answer() -> None:
    meta = MetaInfo(id="r", finish_reason=None, prompt_tokens=2, completion_tokens=1, cached_tokens=0)
    assert msgspec.json.encode(Generated(text="a", output_ids=[97], meta_info=meta)) == (
        b'{"text":"a","output_ids":[97],"meta_info":{"id":"r","finish_reason":null,"prompt_tokens":2,'
        b'"completion_tokens":1,"cached_tokens":0}}'
    )
