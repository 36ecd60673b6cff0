"""A pair answers what one worker answers: text, ends, usage, logprobs, on every endpoint."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from pdplane.core.ids import PageId
from pdplane.worker.engine import Sampling

from .fake_engine import HALF_CHARACTER, first_token, next_token
from .fleets import GENERATE, Talk, chat, completion, essence, events, fleet, generate, texts, until
from .http_fakes import EOS, ByteTokenizer

ASKED = {
    "chat": chat(),
    "chat with logprobs": chat(logprobs=True, top_logprobs=3),
    "chat with a seed": chat(temperature=0.9, seed=7),
    "chat of three": chat(temperature=0.9, seed=7, n=3),
    "max_completion_tokens 1": chat(max_completion_tokens=1),
    "max_tokens 1": completion(max_tokens=1),
    "max_tokens 1 and min_tokens 1": completion(max_tokens=1, min_tokens=1),
    "completion": completion(),
    "long completion": completion("ä word " * 40, max_tokens=60),
    "completion with logprobs": completion(logprobs=2),
    "prompts of text": completion([f"{i} " * (i + 1) for i in range(9)]),
    "prompts of text, two each": completion(["a", "bc"], n=2, temperature=1, seed=3),
    "token ids": completion([104, 105]),
    "lists of token ids": completion([[104, 105], [106]]),
    "one token": completion("x"),
    "generate": generate(),
    "generate a batch": generate(["one", "two", "three"]),
    "generate with logprobs": (GENERATE, {**generate()[1], "return_logprob": True, "top_logprobs_num": 2}),
    "generate from ids": (GENERATE, {"input_ids": [104, 105], "sampling_params": {"temperature": 0}}),
}


async def test_every_request_has_the_aggregated_workers_answer() -> None:
    async with fleet(whole=True) as it:
        for name, (path, body) in ASKED.items():
            pair, whole = await it.both(path, body)
            assert pair.status_code == 200, (name, pair.text)
            assert essence(pair) == essence(whole), name
        await it.at_rest()


async def test_every_stream_has_the_aggregated_workers_text_and_its_usage_once_at_the_end() -> None:
    async with fleet(whole=True, both={"prefix_cache": False}) as it:
        for name, (path, body) in ASKED.items():
            if path == GENERATE:
                streamed = {**body, "stream": True}
            else:
                streamed = {**body, "stream": True, "stream_options": {"include_usage": True}}
            pair, whole = await it.both(path, streamed)
            unstreamed = await it.post(path, body)
            assert texts(pair) == texts(whole) == texts(unstreamed), name
            if path != GENERATE:
                usages = [event["usage"] for event in events(pair)]
                assert usages[:-1] == [None] * (len(usages) - 1), name
                assert usages[-1] == unstreamed.json()["usage"], name
        await it.at_rest()


async def test_sixteen_at_once_over_two_pairs_each_get_their_own_text() -> None:
    async with fleet(2, 2, whole=True) as it:
        asked = [completion(f"prompt number {i} " * (1 + i % 5), max_tokens=12 + i, n=1 + i % 3) for i in range(16)]
        pairs = await asyncio.gather(*(it.post(*one) for one in asked))
        wholes = await asyncio.gather(*(it.whole.post(*one) for one in asked))
        assert [essence(pair) for pair in pairs] == [essence(whole) for whole in wholes]
        await it.at_rest()


# --- the seam: what prefill's token ends, decode does not go on with ---


def prompt_whose_first_token(wanted: Callable[[int], bool]) -> str:
    return next(prompt for i in range(10_000) if wanted(first_token(prompt := f"prompt {i}")))


def greedy(prompt: str, count: int) -> str:
    tokens = list(prompt.encode())
    for _ in range(count):
        tokens.append(next_token(tokens).id)
    return bytes(tokens[len(prompt.encode()) :]).decode()


PLAIN = prompt_whose_first_token(lambda token: chr(token).isalpha() and token < 128)
ENDS_AT_ONCE = prompt_whose_first_token(lambda token: token == EOS)
HALF = prompt_whose_first_token(lambda token: token == HALF_CHARACTER)

AT_THE_SEAM = {
    "a stop string that is the first token": completion(PLAIN, stop=[greedy(PLAIN, 1)]),
    "a stop string of the first two tokens": completion(PLAIN, stop=[greedy(PLAIN, 2)]),
    "a stop string from the second token on": completion(PLAIN, stop=[greedy(PLAIN, 3)[1:]]),
    "a stop string that only begins there": completion(PLAIN, stop=[greedy(PLAIN, 1) + "~"]),
    "a stop token that is the first": completion(PLAIN, stop_token_ids=[ord(greedy(PLAIN, 1))]),
    "the stop string is to be shown": completion(PLAIN, stop=[greedy(PLAIN, 2)], include_stop_str_in_output=True),
    "the end of text first": completion(ENDS_AT_ONCE),
    "the end of text first, and ignored": completion(ENDS_AT_ONCE, ignore_eos=True, max_tokens=3),
    "the end of text first, and too early": completion(ENDS_AT_ONCE, min_tokens=4),
    "half a character first": completion(HALF),
    "half a character, and no more": completion(HALF, max_tokens=1),
    "half a character, whole at the second": completion(HALF, max_tokens=2, logprobs=1),
    "max_tokens 1 at a stop string": completion(PLAIN, stop=[greedy(PLAIN, 1)], max_tokens=1),
    "max_tokens 1 at an end of text": completion(ENDS_AT_ONCE, max_tokens=1),
    "generate with a stop token": generate(PLAIN, stop_token_ids=[ord(greedy(PLAIN, 1))]),
    "generate, untrimmed": generate(PLAIN, stop=greedy(PLAIN, 2), no_stop_trim=True),
}


async def test_ends_at_the_seam_are_the_aggregated_workers() -> None:
    async with fleet(whole=True) as it:
        for name, (path, body) in AT_THE_SEAM.items():
            pair, whole = await it.both(path, body)
            assert (pair.status_code, essence(pair)) == (200, essence(whole)), name
            streamed, apart = await it.both(path, {**body, "stream": True})
            assert texts(streamed) == texts(apart) == texts(pair), name
        await it.at_rest()


async def test_a_row_that_ends_the_request_never_reaches_decodes_engine() -> None:
    async with fleet() as it:
        for name in ("a stop string that is the first token", "the end of text first", "half a character, and no more"):
            await it.post(*AT_THE_SEAM[name])
        assert it.decode.engine.added == []
        assert len(it.prefill.engine.added) == 3


async def test_the_first_tokens_logprobs_come_from_the_row() -> None:
    async with fleet() as it:
        answer = await it.post(*chat(logprobs=True, top_logprobs=2))
        content = answer.json()["choices"][0]["logprobs"]["content"]
        prompt = ByteTokenizer().chat([{"role": "user", "content": "hello there"}])
        first = next_token(prompt, Sampling(max_tokens=24, temperature=0, logprobs=True, top_logprobs=2))
        assert content[0]["logprob"] == first.logprob
        assert [top["logprob"] for top in content[0]["top_logprobs"]] == [top.logprob for top in first.top]
        assert len(content) == answer.json()["usage"]["completion_tokens"]


async def test_no_room_is_used_twice_by_samples_and_prompts() -> None:
    async with fleet() as it:
        answer = await it.post(*completion(["a", "b", "c"], n=3))
        [attempt] = (await it.get(f"/requests/{answer.json()['id']}"))["attempts"]
        assert len(set(attempt["rooms"])) == len(set(attempt["rids"])) == 9


async def test_thirty_three_prompts_keep_their_order() -> None:
    prompts = [f"{i} " * (1 + i % 7) for i in range(33)]
    async with fleet(whole=True) as it:
        pair, whole = await it.both(*completion(prompts, max_tokens=3))
        assert [choice["index"] for choice in pair.json()["choices"]] == list(range(33))
        assert essence(pair) == essence(whole)
        await it.at_rest()


async def test_cached_tokens_without_a_prefix_cache_are_none() -> None:
    async with fleet(both={"prefix_cache": False}) as it:
        for _ in range(2):
            usage = (await it.post(*completion())).json()["usage"]
            assert usage["prompt_tokens_details"]["cached_tokens"] == 0


async def test_these_tests_would_notice_a_page_that_is_not_the_requests_own() -> None:
    async with fleet() as it:
        it.decode.engine.allow = 2
        talk = Talk(it.url, completion(ignore_eos=True)[1])
        await until(lambda: it.decode.engine.allow == 0)
        [pool] = it.decode.shell.parts.pools
        assert pool is not None
        page = pool.page(PageId(1))
        page[:] = bytes(len(page))
        it.decode.engine.allow = None
        answer = await talk.answer()
        assert answer.status_code == 500
        assert "KV of position 4" in answer.json()["error"]["message"]
        await it.at_rest()
