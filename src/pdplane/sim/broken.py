"""Faults seeded into the core, to see that the checkers see them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

BROKEN: dict = {}


@contextmanager
def variant(name: str | None) -> Iterator[None]:
    yield
