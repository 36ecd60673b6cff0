"""The router: takes clients' requests, sends both legs of each, streams decode's answer, ends what must end."""

from .config import RouterConfig
from .server import RouterServer, run, serve

__all__ = ["RouterConfig", "RouterServer", "run", "serve"]
