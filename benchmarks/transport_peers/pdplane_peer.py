"""Ours: a mover in one process, a landing in another. A round is one grant of all pages and one move, from the post to
its completion, which means visible in decode's pool and known there."""

from __future__ import annotations

import sys
import threading
import time
from multiprocessing.connection import Connection

import numpy as np
from pages import WARM_UPS, Job, in_another_process, job_from_arguments, report

from pdplane.core.frames import DataEndpoint
from pdplane.core.ids import GrantNo, Instance, MoveNo, PageId, Rank, Seat
from pdplane.core.slices import whole_page
from pdplane.transport.contract import Landing, Mover, Pair
from pdplane.transport.pool import PagePool
from pdplane.transport.shm_landing import ShmLanding
from pdplane.transport.shm_mover import ShmMover
from pdplane.transport.shm_push_landing import ShmPushLanding
from pdplane.transport.shm_push_mover import ShmPushMover
from pdplane.transport.tcp_landing import TcpLanding
from pdplane.transport.tcp_mover import TcpMover

KINDS = {"shm": (ShmMover, ShmLanding), "shm_push": (ShmPushMover, ShmPushLanding), "tcp": (TcpMover, TcpLanding)}
P, D = Seat(Instance("prefill"), Rank()), Seat(Instance("decode"), Rank())


def ignore(*_: object) -> None:
    """Nothing waits for this callback here."""


def pages_of(pool: PagePool) -> np.ndarray:
    return np.frombuffer(pool.memory, np.uint8).reshape(pool.pages, pool.page_bytes)


def main() -> None:
    job = job_from_arguments(__doc__)
    pool = PagePool(job.pages, job.page_bytes)
    landing: Landing = KINDS[job.variant][1](D, pool, ignore, ignore)
    prefill = in_another_process(serve_prefill, job, landing.endpoint)
    seconds = [one_round(job, number, landing, pool, prefill) for number in range(1, WARM_UPS + job.rounds + 1)]
    prefill.send(0)
    landing.close()
    report(seconds[WARM_UPS:])


def one_round(job: Job, number: int, landing: Landing, pool: PagePool, prefill: Connection) -> float:
    dst = [PageId(page) for page in job.order()[1].tolist()]
    job.blank(pages_of(pool))
    landing.arm(GrantNo(number), P, dst, whole_page(job.page_bytes))
    prefill.send(number)
    took, error = prefill.recv()
    if error:
        sys.exit(f"{job.variant}: {error}")
    job.check(pages_of(pool))
    landing.disarm(GrantNo(number))
    return float(took)


def serve_prefill(decode: Connection, job: Job, endpoint: DataEndpoint) -> None:
    """For each number, moves every page under the grant of that number; 0 ends it."""
    pool = PagePool(job.pages, job.page_bytes)
    job.fill(pages_of(pool))
    src, dst = (order.tolist() for order in job.order())
    pairs = [Pair(PageId(here), PageId(there)) for here, there in zip(src, dst, strict=True)]
    done, errors = threading.Event(), []

    def wrote(_number: MoveNo, error: str) -> None:
        errors.append(error)
        done.set()

    mover: Mover = KINDS[job.variant][0](P, pool, wrote)
    mover.connect(D, endpoint, whole_page(job.page_bytes))
    while number := decode.recv():
        done.clear()
        started = time.perf_counter()
        mover.move(MoveNo(number), GrantNo(number), D, pairs)
        done.wait()
        decode.send((time.perf_counter() - started, errors[-1]))
    mover.close()


if __name__ == "__main__":
    main()
