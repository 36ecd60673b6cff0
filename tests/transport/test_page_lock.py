"""The word and the lock of a grant: who may write, and when nobody can any more."""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Iterator

import pytest

from pdplane.core.ids import GrantNo
from pdplane.transport import memfd
from pdplane.transport.page_lock import GrantWords, WriteGate
from pdplane.transport.tcp_frames import BadData

ONE, TWO, THREE = GrantNo(1), GrantNo(2), GrantNo(3)


@pytest.fixture
def words() -> Iterator[GrantWords]:
    words = GrantWords(slots=2)
    yield words
    words.close()


@pytest.fixture
def gate(words: GrantWords) -> Iterator[WriteGate]:
    gate = WriteGate(words.new_reader(), words.slots)
    yield gate
    gate.close()


def test_a_writer_enters_while_its_grant_stands(words: GrantWords, gate: WriteGate) -> None:
    assert gate.enter(ONE) is None
    words.publish(ONE)
    slot = gate.enter(ONE)
    assert slot is not None
    gate.leave(slot)
    words.withdraw(ONE)
    assert gate.enter(ONE) is None
    assert words.is_quiet(ONE)


def test_a_grant_that_stands_is_not_quiet(words: GrantWords) -> None:
    words.publish(ONE)
    assert not words.is_quiet(ONE)


def test_a_grant_that_was_never_published_is_quiet(words: GrantWords) -> None:
    words.withdraw(ONE)
    assert words.is_quiet(ONE)


def test_a_writer_inside_withholds_the_proof_until_it_leaves(words: GrantWords, gate: WriteGate) -> None:
    words.publish(ONE)
    slot = gate.enter(ONE)
    assert slot is not None
    words.withdraw(ONE)
    words.withdraw(ONE)
    assert not words.is_quiet(ONE)
    gate.leave(slot)
    assert words.is_quiet(ONE)
    assert words.is_quiet(ONE)


def test_several_writers_share_a_grant_and_each_withholds_the_proof(words: GrantWords, gate: WriteGate) -> None:
    other = WriteGate(words.new_reader(), words.slots)
    words.publish(ONE)
    first, second = gate.enter(ONE), other.enter(ONE)
    assert first is not None
    assert first == second
    words.withdraw(ONE)
    gate.leave(first)
    assert not words.is_quiet(ONE)
    other.leave(first)
    assert words.is_quiet(ONE)
    other.close()


def test_a_closed_writer_holds_nothing(words: GrantWords) -> None:
    gate = WriteGate(words.new_reader(), words.slots)
    words.publish(ONE)
    assert gate.enter(ONE) is not None
    words.withdraw(ONE)
    assert not words.is_quiet(ONE)
    gate.close()
    assert words.is_quiet(ONE)


def test_a_slot_that_is_still_locked_is_not_given_to_another_grant(words: GrantWords, gate: WriteGate) -> None:
    words.publish(ONE)
    locked = gate.enter(ONE)
    assert locked is not None
    words.withdraw(ONE)
    assert words.publish(TWO)
    assert gate.enter(TWO) not in (None, locked)
    words.withdraw(TWO)
    assert not words.publish(THREE)
    assert gate.enter(THREE) is None
    gate.leave(locked)
    assert words.publish(THREE)
    assert gate.enter(THREE) == locked
    assert words.may_write()


def test_a_table_without_grants_lets_nobody_write(words: GrantWords) -> None:
    assert not words.may_write()
    words.publish(ONE)
    words.withdraw(ONE)
    assert not words.may_write()


def test_a_writer_that_comes_while_the_slot_is_examined_tries_again(words: GrantWords, gate: WriteGate) -> None:
    words.publish(ONE)
    examiner = os.open(f"/proc/self/fd/{words._fd}", os.O_RDWR)
    exclusive = b"\x01\x00\x00\x00" + bytes(4) + (0).to_bytes(8, "little") + (2).to_bytes(8, "little") + bytes(8)
    fcntl.fcntl(examiner, fcntl.F_OFD_SETLK, exclusive)
    with pytest.raises(BlockingIOError):
        gate.enter(ONE)
    os.close(examiner)
    assert gate.enter(ONE) is not None


def test_a_writer_can_neither_change_a_word_nor_lock_others_out(words: GrantWords) -> None:
    fd = words.new_reader()
    with pytest.raises(PermissionError):
        mmap.mmap(fd, words.slots * 8)
    with pytest.raises(OSError, match="Bad file descriptor"):
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, b"\x01" + bytes(31))
    os.close(fd)


def test_a_table_of_another_size_is_refused() -> None:
    fd = memfd.sealed_memfd("short", 8)
    with pytest.raises(BadData, match="8 bytes, 16 were announced"):
        WriteGate(fd, slots=2)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
