"""Whole fleets in one event loop: workers with rule engines, each on ports of its own, and a router before them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, cast

import httpx
import msgspec

from pdplane.core.pages import Page
from pdplane.router import RouterConfig, RouterServer
from pdplane.router.routing import Router
from pdplane.worker.config import WorkerConfig
from pdplane.worker.engine import ModelSpec
from pdplane.worker.server import AnyGroup, AnyShell, bind, engines_of, running

from .fake_engine import RuleEngine, spec
from .http_fakes import ByteTokenizer

LIMIT_S = 10.0
HOST = "127.0.0.1"
QUICK = {"beat_s": 0.1, "silent_s": 1.5, "grace_s": 0.2}
"""A peer that is gone is known to be soon; one that a busy machine holds up for a second is not gone."""
CHAT, COMPLETIONS, GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"


def chat(text: str = "hello there", **more: Any) -> tuple[str, dict[str, Any]]:
    return CHAT, {"messages": [{"role": "user", "content": text}], "temperature": 0, "max_tokens": 24, **more}


def completion(prompt: Any = "once upon a time", **more: Any) -> tuple[str, dict[str, Any]]:
    return COMPLETIONS, {"prompt": prompt, "temperature": 0, "max_tokens": 24, **more}


def generate(text: Any = "once upon a time", **sampling: Any) -> tuple[str, dict[str, Any]]:
    return GENERATE, {"text": text, "sampling_params": {"temperature": 0, "max_new_tokens": 24, **sampling}}


BODY = completion()[1]


def free_port() -> int:
    """Nobody listens on it now."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


async def until(condition: Callable[[], bool], limit_s: float = LIMIT_S) -> None:
    """Yields to the loop until `condition` holds; the bound only ends a broken test."""
    async with asyncio.timeout(limit_s):
        while not condition():  # noqa: ASYNC110 (figures have no event)
            await asyncio.sleep(0.002)


class Member:
    """One worker in service. `shell` and `engine` are those of its first dp group."""

    def __init__(self, group: AnyGroup, engines: Sequence[RuleEngine], ports: dict[str, int]):
        self.group, self.engines, self.ports = group, tuple(engines), ports
        self.shells: tuple[AnyShell, ...] = group.shells
        self.shell, self.engine = self.shells[0], self.engines[0]
        self.url = f"http://{HOST}:{ports['http']}"
        self.exit: Callable[[], Awaitable[None]]

    async def leave(self) -> None:
        """Stops in the middle of whatever it does, with an explicit error to all that it has."""
        self.group.cut("it stops in the middle")
        await until(lambda: not self.group.jobs)
        await self.exit()

    @property
    def router_url(self) -> str:
        return f"{self.url}@{self.ports['bootstrap']}" if "bootstrap" in self.ports else self.url

    def pages(self, state: Page) -> int:
        return sum(shell.node.ledger.counts[state] for shell in self.shells)

    @property
    def capacity(self) -> int:
        return sum(shell.parts.pages for shell in self.shells)

    @property
    def idle(self) -> bool:
        """No job, nothing in the engine, no claim, every page free or cached. Prefill keeps a sent row until decode has
        it."""
        figures = self.group.figures()
        busy = ("jobs", "in_engine", "waiting", "running", "computing", "claims", "rooms", "parked", "holds")
        rest = self.pages(Page.FREE) + self.pages(Page.CACHED)
        return not any(figures.get(name) for name in busy) and rest == self.capacity

    def limit(self, **limits: Any) -> None:
        """From now on: what is short must not hit what comes before the point of a test."""
        for shell in self.shells:
            shell.node.limits = msgspec.structs.replace(shell.node.limits, **limits)

    def let_go(self) -> None:
        """No engine is held back any more."""
        for engine in self.engines:
            engine.allow = None

    async def post(self, path: str, body: dict[str, Any], **more: Any) -> httpx.Response:
        async with client(self.url) as http:
            return await http.post(path, json=body, **more)

    async def get(self, path: str) -> httpx.Response:
        async with client(self.url) as http:
            return await http.get(path)


def client(url: str) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=url, timeout=LIMIT_S, trust_env=False, verify=False)


@contextlib.asynccontextmanager
async def member(role: str, model: ModelSpec | None = None, port: int = 0, **settings: Any) -> AsyncIterator[Member]:
    """A worker of this role; ports are free ones unless they are given."""
    engine = RuleEngine(model or spec())
    given = {"pool_mb": 1, "bootstrap_port": 0, "page_size": engine.model.page_size, "shutdown_s": 0.1, **settings}
    config = WorkerConfig(role=role, port=port, **given)
    engines = engines_of(engine, config.dp)
    async with contextlib.AsyncExitStack() as stack:
        sock = stack.enter_context(contextlib.closing(bind(HOST, port, "port")))
        group, ports = await stack.enter_async_context(running(config, engines, ByteTokenizer(), sock))
        made = Member(group, cast("list[RuleEngine]", engines), ports)
        made.exit = stack.aclose
        yield made
        made.let_go()
        for shell in made.shells:
            assert shell.node.audit() == []


