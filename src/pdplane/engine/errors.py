"""What goes wrong with a model on disk."""

from __future__ import annotations


class ModelError(Exception):
    """The model cannot be found, read, converted or served. The message names the file and the remedy."""
