"""Sockets of the data plane: listening, dialling, tuning. All non-blocking."""

from __future__ import annotations

import errno
import os
import selectors
import socket

from .contract import Endpoint

READ = selectors.EVENT_READ
WRITE = selectors.EVENT_WRITE
BUFFER_BYTES = 4 << 20
BACKLOG = 128


def listen(host: str, port: int) -> socket.socket:
    """OSError that names the address where it cannot be had."""
    try:
        family, kind, proto, _name, address = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        sock = socket.socket(family, kind, proto)
    except OSError as error:
        raise OSError(error.errno, f"data port {host}:{port} is no address to listen on: {error.strerror}") from None
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
        sock.bind(address)
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        raise OSError(
            error.errno, f"data port {host}:{port} cannot be bound: {error.strerror}; choose another, or 0 for any"
        ) from None
    sock.setblocking(False)
    return sock


def dial(endpoint: Endpoint) -> socket.socket:
    """A socket whose connection is under way: writable once it is up or has failed (SO_ERROR says which). A host that
    is a name is resolved here and now: give addresses where that may take long."""
    family, kind, proto, _name, address = socket.getaddrinfo(endpoint.host, endpoint.port, type=socket.SOCK_STREAM)[0]
    sock = socket.socket(family, kind, proto)
    tune(sock)
    code = sock.connect_ex(address)
    if code not in (0, errno.EINPROGRESS):
        sock.close()
        raise OSError(code, os.strerror(code))
    return sock


def tune(sock: socket.socket) -> None:
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
