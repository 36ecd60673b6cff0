"""Metrics as Prometheus text: a few pure functions over counts that somebody else keeps."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping

BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


Row = tuple[Mapping[str, str], float]
"""The labels of one sample, and its value."""


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
        return self.family(name, help, [({}, self)])

    @staticmethod
    def family(name: str, help: str, parts: Iterable[tuple[Mapping[str, str], Histogram]]) -> Iterable[str]:
        """Several of one name, told apart by their labels."""
        yield from head(name, help, "histogram")
        for labels, one in parts:
            running = 0
            for edge, count in zip((*map(str, BUCKETS_S), "+Inf"), one.counts, strict=True):
                running += count
                yield f"{name}_bucket{braced({**labels, 'le': edge})} {running}"
            yield f"{name}_sum{braced(labels)} {one.total:.6f}"
            yield f"{name}_count{braced(labels)} {running}"


def family(name: str, help: str, kind: str, rows: Iterable[Row]) -> Iterable[str]:
    yield from head(name, help, kind)
    for labels, value in rows:
        yield f"{name}{braced(labels)} {value:g}"


def single(name: str, help: str, kind: str, value: float) -> Iterable[str]:
    return family(name, help, kind, [({}, value)])


def labelled(name: str, help: str, kind: str, label: str, values: Mapping[str, float]) -> Iterable[str]:
    return family(name, help, kind, [({label: key}, value) for key, value in sorted(values.items())])


def head(name: str, help: str, kind: str) -> Iterable[str]:
    yield f"# HELP {name} {help}"
    yield f"# TYPE {name} {kind}"


def braced(labels: Mapping[str, str]) -> str:
    return "{" + ",".join(f'{key}="{escape(value)}"' for key, value in labels.items()) + "}" if labels else ""


def escape(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
