"""The router's parts by themselves: addresses, bodies, rooms, policies, the outbox."""

from __future__ import annotations

import asyncio
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdplane.core.errors import Refused
from pdplane.observe.prometheus import Histogram
from pdplane.router.body import read_body
from pdplane.router.config import RouterConfig, parse_address
from pdplane.router.front import FrontConnection
from pdplane.router.legs.rooms import mint_room, mint_rooms
from pdplane.router.outbox import Outbox
from pdplane.router.policies import LeastLoad, RoundRobin
from pdplane.router.records import Records, RequestRecord
from pdplane.router.routing import Router
from pdplane.router.worker import Worker
from pdplane.settings import BadSetting, effective, load


@pytest.mark.parametrize(
    ("text", "url", "bootstrap"),
    [
        ("http://10.0.0.1:30000", "http://10.0.0.1:30000", None),
        ("http://10.0.0.1:30000/@8998", "http://10.0.0.1:30000", None),
        ("10.0.0.1:30000@8998", "http://10.0.0.1:30000", 8998),
        ("http://host/", "http://host:80", None),
        ("http://[::1]:30000@9000", "http://[::1]:30000", 9000),
    ],
)
def test_a_workers_address_is_read(text: str, url: str, bootstrap: int | None) -> None:
    address = parse_address(text)
    assert address.url == url
    assert address.bootstrap_port == (8998 if text.endswith("/@8998") else bootstrap)


@pytest.mark.parametrize("text", ["", "https://h:1", "http://h:port", "http://h:1@x", "http://h:1@0", "http://:1"])
def test_an_address_that_is_none_is_named(text: str) -> None:
    with pytest.raises(BadSetting, match="write http://HOST:PORT"):
        parse_address(text)


def test_settings_are_checked_and_secrets_stay_hidden() -> None:
    with pytest.raises(BadSetting, match="retries"):
        RouterConfig(retries=-1)
    with pytest.raises(BadSetting, match="policy"):
        load(RouterConfig, {"policy": "dice"}, {})
    assert "secret-word" not in effective(RouterConfig(api_key="secret-word"))
    assert load(RouterConfig, {}, {"PDPLANE_ROUTER_PREFILL": "a:1,b:2"}).prefill == ("a:1", "b:2")


@given(st.text(), st.integers(0, 20))
def test_any_object_keeps_its_bytes(text: str, spaces: int) -> None:
    import msgspec

    raw = msgspec.json.encode({"text": text}) + b" " * spaces
    prefix = read_body(raw).prefix
    assert prefix == raw[: raw.rindex(b"}")] + b","
    assert msgspec.json.decode(prefix + b'"rid":"r"}') == {"text": text, "rid": "r"}


@pytest.mark.parametrize("raw", [b"{}", b"{ }", b" {\n} "])
def test_an_empty_object_gets_no_comma(raw: bytes) -> None:
    assert not read_body(raw).prefix.rstrip().endswith(b",")


def test_nested_topology_is_not_the_routers_business() -> None:
    body = read_body(b'{"messages": [{"rid": 1, "bootstrap_room": 2}]}')
    assert body.stripped == ()


def test_a_body_of_topology_alone_is_empty_after_stripping() -> None:
    body = read_body(b'{"rid": "a", "bootstrap_room": 1}')
    assert (body.prefix, body.label, set(body.stripped)) == (b"{", "a", {"rid", "bootstrap_room"})


def test_token_ids_are_counted() -> None:
    assert read_body(b'{"prompt": [1, 2, 3]}').prompt_tokens == 3
    assert read_body(b'{"prompt": [[1, 2], [1, 2, 3, 4]]}').prompt_tokens == 4
    assert read_body(b'{"input_ids": [1]}').prompt_tokens == 1
    assert read_body(b'{"prompt": "a, b, c"}').prompt_tokens == 0


def test_too_many_samples_name_the_limit() -> None:
    with pytest.raises(Refused, match="limit of 4"):
        read_body(b'{"prompt": ["a", "b", "c"], "n": 2}', 4)


def test_a_room_is_never_zero() -> None:
    class Zero(random.Random):
        def getrandbits(self, k: int) -> int:
            return 0

    assert mint_room(Zero()) > 0
    rooms = mint_rooms(500)
    assert len(set(rooms)) == 500
    assert all(0 < room < 2**63 for room in rooms)


def workers(*loads: int) -> list[Worker]:
    made = [Worker(parse_address(f"http://w{i}:1"), "decode") for i in range(len(loads))]
    for worker, count in zip(made, loads, strict=True):
        worker.load = count
    return made


