"""A worker process: sockets first (a taken port is known before a model is loaded), then the engine, then service."""

from __future__ import annotations

import asyncio
import contextlib
import math
import secrets
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence

import msgspec
import uvicorn

from pdplane.core.ids import Instance, Rank, Shape
from pdplane.core.layout import PARAMS, PROTOCOL_VERSION, ROOMS, Stamp
from pdplane.core.slices import shard_bytes
from pdplane.settings import BadSetting, flag_of
from pdplane.transport.pool import PagePool
from pdplane.wire.address import url_of

from .aggregated import AggregatedShell
from .background import task
from .config import WorkerConfig
from .decode import DecodeShell
from .engine import Engine, ModelSpec, Tokenizer
from .engine_thread import EngineThread
from .group import AggregatedGroup, DecodeGroup, PrefillGroup, RoomsGroup
from .http.app import build_app
from .http.connection import BoundedHttp
from .params_decode import ParamsDecodeShell
from .params_group import ParamsDecodeGroup, ParamsGroup, ParamsPrefillGroup
from .params_prefill import ParamsPrefillShell
from .prefill import PrefillShell
from .registration import registered
from .shell import Parts

Loader = Callable[[WorkerConfig], tuple[Engine, Tokenizer]]
Say = Callable[[str], None]
AnyShell = PrefillShell | DecodeShell | AggregatedShell | ParamsPrefillShell | ParamsDecodeShell
AnyGroup = RoomsGroup | ParamsGroup

MIB = 1024 * 1024
KEEP_ALIVE_S = 120
TURN_S = 0.0005
LAST_WORDS_S = 0.1  # the cut streams' error events are written in this time
CONNECTIONS_END_S = 2
ENGINE_ENDS_S = 5.0

DIALS_ANYBODY = (
    "requests say which prefill is dialled, and the session begins with the secret: keep this port to the routers' "
    "network, and give --prefill-allow with the hosts of your prefills"
)


async def serve(config: WorkerConfig, load: Loader, say: Say) -> None:
    """Runs a worker until it has drained: on SIGINT, SIGTERM, or an operator's call. A second signal does not wait.
    `load` makes the engine, off the loop. Raises BadSetting."""
    http = bind(config.host, config.port, "port")
    asked = Asked()
    with contextlib.closing(http), _on_signals(asked.signal), _short_turns():
        engine, tokenizer = await asyncio.get_running_loop().run_in_executor(None, load, config)
        async with running(config, engines_of(engine, config.dp), tokenizer, http) as (group, ports):
            say(_ready_line(config, group, ports))
            if config.dials_anybody:
                say(DIALS_ANYBODY)
            await _until_asked(group, asked)
            await _drain(config, group, asked, say)


@contextlib.asynccontextmanager
async def running(
    config: WorkerConfig, engines: Sequence[Engine], tokenizer: Tokenizer, http: socket.socket
) -> AsyncIterator[tuple[AnyGroup, dict[str, int]]]:
    """A worker in service, one dp group for each engine; on leaving, everything is closed in the reverse order. The
    ports are those of HTTP, of the first rank's control sessions or tcp data, and of the embedded registry."""
    async with contextlib.AsyncExitStack() as stack:
        model = engines[0].model
        if config.served_model_name:
            model = msgspec.structs.replace(model, name=config.served_model_name)
        process = Instance(secrets.token_hex(8))
        shells = []
        for dp, engine in enumerate(engines):
            parts = _parts(config, process, dp, model, tokenizer)
            stack.callback(_close_pools, parts)
            shell = _shell(config, parts)
            stack.push_async_callback(shell.stop)
            _give_engine(shell, engine)
            stack.callback(_stop_engine, shell.running_engine)
            shells.append(shell)
        group = _group(config, process, shells)
        ports = {"http": int(http.getsockname()[1]), **await _take_ports(stack, config, group)}
        for shell in shells:
            shell.running_engine.start()
            stack.enter_context(task(shell.keep_house()))
        await stack.enter_async_context(_http(group, config, http))
        yield group, ports


def engines_of(engine: Engine, count: int) -> list[Engine]:
    """One engine for each dp group, over the same weights."""
    return [engine, *(engine.sibling() for _ in range(count - 1))]


