"""Local sockets of the data plane: abstract names (nothing to clean up after a kill), whole packets, file descriptors
passed along. All non-blocking."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Sequence

from .shm_frames import MAX_FRAME_BYTES
from .tcp_frames import BadData
from .tcp_sockets import BACKLOG

MAX_FDS = 2


def listen_local(name: str) -> socket.socket:
    """Listens at the abstract address `name`. OSError where it is taken."""
    sock = _socket()
    try:
        sock.bind(f"\0{name}")
        sock.listen(BACKLOG)
    except OSError:
        sock.close()
        raise
    return sock


def dial_local(name: str) -> socket.socket:
    """A connected socket. BlockingIOError where the listener's backlog is full (try again), OSError or ValueError where
    nobody of this user listens at `name`."""
    sock = _socket()
    try:
        if not name:
            raise ValueError("the endpoint names no local socket")
        sock.connect(f"\0{name}")
        check_user(sock)
    except BaseException:
        sock.close()
        raise
    return sock


def check_user(sock: socket.socket) -> None:
    """PermissionError where another user is at the other end: memory is shared with one's own processes alone."""
    _pid, uid, _gid = struct.unpack("iII", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    if uid != os.geteuid():
        raise PermissionError(f"the other end runs as uid {uid}, this process as uid {os.geteuid()}")


def send_packet(sock: socket.socket, packet: bytes, fds: Sequence[int] = ()) -> None:
    """All of it or nothing (BlockingIOError). The descriptors stay the caller's to close."""
    if fds:
        socket.send_fds(sock, [packet], list(fds))
    else:
        sock.send(packet)


def receive_packet(sock: socket.socket, fds: int = 0) -> tuple[bytes, list[int]]:
    """One packet, b"" at the end of the connection, and the `fds` descriptors that must come along, now the caller's
    to close. BadData for a packet that is too long or brings another number of them."""
    passed: list[int] = []
    if fds:
        packet, passed, flags, _ = socket.recv_fds(sock, MAX_FRAME_BYTES, MAX_FDS, socket.MSG_CMSG_CLOEXEC)
    else:  # what comes along all the same, the kernel closes
        packet, _, flags, _ = sock.recvmsg(MAX_FRAME_BYTES)
    if packet and (flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC) or len(passed) != fds):
        close_all(passed)
        raise BadData(f"packet of {len(packet)} bytes that is too long or does not bring {fds} descriptors")
    return packet, passed


def close_all(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)


def _socket() -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.setblocking(False)
    return sock
