"""Keeps glibc from giving work buffers back to the kernel after every step."""

from __future__ import annotations

import ctypes

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3


def keep_buffers() -> bool:
    """Raises glibc's mmap and trim thresholds for this process; before its first big allocation. False elsewhere.

    By default every array above 128 KiB is mapped and unmapped, and so page-faulted anew in every layer.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, 1 << 30)) and bool(mallopt(_M_TRIM_THRESHOLD, 2**31 - 1))
