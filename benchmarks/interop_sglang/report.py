"""Rows of the comparison, as tables."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec


class Row(msgspec.Struct, frozen=True):
    """`left` and `right` as the part's columns are called. `note`: a difference that is meant, or what went wrong where
    the row is not `good`."""

    part: str
    name: str
    left: str
    right: str
    good: bool
    note: str = ""


class Checks:
    """What is due against what was found."""

    def __init__(self) -> None:
        self.rows: list[Row] = []

    def check(self, part: str, name: str, due: object, found: object) -> None:
        good = due == found
        self.rows.append(Row(part, name, _short(due), _short(found), good, "" if good else f"{due!r} != {found!r}"))


def print_rows(title: str, columns: tuple[str, str], rows: Sequence[Row], *, verbose: bool) -> int:
    """One line a part, and each row that differs (or every row); how many are not good."""
    failed = sum(not row.good for row in rows)
    alike = sum(row.good and not row.note for row in rows)
    print(f"\n{title}: {len(rows)} checks, {alike} alike, {len(rows) - alike - failed} differ as meant, {failed} fail")
    for part in dict.fromkeys(row.part for row in rows):
        of_part = [row for row in rows if row.part == part]
        print(f"  {part}: {sum(row.good and not row.note for row in of_part)} of {len(of_part)} alike")
        for row in of_part:
            if verbose or row.note or not row.good:
                shown = f"{columns[0]} {row.left:14} {columns[1]} {row.right:14}"
                print(f"  {'  ' if row.good else '!!'} {row.name:38} {shown} {row.note}".rstrip())
    return failed


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 14 else text[:11] + "..."
