"""Both legs of a request, as clients and workers see them."""

from __future__ import annotations

import asyncio
import json

import pytest

from .router_fakes import CHAT, FakeWorker, fleet, ok, refuse, sse, until


async def test_both_legs_get_the_clients_body_with_one_room_and_one_rid() -> None:
    async with fleet(prefill=ok, decode=ok) as it:
        answer = await it.post({"model": "m", "messages": [], "unknown_field": {"kept": [1]}, "max_tokens": 4})
        assert (answer.status, answer.json) == (200, {"text": "hello"})
        assert answer.headers["x-pd-mode"] == "pd"
        (left,), (right,) = it.prefill.seen, it.decode.seen
        assert left.body == right.body
        assert left.body["unknown_field"] == {"kept": [1]}
        assert left.body["bootstrap_host"] == "127.0.0.1"
        assert left.body["bootstrap_port"] == 8998
        assert 0 < left.room < 2**63
        assert left.rid == answer.headers["x-request-id"] + ".0.0"
        assert 0 < float(left.headers["x-request-timeout"]) <= 300
        await it.idle()


async def test_the_bytes_of_the_clients_body_pass_unchanged() -> None:
    async with fleet(prefill=ok, decode=ok) as it:
        await it.post(b'{ "model" : "m",\n "x": 1.50, "s": "\\u00e9" }')
        assert it.decode.seen[0].raw.startswith(b'{ "model" : "m",\n "x": 1.50, "s": "\\u00e9" ,"bootstrap_host"')


async def test_an_empty_object_is_still_json_for_the_workers() -> None:
    async with fleet(prefill=ok, decode=ok) as it:
        await it.post(b" { } ")
        assert "rid" in it.decode.seen[0].body


async def test_topology_fields_of_a_client_are_stripped_and_counted() -> None:
    async with fleet(prefill=ok, decode=ok) as it:
        topology = b'"bootstrap_room": 5, "bootstrap_host": "evil", "kv_transfer_params": {"a": 1}, "r\\u0069d": "mine"'
        await it.post(b'{%b, "k": 1}' % topology)
        body = it.decode.seen[0].body
        assert body["bootstrap_room"] != 5
        assert body["bootstrap_host"] == "127.0.0.1"
        assert "kv_transfer_params" not in body
        assert body["k"] == 1
        assert it.decode.seen[0].raw.count(b"bootstrap_room") == 1
        assert it.router.metrics.stripped == {
            "bootstrap_room": 1, "bootstrap_host": 1, "kv_transfer_params": 1, "rid": 1,
        }  # fmt: skip
        metrics = (await it.get("/metrics")).body
        assert b'pdplane_router_stripped_fields_total{field="bootstrap_room"} 1' in metrics


@pytest.mark.parametrize(
    ("path", "body", "samples"),
    [
        (CHAT, {"messages": [], "n": 3}, 3),
        ("/v1/completions", {"prompt": ["a", "b"]}, 2),
        ("/v1/completions", {"prompt": ["a", "b"], "n": 2}, 4),
        ("/v1/completions", {"prompt": [[1, 2], [3]]}, 2),
        ("/generate", {"input_ids": [[1], [2], [3]]}, 3),
        ("/generate", {"text": ["a", "b"], "sampling_params": {"n": 2}}, 4),
    ],
)
async def test_a_batch_has_one_room_and_one_rid_per_sample(path: str, body: dict[str, object], samples: int) -> None:
    async with fleet(prefill=ok, decode=ok) as it:
        answer = await it.post(body, path)
        seen = it.decode.seen[0].body
        assert len(set(seen["bootstrap_room"])) == samples
        assert seen["bootstrap_host"] == ["127.0.0.1"] * samples
        assert seen["bootstrap_port"] == [8998] * samples
        assert seen["rid"] == [f"{answer.headers['x-request-id']}.{i}.0" for i in range(samples)]
        assert it.prefill.seen[0].body == seen
        await it.idle()