def bind(host: str, port: int, setting: str) -> socket.socket:
    """A listening address taken now, so that whoever else has it is named with the setting that moves us."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
    except (OSError, OverflowError) as error:
        sock.close()
        raise BadSetting(
            f"cannot listen on {host}:{port}: {error}; choose another with {flag_of(setting)}, or 0 for any free port"
        ) from None
    sock.setblocking(False)
    return sock


def make_pools(config: WorkerConfig, model: ModelSpec) -> tuple[tuple[PagePool | None, ...], int]:
    """(a pool for each tensor parallel rank, the pages of each). Raises BadSetting where the memory does not hold
    useful pools."""
    shards = [shard_bytes(model.groups, model.page_size, rank, config.tp) for rank in range(config.tp)]
    pages = config.pool_mb * MIB // sum(shards)
    if pages < 2:
        need, held = math.ceil(2 * sum(shards) / MIB), "one page" if pages else "no page"
        raise BadSetting(
            f"--pool-mb {config.pool_mb} holds {held} of {sum(shards)} bytes, and the least is two: give {need} or more"
        )
    try:
        return tuple(PagePool(pages, size) if size else None for size in shards), pages
    except OSError as error:
        raise BadSetting(f"--pool-mb {config.pool_mb}: the pools cannot be had: {error}; give less") from None


def stamp_of(model: ModelSpec, policy: str, dialect: str = ROOMS) -> Stamp:
    return Stamp(
        model=model.name,
        weights=model.weights,
        tokenizer=model.tokenizer,
        page_size=model.page_size,
        page_bytes=model.page_bytes,
        kv_dtype=model.kv_dtype,
        groups=model.groups,
        policy=policy,
        protocol_max=PROTOCOL_VERSION,
        dialect=dialect,
    )


def _parts(config: WorkerConfig, process: Instance, dp: int, model: ModelSpec, tokenizer: Tokenizer) -> Parts:
    instance = process if config.dp == 1 else Instance(f"{process}.{dp}")
    pools, pages = make_pools(config, model)
    stamp = stamp_of(model, config.decode_allocation_policy, config.dialect)
    return Parts(instance, dp, model, stamp, pools, pages, tokenizer)


def _shell(config: WorkerConfig, parts: Parts) -> AnyShell:
    """What this worker is: role and dialect are chosen here, once. Raises BadSetting."""
    if config.role == "aggregated":
        return AggregatedShell(config, parts)
    return _SHELLS[config.dialect, config.role](config, parts)


_SHELLS: dict[tuple[str, str], Callable[[WorkerConfig, Parts], AnyShell]] = {
    (ROOMS, "prefill"): PrefillShell,
    (ROOMS, "decode"): DecodeShell,
    (PARAMS, "prefill"): ParamsPrefillShell,
    (PARAMS, "decode"): ParamsDecodeShell,
}


def _give_engine(shell: AnyShell, engine: Engine) -> None:
    pools = [pool.memory if pool else None for pool in shell.parts.pools]
    engine.attach(pools, shell.parts.pages)
    shell.engine = EngineThread(engine, shell.parts.tokenizer, shell.emissions, pools=pools)


def _group(config: WorkerConfig, process: Instance, shells: Sequence[AnyShell]) -> AnyGroup:
    """One worker's shells are all of one kind."""
    match shells[0]:
        case PrefillShell():
            return PrefillGroup(config, process, [shell for shell in shells if isinstance(shell, PrefillShell)])
        case DecodeShell():
            return DecodeGroup(config, process, [shell for shell in shells if isinstance(shell, DecodeShell)])
        case ParamsPrefillShell():
            held = [shell for shell in shells if isinstance(shell, ParamsPrefillShell)]
            return ParamsPrefillGroup(config, process, held)
        case ParamsDecodeShell():
            read = [shell for shell in shells if isinstance(shell, ParamsDecodeShell)]
            return ParamsDecodeGroup(config, process, read)
        case _:
            return AggregatedGroup(config, process, [shell for shell in shells if isinstance(shell, AggregatedShell)])


async def _take_ports(stack: contextlib.AsyncExitStack, config: WorkerConfig, group: AnyGroup) -> dict[str, int]:
    if isinstance(group, DecodeGroup | ParamsDecodeGroup):
        tcp = [port for shell in group.shells for port in shell.landings.tcp_ports]
        return {"data": tcp[0]} if tcp else {}
    if isinstance(group, ParamsPrefillGroup):  # a hand-off names its prefill itself: there is no registry
        return {"control": (await _listen_all(config, group.shells))[Rank()]}
    if not isinstance(group, PrefillGroup):
        return {}
    control = await _listen_all(config, group.shells)
    entry = await stack.enter_async_context(
        registered(
            config,
            instance=group.process,
            page_size=group.model.page_size,
            kv_dtype=group.model.kv_dtype,
            control_ports=control,
            waits_for=group.wait_for,
        )
    )
    group.tell_rank = entry.register_dp_rank
    if entry.bootstrap_port:
        group.default_bootstrap_port = entry.bootstrap_port
    return {"control": control[Rank()], "bootstrap": entry.bootstrap_port}


async def _listen_all(config: WorkerConfig, shells: Sequence[PrefillShell | ParamsPrefillShell]) -> dict[Rank, int]:
    """The ports of the control sessions of every rank."""
    return {
        Rank(dp=dp, tp=tp): await _listen(shell, config, tp)
        for dp, shell in enumerate(shells)
        for tp in range(config.tp)
    }