class Fleet:
    """A router before its pairs; `whole` is the aggregated worker beside it, asked on its own."""

    def __init__(self, prefills: list[Member], decodes: list[Member], whole: Member | None, server: RouterServer):
        self.prefills, self.decodes, self._whole, self._server = prefills, decodes, whole, server
        self.url = f"http://{HOST}:{server.port}"

    @property
    def prefill(self) -> Member:
        return self.prefills[0]

    @property
    def decode(self) -> Member:
        return self.decodes[0]

    @property
    def whole(self) -> Member:
        assert self._whole is not None
        return self._whole

    @property
    def members(self) -> list[Member]:
        return [*self.prefills, *self.decodes, *([self._whole] if self._whole else [])]

    @property
    def router(self) -> Router:
        assert self._server.router is not None
        return self._server.router

    async def post(self, path: str, body: dict[str, Any], **more: Any) -> httpx.Response:
        async with client(self.url) as http:
            return await http.post(path, json=body, **more)

    async def get(self, path: str) -> Any:
        async with client(self.url) as http:
            return (await http.get(path)).json()

    async def both(self, path: str, body: dict[str, Any]) -> tuple[httpx.Response, httpx.Response]:
        """The pair's answer, and the aggregated worker's."""
        pair, whole = await asyncio.gather(self.post(path, body), self.whole.post(path, body))
        return pair, whole

    async def at_rest(self) -> None:
        """Every figure is back at its idle value, on both sides and at the router."""
        router = self.router
        await until(lambda: not router.active and not router.draining and all(m.idle for m in self.members))
        assert all(worker.load == 0 for worker in router.pairing.workers)
        for one in self.members:
            assert [shell.audit() for shell in one.shells] == [[]] * len(one.shells)


async def serves(it: Fleet) -> None:
    """A request is answered as the aggregated worker does, and leaves nothing behind."""
    assert texts(await it.post(COMPLETIONS, BODY)) == texts(await it.whole.post(COMPLETIONS, BODY))
    await it.at_rest()


@contextlib.asynccontextmanager
async def fleet(
    prefills: int = 1,
    decodes: int = 1,
    *,
    whole: bool = False,
    model: ModelSpec | None = None,
    prefill: dict[str, Any] | None = None,
    decode: dict[str, Any] | None = None,
    both: dict[str, Any] | None = None,
    router: dict[str, Any] | None = None,
    ready: bool = True,
) -> AsyncIterator[Fleet]:
    """`prefill`, `decode`, `router`: settings of theirs (`model` among a worker's is its engine's). `both`: of every
    prefill and decode."""
    async with contextlib.AsyncExitStack() as stack:

        async def enter(role: str, settings: dict[str, Any] | None) -> Member:
            shared = {} if role == "aggregated" else both or {}
            return await stack.enter_async_context(member(role, **{"model": model, **shared, **(settings or {})}))

        left = [await enter("prefill", prefill) for _ in range(prefills)]
        right = [await enter("decode", decode) for _ in range(decodes)]
        alone = await enter("aggregated", None) if whole else None
        config = RouterConfig(
            host=HOST,
            port=0,
            prefill=tuple(one.router_url for one in left),
            decode=tuple(one.router_url for one in right),
            **{"health_interval_s": 0.05, "stop_grace_s": 0.0, **(router or {})},
        )
        server = RouterServer(config)
        await server.start()
        stack.push_async_callback(server.stop)
        made = Fleet(left, right, alone, server)
        if ready:
            await until(lambda: made.router.pairing.ready and all(w.ready for w in made.router.pairing.workers))
        yield made
        await server.stop()
        for one in made.members:
            one.let_go()
        await asyncio.gather(*(one.exit() for one in made.members))


class Talk:
    """A request on a connection of its own, which can be dropped at any moment."""

    def __init__(self, url: str, body: dict[str, Any], path: str = COMPLETIONS) -> None:
        self._task = asyncio.create_task(self._ask(url, path, body))

    async def answer(self) -> httpx.Response:
        async with asyncio.timeout(LIMIT_S):
            return await self._task

    @property
    def answered(self) -> bool:
        return self._task.done()

    async def drop(self) -> None:
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task

    @staticmethod
    async def _ask(url: str, path: str, body: dict[str, Any]) -> httpx.Response:
        async with client(url) as http:
            return await http.post(path, json=body)


def pairing(it: Fleet, room: Any, rid: str | None = None) -> dict[str, Any]:
    """What a router writes into both legs."""
    named = {"bootstrap_host": HOST, "bootstrap_port": it.prefill.ports["bootstrap"], "bootstrap_room": room}
    return named if rid is None else {**named, "rid": rid}


def events(answer: httpx.Response) -> list[dict[str, Any]]:
    """The JSON events of a stream, which must end as OpenAI's do."""
    lines = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    assert lines[-1] == "[DONE]", lines[-1:]
    return [json.loads(line) for line in lines[:-1]]


def texts(answer: httpx.Response) -> list[str]:
    """The text of every choice, of a whole answer or a stream, of any of the endpoints."""
    told: dict[int, str] = {}
    if answer.headers["content-type"].startswith("text/event-stream"):
        for event in events(answer):
            if "meta_info" in event:
                told[event.get("index", 0)] = event["text"]
            for choice in event.get("choices", []):
                told[choice["index"]] = told.get(choice["index"], "") + _said(choice)
    else:
        body = answer.json()
        whole: Sequence[Any] = body if isinstance(body, list) else body.get("choices", [body])
        told = {i: _said(choice) for i, choice in enumerate(whole)}
    return [told[index] for index in sorted(told)]


def _said(choice: dict[str, Any]) -> str:
    part = choice.get("message") or choice.get("delta") or choice
    return str(part.get("content") or part.get("text") or "")


def essence(answer: httpx.Response) -> Any:
    """An answer without what differs from one to the next: ids, times, the rids in meta_info, and what prefill had in
    its cache."""
    if answer.headers["content-type"].startswith("text/event-stream"):
        return [_bare(event) for event in events(answer)]
    return answer.status_code, _bare(answer.json())


OF_THE_MOMENT = ("id", "created", "e2e_latency", "cached_tokens")


def _bare(value: Any) -> Any:
    if isinstance(value, list):
        return [_bare(item) for item in value]
    if not isinstance(value, dict):
        return value
    return {key: _bare(item) for key, item in value.items() if key not in OF_THE_MOMENT}
