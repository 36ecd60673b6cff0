"""A small real engine: Llama-family models on the CPU, with KV in the caller's pages."""

from __future__ import annotations

from .errors import ModelError
from .install import DEFAULT_MODEL, default_model_path, install_model
from .loading import load

__all__ = ["DEFAULT_MODEL", "ModelError", "default_model_path", "install_model", "load"]
