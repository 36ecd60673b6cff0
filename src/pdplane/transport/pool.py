"""A pool of pages: one anonymous mapping (a memfd of sealed size where the kernel has it), cut into views by index."""

from __future__ import annotations

import mmap
import os

from pdplane.core.ids import PageId

from . import memfd


class PagePool:
    """`pages` x `page_bytes` writable bytes, zero-filled, touched lazily. Close when no view is in use any more."""

    def __init__(self, pages: int, page_bytes: int, *, name: str = "pdplane-pool") -> None:
        if pages < 1 or page_bytes < 1:
            raise ValueError(f"a pool needs at least one page of one byte, got {pages} x {page_bytes}")
        self.pages = pages
        self.page_bytes = page_bytes
        size = pages * page_bytes
        if memfd.AVAILABLE:
            self.fd = memfd.sealed_memfd(name, size)
            self._map = mmap.mmap(self.fd, size)
        else:
            self.fd = -1
            self._map = mmap.mmap(-1, size)
        self.memory = memoryview(self._map)

    def page(self, index: PageId) -> memoryview:
        """The bytes of one page. IndexError outside the pool: a page number from a peer is checked by whoever owns
        the memory."""
        if not 0 <= index < self.pages:
            raise IndexError(f"page {index} is outside the pool of {self.pages} pages")
        start = index * self.page_bytes
        return self.memory[start : start + self.page_bytes]

    def close(self) -> None:
        self.memory.release()
        self._map.close()
        if self.fd >= 0:
            os.close(self.fd)
