"""A worker process: sockets first (a taken port is known before a model is loaded), then the engine, then service."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import signal
import socket
from collections.abc import AsyncIterator, Callable, Iterator

import msgspec
import uvicorn

from pdplane.core.ids import Instance
from pdplane.core.layout import PROTOCOL_VERSION, Stamp
from pdplane.settings import BadSetting, flag_of
from pdplane.transport.pool import PagePool
from pdplane.wire.address import url_of

from .aggregated import AggregatedShell
from .background import task
from .config import WorkerConfig
from .decode import DecodeShell
from .engine import Engine, ModelSpec, Tokenizer
from .engine_thread import EngineThread
from .http.app import build_app
from .http.connection import BoundedHttp
from .lookup import POLICY
from .prefill import PrefillShell
from .registration import registered
from .shell import Parts

Loader = Callable[[WorkerConfig], tuple[Engine, Tokenizer]]
Say = Callable[[str], None]
AnyShell = PrefillShell | DecodeShell | AggregatedShell

MIB = 1024 * 1024
KEEP_ALIVE_S = 120


async def serve(config: WorkerConfig, load: Loader, say: Say) -> None:
    """Runs a worker until SIGINT or SIGTERM. `load` makes the engine, off the loop. Raises BadSetting."""
    http = bind(config.host, config.port, "port")
    stop = asyncio.Event()
    with contextlib.closing(http), _on_signals(stop.set):
        engine, tokenizer = await asyncio.get_running_loop().run_in_executor(None, load, config)
        async with running(config, engine, tokenizer, http) as (shell, ports):
            say(_ready_line(config, shell, ports))
            await stop.wait()
            await _drain(config, shell, say)


@contextlib.asynccontextmanager
async def running(
    config: WorkerConfig, engine: Engine, tokenizer: Tokenizer, http: socket.socket
) -> AsyncIterator[tuple[AnyShell, dict[str, int]]]:
    """A worker in service; on leaving, everything is closed in the reverse order."""
    async with contextlib.AsyncExitStack() as stack:
        model = engine.model
        if config.served_model_name:
            model = msgspec.structs.replace(model, name=config.served_model_name)
        pool = make_pool(config, model)
        engine.attach(pool.memory, pool.pages)
        shell = _shell(config, model, pool, tokenizer)
        shell.engine = EngineThread(engine, tokenizer, shell.emissions)
        stack.callback(_stop_engine, shell.engine)
        ports = {"http": int(http.getsockname()[1])}
        stack.push_async_callback(shell.stop)
        if isinstance(shell, PrefillShell):
            ports["control"] = await _listen(shell, config)
            ports["bootstrap"] = await stack.enter_async_context(registered(config, shell, ports["control"]))
        elif isinstance(shell, DecodeShell):
            ports["data"] = shell.landing.endpoint.port
        shell.engine.start()
        stack.enter_context(task(shell.keep_house()))
        await stack.enter_async_context(_http(shell, config, http))
        yield shell, ports


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


def make_pool(config: WorkerConfig, model: ModelSpec) -> PagePool:
    """Raises BadSetting where the memory does not hold a useful pool."""
    pages = config.pool_mb * MIB // model.page_bytes
    if pages < 2:
        need = 2 * model.page_bytes / MIB
        raise BadSetting(
            f"--pool-mb {config.pool_mb} holds {pages} pages of {model.page_bytes} bytes: needs {need:.0f} MiB or more"
        )
    try:
        return PagePool(pages, model.page_bytes)
    except OSError as error:
        raise BadSetting(f"--pool-mb {config.pool_mb}: the pool cannot be had: {error}; give less") from None


def stamp_of(model: ModelSpec) -> Stamp:
    return Stamp(
        model=model.name,
        weights=model.weights,
        tokenizer=model.tokenizer,
        page_size=model.page_size,
        page_bytes=model.page_bytes,
        kv_dtype=model.kv_dtype,
        groups=model.groups,
        policy=POLICY,
        protocol=PROTOCOL_VERSION,
    )


def _shell(config: WorkerConfig, model: ModelSpec, pool: PagePool, tokenizer: Tokenizer) -> AnyShell:
    parts = Parts(Instance(secrets.token_hex(8)), model, stamp_of(model), pool, tokenizer)
    try:
        if config.role == "prefill":
            return PrefillShell(config, parts)
        if config.role == "decode":
            return DecodeShell(config, parts)
        return AggregatedShell(config, parts)
    except OSError as error:
        raise BadSetting(
            f"cannot listen on {config.host}:{config.data_port} for pages: {error}; choose another --data-port"
        ) from None


async def _listen(shell: PrefillShell, config: WorkerConfig) -> int:
    try:
        return await shell.listen(config.host, config.control_port)
    except (OSError, OverflowError) as error:
        raise BadSetting(
            f"cannot listen on {config.host}:{config.control_port} for control sessions: {error}; "
            "choose another --control-port"
        ) from None


@contextlib.asynccontextmanager
async def _http(shell: AnyShell, config: WorkerConfig, sock: socket.socket) -> AsyncIterator[None]:
    server = _Uvicorn(
        uvicorn.Config(
            build_app(shell, config),
            log_level="warning",
            access_log=False,
            lifespan="off",
            loop="none",
            http=BoundedHttp,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=2,
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


async def _drain(config: WorkerConfig, shell: AnyShell, say: Say) -> None:
    """No new rooms; what runs may finish; what is left then is said and cut with an explicit error."""
    shell.drain(f"the {config.role} worker is stopping")
    if shell.jobs:
        say(f"{config.role}: stopping, {len(shell.jobs)} requests may finish within {config.shutdown_s:g} s")
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(config.shutdown_s):
            await shell.jobs.all_ended()
    if shell.jobs:
        say(f"{config.role}: {len(shell.jobs)} requests cut: {', '.join(shell.jobs)}")
        shell.cut("the worker stopped before the request had ended")
        await asyncio.sleep(0.1)


def _stop_engine(engine: EngineThread) -> None:
    engine.stop(timeout_s=5.0)


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


def _ready_line(config: WorkerConfig, shell: AnyShell, ports: dict[str, int]) -> str:
    where = ", ".join(f"{name} port {port}" for name, port in ports.items() if name != "http")
    room = f"{shell.pool.pages} pages of {shell.model.page_size} tokens"
    tail = f" ({where})" if where else ""
    return f"{config.role} ready at {url_of(config.host, ports['http'])}{tail}, {shell.model_name}, {room}"
