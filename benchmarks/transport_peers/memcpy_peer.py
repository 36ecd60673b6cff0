"""The mark: the same pages copied page by page within one process.

Variant "pool": the pages lie in memfds, as the pools of workers that share memory must (4 KiB pages where the kernel
gives shared memory no larger ones). "anonymous": in memory of the process's own, which gets huge pages.
"""

from __future__ import annotations

import mmap
import os
import time

import numpy as np
from pages import WARM_UPS, Job, job_from_arguments, report


def main() -> None:
    job = job_from_arguments(__doc__)
    source, target = (memory(job) for _ in range(2))
    job.fill(source)
    src, dst = (order.tolist() for order in job.order())
    seconds = [one_round(job, source, target, src, dst) for _ in range(WARM_UPS + job.rounds)]
    report(seconds[WARM_UPS:])


def memory(job: Job) -> np.ndarray:
    if job.variant != "pool":
        return np.empty((job.pages, job.page_bytes), np.uint8)
    fd = os.memfd_create("memcpy")
    os.ftruncate(fd, job.size_bytes)
    return np.frombuffer(mmap.mmap(fd, job.size_bytes), np.uint8).reshape(job.pages, job.page_bytes)


def one_round(job: Job, source: np.ndarray, target: np.ndarray, src: list[int], dst: list[int]) -> float:
    job.blank(target)
    started = time.perf_counter()
    for here, there in zip(src, dst, strict=True):
        target[there] = source[here]
    took = time.perf_counter() - started
    job.check(target)
    return took


if __name__ == "__main__":
    main()
