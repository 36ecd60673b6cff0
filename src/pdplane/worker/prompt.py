"""Which prompt: the digest by which both sides of a hand-off know that they speak of the same tokens, and the keys by
which prefill knows that two prompts begin alike.

Both take time in proportion to the prompt, milliseconds where it is long: they are computed where a request is read,
off the loop (rule 6).
"""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections.abc import Sequence

from pdplane.core.frames import PromptId


def prompt_id(prompt: Sequence[int]) -> PromptId:
    """blake2b-128 over the token ids as u32 little-endian, and their count."""
    return PromptId(hashlib.blake2b(_packed(prompt), digest_size=16).digest(), len(prompt))


def page_keys(prompt: Sequence[int], page_size: int) -> tuple[bytes, ...]:
    """One key per full page: the digest of all tokens up to its end, as `prompt_id` has it. So equal keys are equal
    prefixes. 0.6 microseconds per page of 16 tokens."""
    packed, size = memoryview(_packed(prompt)), 4 * page_size
    digest = hashlib.blake2b(digest_size=16)
    keys = []
    for start in range(0, len(packed) - size + 1, size):
        digest.update(packed[start : start + size])
        keys.append(digest.digest())  # of what came so far; more may follow
    return tuple(keys)


def _packed(prompt: Sequence[int]) -> bytes:
    """As u32 little-endian."""
    ids = array("I", prompt)
    if ids.itemsize != 4:
        raise RuntimeError("this platform has no 32-bit unsigned array")
    if sys.byteorder == "big":
        ids.byteswap()
    return ids.tobytes()
