"""From a model's name or folder to an engine and its tokenizer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from pdplane.worker.engine import Engine, Tokenizer

from .checkpoint import Checkpoint
from .errors import ModelError
from .install import DEFAULT_MODEL, default_model_path
from .malloc import keep_buffers
from .model import LlamaModel
from .numpy_engine import NumpyEngine, spec_of
from .tokenizer import FolderTokenizer
from .weights import open_weights


def load(
    model: str | None,
    *,
    page_size: int = 16,
    batch_invariant: bool = False,
    progress: Callable[[str], None] | None = None,
) -> tuple[Engine, Tokenizer]:
    """The engine and tokenizer of a Hugging Face folder, or of the embedded model (None or its name).

    The first load of a folder packs its weights into the cache, which takes seconds; later ones map them. Raises
    ModelError, which names the file and the remedy.
    """
    engine, tokenizer = load_numpy(model, page_size=page_size, batch_invariant=batch_invariant, progress=progress)
    return engine, tokenizer


def load_numpy(
    model: str | None,
    *,
    page_size: int = 16,
    batch_invariant: bool = False,
    progress: Callable[[str], None] | None = None,
) -> tuple[NumpyEngine, FolderTokenizer]:
    """`load`, with the concrete types."""
    if page_size < 1:
        raise ModelError(f"page size {page_size} is no page; use 16")
    keep_buffers()
    folder = _folder(model)
    checkpoint = Checkpoint(folder)
    tokenizer = FolderTokenizer(folder)
    llama = LlamaModel(open_weights(checkpoint, progress), fixed=batch_invariant)
    spec = spec_of(
        llama,
        name=folder.resolve().name,
        weights=checkpoint.digest(),
        tokenizer=tokenizer.digest,
        page_size=page_size,
    )
    return NumpyEngine(llama, spec), tokenizer


def _folder(model: str | None) -> Path:
    if model and model != DEFAULT_MODEL:
        return Path(model).expanduser()
    folder = default_model_path()
    if folder is None:
        raise ModelError(
            "the embedded model is not installed; run 'pdplane model install', or give a local Hugging "
            "Face folder with --model"
        )
    return folder
