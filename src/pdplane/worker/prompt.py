"""Which prompt: the digest by which both sides of a hand-off know that they speak of the same tokens."""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections.abc import Sequence

from pdplane.core.frames import PromptId


def prompt_id(prompt: Sequence[int]) -> PromptId:
    """blake2b-128 over the token ids as u32 little-endian, and their count."""
    ids = array("I", prompt)
    if ids.itemsize != 4:
        raise RuntimeError("this platform has no 32-bit unsigned array")
    if sys.byteorder == "big":
        ids.byteswap()
    return PromptId(hashlib.blake2b(ids.tobytes(), digest_size=16).digest(), len(prompt))
