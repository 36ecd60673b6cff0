"""Real vLLM servers on this machine: a prefill and a decode with NixlConnector, and a single one without."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import httpx
from fleet import Process, end, ended_by_sigterm, free_ports
from sides import MODEL

HERE = Path(__file__).parent
HOST = "127.0.0.1"
BLOCK = 32  # tokens; what the CPU's attention can do at least
LEASE_S = 6.0
"""Of prefill's blocks; vLLM's own is 30 s. What nobody fetches is free after it."""

MODEL_TOKENS = 1024
DTYPE = "float32"
"""In bfloat16 the logits of this model lie 1/8 apart, and the best two are often equal: then the same KV gives one
token or the other, by how the steps were cut."""

STARTS_WITHIN_S = 300.0
PROGRESS_S = 15.0
SMALL_MACHINE = {"NIXL_PTHR_DELAY_US": "200", "PYTHONPATH": str(HERE / "small_machine")}
ROLES = {"prefill": "kv_producer", "decode": "kv_consumer", "single": None}
HOW = "It is made by `make interop-vllm`, with what benchmarks/requirements-vllm.txt says"


@dataclasses.dataclass
class VllmServer(Process):
    """One OpenAI server of vLLM: a process group, which ends as a whole."""

    python: Path = Path()
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def start(self) -> None:
        with self.log.open("ab") as log:
            self.popen = subprocess.Popen(
                [str(self.python), "-m", "vllm.entrypoints.openai.api_server", *self.arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, **self.environment},
            )

    def kill(self) -> None:
        """SIGKILL to the server and its engine, reaped."""
        assert self.popen is not None
        self._end_group()
        self.popen.wait()

    def stop(self) -> int | None:
        code = super().stop()
        if self.popen is not None:
            self._end_group()
        return code

    async def ready(self) -> float:
        """Seconds until it is healthy; says on stderr that it waits."""
        started = said = time.monotonic()
        while time.monotonic() - started < STARTS_WITHIN_S:
            if not self.running:
                raise RuntimeError(f"{self.name} ended:\n{self.tail(40)}")
            if await asyncio.to_thread(self._healthy):
                return time.monotonic() - started
            if time.monotonic() - said > PROGRESS_S:
                said = time.monotonic()
                print(f"  {self.name}: starts since {said - started:.0f} s", file=sys.stderr, flush=True)
            await asyncio.sleep(0.5)
        raise RuntimeError(f"{self.name} was not healthy after {STARTS_WITHIN_S:g} s:\n{self.tail(40)}")

    def _healthy(self) -> bool:
        with contextlib.suppress(httpx.HTTPError):
            return httpx.get(f"{self.url}/health", timeout=2.0, trust_env=False).status_code == 200
        return False

    def _end_group(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)


@dataclasses.dataclass
class Trio:
    prefill: VllmServer
    decode: VllmServer
    single: VllmServer
    folder: Path

    @property
    def all(self) -> list[VllmServer]:
        return [self.prefill, self.decode, self.single]


@contextlib.contextmanager
def trio(python: Path, model: Path, *, pinned: bool) -> Iterator[Trio]:
    """Started when entered, all at once; each is `ready` later. Stopped when left. `pinned`: without small_machine."""
    with ended_by_sigterm(), tempfile.TemporaryDirectory(prefix="interop-vllm-") as name:
        folder = Path(name)
        ports = free_ports(6)
        servers = [
            _server(role, python, model, folder, port, side_channel, {} if pinned else SMALL_MACHINE)
            for role, port, side_channel in zip(ROLES, ports[:3], ports[3:], strict=True)
        ]
        try:
            for server in servers:
                server.start()
            prefill, decode, single = servers
            yield Trio(prefill, decode, single, folder)
        finally:
            end(servers)


def _server(
    role: str, python: Path, model: Path, folder: Path, port: int, side_channel: int, more: Mapping[str, str]
) -> VllmServer:
    arguments = [
        *("--model", str(model), "--served-model-name", MODEL, "--dtype", DTYPE, "--enforce-eager"),
        *("--max-model-len", str(MODEL_TOKENS), "--max-num-seqs", "8", "--block-size", str(BLOCK)),
        *("--host", HOST, "--port", str(port)),
    ]
    if kv_role := ROLES[role]:
        arguments += ["--kv-transfer-config", json.dumps(_transfer(kv_role))]
    environment = {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_NIXL_SIDE_CHANNEL_HOST": HOST,
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(side_channel),
        "UCX_RCACHE_MAX_UNRELEASED": "1024",
        **more,
    }
    url = f"http://{HOST}:{port}"
    return VllmServer(f"vllm {role}", arguments, url, folder / f"{role}.log", python=python, environment=environment)


def _transfer(kv_role: str) -> dict[str, object]:
    return {
        "kv_connector": "NixlConnector",
        "kv_role": kv_role,
        "kv_buffer_device": "cpu",
        "kv_connector_extra_config": {"kv_lease_duration": int(LEASE_S)},
    }
