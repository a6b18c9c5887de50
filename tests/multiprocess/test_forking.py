"""Forks while the library's threads are busy: neither the child nor the parent hangs."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time

import pytest

from dsgdac_accel.checkpoint.serialization import PARTIAL, write_whole
from dsgdac_accel.distributed.poster import no_fork

pytestmark = pytest.mark.multiprocess


def child_ends(seconds: float = 10.0) -> bool:
    """Whether a child that is forked now reaches its first line."""
    child = os.fork()
    if child == 0:
        os._exit(0)
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if os.waitpid(child, os.WNOHANG)[0]:
            return True
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return False


def test_a_child_does_not_wait_for_a_file_that_is_being_written(tmp_path):
    path = tmp_path / "state"
    pipe = path.with_name(path.name + PARTIAL)
    os.mkfifo(pipe)  # writing to it blocks once it is full, until somebody reads

    def write():
        with contextlib.suppress(OSError):  # a pipe cannot be synchronized to disk
            write_whole(path, [bytes(2**20)])

    writer = threading.Thread(target=write)
    writer.start()
    with open(pipe, "rb", buffering=0) as reader:
        assert reader.read(1), "the writer is in the middle of it"
        assert child_ends()
        while reader.read(2**20):
            pass
    writer.join(10)
    assert not writer.is_alive()


def test_a_fork_waits_for_a_thread_that_holds_the_lock():
    held, order = threading.Event(), []

    def work():
        with no_fork:
            held.set()
            time.sleep(0.3)
            order.append("work")

    thread = threading.Thread(target=work)
    thread.start()
    held.wait()
    assert child_ends()
    order.append("fork")
    thread.join()
    assert order == ["work", "fork"]
    assert not no_fork.locked()
