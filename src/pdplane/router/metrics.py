"""The router's counters, and their text for Prometheus. The hot path only adds to integers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from pdplane.observe.prometheus import Histogram, head, labelled, single


class Metrics:
    """Everything counted. `verdicts` by code ("ok" is a whole answer)."""

    def __init__(self) -> None:
        self.answers: defaultdict[tuple[str, int], int] = defaultdict(int)
        self.verdicts: defaultdict[str, int] = defaultdict(int)
        self.retries: defaultdict[str, int] = defaultdict(int)
        self.stripped: defaultdict[str, int] = defaultdict(int)
        self.handoffs: defaultdict[str, int] = defaultdict(int)
        self.attempts = 0
        self.decode_only = 0
        self.late = 0
        self.first_byte = Histogram()
        self.prefill_leg = Histogram()
        self.duration = Histogram()

    def lines(self) -> Iterable[str]:
        yield from head("pdplane_router_answers_total", "Answers by path and status.", "counter")
        for (path, status), count in sorted(self.answers.items()):
            yield f'pdplane_router_answers_total{{path="{path}",status="{status}"}} {count}'
        for name, help, label, values in (
            ("requests", "Requests by verdict.", "verdict", self.verdicts),
            ("retries", "Retries by the cause of the first.", "cause", self.retries),
            (
                "handoffs",
                "Prefill's answers of legs that leave in turn, by what they handed over.",
                "kind",
                self.handoffs,
            ),
            ("stripped_fields", "Topology fields removed from clients' bodies.", "field", self.stripped),
        ):
            yield from labelled(f"pdplane_router_{name}_total", help, "counter", label, values)
        yield from single("pdplane_router_attempts_total", "Attempts opened.", "counter", self.attempts)
        help = "Attempts whose prompt decode computes itself."
        yield from single("pdplane_router_decode_only_total", help, "counter", self.decode_only)
        yield from single("pdplane_router_late_total", "Late events that changed nothing.", "counter", self.late)
        yield from self.first_byte.lines("pdplane_router_first_byte_seconds", "Request read to first byte sent.")
        help = "Prefill's leg opened to its answer, where decode's leg waits for it."
        yield from self.prefill_leg.lines("pdplane_router_prefill_leg_seconds", help)
        yield from self.duration.lines("pdplane_router_request_seconds", "Request read to verdict.")


def per_worker(name: str, help: str, kind: str, values: Iterable[tuple[str, str, float]]) -> Iterable[str]:
    """`values` are (url, role, value)."""
    yield from head(name, help, kind)
    for url, role, value in values:
        yield f'{name}{{worker="{url}",role="{role}"}} {value}'


def per_rank(name: str, help: str, values: Iterable[tuple[str, int, int]]) -> Iterable[str]:
    """A gauge; `values` are (url, rank, value)."""
    yield from head(name, help, "gauge")
    for url, rank, value in values:
        yield f'{name}{{worker="{url}",rank="{rank}"}} {value}'
