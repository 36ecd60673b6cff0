"""The prefix cache of decode in whole fleets: what is there is not moved, and every answer is right all the same."""

from __future__ import annotations

from typing import Any

import pytest

from pdplane.core.pages import Page

from .fleets import Fleet, Talk, completion, essence, fleet, until

PAGE = 4  # tokens of the fleet's pages
FULL = "0123456789abcdef"  # four pages, and nothing behind them


def hits(it: Fleet) -> dict[str, int]:
    """Requests whose prompts decode had already, wholly or in part."""
    counts = it.decode.shell.counts
    return {kind: int(counts["decode_prefix_hits", kind]) for kind in ("partial", "full")}


async def grants(it: Fleet, answer: Any) -> list[int]:
    """Pages of each grant of this request, as decode's record has them."""
    record = it.decode.group.record(answer.json()["id"])
    assert record is not None
    return [grant["pages"] for leg in record["legs"] for grant in leg["grants"]]


@pytest.mark.parametrize("transport", ["shm", "tcp", "shm_push"])
@pytest.mark.parametrize("policy", ["early", "prefill_complete"])
async def test_a_prompt_that_comes_again_moves_no_page_and_is_answered_alike(transport: str, policy: str) -> None:
    both = {"transport": (transport,), "decode_allocation_policy": policy}
    async with fleet(whole=True, both=both) as it:
        for moved in (4, 0, 0):
            pair, whole = await it.both(*completion(FULL, max_tokens=9))
            assert essence(pair) == essence(whole)
            assert await grants(it, pair) == [moved]
        assert hits(it) == {"partial": 0, "full": 2}
        await it.at_rest()


@pytest.mark.parametrize("tp", [(1, 2), (2, 1)])
async def test_prompts_that_begin_alike_move_what_differs(tp: tuple[int, int]) -> None:
    async with fleet(whole=True, prefill={"tp": tp[0]}, decode={"tp": tp[1]}) as it:
        for tail, moved in (("one", 5), ("two", 1), ("another one", 3)):
            pair, whole = await it.both(*completion(FULL + tail, max_tokens=6))
            assert essence(pair) == essence(whole)
            assert await grants(it, pair) == [moved]
        assert hits(it) == {"partial": 2, "full": 0}
        await it.at_rest()


async def test_the_record_says_what_was_there_and_usage_says_what_prefill_had() -> None:
    async with fleet() as it:
        await it.post(*completion(FULL, max_tokens=2))
        answer = await it.post(*completion(FULL, max_tokens=2))
        record = it.decode.group.record(answer.json()["id"])
        assert record is not None
        told = [entry["detail"] for entry in record["legs"][0]["entries"] if entry["state"] == "cached"]
        assert told == ["4 of 4 pages are here"]
        assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 12
        metrics = it.decode.group.metrics_text().splitlines()
        assert 'pdplane_decode_prefix_hits_total{what="full",dp="0"} 1' in metrics


async def test_decode_without_a_cache_is_sent_every_page() -> None:
    async with fleet(decode={"prefix_cache": False}) as it:
        for _ in range(2):
            assert await grants(it, await it.post(*completion(FULL, max_tokens=3))) == [4]
        assert it.decode.pages(Page.CACHED) == 0


async def test_tokens_that_decode_made_are_in_nobodys_prefix() -> None:
    """The prompt and its answer, asked as a prompt, has the first prompt's pages there and not the answer's."""
    async with fleet(whole=True) as it:
        first = await it.post(*completion(FULL, max_tokens=9, ignore_eos=True))
        prompt = FULL + first.json()["choices"][0]["text"]
        pair, whole = await it.both(*completion(prompt, max_tokens=4))
        assert essence(pair) == essence(whole)
        assert hits(it) == {"partial": 1, "full": 0}


async def test_a_client_that_leaves_while_others_share_its_head_takes_nothing_from_them() -> None:
    async with fleet(whole=True) as it:
        await it.post(*completion(FULL, max_tokens=2))
        it.decode.engine.allow = 1
        leaving = Talk(it.url, completion(FULL, max_tokens=20, ignore_eos=True)[1])
        staying = Talk(it.url, completion(FULL, max_tokens=9)[1])
        await until(lambda: hits(it)["full"] == 2)
        await leaving.drop()
        it.decode.engine.allow = None
        answer = await staying.answer()
        _, whole = await it.both(*completion(FULL, max_tokens=9))
        assert essence(answer) == essence(whole)
        await it.at_rest()