@pytest.mark.parametrize(
    "body",
    [{"n": 0}, {"n": -1}, {"n": "2"}, {"n": True}, {"n": 129}, {"prompt": []}, {"prompt": [1, 2, 3]}, {"prompt": "a"}],
)
async def test_what_is_one_sample_or_a_mistake_stays_scalar(body: dict[str, object]) -> None:
    async with fleet(prefill=ok, decode=ok) as it:
        await it.post(body, "/v1/completions")
        assert isinstance(it.decode.seen[0].room, int)


async def test_too_many_samples_are_refused_before_any_leg() -> None:
    async with fleet(prefill=ok, decode=ok, max_samples=8) as it:
        answer = await it.post({"prompt": ["a"] * 5, "n": 2}, "/v1/completions")
        assert (answer.status, answer.error["code"]) == (400, "too_many_samples")
        assert not it.decode.seen
        await it.idle()


async def test_token_ids_over_a_workers_limit_are_refused_naming_limit_length_and_side() -> None:
    async with fleet(prefill=ok, decode=ok) as it:
        it.decode.info = {"limits": {"max_prompt_tokens": 4, "context_len": 8}}
        await until(lambda: it.router.pairing.decodes[0].limits.max_prompt_tokens == 4)
        assert (await it.post({"prompt": [1] * 4}, "/v1/completions")).status == 200
        answer = await it.post({"prompt": [1] * 5}, "/v1/completions")
        assert answer.status == 400
        assert "5 tokens" in answer.error["message"]
        assert "decode" in answer.error["message"]
        assert "hold 4" in answer.error["message"]
        answer = await it.post({"prompt": [[1], [1] * 9]}, "/v1/completions")
        assert (answer.error["code"], answer.error["param"]) == ("context_length_exceeded", "prompt[1]")
        assert len(it.prefill.seen) == 1
        await it.idle()


async def test_a_stream_passes_as_bytes_as_soon_as_decode_sends_it() -> None:
    async with fleet(prefill=ok) as it, it.client() as client:
        client.post(b'{"stream": true}')
        decode = await it.decode.next()
        decode.start()
        decode.chunk(b'data: {"a"')
        status, headers = await client.head()
        assert (status, headers["content-type"]) == (200, "text/event-stream")
        assert await client.chunk() == b'data: {"a"'
        decode.chunk(b":1}\n\ndata: \r\n0\r\n\r\n")
        assert await client.chunk() == b":1}\n\ndata: \r\n0\r\n\r\n"
        decode.finish()
        assert await client.chunk() == b""
        await it.idle()


async def test_a_stream_cut_at_any_byte_arrives_whole() -> None:
    whole = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    whole += b"5\r\ndata:\r\n4;x=y\r\n a\n\n\r\n0\r\n\r\n"
    async with fleet(prefill=ok) as it:
        for cut in range(1, len(whole)):
            async with it.client() as client:
                client.post(b"{}")
                decode = await it.decode.next()
                decode.send(whole[:cut])
                await asyncio.sleep(0)
                decode.send(whole[cut:])
                decode.end()
                assert (await client.read_raw(b"0\r\n\r\n")).endswith(b"5\r\ndata:\r\n4;x=y\r\n a\n\n\r\n0\r\n\r\n")
        await it.idle()


async def test_decodes_head_is_held_until_its_first_body_byte() -> None:
    async with fleet(2, 1, prefill=None) as it, it.client() as client:
        client.post(b"{}")
        decode = await it.decode.next()
        decode.start()  # a head alone
        first = it.prefills[0] if not it.prefills[0].asked.empty() else it.prefills[1]
        prefill = await first.next()
        prefill.fail(500)
        await asyncio.wait_for(decode.left.wait(), 10)
        again = await it.decode.next()  # nothing had reached the client: another attempt is still allowed
        other = it.prefills[1] if first is it.prefills[0] else it.prefills[0]
        (await other.next()).reply()
        again.reply(200, {"second": True})
        assert (await client.read()).json == {"second": True}
        await it.idle()


async def test_prefills_load_ends_with_prefills_leg_while_decode_runs_on() -> None:
    async with fleet() as it, it.client() as client:
        client.post(b'{"stream": true}')
        decode = await it.decode.next()
        prefill = await it.prefill.next()
        left, right = it.router.pairing.prefills[0], it.router.pairing.decodes[0]
        assert (left.load, right.load) == (1, 1)
        prefill.reply()
        await until(lambda: left.load == 0)
        assert right.load == 1
        sse(decode)
        assert b"[DONE]" in (await client.read()).body
        await it.idle()


