"""Which host this process shares memory with: the `where` of the shared-memory transports.

Two processes may use them where the kernel is the same (boot id), an abstract Unix socket of one is in reach of the
other (network namespace), and the file descriptors passed over it may be opened by both (user namespace and uid). The
IPC namespace is compared too: containers that were given different ones were not meant to share memory.
"""

from __future__ import annotations

import fcntl
import os
import sys
from pathlib import Path

from .pool import PagePool

NAMESPACES = ("net", "ipc", "user")


def host_identity() -> str:
    """Equal in two processes that can share pools; "" where this one can share with nobody."""
    if not _has_primitives():
        return ""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        spaces = [f"{name}{os.stat(f'/proc/self/ns/{name}').st_ino}" for name in NAMESPACES]
    except OSError:
        return ""
    return "/".join((boot, *spaces, f"uid{os.geteuid()}"))


def shared_host(kind: str, pool: PagePool) -> str:
    """The `where` of an end that shares `pool`. OSError where it cannot."""
    where = host_identity() if pool.fd >= 0 else ""
    if not where:
        raise OSError(f"transport {kind} needs Linux with memfd, /proc and open-file-description locks: use tcp here")
    return where


def _has_primitives() -> bool:
    """Linux on 64 bits: sealed memfds, and locks that belong to an open file description."""
    return sys.maxsize > 2**32 and hasattr(os, "memfd_create") and hasattr(fcntl, "F_OFD_SETLK")