async def _listen(shell: PrefillShell | ParamsPrefillShell, config: WorkerConfig, tp: int) -> int:
    """Where a port is given, ranks count up from it."""
    port = config.rank_port(config.control_port, Rank(dp=shell.parts.dp, tp=tp))
    try:
        return await shell.listen(config.host, port, tp)
    except (OSError, OverflowError) as error:
        raise BadSetting(
            f"cannot listen on {config.host}:{port} for control sessions: {error}; choose another --control-port"
        ) from None


@contextlib.asynccontextmanager
async def _http(group: AnyGroup, config: WorkerConfig, sock: socket.socket) -> AsyncIterator[None]:
    server = _Uvicorn(
        uvicorn.Config(
            build_app(group, config),
            log_level="warning",
            access_log=False,
            lifespan="off",
            loop="none",
            http=BoundedHttp,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=CONNECTIONS_END_S,
            server_header=False,
        )
    )
    serving = asyncio.get_running_loop().create_task(server.serve(sockets=[sock]))
    try:
        while not server.started and not serving.done():  # noqa: ASYNC110  (uvicorn has no event for it)
            await asyncio.sleep(0.005)
        yield
    finally:
        server.should_exit = True
        await serving


class _Uvicorn(uvicorn.Server):
    """Signals are this module's business, not the server's."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Asked:
    """What signals ask for: to stop, and then not to wait for what runs."""

    def __init__(self) -> None:
        self.stop, self.cut = asyncio.Event(), asyncio.Event()

    def signal(self) -> None:
        (self.cut if self.stop.is_set() else self.stop).set()


async def _until_asked(group: AnyGroup, asked: Asked) -> None:
    """Returns on a signal, or when an operator asks for a drain."""
    await _first_of(asked.stop.wait(), group.asked_to_drain.wait())


async def _drain(config: WorkerConfig, group: AnyGroup, asked: Asked, say: Say) -> None:
    """No new rooms; what runs may finish, for so long; what is left then is said and cut with an explicit error."""
    group.drain(f"the {config.role} worker is stopping")
    if group.jobs or group.holds:
        held = f" and {len(group.holds)} holds" if group.holds else ""
        say(
            f"{config.role}: draining ({group.draining}), {len(group.jobs)} requests{held} may finish within "
            f"{config.shutdown_s:g} s; a second signal cuts them"
        )
    await _first_of(group.all_ended(), asked.cut.wait(), limit_s=config.shutdown_s)
    if group.jobs or group.holds:
        if group.jobs:
            say(f"{config.role}: {len(group.jobs)} requests cut: {', '.join(group.jobs)}")
        if group.holds:
            say(f"{config.role}: {len(group.holds)} holds cut: {_holds(group)}")
        group.cut("the worker stopped before the request had ended")
        await asyncio.sleep(LAST_WORDS_S)
    say(f"{config.role}: {_left(group)}")


async def _first_of(*waits: Coroutine[None, None, object], limit_s: float | None = None) -> None:
    """Returns when one of them does, or so much later; the others are given up."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()


def _left(group: AnyGroup) -> str:
    """Pages that somebody still holds when the process goes, the prefix cache aside."""
    pages = group.figures()["pages"]
    held = [f"{count} pages {state}" for state, count in pages.items() if count and state not in ("free", "cached")]
    holds = f" ({_holds(group)})" if group.holds else ""
    return f"left: {', '.join(held)}{holds}" if held else "nothing is left"


def _holds(group: AnyGroup) -> str:
    return ", ".join(f"hold {hold['hold']} of {hold['rid']}, {hold['pages']} pages" for hold in group.holds)


def _close_pools(parts: Parts) -> None:
    for pool in parts.pools:
        with contextlib.suppress(BufferError):  # an engine that keeps views of its own has it until it is gone itself
            if pool is not None:
                pool.close()


def _stop_engine(engine: EngineThread) -> None:
    engine.stop(timeout_s=ENGINE_ENDS_S)


@contextlib.contextmanager
def _short_turns() -> Iterator[None]:
    """A thread that computes in Python (reads a long prompt, say) lets the loop in after so long, not after 5 ms."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(TURN_S)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


@contextlib.contextmanager
def _on_signals(call: Callable[[], None]) -> Iterator[None]:
    loop = asyncio.get_running_loop()
    numbers = (signal.SIGINT, signal.SIGTERM)
    for number in numbers:
        loop.add_signal_handler(number, call)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


def _ready_line(config: WorkerConfig, group: AnyGroup, ports: dict[str, int]) -> str:
    where = ", ".join(f"{name} port {port}" for name, port in ports.items() if name != "http" and port)
    size = "" if config.shape == Shape() else f"{config.dp} dp groups of {config.tp} tp ranks, each with "
    room = f"{size}{group.shells[0].parts.pages} pages of {group.model.page_size} tokens"
    tail = f" ({where})" if where else ""
    return f"{config.role} ready at {url_of(config.host, ports['http'])}{tail}, {group.model_name}, {room}"
