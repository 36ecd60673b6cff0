"""status, explain and chat before a fleet in this process."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import socket
from time import monotonic

import msgspec
import pytest

from pdplane.cli.main import main
from pdplane.cli.status import quarantine
from pdplane.core.errors import Cause
from pdplane.core.ids import Instance
from tests.worker.fleets import COMPLETIONS, HOST, Fleet, Talk, completion, fleet, until

BODY = completion()[1]


class Terminal:
    """Runs a command off the loop and keeps what it said."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys
        self.out = self.err = ""

    async def run(self, *argv: str) -> int:
        code = await asyncio.to_thread(main, argv)
        self.out, self.err = self._capsys.readouterr()
        assert "Traceback" not in self.err
        return code


@pytest.fixture
def terminal(capsys: pytest.CaptureFixture[str]) -> Terminal:
    return Terminal(capsys)


# --- status -------------------------------------------------------------------------------------------------------


async def test_status_shows_every_worker_with_its_pages(terminal: Terminal) -> None:
    async with fleet() as it:
        it.decode.engine.allow = 2
        talk = Talk(it.url, {**BODY, "ignore_eos": True})
        await until(lambda: it.decode.engine.allow == 0)
        assert await terminal.run("status", "--url", it.url) == 0
        assert f"router {it.url}: ready" in terminal.out
        for one in it.members:
            assert one.url in terminal.out
            assert one.shell.instance in terminal.out
        assert "active" in terminal.out
        await talk.drop()
        await it.at_rest()
        assert await terminal.run("status", "--url", it.url, "--json") == 0
        told = json.loads(terminal.out)
        assert [worker["server_info"]["figures"]["jobs"] for worker in told["workers"]] == [0, 0]


async def test_status_shows_shape_policy_transports_and_load_by_rank(terminal: Terminal) -> None:
    async with fleet(prefill={"dp": 2}) as it:
        assert await terminal.run("status", "--url", it.url) == 0
        assert "load 0 (0+0 by dp rank)" in terminal.out
        assert "dp 2, tp 1, dialect rooms, policy early, transports shm, tcp" in terminal.out


async def test_status_shows_a_ban_with_its_time_left(terminal: Terminal) -> None:
    async with fleet(1, 2, router={"ban_after": 1, "ban_s": 60.0}) as it:
        ill = it.router.pairing.decodes[0]
        it.router.blame(ill, Cause("x", "it broke", 500), monotonic())
        assert await terminal.run("status", "--url", it.url) == 0
        [line] = [line for line in terminal.out.splitlines() if "others preferred" in line]
        assert re.search(r"for (59|60)\.\d s more: 1 failures in a row, the last: it broke", line)
        ill.ban.expire(ill.ban.until)
        assert await terminal.run("status", "--url", it.url) == 0
        assert "others preferred until the next request tests it" in terminal.out


async def test_status_shows_whom_a_worker_in_service_does_not_fit(terminal: Terminal) -> None:
    async with fleet(1, 2, router={"health_interval_s": 60.0}) as it:
        worker = it.router.pairing.decodes[0]
        assert worker.stamp is not None
        worker.stamp = msgspec.structs.replace(worker.stamp, page_size=32)
        it.router.pairing.refresh()
        assert await terminal.run("status", "--url", it.url) == 0
        assert f"does not fit {worker.url}: page_size differs: prefill has 4, decode has 32" in terminal.out


async def test_status_shows_whose_session_a_worker_refused_with_the_remedy(terminal: Terminal) -> None:
    async with fleet() as it:
        cause = Cause("incompatible", "weights differs: one has 'a', the other 'b'; load the same weights", 503)
        it.decode.shell.refusals.note(Instance("p-9"), cause, asyncio.get_running_loop().time())
        it.prefill.shell.refusals.note(Instance(""), cause, asyncio.get_running_loop().time())
        assert await terminal.run("status", "--url", it.url) == 0
        for peer in ("p-9", "a stranger"):
            assert re.search(rf"REFUSED {peer} \d+ s ago: weights differs.*; load the same weights", terminal.out)


def test_pages_in_quarantine_name_their_holder_and_the_verb_that_frees_them() -> None:
    one = {"instance": "d1", "owner": "grant 7", "pages": 3, "grant": 7, "rid": "r.0.0", "room": 5}
    told = quarantine(one | {"no_proof_from": ["p1/dp0cp0tp0pp0"]}, "http://h:1")
    assert told.startswith("QUARANTINE 3 pages of rid r.0.0, room 5, grant 7, no proof from p1/dp0cp0tp0pp0; ")
    assert "`pdplane release http://h:1 --instance d1 --grant 7`" in told


