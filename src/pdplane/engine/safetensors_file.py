"""The safetensors container: 8 bytes of header length (u64 little-endian), a JSON header, then the tensors' bytes.

Read by mapping, so that processes share the pages of float32 tensors; bf16 and f16 are widened on reading.
"""

from __future__ import annotations

import json
import math
import mmap
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypedDict

import numpy as np
from numpy.typing import NDArray

from .errors import ModelError

Array = NDArray[np.float32]
Shape = tuple[int, ...]

_ALIGNMENT = 64
_MAX_HEADER = 100_000_000
_WIDTH = {"F32": 4, "F16": 2, "BF16": 2}


class _Entry(TypedDict):
    dtype: str
    shape: list[int]
    data_offsets: list[int]


class SafetensorsFile:
    """A mapped file. Raises ModelError where it is truncated or is no safetensors file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise ModelError(f"cannot read {path}: {error}; download the model again") from error
        self._data, self.header = self._parse()
        for name, entry in self.header.items():
            self._check(name, entry)

    def _parse(self) -> tuple[int, dict[str, _Entry]]:
        size = int.from_bytes(self._map[:8], "little")
        if len(self._map) < 8 or size > min(_MAX_HEADER, len(self._map) - 8):
            raise ModelError(f"{self.path} is truncated or is no safetensors file; download the model again")
        try:
            header = json.loads(self._map[8 : 8 + size])
        except ValueError as error:
            raise ModelError(f"{self.path} has no safetensors header ({error}); download the model again") from error
        header.pop("__metadata__", None)
        return 8 + size, header

    def _check(self, name: str, entry: _Entry) -> None:
        begin, end = entry["data_offsets"]
        have = len(self._map) - self._data
        if end > have or begin > end:
            raise ModelError(
                f"{self.path} is truncated: tensor {name} ends at byte {end} of {have}; download the model again"
            )
        width = _WIDTH.get(entry["dtype"])
        if width is not None and end - begin != width * math.prod(entry["shape"]):
            raise ModelError(
                f"{self.path} is damaged: tensor {name} has {end - begin} bytes for shape "
                f"{entry['shape']}; download the model again"
            )

    def __contains__(self, name: str) -> bool:
        return name in self.header

    def shape(self, name: str) -> Shape:
        return tuple(self.header[name]["shape"])

    def raw(self, name: str) -> memoryview:
        begin, end = self.header[name]["data_offsets"]
        return memoryview(self._map)[self._data + begin : self._data + end]

    def read(self, name: str) -> Array:
        """The tensor as float32: the mapped bytes themselves where they are float32, read-only."""
        dtype, raw = self.header[name]["dtype"], self.raw(name)
        if dtype == "F32":
            flat = np.frombuffer(raw, np.float32)
        elif dtype == "F16":
            flat = np.frombuffer(raw, np.float16).astype(np.float32)
        elif dtype == "BF16":
            flat = (np.frombuffer(raw, np.uint16).astype(np.uint32) << 16).view(np.float32)
        else:
            raise ModelError(
                f"{self.path}: tensor {name} has type {dtype}; the numpy engine reads F32, F16 and BF16, "
                "so give an unquantised checkpoint"
            )
        return flat.reshape(self.shape(name))


def write_float32(path: Path, shapes: Mapping[str, Shape], produce: Callable[[str], Array]) -> None:
    """Writes float32 tensors in the given order, one in memory at a time, data aligned to 64 bytes."""
    entries: dict[str, _Entry] = {}
    offset = 0
    for name, shape in shapes.items():
        size = 4 * math.prod(shape)
        entries[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, shape in shapes.items():
            tensor = produce(name)
            assert tensor.shape == shape, f"{name}: {tensor.shape} is not {shape}"
            np.ascontiguousarray(tensor, np.float32).tofile(file)
