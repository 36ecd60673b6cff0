"""Pages that are kept, laid aside and held back: prefix hits at prefill, retracts at decode, quarantine and release."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import pytest

from pdplane.core.pages import Page

from .fake_engine import spec
from .fleets import Fleet, Talk, completion, essence, events, fleet, texts, until

PAGE = 4  # tokens


def cached_tokens(answer: Any) -> int:
    return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


# --- prefixes -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["early", "prefill_complete"])
@pytest.mark.parametrize("tp", [1, 2])
async def test_text_is_right_around_page_edges_with_no_partial_and_full_prefix_hits(policy: str, tp: int) -> None:
    both = {"decode_allocation_policy": policy}
    async with fleet(whole=True, both=both, prefill={"tp": tp}) as it:
        for pages, offset in itertools.product((1, 3, 8), (-1, 0, 1)):
            for start in ("fresh", "known", "known"):  # no hit, a partial one, a full one
                prompt = f"{start} {pages}" + "abcdefgh" * 8
                pair, whole = await it.both(*completion(prompt[: pages * PAGE + offset], max_tokens=5))
                assert essence(pair) == essence(whole), (start, pages, offset)
        await it.at_rest()


async def test_cached_tokens_are_prefills_hit_and_never_the_whole_prompt() -> None:
    async with fleet() as it:
        path, body = completion("0123456789abcdef", max_tokens=3)
        assert cached_tokens(await it.post(path, body)) == 0
        again = cached_tokens(await it.post(path, body))
        assert again == 12  # whole pages, and not the last one: its last token is computed again, for the logits
        streamed = await it.post(path, {**body, "stream": True, "stream_options": {"include_usage": True}})
        told = [event["usage"] for event in events(streamed) if event.get("usage")]
        assert [usage["prompt_tokens_details"]["cached_tokens"] for usage in told] == [again]
        longer = await it.post(*completion("0123456789abcdef" + "ghijkl", max_tokens=3))
        assert cached_tokens(longer) == 16
        other = await it.post(*completion("1123456789abcdef", max_tokens=3))
        assert cached_tokens(other) == 0
        await it.at_rest()
        assert it.prefill.pages(Page.CACHED) > 0


async def test_a_cancelled_prefill_leaves_nothing_in_the_cache_that_was_not_computed() -> None:
    async with fleet(whole=True) as it:
        it.prefill.engine.allow = 1
        talk = Talk(it.url, completion("x" * 100)[1])
        await until(lambda: it.prefill.engine.holds(computed=8))
        await talk.drop()
        await until(lambda: not it.prefill.group.jobs)
        it.prefill.let_go()
        await it.at_rest()
        pair, whole = await it.both(*completion("x" * 100))
        assert essence(pair) == essence(whole)
        await it.at_rest()


async def test_cached_pages_make_way_for_prompts_that_need_them() -> None:
    async with fleet(whole=True, model=spec(row_bytes=16 * 1024)) as it:  # 64 tokens
        for i in range(8):
            pair, whole = await it.both(*completion(f"{i}" * 40, max_tokens=4))
            assert essence(pair) == essence(whole)
        await it.at_rest()


# --- retracts -----------------------------------------------------------------------------------------------------

TIGHT = spec(row_bytes=8 * 1024)  # 128 tokens
GROWS = {"max_tokens": 60, "ignore_eos": True}


@pytest.mark.parametrize("tp", [1, 2])
async def test_requests_that_outgrow_the_pool_are_retracted_and_their_text_is_right(tp: int) -> None:
    async with fleet(whole=True, model=TIGHT, decode={"reserve_tokens": 4, "tp": tp}) as it:
        asked = [completion(f"{i} grows", **GROWS) for i in range(6)]
        pairs = await asyncio.gather(*(it.post(*one) for one in asked))
        wholes = await asyncio.gather(*(it.whole.post(*one) for one in asked))
        assert [essence(pair) for pair in pairs] == [essence(whole) for whole in wholes]
        counts = it.decode.shell.counts
        assert counts["retracted", ""] == counts["restored", ""] > 0
        await it.at_rest()
        assert it.decode.group.figures()["retracted_bytes"] == 0


async def test_a_client_that_leaves_while_its_request_is_retracted_takes_the_host_copy_with_it() -> None:
    async with fleet(model=TIGHT, decode={"reserve_tokens": 4}) as it:
        talks = [Talk(it.url, completion(f"{i} grows", max_tokens=100, ignore_eos=True)[1]) for i in range(4)]
        await until(lambda: it.decode.shell.counts["retracted", ""] > 0)
        for talk in talks:
            await talk.drop()
        await it.at_rest()
        assert it.decode.group.figures()["retracted_bytes"] == 0


# --- what is held back --------------------------------------------------------------------------------------------


async def quarantined(it: Fleet, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A room whose proof never comes: what decode says of it."""
    for landing in it.decode.shell.landings._landings.values():  # type: ignore[union-attr]
        monkeypatch.setattr(landing, "revoke", lambda grant: False)
    it.prefill.engine.allow = 1
    talk = Talk(it.url, completion("x" * 40)[1])
    await until(lambda: it.prefill.engine.holds(computed=8))
    await talk.drop()
    await until(lambda: not (it.decode.group.jobs or it.prefill.group.jobs))
    it.prefill.let_go()
    await until(lambda: it.decode.pages(Page.QUARANTINED) > 0)
    [told] = (await it.decode.get("/server_info")).json()["quarantined"]
    return dict(told)


