"""`pdplane up`: a whole fleet on this machine, as child processes under a supervisor that hides nothing."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import itertools
import json
import os
import shlex
import shutil
import signal
import socket
import sys
from collections.abc import AsyncIterator, Iterable
from pathlib import Path

import httpx

from pdplane import settings
from pdplane.core.layout import PARAMS, ROOMS
from pdplane.router.config import RouterConfig
from pdplane.settings import BadSetting, flag_of, setting
from pdplane.wire.address import url_of
from pdplane.wire.registry import FOLLOW_ROOM
from pdplane.worker.config import (
    DIALECTS,
    EMBEDDED,
    FAIL,
    POLICIES,
    RECOMPUTE,
    TOTAL_REQUESTS,
    TRANSPORTS,
    WorkerConfig,
)

from .child import Child
from .http import API_KEY

START_LIMIT_S = 170.0
STOP_GRACE_S = 5.0
LEASE_MARGINS = 4  # in a lease, where the router's own margin is longer
"""For a child to end after its own limit; then it is killed."""


@dataclasses.dataclass(frozen=True)
class UpConfig:
    prefill: int = setting(1, "prefill workers; 0 with --aggregated N starts no pairs")
    decode: int = setting(1, "decode workers")
    aggregated: int = setting(0, "aggregated workers (prompt and answer in one process)")
    model: str = setting(EMBEDDED, "folder of a Llama-family model in Hugging Face's format, or the embedded model")
    host: str = setting("127.0.0.1", "address of the router (see `pdplane router --help`); workers stay on loopback")
    port: int = setting(8000, "port of the router")
    prefill_port: int = setting(8100, "HTTP port of the first prefill, the next ones count up")
    decode_port: int = setting(8200, "HTTP port of the first decode, the next ones count up")
    aggregated_port: int = setting(8300, "HTTP port of the first aggregated worker, the next ones count up")
    bootstrap_port: int = setting(8998, "registry port of the first prefill, the next ones count up")
    dialect: str = setting(
        ROOMS,
        "how a hand-off is made: rooms (SGLang's bootstrap) or params (vLLM's kv_transfer_params)",
        choices=DIALECTS,
    )
    lease_s: float = setting(30.0, "params: how long a prefill holds computed pages for decode, from each renewal anew")
    kv_load_failure_policy: str = setting(
        FAIL, "params: fail a request whose pages cannot be read, or recompute its prompt", choices=(FAIL, RECOMPUTE)
    )
    dp: int = setting(1, "data parallel groups of each prefill and decode")
    tp: int = setting(1, "tensor parallel ranks (pools over which KV heads are split) of each prefill and decode")
    prefill_dp: int | None = setting(None, "--dp of the prefills alone")
    prefill_tp: int | None = setting(None, "--tp of the prefills alone")
    decode_dp: int | None = setting(None, "--dp of the decodes alone")
    decode_tp: int | None = setting(None, "--tp of the decodes alone")
    decode_allocation_policy: str = setting(
        "early", "when decode reserves pages: before prefill computes, or after it", choices=POLICIES
    )
    load_balance_method: str = setting(
        FOLLOW_ROOM,
        "which dp group of a prefill serves a request: by the room's number, or the least loaded",
        choices=(FOLLOW_ROOM, TOTAL_REQUESTS),
    )
    transport: tuple[str, ...] = setting(
        ("shm", "tcp"), f"how pages may move, the preferred way first, of {', '.join(TRANSPORTS)}"
    )
    checksum: bool = setting(False, "check every page that has moved, end to end (xxh3)")
    prefix_cache: bool = setting(True, "keep the pages of prompts for later ones that begin alike, on either side")
    reserve_tokens: int = setting(512, "decode: growth kept free per request at admission")
    page_size: int = setting(16, "tokens per page")
    pool_mb: int = setting(1024, "memory of each dp group's pages, MiB")
    max_running: int = setting(16, "requests in each dp group's engine at once")
    batch_invariant: bool = setting(False, "bit-equal logits whoever shares a step; slower at small batches")
    policy: str = setting("least-load", "how the router picks workers", choices=("least-load", "round-robin"))
    request_timeout_s: float = setting(300.0, "deadline of a request")
    shutdown_s: float = setting(10.0, "on Ctrl-C or a drain: how long requests may finish; Ctrl-C again cuts them")
    api_key: str = setting("", "the key that clients of the router must present; none: open", secret=True)
    log_level: str = setting("warning", "what is logged", choices=("debug", "info", "warning", "error"))


@dataclasses.dataclass(frozen=True)
class Part:
    """One process to be: its name, its arguments, and the ports that it will take, with the setting of each."""

    name: str
    arguments: tuple[str, ...]
    ports: tuple[tuple[str, int], ...]
    env: tuple[tuple[str, str], ...] = ()


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "up",
        help="start prefill, decode and router on this machine",
        description="Start a fleet on this machine: prefills (in dialect rooms each with its registry), decodes and "
        "the router. Ctrl-C stops all of it.",
        epilog="example: pdplane up --prefill 2 --decode 2 --port 8080",
    )
    settings.add_arguments(parser, UpConfig)
    parser.set_defaults(run=main)


def main(args: argparse.Namespace) -> int:
    config = settings.load(UpConfig, vars(args))
    parts = plan(config)
    _check_model(config)
    _check_ports(config, parts)
    print(f"fleet config\n{settings.effective(config)}", flush=True)
    for part in parts:
        print(f"{part.name}: pdplane {shlex.join(part.arguments)}", flush=True)
    return asyncio.run(_supervise(config, parts))


def plan(config: UpConfig) -> list[Part]:
    """Every process of the fleet, workers before the router. Raises BadSetting where it cannot serve."""
    if min(config.prefill, config.decode, config.aggregated) < 0:
        raise BadSetting("the number of workers cannot be negative")
    if not config.aggregated and not (config.prefill and config.decode):
        raise BadSetting(
            f"--prefill {config.prefill} --decode {config.decode} makes no pair: give at least one of each"
        )
    _check_sizes(config)
    prefills = [_prefill(config, i) for i in range(config.prefill)]
    decodes = [_decode(config, i) for i in range(config.decode)]
    whole = [_worker(config, "aggregated", i, config.aggregated_port + i) for i in range(config.aggregated)]
    return [*prefills, *decodes, *whole, _router(config)]


def _prefill(config: UpConfig, index: int) -> Part:
    part = _worker(config, "prefill", index, config.prefill_port + index)
    bootstrap = config.bootstrap_port + index
    arguments = [
        *(*part.arguments, *_sizes(config, config.prefill_dp, config.prefill_tp), *_pairing(config)),
        *("--load-balance-method", config.load_balance_method),
    ]
    if config.dialect == PARAMS:  # no registry
        return Part(part.name, (*arguments, "--lease-s", str(config.lease_s)), part.ports)
    arguments += ["--bootstrap-port", str(bootstrap)]
    return Part(part.name, tuple(arguments), (*part.ports, ("bootstrap_port", bootstrap)))


def _decode(config: UpConfig, index: int) -> Part:
    part = _worker(config, "decode", index, config.decode_port + index)
    arguments = [
        *(*part.arguments, *_sizes(config, config.decode_dp, config.decode_tp), *_pairing(config)),
        *("--reserve-tokens", str(config.reserve_tokens)),
        *("--kv-load-failure-policy", config.kv_load_failure_policy),
    ]
    return Part(part.name, tuple(arguments), part.ports)


def _sizes(config: UpConfig, dp: int | None, tp: int | None) -> list[str]:
    return ["--dp", str(config.dp if dp is None else dp), "--tp", str(config.tp if tp is None else tp)]


def _pairing(config: UpConfig) -> list[str]:
    """What both sides of a pair are told alike."""
    arguments = ["--dialect", config.dialect, "--decode-allocation-policy", config.decode_allocation_policy]
    arguments += ["--transport", ",".join(config.transport)]
    arguments += [] if config.prefix_cache else ["--no-prefix-cache"]
    return [*arguments, "--checksum"] if config.checksum else arguments


def _worker(config: UpConfig, role: str, index: int, port: int) -> Part:
    arguments = [
        *("worker", "--role", role, "--port", str(port), "--pool-mb", str(config.pool_mb)),
        *("--page-size", str(config.page_size)),
        *("--max-running", str(config.max_running), "--request-timeout-s", str(config.request_timeout_s)),
        *("--shutdown-s", str(config.shutdown_s), "--log-level", config.log_level),
    ]
    if config.model != EMBEDDED:
        arguments += ["--model", config.model]
    if config.batch_invariant:
        arguments.append("--batch-invariant")
    return Part(f"{role} {index}", tuple(arguments), ((f"{role}_port", port),))


def _router(config: UpConfig) -> Part:
    arguments = [
        *("router", "--host", config.host, "--port", str(config.port), "--policy", config.policy),
        *("--request-timeout-s", str(config.request_timeout_s), "--stop-grace-s", str(config.shutdown_s)),
        *("--log-level", config.log_level),
    ]
    for i in range(config.prefill):
        registry = "" if config.dialect == PARAMS else f"@{config.bootstrap_port + i}"
        arguments += ["--prefill", f"http://127.0.0.1:{config.prefill_port + i}{registry}"]
    for i in range(config.decode):
        arguments += ["--decode", f"http://127.0.0.1:{config.decode_port + i}"]
    if config.dialect == PARAMS:
        arguments += ["--lease-margin-s", f"{min(RouterConfig.lease_margin_s, config.lease_s / LEASE_MARGINS):g}"]
    for i in range(config.aggregated):
        arguments += ["--worker", f"http://127.0.0.1:{config.aggregated_port + i}"]
    # A secret goes by the environment: arguments are there for everybody to read.
    env = ((settings.env_of(RouterConfig, "api_key"), config.api_key),) if config.api_key else ()
    return Part("router", tuple(arguments), (("port", config.port),), env)


def _check_sizes(config: UpConfig) -> None:
    """Before anything is started. Raises BadSetting."""
    for dp, tp in ((config.prefill_dp, config.prefill_tp), (config.decode_dp, config.decode_tp)):
        WorkerConfig(
            role="prefill",
            dp=config.dp if dp is None else dp,
            tp=config.tp if tp is None else tp,
            transport=config.transport,
            dialect=config.dialect,
            decode_allocation_policy=config.decode_allocation_policy,
            lease_s=config.lease_s,
            kv_load_failure_policy=config.kv_load_failure_policy,
            page_size=config.page_size,
            pool_mb=config.pool_mb,
        )


def _check_model(config: UpConfig) -> None:
    from pdplane.engine.install import default_model_path

    embedded = config.model == EMBEDDED
    if not embedded and not Path(config.model).is_dir():
        raise BadSetting(f"--model {config.model} is not a folder; give a model folder in Hugging Face's format")
    if embedded and default_model_path() is None:
        raise BadSetting("no model is installed: run `pdplane model install` once, or give --model DIR")


def _check_ports(config: UpConfig, parts: Iterable[Part]) -> None:
    """Names the first taken port with its setting, before anything is started."""
    for part in parts:
        host = config.host if part.name == "router" else "127.0.0.1"
        for name, port in part.ports:
            with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                try:
                    probe.bind((host, port))
                except (OSError, OverflowError) as error:
                    reason = getattr(error, "strerror", None) or error
                    raise BadSetting(
                        f"port {port} for {part.name} cannot be had on {host} ({reason}): "
                        f"choose another with {flag_of(name)}"
                    ) from None


async def _supervise(config: UpConfig, parts: list[Part]) -> int:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    async with _children(parts, config.shutdown_s + STOP_GRACE_S) as children:
        signals = itertools.count()

        def on_signal() -> None:
            """The first one asks, a second one does not wait for answers, a third one for nothing."""
            count = next(signals)
            stop.set()
            for child in children if count else ():
                child.cut() if count == 1 else child.kill()

        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, on_signal)
        try:
            if not await _until_ready(config, children, stop):
                return 0 if stop.is_set() else 1
            print(_welcome(config), flush=True)
            return await _watch(children, stop)
        finally:
            print("stopping", flush=True)


@contextlib.asynccontextmanager
async def _children(parts: list[Part], limit_s: float) -> AsyncIterator[list[Child]]:
    """Started in order, ended in the reverse order, each within the limit: the door closes first."""
    children: list[Child] = []
    try:
        for part in parts:
            children.append(
                await Child.start(part.name, [sys.executable, "-m", "pdplane", *part.arguments], dict(part.env))
            )
        yield children
    finally:
        if children:
            await children[-1].end(limit_s)
            await asyncio.gather(*(child.end(limit_s) for child in children[:-1]))


async def _until_ready(config: UpConfig, children: list[Child], stop: asyncio.Event) -> bool:
    """Polls the router until a whole pair serves; False where a child died, time is over, or a stop came first."""
    url = url_of(config.host, config.port) + "/ready"
    loop = asyncio.get_running_loop()
    until, said = loop.time() + START_LIMIT_S, ""
    async with httpx.AsyncClient(timeout=2.0, trust_env=False) as http:
        while not stop.is_set():
            if dead := next((child for child in children if child.ended), None):
                print(dead.obituary(), file=sys.stderr, flush=True)
                return False
            ready, why = await _ready(http, url)
            if ready:
                return True
            if loop.time() > until:
                print(f"not ready after {START_LIMIT_S:g} s: {why}", file=sys.stderr, flush=True)
                return False
            if why and why != said:
                print(f"waiting: {why}", flush=True)
                said = why
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), 0.25)
    return False


async def _ready(http: httpx.AsyncClient, url: str) -> tuple[bool, str]:
    try:
        answer = await http.get(url)
        if answer.status_code == 200:
            return True, ""
        return False, str(json.loads(answer.content)["missing"])
    except (httpx.HTTPError, ValueError, KeyError, TypeError):
        return False, ""


async def _watch(children: list[Child], stop: asyncio.Event) -> int:
    """Until a stop, or until a child has died and what is left cannot serve. A child that ends is reported with its
    last lines; the rest serves on. One that was drained ends well: then the router alone has to live."""
    stopped = asyncio.create_task(stop.wait())
    waits = {asyncio.create_task(child.wait()): child for child in children}
    failed = False
    while waits and not stop.is_set():
        done, _ = await asyncio.wait({stopped, *waits}, return_when=asyncio.FIRST_COMPLETED)
        ended = {waits.pop(task): task.result() for task in done - {stopped}}
        for child, code in ended.items():
            failed = failed or code != 0
            print(child.obituary(), file=sys.stderr, flush=True)
        if ended and not _goes_on(children, well=not any(ended.values())):
            print("what is left cannot serve", file=sys.stderr, flush=True)
            break
    for task in (stopped, *waits):
        task.cancel()
    return 0 if stop.is_set() and not failed else 1


def _goes_on(children: list[Child], *, well: bool) -> bool:
    """Whether the rest is worth running. `well`: whoever has ended now was drained, so somebody means to start it
    again; until then the router says 503 and why."""
    alive = {child.name.split()[0] for child in children if not child.ended}
    if "router" not in alive:
        return False
    serves = {"prefill", "decode"} <= alive or "aggregated" in alive
    if well and not serves:
        kinds = " and no ".join(kind for kind in ("prefill", "decode") if kind not in alive)
        print(f"drained: no {kinds} is left, the router answers 503 until one is started again", flush=True)
    return serves or well


def _welcome(config: UpConfig) -> str:
    url = url_of(config.host, config.port)
    me = _command()
    key = f'-H "authorization: Bearer ${API_KEY}" ' if config.api_key else ""
    curl = (
        f"curl {url}/v1/chat/completions -H 'content-type: application/json' {key}"
        '-d \'{"messages": [{"role": "user", "content": "What is the capital of France?"}], '
        '"temperature": 0, "max_tokens": 32}\''
    )
    return f"""
ready: {url}

  ask     {curl}
  chat    {me} chat --url {url}
  look    {me} status --url {url}
  why     {me} explain ID --url {url}      (ID: the answer's id)
{_key_line(config)}  stop    Ctrl-C
"""


def _key_line(config: UpConfig) -> str:
    return f"  key     export {API_KEY}=...     (the router asks for one)\n" if config.api_key else ""


def _command() -> str:
    """How this user can call us: by name where that is on the PATH, else as they did now."""
    if shutil.which("pdplane"):
        return "pdplane"
    return os.path.relpath(sys.argv[0]) if os.path.basename(sys.argv[0]) == "pdplane" else "python -m pdplane"
