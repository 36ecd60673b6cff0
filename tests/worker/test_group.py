"""One door before several dp groups: whose request is whose, and what the worker says of itself as a whole."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from pdplane.core.errors import Refused
from pdplane.core.ids import Rid, Room
from pdplane.settings import BadSetting
from pdplane.worker import kinds
from pdplane.worker.config import WorkerConfig
from pdplane.worker.engine import Sampling
from pdplane.worker.group import PrefillGroup
from pdplane.worker.kinds import usable
from pdplane.worker.prompt import prompt_id
from pdplane.worker.server import engines_of, make_pools
from pdplane.worker.service import Generation

from .fake_engine import RuleEngine, spec
from .fleets import COMPLETIONS, Member, Talk, completion, member, until

numbers = itertools.count(1)


def generation(**named: Any) -> Generation:
    rid = Rid(f"r{next(numbers)}")
    given = {"prompt": [1, 2, 3], "sampling": Sampling(max_tokens=2), "bootstrap_host": "127.0.0.1", **named}
    return Generation(rid=rid, request_id=rid, prompt_id=prompt_id(given["prompt"]), **given)


def jobs(one: Member) -> list[int]:
    return [len(shell.jobs) for shell in one.shells]


# --- whose request it is ------------------------------------------------------------------------------------------


async def test_a_request_goes_to_the_least_loaded_group() -> None:
    async with member("aggregated", dp=3) as one:
        for engine in one.engines:
            engine.allow = 0
        one.group.submit([generation() for _ in range(7)])
        assert jobs(one) == [3, 2, 2]
        one.group.submit([generation(dp_rank=2)])
        assert jobs(one) == [3, 2, 3]
        one.group.submit([generation()])
        assert jobs(one) == [3, 3, 3]


async def test_a_prefill_follows_the_rooms_number() -> None:
    async with member("prefill", dp=3) as one:
        one.group.submit([generation(room=Room(room)) for room in (3, 6, 9, 4, 5)])
        assert jobs(one) == [3, 1, 1]
        with pytest.raises(Refused, match=r"rank 1 contradicts bootstrap_room 5.*is 2"):
            one.group.submit([generation(room=Room(5), dp_rank=1)])
        assert jobs(one) == [3, 1, 1]


async def test_a_prefill_that_goes_by_load_tells_the_registry_who_has_a_room() -> None:
    async with member("prefill", dp=2, load_balance_method="total_requests") as one:
        told: list[tuple[int, int]] = []
        assert isinstance(one.group, PrefillGroup)
        one.group.tell_rank = lambda room, dp: told.append((room, dp))
        one.group.submit([generation(room=Room(room)) for room in (2, 4, 6)])
        one.group.submit([generation(room=Room(8), dp_rank=0)])
        assert told == [(2, 0), (4, 1), (6, 0), (8, 0)]


@pytest.mark.parametrize("role", ["prefill", "decode", "aggregated"])
@pytest.mark.parametrize("rank", [-1, 2])
async def test_a_rank_that_is_not_there_is_refused_before_anything_is_taken(role: str, rank: int) -> None:
    async with member(role, dp=2, load_balance_method="total_requests") as one:
        rooms = (generation(room=Room(1)), generation(room=Room(2), dp_rank=rank))
        with pytest.raises(Refused, match=f"rank {rank} is not here.* has 2"):
            one.group.submit(rooms)
        assert jobs(one) == [0, 0]


async def test_one_refusal_takes_the_whole_batch_back_from_every_group() -> None:
    async with member("aggregated", dp=2) as one:
        for engine in one.engines:
            engine.allow = 0
        batch = [generation(), generation(), generation(prompt=[1] * 10_000)]
        with pytest.raises(Refused):
            one.group.submit(batch)
        assert jobs(one) == [0, 0]
        one.let_go()
        await until(lambda: one.idle)


@pytest.mark.parametrize("role", ["prefill", "decode", "aggregated"])
async def test_a_rid_in_use_is_refused_in_whichever_group_it_is(role: str) -> None:
    async with member(role, dp=2) as one:
        for engine in one.engines:
            engine.allow = 0
        [first, second] = [generation(room=Room(2), dp_rank=0), generation(room=Room(3), dp_rank=1)]
        one.group.submit([first])
        second.rid = first.rid
        with pytest.raises(Refused, match="is in use") as refused:
            one.group.submit([second])
        assert refused.value.cause.status == 409
        assert jobs(one) == [1, 0]
        one.let_go()


async def test_abort_finds_a_request_in_whichever_group_it_is() -> None:
    async with member("aggregated", dp=2) as one:
        for engine in one.engines:
            engine.allow = 0
        batch = [generation(), generation()]
        one.group.submit(batch)
        assert [one.group.abort(each.rid) for each in batch] == [1, 1]
        assert one.group.abort("nobody") == 0
        one.let_go()
        await until(lambda: one.idle)


# --- what it says of itself ---------------------------------------------------------------------------------------


async def test_server_info_names_shape_policy_transports_and_every_instance() -> None:
    settings = {"decode_allocation_policy": "prefill_complete", "transport": ("tcp",)}
    async with member("decode", dp=2, tp=4, **settings) as one:
        told = (await one.get("/server_info")).json()
        assert told["shape"] == {"dp": 2, "cp": 1, "tp": 4, "pp": 1}
        assert (told["dp_size"], told["tp_size"]) == (2, 4)
        assert (told["decode_allocation_policy"], told["transports"]) == ("prefill_complete", ["tcp"])
        assert told["instances"] == [f"{told['instance']}.0", f"{told['instance']}.1"]
        assert told["stamp"]["policy"] == "prefill_complete"
        assert told["draining"] == ""
        free = [shell.parts.pages for shell in one.shells]
        assert told["figures"]["pages"]["free"] == sum(free)
        assert [group["pages"]["free"] for group in told["figures"]["groups"]] == free


async def test_a_single_group_has_the_instance_of_its_process_and_no_detail() -> None:
    async with member("decode") as one:
        told = (await one.get("/server_info")).json()
        assert told["instances"] == [told["instance"]]
        assert "groups" not in told["figures"]
        assert "groups" not in (await one.get("/health")).json()


async def test_metrics_name_each_family_once_and_the_dp_rank_of_each_sample() -> None:
    async with member("aggregated", dp=2) as one:
        await one.post(COMPLETIONS, completion()[1])
        lines = (await one.get("/metrics")).text.splitlines()
        heads = [line for line in lines if line.startswith("# TYPE")]
        assert len(heads) == len(set(heads))
        for dp in "01":
            assert any(line.startswith("pdplane_pages{") and f'dp="{dp}"' in line for line in lines)
        assert [line for line in lines if line.startswith("pdplane_leg_seconds_count")] == [
            'pdplane_leg_seconds_count{dp="0"} 1',
            'pdplane_leg_seconds_count{dp="1"} 0',
        ]


async def test_a_worker_is_as_well_as_its_sickest_group() -> None:
    async with member("aggregated", dp=2) as one:
        assert one.group.health()[0]
        one.shells[1].broken = "the test says so"
        healthy, facts = one.group.health()
        assert not healthy
        assert facts["broken"] == "the test says so"
        assert [group["live"] for group in facts["groups"]] == [True, False]
        one.shells[1].broken = ""


async def test_a_request_of_several_groups_has_one_record() -> None:
    async with member("aggregated", dp=2) as one:
        for engine in one.engines:
            engine.allow = 0
        talk = Talk(one.url, {**completion(["a", "b"])[1], "rid": "mine"})
        await until(lambda: jobs(one) == [1, 1])
        told = (await one.get("/requests/mine")).json()
        assert told["instance"] == one.group.process
        assert {leg["instance"] for leg in told["legs"]} == {shell.instance for shell in one.shells}
        one.let_go()
        assert (await talk.answer()).status_code == 200


# --- what it is made of -------------------------------------------------------------------------------------------


def config(**settings: Any) -> WorkerConfig:
    return WorkerConfig(**{"pool_mb": 1, "page_size": 4, **settings})


@pytest.mark.parametrize(("heads", "tp", "empty"), [(4, 1, []), (4, 4, []), (3, 4, [0]), (1, 4, [0, 1, 2]), (3, 2, [])])
def test_the_memory_of_a_group_is_that_of_all_its_pools(heads: int, tp: int, empty: list[int]) -> None:
    model = spec(heads=heads, row_bytes=heads * 64)
    pools, pages = make_pools(config(tp=tp), model)
    assert [rank for rank, pool in enumerate(pools) if pool is None] == empty
    assert sum(pool.page_bytes for pool in pools if pool) == model.page_bytes
    assert pages == 1024 * 1024 // model.page_bytes
    assert {pool.pages for pool in pools if pool} == {pages}
    for pool in pools:
        if pool:
            pool.close()


def test_siblings_share_what_was_loaded() -> None:
    engine = RuleEngine()
    assert engines_of(engine, 3) == [engine, *engine.siblings]
    assert len(engine.siblings) == 2


def test_transports_are_a_list_of_preferences_each_once() -> None:
    assert config(transport=("tcp,shm", "tcp")).transports == ("tcp", "shm")
    assert config().transports == ("shm", "tcp")


def test_without_shared_memory_only_tcp_is_left_and_said_where_that_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    assert usable(config(transport=("shm_push", "tcp"))) == ("shm_push", "tcp")
    monkeypatch.setattr("pdplane.worker.kinds.host_identity", lambda: "")
    assert usable(config()) == ("tcp",)
    with pytest.raises(BadSetting, match="give tcp"):
        usable(config(transport=("shm",)))


def test_a_checksum_that_cannot_be_computed_is_a_setting_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdplane.transport.checksum.AVAILABLE", False)
    with pytest.raises(BadSetting, match="pip install"):
        usable(config(checksum=True))


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_who_leaves_loopback_has_a_secret_or_says_that_it_needs_none(role: str) -> None:
    with pytest.raises(BadSetting, match=r"--secret.*--allow-insecure"):
        config(role=role, advertise_host="10.0.0.1")
    for allowed in ({"secret": "s"}, {"allow_insecure": True}):
        assert config(role=role, advertise_host="10.0.0.1", **allowed).peer_host == "10.0.0.1"


@pytest.mark.parametrize(
    ("given", "anybody"),
    [
        ({"role": "decode", "host": "10.0.0.2"}, True),
        ({"role": "decode", "host": "10.0.0.2", "prefill_allow": ("10.0.0.1",)}, False),
        ({"role": "decode"}, False),
        ({"role": "prefill", "host": "10.0.0.2"}, False),
    ],
)
def test_a_decode_that_strangers_can_send_anywhere_is_known(given: dict[str, Any], anybody: bool) -> None:
    assert config(**given, secret="s").dials_anybody == anybody


async def test_a_transport_that_fails_when_it_is_made_is_a_setting_and_leaves_nothing_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(*given: object, **more: object) -> None:
        raise OSError("no memory is shared here")

    closed: list[str] = []
    for kind in ("TcpMover", "TcpLanding"):
        one = getattr(kinds, kind)
        close = one.close
        monkeypatch.setattr(one, "close", lambda self, close=close, kind=kind: (closed.append(kind), close(self)))
    monkeypatch.setattr(kinds, "SHARED", {"shm": (fails, fails)})
    for role in ("prefill", "decode"):
        with pytest.raises(BadSetting, match="--transport shm: no memory is shared here"):
            async with member(role, transport=("tcp", "shm")):
                pass
    assert closed == ["TcpMover", "TcpLanding"]
