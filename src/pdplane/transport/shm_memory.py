"""Memory of another process in this one: mapped only where it cannot shrink under the reader."""

from __future__ import annotations

import mmap
import os

from . import memfd
from .tcp_frames import BadData


def map_passed(fd: int, size: int, *, writable: bool) -> memoryview:
    """The `size` bytes behind a descriptor that a peer passed, mapped for as long as the view (or one of it) lives.
    BadData for anything but a sealed memfd of this size."""
    try:
        sealed = memfd.is_sealed(fd)
    except OSError:
        raise BadData("the descriptor that came along is no memfd") from None
    if not sealed:
        raise BadData("the memfd that came along can still change its size: it must be sealed against it")
    actual = os.fstat(fd).st_size
    if actual != size:
        raise BadData(f"the memfd that came along has {actual} bytes, {size} were announced")
    try:
        return memoryview(mmap.mmap(fd, size, access=mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ))
    except (OSError, ValueError, OverflowError) as error:
        raise BadData(f"the memfd that came along cannot be mapped: {error}") from None
