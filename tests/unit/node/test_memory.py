"""What the allocator keeps is given back, and not asked for over and over when it is in use."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest

from dsec.model.limits import MIB
from dsec.node.memory import PAUSE_MAX, SLACK_BYTES, GiveBack

pytestmark = pytest.mark.unit


class Heap:
    """In use, and kept beside that until it is trimmed."""

    def __init__(self) -> None:
        self.used = self.kept = 0
        self.trims = 0

    def held(self) -> int:
        return self.used + self.kept

    def trim(self) -> None:
        self.trims += 1
        self.kept = 0


def test_what_was_freed_while_much_was_in_use_is_given_back_later() -> None:
    heap = Heap()
    give_back = GiveBack(heap.trim, heap.held)
    heap.used = 300 * MIB
    give_back.look()
    heap.used, heap.kept = 0, 300 * MIB
    for _ in range(2):
        give_back.look()
    assert heap.held() == 0


def test_little_is_left_alone() -> None:
    heap = Heap()
    give_back = GiveBack(heap.trim, heap.held)
    heap.kept = SLACK_BYTES
    for _ in range(100):
        give_back.look()
    assert heap.trims == 0


def test_what_is_in_use_is_asked_for_less_and_less() -> None:
    heap = Heap()
    give_back = GiveBack(heap.trim, heap.held)
    heap.used = 300 * MIB
    for _ in range(10 * PAUSE_MAX):
        give_back.look()
    assert heap.trims < 20
    # And none of that makes it miss what comes then.
    heap.kept = 2 * SLACK_BYTES
    give_back.look()
    assert heap.kept == 0
    heap.used, heap.kept = 0, 300 * MIB
    for _ in range(PAUSE_MAX + 1):
        give_back.look()
    assert heap.held() == 0


# Pieces of less than 128 KiB each, so that they are of the heap; the last keeps the others below from its end.
ITSELF = """
from dsec.node.memory import own_bytes, trimmer
before = own_bytes()
pieces = [bytearray(100_000) for _ in range(1000)]
last = bytearray(100_000)
full = own_bytes()
pieces.clear()
trimmer()()
print(full - before, own_bytes() - before, len(last))
"""


def test_the_allocator_of_a_process_does() -> None:
    if not hasattr(ctypes.CDLL(None), "malloc_trim"):
        pytest.skip("this libc has no malloc_trim")
    # One of its own: what tests have freed before is used again, and adds nothing.
    done = subprocess.run([sys.executable, "-c", ITSELF], capture_output=True, text=True, check=True)
    full, left, _ = map(int, done.stdout.split())
    assert full > 80 * MIB
    assert left < 20 * MIB
