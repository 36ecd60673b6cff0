"""The backends by their names."""

from __future__ import annotations

from . import Backend
from .pdplane import Pdplane
from .sglang import Sglang
from .vllm import Vllm

BACKENDS: dict[str, type[Backend]] = {"pdplane": Pdplane, "sglang": Sglang, "vllm": Vllm}