async def test_a_hung_prefill_never_holds_back_a_finished_answer_and_is_ended_after_the_drain_limit() -> None:
    async with fleet(decode=ok, drain_s=0.01) as it:
        answer = await it.post({})
        assert answer.status == 200
        prefill = await it.prefill.next()
        await asyncio.wait_for(prefill.left.wait(), 10)
        assert (await it.prefill.aborted())["rid"] == prefill.rid
        await it.idle()


async def test_a_prefill_that_dies_after_decodes_first_byte_changes_nothing() -> None:
    async with fleet() as it, it.client() as client:
        client.post(b"{}")
        decode, prefill = await it.decode.next(), await it.prefill.next()
        decode.start()
        decode.chunk(b"data: x\n\n")
        await client.head()
        prefill.reset()
        await until(lambda: it.router.pairing.prefills[0].load == 0)
        decode.finish()
        assert await client.chunks() == b"data: x\n\n"
        await it.idle()


async def test_connections_to_workers_are_used_again() -> None:
    async with fleet(prefill=ok, decode=ok) as it:
        await it.post({})
        before = [leg for worker in it.router.pairing.workers for leg in worker.idle]
        for _ in range(5):
            assert (await it.post({})).status == 200
        assert [leg for worker in it.router.pairing.workers for leg in worker.idle] == before


async def test_an_aggregated_worker_serves_alone_and_the_answer_says_so() -> None:
    worker = FakeWorker("aggregated", ok)
    await worker.start()
    async with fleet(0, 0, ready=False, worker=(worker.url,)) as it:
        await until(lambda: it.router.pairing.ready)
        answer = await it.post({"messages": []})
        assert (answer.status, answer.headers["x-pd-mode"]) == (200, "aggregated")
        assert set(worker.seen[0].body) == {"messages", "rid"}
        await it.idle()
    await worker.stop()


async def test_a_workers_answer_passes_with_its_headers_but_not_its_connections() -> None:
    def tell(asked) -> None:  # type: ignore[no-untyped-def]
        asked.reply(200, {"a": 1}, "x-custom: kept\r\nkeep-alive: timeout=5\r\nx-request-id: theirs\r\n")

    async with fleet(prefill=ok, decode=tell) as it:
        answer = await it.post({})
        assert answer.headers["x-custom"] == "kept"
        assert "keep-alive" not in answer.headers
        assert answer.headers["x-request-id"].startswith("pd-")


async def test_a_4xx_of_both_legs_reaches_the_client_once_and_verbatim() -> None:
    body = {"error": {"message": "temperature must be at least 0", "code": "bad", "param": "temperature"}}
    async with fleet(prefill=lambda a: a.reply(400, body), decode=lambda a: a.reply(400, body)) as it:
        answer = await it.post({"temperature": -1})
        assert (answer.status, answer.json) == (400, body)
        assert len(it.prefill.seen) <= 1
        assert all(worker.failures == 0 for worker in it.router.pairing.workers)
        await it.idle()


async def test_a_record_tells_the_attempts_rooms_and_times() -> None:
    async with fleet(1, 2, prefill=ok, decode=ok) as it:
        it.decodes[0].behaviour = refuse(500)
        it.decodes[1].behaviour = refuse(500)
        answer = await it.post({}, headers="x-request-id: my-label\r\n")
        rid = answer.headers["x-request-id"]
        rooms = [asked.room for worker in it.decodes for asked in worker.seen]
        for key in (rid, f"{rid}.0.0", str(rooms[0]), "my-label"):
            record = (await it.get(f"/requests/{key}")).json
            assert record["request_id"] == rid
        assert record["label"] == "my-label"
        assert record["verdict"] == "boom"
        assert sorted(a["rooms"][0] for a in record["attempts"]) == sorted(rooms)
        assert len(set(rooms)) == 2
        assert json.dumps(record)
        assert (await it.get("/requests/nobody")).status == 404
