"""Prefill's end over TCP. A peer of data protocol 1 cannot read frames with a checksum."""

from __future__ import annotations

from typing import ClassVar

from .contract import Capabilities
from .mover import PageMover, PeerLink
from .tcp_sender import Sender


class TcpMover(PageMover):
    """contract.Mover."""

    capabilities = Capabilities(push=True, pull=False, fence=True, one_sided=False)
    kind: ClassVar[str] = "tcp"
    link: ClassVar[type[PeerLink]] = Sender
