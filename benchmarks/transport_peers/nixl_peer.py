"""NIXL: an agent that reads from, or writes to, another process's memory. Transfers are prepared ahead of the clock; a
round is from the post to DONE. Variants are `<tuning>-<read|write>`."""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from pages import WARM_UPS, Job, in_another_process, job_from_arguments, missing, obey, report, tell


@dataclass(frozen=True)
class Tuning:
    """`poll_delay_us`: what the progress thread sleeps between two polls (its Python API always asks for 0).
    `target_sleep_s`: what the passive side waits between its own polls."""

    progress_thread: bool = True
    poll_delay_us: int = 0
    transports: str = ""
    target_sleep_s: float = 0.0005


TUNINGS = {
    "default": Tuning(),
    "delay": Tuning(poll_delay_us=1000),
    "nothread": Tuning(progress_thread=False),
    "tcp": Tuning(transports="tcp,self"),
    "tcpdelay": Tuning(poll_delay_us=200, transports="tcp,self"),
    "tcpnothread": Tuning(progress_thread=False, transports="tcp,self", target_sleep_s=0.0),
}


def new_agent(name: str, tuning: Tuning) -> Any:
    if tuning.transports:
        os.environ["UCX_TLS"] = tuning.transports
    os.environ.setdefault("NIXL_LOG_LEVEL", "ERROR")
    import nixl_cu12._api as api

    class Config(api.nixlBind.nixlAgentConfig):  # type: ignore[misc]
        def __setattr__(self, field: str, value: object) -> None:
            super().__setattr__(field, tuning.poll_delay_us if field == "pthrDelay" else value)

    api.nixlBind.nixlAgentConfig = Config
    return api.nixl_agent(name, api.nixl_agent_config(enable_prog_thread=tuning.progress_thread, backends=["UCX"]))


def registered(agent: Any, memory: np.ndarray) -> None:
    agent.register_memory([(memory.ctypes.data, memory.nbytes, 0, "")], "DRAM")


def descriptors(agent: Any, address: int, order: np.ndarray, page_bytes: int) -> Any:
    return agent.get_xfer_descs([(address + page * page_bytes, page_bytes, 0) for page in order.tolist()], "DRAM")


def main() -> None:
    job = job_from_arguments(__doc__)
    try:
        import nixl_cu12  # noqa: F401
    except ImportError as error:
        missing(f"{error}; make bench-transport installs it from benchmarks/requirements-transport.txt")
        return
    tuning, operation = job.variant.split("-")
    report(Initiator(job, TUNINGS[tuning], operation.upper()).run()[WARM_UPS:])
    os._exit(0)  # the agent's own exit takes seconds


class Initiator:
    """Holds the source where it writes, the target where it reads."""

    def __init__(self, job: Job, tuning: Tuning, operation: str) -> None:
        self.job, self.reads = job, operation == "READ"
        self.far = in_another_process(serve, job, tuning, self.reads)
        self.agent = new_agent("initiator", tuning)
        self.memory = np.zeros((job.pages, job.page_bytes), np.uint8)
        if not self.reads:
            job.fill(self.memory)
        registered(self.agent, self.memory)
        metadata, address = self.far.recv()
        name = self.agent.add_remote_agent(metadata)
        self.far.send(self.agent.get_agent_metadata())
        src, dst = job.order()
        ours = descriptors(self.agent, self.memory.ctypes.data, dst if self.reads else src, job.page_bytes)
        theirs = descriptors(self.agent, address, src if self.reads else dst, job.page_bytes)
        self.transfer = self.agent.initialize_xfer(operation, ours, theirs, name, b"pages")

    def run(self) -> list[float]:
        return [self._round() for _ in range(WARM_UPS + self.job.rounds)]

    def _round(self) -> float:
        self._target("blank")
        started = time.perf_counter()
        state = self.agent.transfer(self.transfer)
        while state == "PROC":
            state = self.agent.check_xfer_state(self.transfer)
        took = time.perf_counter() - started
        assert state == "DONE", state
        self._target("check")
        return took

    def _target(self, verb: str) -> None:
        if self.reads:
            getattr(self.job, verb)(self.memory)
        else:
            tell(self.far, verb)


def serve(initiator: Connection, job: Job, tuning: Tuning, is_source: bool) -> None:
    """The passive side: gives its agent time, and blanks or checks its memory when told to."""
    agent = new_agent("target", tuning)
    memory = np.zeros((job.pages, job.page_bytes), np.uint8)
    if is_source:
        job.fill(memory)
    registered(agent, memory)
    initiator.send((agent.get_agent_metadata(), memory.ctypes.data))
    agent.add_remote_agent(initiator.recv())
    with contextlib.suppress(EOFError):
        while True:
            agent.get_new_notifs()
            if initiator.poll(tuning.target_sleep_s):
                obey(initiator, job, memory)
    os._exit(0)


if __name__ == "__main__":
    main()
