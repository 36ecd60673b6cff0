"""Anonymous files that hold pools: their size is sealed, so that whoever maps one can never fault on it (SIGBUS)."""

from __future__ import annotations

import fcntl
import os

AVAILABLE = hasattr(os, "memfd_create")


def sealed_memfd(name: str, size: int) -> int:
    """A file of `size` zero bytes whose size can never change again. The caller closes it."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, size)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    except BaseException:
        os.close(fd)
        raise
    return fd


def is_sealed(fd: int) -> bool:
    """OSError where `fd` is no memfd."""
    size_seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
    return fcntl.fcntl(fd, fcntl.F_GET_SEALS) & size_seals == size_seals


def reopened(fd: int, flags: int) -> int:
    """Another open file description of the same file: with other rights, and with locks of its own. The caller closes
    it."""
    return os.open(f"/proc/self/fd/{fd}", flags | os.O_CLOEXEC)
