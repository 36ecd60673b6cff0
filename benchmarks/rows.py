"""What was tried, what had to come of it, and what came."""

from __future__ import annotations

import dataclasses
import sys
import textwrap
from collections.abc import Sequence

WIDTHS = (52, 46, 58)


@dataclasses.dataclass(frozen=True)
class Row:
    tried: str
    wanted: str
    got: str
    ok: bool


class Rows:
    """Of one part of the run; each is shown when it is known."""

    def __init__(self, title: str) -> None:
        self.title = title
        self.rows: list[Row] = []
        self.stalls: list[float] = []  # seconds of each request that had one
        print(f"\n{title}", flush=True)
        print("\n".join(lines(Row("tried", "wanted", "got", True), "  ")), flush=True)

    def add(self, tried: str, wanted: str, got: str, ok: bool) -> None:
        self.rows.append(Row(tried, wanted, got, ok))
        print("\n".join(lines(self.rows[-1], "  " if ok else "!!")), flush=True)

    def stalled(self, seconds: float) -> None:
        self.stalls.append(seconds)
        print(f"  a stall: {seconds:.1f} s", file=sys.stderr, flush=True)

    @property
    def failed(self) -> int:
        return sum(not row.ok for row in self.rows)

    def sum_up(self) -> str:
        stalls = f"; {len(self.stalls)} stalls, {max(self.stalls):.1f} s at most" if self.stalls else "; no stall"
        return f"{self.title}: {len(self.rows) - self.failed} of {len(self.rows)} right{stalls}"


def lines(row: Row, mark: str) -> list[str]:
    """One row, wrapped into its columns."""
    shown = lines_of((row.tried, row.wanted, row.got), WIDTHS)
    return [f"{mark if line == 0 else '  '} {text}" for line, text in enumerate(shown)]


def lines_of(cells: Sequence[str], widths: Sequence[int]) -> list[str]:
    """Cells wrapped into columns; of the last widths, where there are fewer cells, none is used."""
    columns = [textwrap.wrap(cell, width - 1) or [""] for cell, width in zip(cells, widths, strict=False)]
    height = max(len(column) for column in columns)
    return [
        "".join(
            (column[line] if line < len(column) else "").ljust(width)
            for column, width in zip(columns, widths, strict=False)
        ).rstrip()
        for line in range(height)
    ]
