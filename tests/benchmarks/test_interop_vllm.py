"""What is pure in the comparison with vLLM: what a client was told, the gate, the tables, the cases."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from added_time import Medians
from asked import Choice, Told, ask, told
from client import Call
from deaths import has_code, other_engine
from fleet import Process
from gate import Gate
from idle import errors_logged
from rows import Row, lines, lines_of
from sides import total
from texts import Case, difference, edges

COMPLETION = "completions"
ANSWER = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"


def _answered(choices: dict[int, Choice], **more: Any) -> Told:
    usual: dict[str, Any] = {"ids": ("", ""), "status": 200, "error": "", "usage": {}, "headers": {}}
    usual |= {"first_text_s": 0, "total_s": 0}
    return Told(choices=choices, **{**usual, **more})


# --- what a client was told ---------------------------------------------------------------------------------------


def test_events_of_two_choices_are_put_together_by_index() -> None:
    call = Call("", "", {}, status=200, done=True)
    call.events = [
        {"choices": [{"index": 1, "text": "b", "token_ids": [2], "finish_reason": None}]},
        {"choices": [{"index": 0, "text": "a", "token_ids": [1], "finish_reason": None}]},
        {"choices": [{"index": 1, "text": "d", "token_ids": [4], "finish_reason": "stop"}]},
        {"choices": [], "usage": {"prompt_tokens": 3}},
    ]
    answer = told(call)
    assert answer.choices == {0: Choice("a", (1,), ""), 1: Choice("bd", (2, 4), "stop")}
    assert answer.usage == {"prompt_tokens": 3}
    assert not answer.error


def test_a_chat_answer_is_read_from_its_message() -> None:
    body = {"choices": [{"index": 0, "message": {"role": "assistant", "content": "hi"}, "finish_reason": "stop"}]}
    assert told(Call("", "", {}, status=200, body=json.dumps(body).encode())).choices == {0: Choice("hi", (), "stop")}


def test_a_stream_without_its_end_is_an_error() -> None:
    call = Call("", "", {}, status=200, events=[{"choices": [{"index": 0, "text": "a"}]}])
    assert told(call).error == "the stream ended without [DONE]"


def test_an_error_is_told_with_its_code() -> None:
    body = json.dumps({"error": {"code": "spent", "message": "somebody had it"}}).encode()
    assert str(told(Call("", "", {}, status=409, body=body))) == "409 spent: somebody had it"


async def test_nobody_listening_is_an_answer_too() -> None:
    async with _server() as (port, _):
        pass
    assert (await ask(f"http://127.0.0.1:{port}", COMPLETION, {})).error.startswith("ConnectionRefusedError")


# --- what differs -------------------------------------------------------------------------------------------------

CASE = Case("one", COMPLETION, {}, samples=1)


def test_alike_means_text_tokens_end_and_usage() -> None:
    one = {0: Choice("a", (1,), "stop")}
    assert difference(CASE, _answered(one), _answered(one)) == ""
    assert difference(CASE, _answered(one), _answered({0: Choice("a", (2,), "stop")}))
    assert difference(CASE, _answered(one), _answered({0: Choice("a", (1,), "length")}))
    assert difference(CASE, _answered(one), _answered(one, usage={"prompt_tokens": 2})) == (
        "usage [2, None] instead of [None, None]"
    )


def test_an_answer_that_decode_computed_alone_is_a_difference() -> None:
    one = {0: Choice("a", (1,), "stop")}
    alone = _answered(one, headers={"x-pd-mode": "decode-only"})
    assert difference(CASE, _answered(one), alone) == "served decode-only, not by the pair"


def test_a_single_server_that_tells_too_little_proves_nothing() -> None:
    assert "the single server itself" in difference(CASE, _answered({}), _answered({}))
    assert "the single server itself" in difference(CASE, _answered({}, error="x"), _answered({}, error="x"))


def test_prompts_lie_on_both_sides_of_block_edges() -> None:
    assert {31, 32, 33, 63, 64, 65} <= set(edges(32))


# --- the gate -----------------------------------------------------------------------------------------------------


class _Heard:
    """What the server behind a gate heard, and who has left it."""

    def __init__(self) -> None:
        self.requests: list[bytes] = []
        self.left = asyncio.Event()


@contextlib.asynccontextmanager
async def _server(body: bytes = b'{"choices": []}') -> AsyncIterator[tuple[int, _Heard]]:
    heard = _Heard()
    served: list[asyncio.Task[None]] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            heard.requests.append(data)
            writer.write(ANSWER % (len(body), body))
        heard.left.set()
        writer.close()
        await writer.wait_closed()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        served.append(asyncio.create_task(serve(reader, writer)))

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1], heard
    await asyncio.gather(*served)


async def test_an_open_gate_passes_both_ways_and_tells_of_generations() -> None:
    async with _server() as (port, heard), Gate(port).open() as gate:
        answer = await ask(gate.url, COMPLETION, {"prompt": "a"})
        assert (answer.status, len(heard.requests)) == (200, 1)
        assert gate.asked.is_set()
        assert gate.answered.is_set()


async def test_a_look_is_no_generation() -> None:
    async with _server() as (port, _), Gate(port).open() as gate:
        gate.reset(hold_requests=True, hold_answers=True)
        reader, writer = await asyncio.open_connection("127.0.0.1", int(gate.url.rsplit(":", 1)[1]))
        writer.write(b"GET /health HTTP/1.1\r\n\r\n")
        assert (await reader.read(65536)).startswith(b"HTTP/1.1 200")
        assert not gate.asked.is_set()
        writer.close()
        await writer.wait_closed()


async def test_a_held_request_never_reaches_the_server() -> None:
    async with _server() as (port, heard), Gate(port).open() as gate:
        gate.reset(hold_requests=True)
        call = Call(gate.url, "/v1/completions", {})
        await call.send()
        await gate.asked.wait()
        call.close()
        await heard.left.wait()
        assert heard.requests == []


async def test_a_held_answer_is_known_and_its_client_s_leaving_passed_on() -> None:
    async with _server() as (port, heard), Gate(port).open() as gate:
        gate.reset(hold_answers=True)
        call = Call(gate.url, "/v1/completions", {})
        await call.send()
        await gate.answered.wait()
        call.close()
        await heard.left.wait()
        assert call.status == 0


async def test_a_lying_gate_changes_the_answer_only() -> None:
    async with _server(b'{"id": "aa"}') as (port, heard), Gate(port).open() as gate:
        gate.reset(rewrite=lambda data: data.replace(b"aa", b"bb"))
        call = Call(gate.url, "/v1/completions", {"prompt": "aa"})
        await call.send()
        await call.read_all()
        assert call.body == b'{"id": "bb"}'
        assert b"aa" in heard.requests[0]


# --- tables and figures -------------------------------------------------------------------------------------------


def test_a_row_wraps_within_its_columns() -> None:
    shown = lines(Row("tried", "wanted " * 12, "got", False), "!!")
    assert shown[0].startswith("!! tried")
    assert len(shown) > 1
    assert all(len(line) < 165 for line in shown)


@pytest.mark.parametrize(("labels", "found"), [("", 7.0), ('role="a"', 3.0), ('role="c"', 0.0)])
def test_a_metric_is_summed_over_the_samples_that_are_meant(labels: str, found: float) -> None:
    text = 'x_total{role="a"} 1.0\nx_total{role="a",n="2"} 2.0\nx_total{role="b"} 4\nx_total_created{role="a"} 9.0'
    assert total(text, "x_total", labels) == found


def test_of_fewer_cells_than_columns_the_last_stay_empty() -> None:
    assert lines_of(("a", "b"), (4, 4, 4)) == ["a   b"]


def test_what_is_added_is_the_median_of_differences_not_the_difference_of_medians() -> None:
    medians = Medians.of([1.0, 5.0, 9.0], [2.0, 5.5, 20.0])
    assert (medians.alone_s, medians.pair_s, medians.added_s) == (5.0, 5.5, 1.0)


def test_a_log_s_errors_are_told_with_the_process_that_wrote_them(tmp_path: Path) -> None:
    log = tmp_path / "decode.log"
    log.write_text("07:00 WARNING peer gone\n07:01 ERROR boom\nTraceback (most recent call last):\n")
    assert errors_logged([Process("decode 0", [], "", log)]) == [
        "decode 0 logged: 07:01 ERROR boom",
        "decode 0 logged: Traceback (most recent call last):",
    ]


# --- what an error says ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "typed"),
    [("kv_load_failed: it could not", True), ("500: Internal server error", False), ("None: x", False)],
)
def test_a_status_in_the_place_of_a_code_is_no_code(error: str, typed: bool) -> None:
    assert has_code(_answered({}, status=500, error=error)) is typed


def test_another_engine_s_id_is_as_long_and_not_the_same() -> None:
    for engine in ("608eca6f-bf50", "00"):
        assert len(other_engine(engine)) == len(engine)
        assert other_engine(engine) != engine
