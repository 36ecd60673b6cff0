"""GB/s of scattered pages from process to process, checked in every round: our transports beside a memcpy of the same
pages in one process, NIXL and Mooncake, all in one run.

    python benchmarks/transport.py [--page-kib 64] [--pages 1000] [--rounds 10] [--passes 2]

Each contender runs `rounds` rounds in each of `passes` passes over all contenders; the median is of them all. Fails
where shm is slower than 0.6 of memcpy, or our tcp not ahead of every tcp of the peers that are here. They live in
.bench-transport-venv (benchmarks/requirements-transport.txt).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).parent
PEERS_PYTHON = HERE.parent / ".bench-transport-venv/bin/python"
LIMIT_S = 120
SHM_MARK = 0.6


@dataclass
class Contender:
    """`family`: "memcpy", "shm" (memory of one host) or "tcp"."""

    name: str
    script: str
    variant: str = ""
    family: str = "shm"
    python: Path = Path(sys.executable)
    seconds: list[float] = field(default_factory=list)
    missing: str = ""

    def run(self, options: argparse.Namespace) -> None:
        if self.missing:
            return
        if not self.python.exists():
            self.missing = f"{self.python} is missing: make bench-transport builds it"
            return
        command = [str(self.python), str(HERE / "transport_peers" / self.script), "--pages", str(options.pages)]
        command += ["--page-bytes", str(options.page_kib << 10), "--rounds", str(options.rounds)]
        try:
            done = subprocess.run(
                [*command, "--variant", self.variant], capture_output=True, text=True, timeout=LIMIT_S, check=False
            )
        except subprocess.TimeoutExpired:
            self.missing = f"no answer within {LIMIT_S} s"
            return
        self._take(done)

    def _take(self, done: subprocess.CompletedProcess[str]) -> None:
        lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
        if not lines:
            said = (done.stderr or done.stdout).strip().splitlines()
            self.missing = f"exit {done.returncode}: {said[-1] if said else 'without a word'}"
            return
        answer = json.loads(lines[-1])
        self.missing = answer.get("missing", "")
        self.seconds += answer.get("seconds", [])


def contenders() -> list[Contender]:
    ours = "pdplane_peer.py"
    return [
        Contender("memcpy of pool pages, one process", "memcpy_peer.py", "pool", family="memcpy"),
        Contender("memcpy of anonymous memory, one process", "memcpy_peer.py", "anonymous", family="memcpy"),
        Contender("pdplane shm", ours, "shm"),
        Contender("pdplane shm_push", ours, "shm_push"),
        *nixl("default"),
        *nixl("delay", ", thread polls every 1 ms"),
        *nixl("nothread", ", no progress thread"),
        Contender("pdplane tcp", ours, "tcp", "tcp"),
        *nixl("tcp", " tcp", "tcp"),
        *nixl("tcpdelay", " tcp, thread polls every 0.2 ms", "tcp"),
        *nixl("tcpnothread", " tcp, no progress thread", "tcp"),
        Contender("Mooncake 0.3.13 tcp, read", "mooncake_peer.py", "read", "tcp", PEERS_PYTHON),
        Contender("Mooncake 0.3.13 tcp, write", "mooncake_peer.py", "write", "tcp", PEERS_PYTHON),
    ]


def nixl(tuning: str, says: str = "", family: str = "shm") -> list[Contender]:
    return [
        Contender(f"NIXL 1.5.1{says}, {way}", "nixl_peer.py", f"{tuning}-{way}", family, PEERS_PYTHON)
        for way in ("read", "write")
    ]


def rate(contender: Contender, size: int) -> float:
    """GB/s by the median round; 0 where there is none."""
    return size / statistics.median(contender.seconds) / 1e9 if contender.seconds else 0.0


def show(everyone: list[Contender], size: int) -> None:
    mark = rate(everyone[0], size)
    print(f"{'':46} {'GB/s':>7} {'best':>7} {'of memcpy':>10}")
    for one in everyone:
        if one.missing:
            print(f"{one.name:46} not here: {one.missing}")
        else:
            best = size / min(one.seconds) / 1e9
            print(f"{one.name:46} {rate(one, size):7.2f} {best:7.2f} {rate(one, size) / mark:10.2f}")


def failures(everyone: list[Contender], size: int) -> list[str]:
    by_name = {one.name: one for one in everyone}
    memcpy, shm = rate(everyone[0], size), rate(by_name["pdplane shm"], size)
    tcp = rate(by_name["pdplane tcp"], size)
    found = [f"{one.name} did not run: {one.missing}" for one in everyone if one.missing and "pdplane" in one.name]
    if shm < SHM_MARK * memcpy:
        found.append(f"shm: {shm:.2f} GB/s is less than {SHM_MARK} of memcpy's {memcpy:.2f}")
    for peer in everyone:
        if peer.family == "tcp" and "pdplane" not in peer.name and rate(peer, size) >= tcp:
            found.append(f"tcp: {tcp:.2f} GB/s is not ahead of {peer.name} with {rate(peer, size):.2f}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--page-kib", type=int, default=64)
    parser.add_argument("--pages", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--passes", type=int, default=2)
    options = parser.parse_args()
    busy, cores = os.getloadavg()[0], os.cpu_count() or 1
    if busy > cores / 2:
        print(
            f"others use this machine (load {busy:.1f} on {cores} cores): these are no figures to compare with others"
        )
    everyone = contenders()
    for _ in range(options.passes):
        for contender in everyone:
            contender.run(options)
    size = options.pages * options.page_kib << 10
    print(f"{options.pages} pages of {options.page_kib} KiB, shuffled, {options.passes} x {options.rounds} rounds")
    show(everyone, size)
    found = failures(everyone, size)
    for failure in found:
        print(f"FAILED  {failure}")
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
