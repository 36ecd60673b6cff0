"""Workers that come back with other values, and workers that come late: parts of trials/drain.py."""

from __future__ import annotations

import asyncio
import contextlib
import random
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
from fleet import Fleet, Process, end, ended_by_sigterm, fleet, free_ports
from load import Known, ask, instances, invent, learn, seen_by_router
from verdicts import Verdicts

from pdplane.core.ids import Rank, Shape
from pdplane.registry.client import RegistryClient
from pdplane.wire.registry import registration_of

HOST = "127.0.0.1"
WORKER_ARGS = ("--pool-mb", "64")
REFUSED_LIMIT_S = 1.0
SEEN_LIMIT_S = 15.0


def other_page_size(verdicts: Verdicts, rng: random.Random) -> None:
    """A warm pair; its prefill comes back on the same ports with another page size, then with the old one."""
    with fleet(1, 1, worker_args=(*WORKER_ARGS, "--batch-invariant")) as running:
        [prefill] = running.prefills
        known = asyncio.run(learn(running, invent(3, 60, rng)))
        decode_before = asyncio.run(instances(running))[running.decodes[0].url]
        old = list(prefill.arguments)
        _restart(prefill, [*old, "--page-size", "32"])
        asyncio.run(_refused(running, verdicts))
        _restart(prefill, old)
        asyncio.run(_until_ready(running))
        asked = asyncio.run(_all(running, known))
        verdicts.none(
            "another page size: with the old one it serves, right", [one.fault() for one in asked if one.fault()]
        )
        decode_after = asyncio.run(instances(running))[running.decodes[0].url]
        verdicts.say("another page size: decode was not touched", decode_before == decode_after, decode_after)


def _restart(process: Process, arguments: list[str]) -> None:
    process.stop()
    process.arguments = arguments
    process.start()
    process.wait_ready()


async def _refused(running: Fleet, verdicts: Verdicts) -> None:
    """At the router, and by both engines when asked without it; nothing is computed anywhere."""
    assert running.router is not None
    [prefill], [decode] = running.prefills, running.decodes
    seen = await _seen_incompatible(running, prefill)
    verdicts.say("another page size: the router shows the worker as incompatible", _names_both(seen), seen)
    async with httpx.AsyncClient(trust_env=False, timeout=20.0) as http:
        body: dict[str, Any] = {"prompt": "hello", "max_tokens": 4, "temperature": 0}
        started = time.monotonic()
        answer = await http.post(running.router.url + "/v1/completions", json=body)
        took_s = time.monotonic() - started
        good = answer.status_code == 503 and _names_both(answer.text) and took_s < REFUSED_LIMIT_S
        verdicts.say(
            "another page size: the router refuses at once, naming both", good, f"{took_s:.2f} s {answer.text}"
        )
        bootstrap = int(prefill.arguments[prefill.arguments.index("--bootstrap-port") + 1])
        straight = {**body, "bootstrap_host": HOST, "bootstrap_port": bootstrap, "bootstrap_room": 4}
        legs = await asyncio.gather(
            *(http.post(worker.url + "/v1/completions", json=straight) for worker in (decode, prefill))
        )
    good = legs[0].status_code == 503 and _names_both(legs[0].text)
    verdicts.say("another page size: decode refuses too, naming both", good, f"{legs[0].status_code} {legs[0].text}")
    good = legs[1].status_code in (503, 504) and bool(legs[1].json()["error"]["message"])
    verdicts.say("another page size: prefill alone serves nothing", good, f"{legs[1].status_code} {legs[1].text}")
    steps = {worker.name: worker.metric("pdplane_engine_steps_total") for worker in (prefill, decode)}
    verdicts.say("another page size: nothing was computed for it", steps[prefill.name] == 0, steps)


async def _seen_incompatible(running: Fleet, prefill: Process) -> str:
    """What the router says of the pair, once it says it."""
    until = time.monotonic() + SEEN_LIMIT_S
    while time.monotonic() < until:
        worker = (await seen_by_router(running))[prefill.url]
        if worker["incompatible"]:
            return str(worker["incompatible"])
        await asyncio.sleep(0.1)
    return f"nothing: {worker}"


def _names_both(text: str) -> bool:
    return "page" in text and "16" in text and "32" in text


async def _until_ready(running: Fleet) -> None:
    assert running.router is not None
    await asyncio.to_thread(running.router.wait_ready, "/ready")


async def _all(running: Fleet, known: list[Known]) -> list[Any]:
    assert running.router is not None
    return [await ask(running.router.url, one) for one in known]