def test_pages_in_quarantine_that_no_grant_can_free_name_no_verb() -> None:
    told = quarantine({"instance": "p1", "owner": "r.0.0", "pages": 2, "room": None}, "http://h:1")
    assert told == "QUARANTINE 2 pages of r.0.0"


async def test_status_says_why_a_fleet_is_not_ready(terminal: Terminal) -> None:
    async with fleet() as it:
        it.decode.shell.drain("it is stopping")
        await until(lambda: not it.router.pairing.ready)
        assert await terminal.run("status", "--url", it.url) == 1
        assert f"not ready: no decode is ready: {it.decode.url}" in terminal.out
        assert "OUT:" in terminal.out


async def test_status_of_a_worker_says_to_name_the_router(terminal: Terminal) -> None:
    async with fleet() as it:
        assert await terminal.run("status", "--url", it.decode.url) == 2
        assert "--url" in terminal.err


@pytest.mark.parametrize("argv", [["status"], ["explain", "x"], ["chat", "hello"]], ids=lambda argv: argv[0])
async def test_where_nobody_answers_the_address_and_the_remedy_are_said(argv: list[str], terminal: Terminal) -> None:
    with contextlib.closing(socket.socket()) as nobody:
        nobody.bind((HOST, 0))
        url = f"http://{HOST}:{nobody.getsockname()[1]}"
        assert await terminal.run(*argv, "--url", url) == 2
    assert url in terminal.err
    assert "pdplane up" in terminal.err


@pytest.mark.parametrize("url", ["localhost", "ftp://127.0.0.1", "http://127.0.0.1:99999", ""])
async def test_a_bad_url_is_a_message(url: str, terminal: Terminal) -> None:
    assert await terminal.run("status", "--url", url) == 2
    assert "--url" in terminal.err


# --- explain ------------------------------------------------------------------------------------------------------


async def explained(it: Fleet, terminal: Terminal, key: str) -> list[str]:
    assert await terminal.run("explain", key, "--url", it.url) == 0, terminal.err
    return terminal.out.splitlines()


async def test_explain_tells_both_sides_in_the_order_in_which_it_happened(terminal: Terminal) -> None:
    async with fleet() as it:
        answer = (await it.post(COMPLETIONS, BODY)).json()
        await it.at_rest()
        lines = await explained(it, terminal, answer["id"])
        assert lines[0].startswith(f"request {answer['id']}  /v1/completions  verdict ok  status 200")
        assert it.prefill.url in lines[1]
        assert it.decode.url in lines[1]
        steps = [line.split(None, 1) for line in lines if line[:10].strip().replace(".", "").replace("-", "").isdigit()]
        assert [float(at) for at, _ in steps] == sorted(float(at) for at, _ in steps)
        story = [" ".join(what.split()) for _, what in steps]
        for step in (
            "router request received",
            "router both legs sent",
            "prefill Queued",
            "decode Granted",
            "prefill Sent",
            "decode Success",
            "router first byte to the client",
            "router verdict ok",
        ):
            assert any(line == step or line.startswith(f"{step} (") for line in story), step
        assert sum("holds nothing" in line for line in lines) == 2


async def test_explain_names_ranks_grants_and_links(terminal: Terminal) -> None:
    async with fleet(prefill={"dp": 2}) as it:
        answer = (await it.post(COMPLETIONS, BODY)).json()
        await it.at_rest()
        lines = await explained(it, terminal, answer["id"])
        [attempt] = (await it.get(f"/requests/{answer['id']}"))["attempts"]
        assert f"prefill {it.prefill.url} (dp rank {attempt['rooms'][0] % 2})" in lines[1]
        granted = [line for line in lines if line.startswith("  grant ")]
        assert len(granted) == 2
        assert all(f"of instance {it.decode.group.shells[0].instance}" in line for line in granted)
        assert all(line.endswith("none held here") for line in granted)
        assert any(line.startswith("    link ") and " by shm" in line for line in lines)


async def test_explain_shows_a_prefix_hit_and_whose_end_a_legs_end_is(terminal: Terminal) -> None:
    async with fleet() as it:
        for tokens in (0, 12):
            answer = (await it.post(COMPLETIONS, BODY)).json()
            await it.at_rest()
            lines = await explained(it, terminal, answer["id"])
            hits = [line.split("cached: ")[1] for line in lines if "prefill    cached: " in line]
            assert hits == [f"{tokens} of 16 prompt tokens were in the prefix cache"] * bool(tokens)
            [end] = [line for line in lines if "prefill    finished" in line]
            assert "how the request ended is decode's to say" in end


