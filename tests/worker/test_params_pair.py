"""A pair of the params dialect by hand: what prefill answers, and that decode's text is the aggregated worker's."""

from __future__ import annotations

import pytest

from .fleets import chat, completion, essence, texts
from .pairs import pair

ASKED = {
    "chat": chat(),
    "chat with logprobs": chat(logprobs=True, top_logprobs=3),
    "chat with a seed": chat(temperature=0.9, seed=7),
    "max_tokens 1": completion(max_tokens=1),
    "completion": completion(),
    "long completion": completion("ä word " * 40, max_tokens=60),
    "completion with logprobs": completion(logprobs=2),
    "token ids": completion([104, 105]),
    "one token": completion("x"),
    "a page less one": completion("abc"),
    "a page": completion("abcd"),
    "a page and one": completion("abcde"),
    "stop string": completion("tell me", stop=["a"], max_tokens=60),
}


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("cached", [True, False])
async def test_every_request_has_the_aggregated_workers_answer(transport: str, cached: bool) -> None:
    async with pair(transport=(transport,), prefix_cache=cached) as it:
        for name, (path, body) in ASKED.items():
            for _ in range(2):
                told, whole = await it.both(body, path), await it.whole.post(path, body)
                assert told.status_code == 200, (name, told.text)
                assert essence(told) == essence(whole), name
        await it.at_rest()


async def test_every_stream_has_the_aggregated_workers_text() -> None:
    async with pair() as it:
        for name, (path, body) in ASKED.items():
            streamed = {**body, "stream": True}
            told, whole = await it.both(streamed, path), await it.whole.post(path, streamed)
            assert texts(told) == texts(whole), name
        await it.at_rest()
