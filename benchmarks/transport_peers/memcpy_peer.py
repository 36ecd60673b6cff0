"""The mark: the same pages copied page by page within one process."""

from __future__ import annotations

import time

import numpy as np
from pages import WARM_UPS, Job, job_from_arguments, report


def main() -> None:
    job = job_from_arguments(__doc__)
    source, target = (np.empty((job.pages, job.page_bytes), np.uint8) for _ in range(2))
    job.fill(source)
    src, dst = (order.tolist() for order in job.order())
    seconds = [one_round(job, source, target, src, dst) for _ in range(WARM_UPS + job.rounds)]
    report(seconds[WARM_UPS:])


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
