"""The HTTP edge of a worker."""

from .app import build_app
from .settings import HttpSettings

__all__ = ["HttpSettings", "build_app"]
