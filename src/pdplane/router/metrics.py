"""The router's counters, and their text for Prometheus. The hot path only adds to integers."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Mapping

BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


class Histogram:
    """Seconds."""

    __slots__ = ("counts", "total")

    def __init__(self) -> None:
        self.counts = [0] * (len(BUCKETS_S) + 1)
        self.total = 0.0

    def observe(self, seconds: float) -> None:
        self.counts[bisect_left(BUCKETS_S, seconds)] += 1
        self.total += seconds

    def lines(self, name: str, help: str) -> Iterable[str]:
        yield from _head(name, help, "histogram")
        running = 0
        for edge, count in zip((*map(str, BUCKETS_S), "+Inf"), self.counts, strict=True):
            running += count
            yield f'{name}_bucket{{le="{edge}"}} {running}'
        yield f"{name}_sum {self.total:.6f}"
        yield f"{name}_count {running}"


class Metrics:
    """Everything counted. `verdicts` by code ("ok" is a whole answer)."""

    def __init__(self) -> None:
        self.answers: defaultdict[tuple[str, int], int] = defaultdict(int)
        self.verdicts: defaultdict[str, int] = defaultdict(int)
        self.retries: defaultdict[str, int] = defaultdict(int)
        self.stripped: defaultdict[str, int] = defaultdict(int)
        self.attempts = 0
        self.late = 0
        self.first_byte = Histogram()
        self.duration = Histogram()

    def lines(self) -> Iterable[str]:
        yield from _head("pdplane_router_answers_total", "Answers by path and status.", "counter")
        for (path, status), count in sorted(self.answers.items()):
            yield f'pdplane_router_answers_total{{path="{path}",status="{status}"}} {count}'
        yield from _labelled("pdplane_router_requests_total", "Requests by verdict.", "verdict", self.verdicts)
        yield from _labelled(
            "pdplane_router_retries_total", "Retries by the cause of the first.", "cause", self.retries
        )
        yield from _labelled(
            "pdplane_router_stripped_fields_total", "Topology fields removed from bodies.", "field", self.stripped
        )  # fmt: skip
        yield from single("pdplane_router_attempts_total", "Attempts opened.", "counter", self.attempts)
        yield from single("pdplane_router_late_total", "Late events that changed nothing.", "counter", self.late)
        yield from self.first_byte.lines("pdplane_router_first_byte_seconds", "Request read to first byte sent.")
        yield from self.duration.lines("pdplane_router_request_seconds", "Request read to verdict.")


def single(name: str, help: str, kind: str, value: float) -> Iterable[str]:
    yield from _head(name, help, kind)
    yield f"{name} {value}"


def per_worker(name: str, help: str, kind: str, values: Iterable[tuple[str, str, float]]) -> Iterable[str]:
    """`values` are (url, role, value)."""
    yield from _head(name, help, kind)
    for url, role, value in values:
        yield f'{name}{{worker="{url}",role="{role}"}} {value}'


def _labelled(name: str, help: str, label: str, values: Mapping[str, int]) -> Iterable[str]:
    yield from _head(name, help, "counter")
    for key, count in sorted(values.items()):
        yield f'{name}{{{label}="{escape(key)}"}} {count}'


def _head(name: str, help: str, kind: str) -> Iterable[str]:
    yield f"# HELP {name} {help}"
    yield f"# TYPE {name} {kind}"


def escape(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
