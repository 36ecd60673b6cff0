"""Which mover and which landing stand behind each kind of transport that `--transport` names."""

from __future__ import annotations

import logging

from pdplane.core.frames import DataEndpoint
from pdplane.core.ids import Seat
from pdplane.settings import BadSetting
from pdplane.transport import checksum
from pdplane.transport.contract import LandedCallback, Landing, Mover, QuietCallback, WroteCallback
from pdplane.transport.host_identity import host_identity
from pdplane.transport.pool import PagePool
from pdplane.transport.shm_landing import LocalLanding, ShmLanding
from pdplane.transport.shm_mover import ShmMover
from pdplane.transport.shm_push_landing import ShmPushLanding
from pdplane.transport.shm_push_mover import ShmPushMover
from pdplane.transport.tcp_landing import TcpLanding
from pdplane.transport.tcp_mover import TcpMover

from .config import WorkerConfig

log = logging.getLogger(__name__)

TCP = "tcp"
SHARED: dict[str, tuple[type[ShmMover], type[LocalLanding]]] = {
    "shm": (ShmMover, ShmLanding),
    "shm_push": (ShmPushMover, ShmPushLanding),
}
"""The kinds that need both ends on one host."""


def usable(config: WorkerConfig) -> tuple[str, ...]:
    """The kinds of `--transport` that this process can serve, by preference. Raises BadSetting where there is none, or
    where pages cannot be checked as asked."""
    if config.checksum and not checksum.AVAILABLE:
        raise BadSetting(f"--checksum: {checksum.REMEDY}")
    kinds = tuple(kind for kind in config.transports if kind not in SHARED or host_identity())
    if not kinds:
        raise BadSetting(
            f"--transport {', '.join(config.transports)}: this system cannot share memory between processes as that "
            "needs; give tcp"
        )
    if kinds != config.transports:
        log.info("pages move by %s: this system shares no memory between processes", ", ".join(kinds))
    return kinds


def make_mover(
    config: WorkerConfig, kind: str, seat: Seat, pool: PagePool, done: WroteCallback
) -> tuple[Mover, DataEndpoint]:
    """A mover, and what our WELCOME says that it can send by. Raises BadSetting."""
    if kind == TCP:
        return TcpMover(seat, pool, done, checksum=config.checksum), DataEndpoint(kind)
    try:
        mover = SHARED[kind][0](seat, pool, done, checksum=config.checksum)
    except OSError as error:
        raise _not_shared(kind, error) from None
    return mover, mover.offer


def make_landing(
    config: WorkerConfig, kind: str, seat: Seat, pool: PagePool, landed: LandedCallback, quiet: QuietCallback
) -> Landing:
    """Raises BadSetting where the tcp port is taken; ranks count up from the one that is given."""
    if kind == TCP:
        return _tcp_landing(config, seat, pool, landed, quiet)
    try:
        return SHARED[kind][1](seat, pool, landed, quiet)
    except OSError as error:
        raise _not_shared(kind, error) from None


def _tcp_landing(
    config: WorkerConfig, seat: Seat, pool: PagePool, landed: LandedCallback, quiet: QuietCallback
) -> Landing:
    port = config.rank_port(config.data_port, seat.rank)
    try:
        return TcpLanding(seat, pool, landed, quiet, host=config.host, port=port, advertise_host=config.peer_host)
    except (OSError, OverflowError) as error:
        raise BadSetting(
            f"cannot listen on {config.host}:{port} for pages: {error}; choose another --data-port"
        ) from None


def _not_shared(kind: str, error: OSError) -> BadSetting:
    return BadSetting(f"--transport {kind}: {error}")
