"""Page numbers by the hundred thousand, as a grant of a long prompt brings them: packed and checked without a loop."""

from __future__ import annotations

from array import array
from collections.abc import Collection
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from pdplane.core.ids import PageId

PageNumbers: TypeAlias = npt.NDArray[np.uint32]
"""Four bytes each, as on the wire."""


def packed(pages: Collection[PageId]) -> PageNumbers:
    """OverflowError where a number is none of four bytes."""
    return np.asarray(array("I", pages), np.uint32)


def packed_inside(pages: Collection[PageId], pool_pages: int) -> PageNumbers:
    """IndexError for a page outside a pool of so many."""
    try:
        numbers = packed(pages)
        if int(numbers.max(initial=0)) < pool_pages:
            return numbers
    except OverflowError:
        pass
    outside = next(page for page in pages if not 0 <= page < pool_pages)
    raise IndexError(f"page {outside} is outside the pool of {pool_pages} pages")