# --- late -------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _processes() -> Iterator[dict[str, Process]]:
    """Registry, decode, router, and a prefill with two dp ranks: planned, not started."""
    with ended_by_sigterm(), tempfile.TemporaryDirectory(prefix="pdplane-late-") as folder:
        registry, prefill, decode, router = free_ports(4)
        urls = {
            name: f"http://{HOST}:{port}"
            for name, port in zip(
                ("registry", "prefill", "decode", "router"), (registry, prefill, decode, router), strict=True
            )
        }
        worker = ["worker", *WORKER_ARGS, "--log-level", "warning"]
        plans = {
            "registry": ["registry", "--port", str(registry)],
            "decode": [*worker, "--role", "decode", "--port", str(decode)],
            "router": [
                *("router", "--port", str(router), "--health-interval-s", "0.5"),
                *("--prefill", f"{urls['prefill']}@{registry}", "--decode", urls["decode"]),
            ],
            "prefill": [
                *(*worker, "--role", "prefill", "--port", str(prefill)),
                *("--dp", "2", "--registry", urls["registry"]),
            ],
        }
        made = {name: Process(name, plan, urls[name], Path(folder) / f"{name}.log") for name, plan in plans.items()}
        try:
            yield made
        finally:
            end(list(made.values()))


def late_ranks(verdicts: Verdicts, rng: random.Random) -> None:
    """Router and decode first; then a registry that knows one of two ranks; then the whole prefill."""
    with _processes() as made:
        for name in ("registry", "decode", "router"):
            made[name].start()
        made["router"].wait_ready()
        made["decode"].wait_ready()
        asyncio.run(_late(made, verdicts))


async def _late(made: dict[str, Process], verdicts: Verdicts) -> None:
    body: dict[str, Any] = {"prompt": "hello", "max_tokens": 4, "temperature": 0}
    async with httpx.AsyncClient(trust_env=False, timeout=20.0) as http:

        async def post(url: str, **more: Any) -> tuple[httpx.Response, float]:
            started = time.monotonic()
            answer = await http.post(url + "/v1/completions", json={**body, **more})
            return answer, time.monotonic() - started

        router, decode, registry = (made[name].url for name in ("router", "decode", "registry"))
        before = (await http.get(decode + "/server_info")).json()["instance"]
        for _ in range(100):  # the router's looks at decode
            if "decode" not in (await http.get(router + "/ready")).json()["missing"]:
                break
            await asyncio.sleep(0.1)
        answer, took_s = await post(router)
        good = answer.status_code == 503 and took_s < REFUSED_LIMIT_S and "prefill" in answer.text
        verdicts.say("late: without a prefill 503 within a second, naming it", good, f"{took_s:.2f} s {answer.text}")
        ready = await http.get(router + "/ready")
        verdicts.say("late: not ready without a prefill", ready.status_code == 503, ready.text)

        async with RegistryClient(registry) as client:
            one = registration_of(
                Rank(dp=0), Shape(dp=2), HOST, 1, page_size=16, kv_cache_dtype="float32", pd_instance="half"
            )
            await client.register(one)
            port = registry.rpartition(":")[2]
            answer, took_s = await post(decode, bootstrap_host=HOST, bootstrap_port=int(port), bootstrap_room=3)
            good = answer.status_code == 503 and took_s < REFUSED_LIMIT_S and "1 of 2" in answer.text
            verdicts.say(
                "late: with one of two ranks 503, naming the missing one", good, f"{took_s:.2f} s {answer.text}"
            )
            missing = (await http.get(registry + "/v1/registry")).json()["missing"]
            verdicts.say("late: the registry says what is missing", missing == [[1, 0, 0, 0]], missing)
            await client.deregister("half")

        made["prefill"].start()
        statuses = []
        until = time.monotonic() + 60.0
        while time.monotonic() < until and 200 not in statuses:
            answer, took_s = await post(router)
            statuses.append(answer.status_code)
            if took_s > REFUSED_LIMIT_S and answer.status_code != 200:
                verdicts.say("late: each refusal within a second", False, f"{took_s:.2f} s {answer.text}")
            await asyncio.sleep(0.25)
        after = [(await post(router))[0].status_code for _ in range(8)]
        good = set(statuses[:-1]) <= {503} and set(after) == {200}
        verdicts.say("late: 503 until both ranks are there, then 200", good, f"{statuses[-5:]}, then {after}")
        same = (await http.get(decode + "/server_info")).json()["instance"] == before
        verdicts.say("late: nothing was restarted", same)