async def test_explain_finds_a_request_by_rid_room_and_label(terminal: Terminal) -> None:
    async with fleet() as it:
        answer = (await it.post(COMPLETIONS, {**BODY, "rid": "my own/label"})).json()
        [attempt] = (await it.get(f"/requests/{answer['id']}"))["attempts"]
        for key in (attempt["rids"][0], str(attempt["rooms"][0]), "my own/label"):
            lines = await explained(it, terminal, key)
            assert lines[0].startswith(f"request {answer['id']} ")
        assert "label my own/label" in lines


async def test_explain_tells_who_holds_what_of_a_request_that_runs(terminal: Terminal) -> None:
    async with fleet() as it:
        it.decode.engine.allow = 2
        talk = Talk(it.url, {**BODY, "ignore_eos": True, "rid": "running"})
        await until(lambda: it.decode.engine.allow == 0)
        lines = await explained(it, terminal, "running")
        assert "verdict running" in lines[0]
        assert any(line.startswith("decode") and "pages active" in line for line in lines)
        await talk.drop()
        await it.at_rest()


async def test_explain_tells_the_cause_of_a_failure_and_every_attempt(terminal: Terminal) -> None:
    async with fleet(2, 2, router={"health_interval_s": 60.0}) as it:
        for one in it.prefills:
            one.shell.node.draining = "the test says so"  # the router does not hear of it
        answer = await it.post(COMPLETIONS, {**BODY, "rid": "failed"})
        assert answer.status_code == 503
        lines = await explained(it, terminal, "failed")
        assert any(line.startswith("cause ") and "the test says so" in line for line in lines)
        assert sum(line.startswith("attempt ") for line in lines) == 2


async def test_explain_says_where_a_worker_does_not_answer_any_more(terminal: Terminal) -> None:
    async with fleet() as it:
        answer = (await it.post(COMPLETIONS, BODY)).json()
        await it.at_rest()
        await it.decode.leave()
        lines = await explained(it, terminal, answer["id"])
        assert any(line.startswith("decode") and "nobody answers" in line for line in lines)


async def test_explain_of_an_unknown_request_says_what_can_be_given(terminal: Terminal) -> None:
    async with fleet() as it:
        assert await terminal.run("explain", "nothing", "--url", it.url) == 2
        assert "'nothing'" in terminal.err
        assert "a room or a label" in terminal.err


async def test_explain_at_a_worker_says_to_name_the_router(terminal: Terminal) -> None:
    async with fleet() as it:
        answer = (await it.post(COMPLETIONS, BODY)).json()
        assert await terminal.run("explain", answer["id"], "--url", it.prefill.url) == 2
        assert "router" in terminal.err


async def test_explain_as_json_holds_the_records_of_all_three(terminal: Terminal) -> None:
    async with fleet() as it:
        answer = (await it.post(COMPLETIONS, BODY)).json()
        assert await terminal.run("explain", answer["id"], "--url", it.url, "--json") == 0
        told = json.loads(terminal.out)
        assert told["router"]["request_id"] == answer["id"]
        assert [leg["record"]["role"] for leg in told["legs"]] == ["prefill", "decode"]


# --- chat ---------------------------------------------------------------------------------------------------------


async def test_chat_says_an_answer_once(terminal: Terminal) -> None:
    async with fleet() as it:
        asked = {"messages": [{"role": "user", "content": "hello you"}], "temperature": 0, "max_tokens": 12}
        expected = (await it.post("/v1/chat/completions", asked)).json()["choices"][0]["message"]["content"]
        assert await terminal.run("chat", "hello", "you", "--url", it.url, "--max-tokens", "12") == 0
        assert terminal.out == expected + "\n"


async def test_chat_goes_on_with_what_was_said(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = iter(["hello", "and then?", ""])
    monkeypatch.setattr("builtins.input", lambda prompt: next(asked))
    async with fleet() as it:
        assert await terminal.run("chat", "--url", it.url, "--max-tokens", "5") == 0
        first, second = [record.prompt_tokens for record in it.decode.shell.jobs.records._records.values()]
        assert second > first + len("and then?")


async def test_chat_tells_an_error_and_ends_with_1(terminal: Terminal) -> None:
    async with fleet() as it:
        assert await terminal.run("chat", "x" * 1000, "--url", it.url) == 1
        assert "512" in terminal.err


async def test_chat_before_a_fleet_that_is_not_ready_says_why(terminal: Terminal) -> None:
    async with fleet() as it:
        it.decode.shell.drain("it is stopping")
        await until(lambda: not it.router.pairing.ready)
        assert await terminal.run("chat", "hello", "--url", it.url) == 2
        assert "no decode is ready" in terminal.err