def test_least_load_picks_the_least_and_turns_among_equals() -> None:
    policy = LeastLoad()
    assert policy.pick(workers(3, 1, 2), ()).url == "http://w1:1"  # type: ignore[union-attr]
    equal = workers(0, 0, 0)
    assert len({policy.pick(equal, ()) for _ in range(3)}) == 3


def test_round_robin_takes_turns_whatever_the_load() -> None:
    policy, three = RoundRobin(), workers(9, 0, 0)
    picked = [policy.pick(three, ()) for _ in range(6)]
    assert picked[:3] == picked[3:]
    assert len(set(picked)) == 3


@pytest.mark.parametrize("policy", [LeastLoad(), RoundRobin()])
def test_policies_respect_exclusion_and_prefer_those_not_avoided(policy: LeastLoad | RoundRobin) -> None:
    one, two = workers(0, 5)
    assert policy.pick([one, two], {one.url}) is two
    one.avoid = "busy"
    assert {policy.pick([one, two], ()) for _ in range(4)} == {two}
    assert policy.pick([one, two], {two.url}) is one
    assert policy.pick([one, two], {one.url, two.url}) is None
    assert policy.pick([], ()) is None


def test_a_load_below_zero_is_a_bug() -> None:
    (worker,) = workers(0)
    with pytest.raises(AssertionError, match="below zero"):
        worker.let_go(1)


def test_the_ring_of_records_forgets_the_oldest() -> None:
    records = Records(2)
    for number in range(3):
        records.add(RequestRecord(number, f"r{number}", "/", 1.0, 1.0))
    assert records.find("r0") is None
    assert records.find("r2.0.1").request_id == "r2"  # type: ignore[union-attr]


def test_a_histogram_counts_by_upper_edge() -> None:
    histogram = Histogram()
    for seconds in (0.001, 0.0011, 400.0):
        histogram.observe(seconds)
    lines = list(histogram.lines("x", "y"))
    assert 'x_bucket{le="0.001"} 1' in lines
    assert 'x_bucket{le="0.0025"} 2' in lines
    assert 'x_bucket{le="300.0"} 2' in lines
    assert lines[-1] == "x_count 3"


class Wire:
    """A connection that remembers its writes."""

    def __init__(self) -> None:
        self.written: list[bytes] = []
        self.transport = self  # type: ignore[assignment]

    def write(self, data: bytes) -> None:
        self.written.append(data)


class Pipe(asyncio.Transport):
    """A transport that is only looked at."""

    def __init__(self) -> None:
        self.reading = True
        self.written = b""

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written += bytes(data)

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True


async def test_a_leg_paused_by_a_slow_client_reads_again_once_it_is_back_in_its_pool() -> None:
    router = Router(RouterConfig(prefill=("p:1",), decode=("d:1",)), asyncio.get_running_loop())
    legs = []
    for worker in router.pairing.workers:
        worker.reason = ""
        leg = router.leg_class(worker)(worker, router.outbox)
        leg.connection_made(Pipe())
        worker.idle.append(leg)
        legs.append(leg)
    router.pairing.refresh()
    front = FrontConnection(router)
    front.connection_made(Pipe())
    front.pause_writing()
    front.data_received(b"POST /generate HTTP/1.1\r\ncontent-length: 2\r\n\r\n{}")
    head = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n"
    legs[1].data_received(head + b"o")
    assert not legs[1].transport.reading  # type: ignore[union-attr]
    legs[1].data_received(b"k")
    assert legs[1].transport.reading  # type: ignore[union-attr]
    assert legs[1] in router.pairing.decodes[0].idle
    legs[0].data_received(head + b"ok")
    router.outbox.flush()
    assert front.transport.written.endswith(b"\r\n\r\nok")  # type: ignore[union-attr]
    assert not router.active
    assert not router.draining


async def test_the_outbox_writes_once_per_turn_and_in_order() -> None:
    outbox, one, two = Outbox(asyncio.get_running_loop()), Wire(), Wire()
    for part in (b"a", b"b", b"c"):
        outbox.write(one, part)  # type: ignore[arg-type]
        outbox.write(two, part)  # type: ignore[arg-type]
    outbox.flush_one(two)  # type: ignore[arg-type]
    assert (one.written, two.written) == ([], [b"abc"])
    await asyncio.sleep(0)
    assert (one.written, two.written) == ([b"abc"], [b"abc"])
    outbox.write(one, b"never")  # type: ignore[arg-type]
    assert outbox.drop(one)  # type: ignore[arg-type]
    assert not outbox.drop(one)  # type: ignore[arg-type]
    await asyncio.sleep(0)
    assert one.written == [b"abc"]