async def test_a_quarantined_grant_is_named_with_its_holder_and_an_operator_can_release_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with fleet(decode={"drain_limit_s": 0.05}) as it:
        told = await quarantined(it, monkeypatch)
        assert told["pages"] == it.decode.pages(Page.QUARANTINED)
        assert told["instance"] == it.decode.shell.instance
        assert it.prefill.shell.instance in told["no_proof_from"][0]
        [leg] = (await it.decode.get(f"/requests/{told['room']}")).json()["legs"]
        [grant] = leg["grants"]
        assert (grant["grant"], grant["held_pages"]) == (told["grant"], {"quarantined": told["pages"]})
        assert grant["links"][0]["there"].startswith(it.prefill.shell.instance)
        wrong = {"instance": it.prefill.shell.instance, "grant": told["grant"]}
        assert (await it.decode.post("/release", wrong)).json() == {"released": 0}
        named = {"instance": told["instance"], "grant": told["grant"]}
        assert (await it.decode.post("/release", named)).json() == {"released": told["pages"]}
        assert (await it.decode.post("/release", named)).json() == {"released": 0}
        assert any("unproven" in alarm for alarm in it.decode.shell.alarms)
        await it.at_rest()


async def test_a_leg_names_its_grants_on_both_sides_with_links_and_transport() -> None:
    async with fleet(prefill={"tp": 2}, decode={"tp": 4}) as it:
        answer = await it.post(*completion())
        decode, prefill = [
            (await one.get(f"/requests/{answer.json()['id']}")).json()["legs"][0]["grants"][0]
            for one in (it.decode, it.prefill)
        ]
        assert decode["grant"] == prefill["grant"]
        assert decode["instance"] == prefill["instance"] == it.decode.shell.instance
        assert decode["pages"] == prefill["pages"] == 4
        for grant in (decode, prefill):
            assert [link["transport"] for link in grant["links"]] == ["shm"] * 4
        assert sum(link["page_bytes"] for link in decode["links"]) == it.decode.shell.model.page_bytes


async def test_peers_say_how_they_are() -> None:
    quick = {"beat_s": 0.02}
    async with fleet(both=quick) as it:
        it.prefill.engine.allow = 1
        talk = Talk(it.url, completion("x" * 40)[1])
        await until(lambda: it.prefill.engine.holds(computed=8))
        await until(lambda: any(peer["step_age_s"] > 0 for peer in it.decode.shell.peers()))
        [peer] = (await it.decode.get("/server_info")).json()["peers"]
        assert peer["instance"] == it.prefill.shell.instance
        it.prefill.let_go()
        assert texts(await talk.answer())
