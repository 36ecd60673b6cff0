"""A linear layer as panels: [out / 64, in, 64] float32, multiplied in tiles of 8 (or 4) rows.

BLAS packs its operands again on every call, which for a few rows costs more than the product. A tile times a panel
is below OpenBLAS's small-matrix limit, which skips the packing: 8 rows then cost little more than one, and 64 rows
reach what the large kernel reaches at 256. The shape of every product is fixed, so a row's bits do not depend on
how many other rows there are: see selftest.py.
"""

from __future__ import annotations

import numpy as np

from .safetensors_file import Array

WIDTH = 64
TILE = 8
SMALL_TILE = 4
_DEPTH = 1_000_000 // (TILE * WIDTH)  # OpenBLAS: small where rows x width x depth <= 100^3


def panels_of(weight: Array) -> Array:
    """[out, in] -> [ceil(out / 64), in, 64], the last panel zero-padded."""
    out, width = weight.shape
    count = -(-out // WIDTH)
    padded = np.zeros((count * WIDTH, width), np.float32)
    padded[:out] = weight
    return np.ascontiguousarray(padded.reshape(count, WIDTH, width).transpose(0, 2, 1))


def padded_rows(rows: int, *, fixed: bool) -> int:
    """How many rows a step over `rows` computes: a multiple of 8; unless `fixed`, 1 to 4 left over take a tile of 4."""
    left = rows % TILE
    if not left:
        return rows
    return rows - left + (SMALL_TILE if left <= SMALL_TILE and not fixed else TILE)


class Linear:
    """y = x W^T + b over panels. `features` is the true output width."""

    def __init__(self, panels: Array, features: int, bias: Array | None = None) -> None:
        self.panels = panels
        self.features = features
        self.bias = bias
        depth = panels.shape[1]
        parts = -(-depth // _DEPTH)
        step = -(-depth // parts)
        self._slices = [slice(begin, min(begin + step, depth)) for begin in range(0, depth, step)]

    def __call__(self, x: Array) -> Array:
        """x [rows, in] with rows as `padded_rows` gives them -> [rows, features]."""
        rows = x.shape[0]
        out = np.empty((rows, self.panels.shape[0] * WIDTH), np.float32)
        whole = rows - rows % TILE
        if whole:
            self._multiply(x[:whole], out[:whole], TILE)
        if whole < rows:
            self._multiply(x[whole:], out[whole:], rows - whole)
        y = out[:, : self.features]
        if self.bias is not None:
            y += self.bias
        return y

    def _multiply(self, x: Array, out: Array, tile: int) -> None:
        tiles = x.shape[0] // tile
        left = x.reshape(1, tiles, tile, x.shape[1])
        right = self.panels[:, None]
        target = out.reshape(tiles, tile, -1, WIDTH).transpose(2, 0, 1, 3)
        first, *rest = self._slices
        np.matmul(left[..., first], right[:, :, first], out=target)
        for part in rest:
            target += np.matmul(left[..., part], right[:, :, part])

    def rows(self, indices: np.ndarray) -> Array:
        """Rows of W (so of a tied embedding) [len(indices), in]."""
        return self.panels[indices // WIDTH, :, indices % WIDTH]
