"""The fence against a peer that writes into our pool itself: a word and a lock for each grant.

Decode keeps, for each peer, a table of words in a memfd: `words[slot] == grant no` while that peer may write under the
grant, else 0. The writer, for each batch: takes the shared lock on byte `slot` of the memfd, and only *inside* it
compares the word; copies; unlocks. The revoker: sets the word to 0, then asks for the exclusive lock on that byte,
without waiting. Once it has had it, every writer that saw the grant has unlocked, and every later one will see 0: the
proof that O4 asks for. A check of the word outside the lock would prove nothing, as the writer could be on its way.

Grant numbers are never reused, so a slot may be. Locks belong to open file descriptions: each writing connection
is handed one of its own, and the kernel drops what a dead writer held. A frozen one keeps it: no proof, no reuse.
The system calls order memory, on every architecture.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
from collections import deque

import numpy as np

from pdplane.core.ids import GrantNo

from . import memfd
from .shm_memory import map_passed

WORD_BYTES = 8
_FLOCK = struct.Struct("hhqqi4x")  # type, whence, start, length, pid: 64-bit Linux


def _lock(fd: int, kind: int, slot: int) -> bool:
    """Without waiting. False where another description holds what conflicts with it."""
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(kind, os.SEEK_SET, slot, 1, 0))
    except BlockingIOError:
        return False
    return True


class GrantWords:
    """The landing's side of one peer's table. Not thread-safe."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self._fd = memfd.sealed_memfd("pdplane-words", slots * WORD_BYTES)
        self._map = mmap.mmap(self._fd, slots * WORD_BYTES)
        self._words = memoryview(self._map).cast("Q")
        self._fresh = 0  # slots from here on have never been used
        self._freed: deque[int] = deque()
        self._slots: dict[GrantNo, int] = {}
        self._withdrawn: set[GrantNo] = set()

    def publish(self, grant: GrantNo) -> bool:
        """From now on the peer may write under the grant. False where every slot is locked or in use: it may not."""
        if self._fresh < self.slots:
            slot = self._fresh
            self._fresh += 1
        elif self._freed or self._sweep():
            slot = self._freed.popleft()
        else:
            return False
        self._slots[grant] = slot
        self._words[slot] = grant
        return True

    def withdraw(self, grant: GrantNo) -> None:
        """No batch begins under the grant after this. Idempotent."""
        if grant in self._slots:
            self._words[self._slots[grant]] = 0
            self._withdrawn.add(grant)

    def is_quiet(self, grant: GrantNo) -> bool:
        """The proof: no batch of this withdrawn (or never published) grant is under way. Its slot is free then."""
        slot = self._slots.get(grant)
        if slot is None:
            return True
        if grant not in self._withdrawn or not _lock(self._fd, fcntl.F_WRLCK, slot):
            return False
        _lock(self._fd, fcntl.F_UNLCK, slot)
        del self._slots[grant]
        self._withdrawn.discard(grant)
        self._freed.append(slot)
        return True

    def may_write(self) -> bool:
        """The peer may be writing, now or later, under some grant."""
        self._sweep()
        return bool(self._slots)

    def _sweep(self) -> bool:
        """Frees what can be proven; True where that is a slot."""
        for earlier in list(self._withdrawn):
            self.is_quiet(earlier)
        return bool(self._freed)

    def new_reader(self) -> int:
        """A descriptor for one connection of the peer: it can read the words and take shared locks, no more. Whoever
        keeps it open keeps its locks: close ours once it is passed on."""
        return memfd.reopened(self._fd, os.O_RDONLY)

    def close(self) -> None:
        self._words.release()
        self._map.close()
        os.close(self._fd)


class WriteGate:
    """The writer's side: one connection's view of the table. Takes over the descriptor. BadData where it is no table of
    `slots` words."""

    def __init__(self, fd: int, slots: int) -> None:
        self._fd = fd
        try:
            self._words = np.frombuffer(map_passed(fd, slots * WORD_BYTES, writable=False), np.uint64)
        except BaseException:
            os.close(fd)
            raise
        self._last = GrantNo(0), 0

    def enter(self, grant: GrantNo) -> int | None:
        """The slot, locked, where the grant stands: copy one batch, then `leave`. None: it does not stand.
        BlockingIOError: the revoker is just looking at that slot, try again."""
        slot = self._find(grant)
        if slot is None:
            return None
        if not _lock(self._fd, fcntl.F_RDLCK, slot):
            if self._stands(grant, slot):
                raise BlockingIOError(f"slot {slot} is being examined")
            return None
        if self._stands(grant, slot):
            return slot
        self.leave(slot)
        return None

    def leave(self, slot: int) -> None:
        _lock(self._fd, fcntl.F_UNLCK, slot)

    def close(self) -> None:
        """Any lock still held is given up: the mapping goes too, as it keeps the description open."""
        self._words = np.empty(0, np.uint64)
        os.close(self._fd)

    def _find(self, grant: GrantNo) -> int | None:
        if self._last[0] != grant or not self._stands(grant, self._last[1]):
            found = np.flatnonzero(self._words == grant)
            if not len(found):
                return None
            self._last = grant, int(found[0])
        return self._last[1]

    def _stands(self, grant: GrantNo, slot: int) -> bool:
        return int(self._words[slot]) == grant
