"""Mooncake's transfer engine over tcp: batches read from, or written to, another process's memory. Variants: read,
write."""

from __future__ import annotations

import contextlib
import os
import time
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from pages import WARM_UPS, Job, in_another_process, job_from_arguments, missing, obey, report, tell

HOST = "127.0.0.1"


def new_engine(memory: np.ndarray) -> Any:
    from mooncake.engine import TransferEngine

    engine = TransferEngine()
    if engine.initialize(HOST, "P2PHANDSHAKE", "tcp", "") or engine.register_memory(memory.ctypes.data, memory.nbytes):
        raise RuntimeError("the engine did not start")
    return engine


def main() -> None:
    job = job_from_arguments(__doc__)
    try:
        import mooncake.engine  # noqa: F401
    except ImportError as error:
        missing(
            f"{error}; apt-get install libibverbs1, and make bench-transport installs the rest from "
            "benchmarks/requirements-transport.txt"
        )
        return
    report(run(job, reads=job.variant == "read")[WARM_UPS:])
    os._exit(0)


def run(job: Job, *, reads: bool) -> list[float]:
    far = in_another_process(serve, job, reads)
    memory = np.zeros((job.pages, job.page_bytes), np.uint8)
    if not reads:
        job.fill(memory)
    engine = new_engine(memory)
    session, address = far.recv()
    src, dst = (order.tolist() for order in job.order())
    ours = [memory.ctypes.data + page * job.page_bytes for page in (dst if reads else src)]
    theirs = [address + page * job.page_bytes for page in (src if reads else dst)]
    batch = engine.batch_transfer_sync_read if reads else engine.batch_transfer_sync_write
    sizes = [job.page_bytes] * job.pages

    def one_round() -> float:
        target("blank")
        started = time.perf_counter()
        code = batch(session, ours, theirs, sizes)
        took = time.perf_counter() - started
        assert code == 0, code
        target("check")
        return took

    def target(verb: str) -> None:
        if reads:
            getattr(job, verb)(memory)
        else:
            tell(far, verb)

    return [one_round() for _ in range(WARM_UPS + job.rounds)]


def serve(initiator: Connection, job: Job, is_source: bool) -> None:
    memory = np.zeros((job.pages, job.page_bytes), np.uint8)
    if is_source:
        job.fill(memory)
    engine = new_engine(memory)
    initiator.send((f"{HOST}:{engine.get_rpc_port()}", memory.ctypes.data))
    with contextlib.suppress(EOFError):
        while True:
            obey(initiator, job, memory)
    os._exit(0)


if __name__ == "__main__":
    main()
