"""Bytes per second from pool to pool over tcp on loopback, both ends in this process (one interpreter lock).

python benchmarks/transport.py [--page-kib 64] [--pages 1024] [--rounds 10]
"""

from __future__ import annotations

import argparse
import statistics
import threading
import time
from collections.abc import Sequence

from pdplane.core.ids import GrantNo, Instance, MoveNo, PageId
from pdplane.transport.contract import Pair
from pdplane.transport.pool import PagePool
from pdplane.transport.tcp_landing import TcpLanding
from pdplane.transport.tcp_mover import TcpMover

D = Instance("decode")


def ignore(*_: object) -> None:
    """Nothing waits for this callback here."""


def measure(page_bytes: int, pages: int, rounds: int) -> list[float]:
    """Seconds of each round: one grant of the whole pool, one move."""
    source, target = PagePool(pages, page_bytes), PagePool(pages, page_bytes)
    source.memory[:] = b"\x5a" * len(source.memory)
    done = threading.Event()
    errors: list[str] = []

    def wrote(_number: MoveNo, error: str) -> None:
        errors.append(error)
        done.set()

    landing = TcpLanding(D, target, ignore, ignore)
    mover = TcpMover(Instance("prefill"), source, wrote)
    mover.connect(D, landing.endpoint, landing.token)
    everything: Sequence[PageId] = [PageId(page) for page in range(pages)]
    times = []
    for number in range(1, rounds + 1):
        landing.arm(GrantNo(number), Instance("prefill"), everything)
        done.clear()
        started = time.perf_counter()
        mover.move(MoveNo(number), GrantNo(number), D, [Pair(page, page) for page in everything])
        done.wait()
        times.append(time.perf_counter() - started)
        landing.disarm(GrantNo(number))
    mover.close()
    landing.close()
    assert errors == [""] * rounds, errors
    assert source.memory == target.memory
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--page-kib", type=int, default=64)
    parser.add_argument("--pages", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=10)
    options = parser.parse_args()
    size = options.page_kib * 1024 * options.pages
    times = measure(options.page_kib * 1024, options.pages, options.rounds)
    median, best = statistics.median(times), min(times)
    print(f"{options.pages} pages of {options.page_kib} KiB, {options.rounds} rounds")
    print(f"median {size / median / 1e9:.2f} GB/s   best {size / best / 1e9:.2f} GB/s   {median * 1e3:.1f} ms a round")


if __name__ == "__main__":
    main()
