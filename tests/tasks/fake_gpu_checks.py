"""Checks that pass, fail, raise, hang or end their process, for the tests of what runs them."""

import os
import signal
import time

from tasks.gpu.bench import NotHere
from tasks.gpu.check import Finding, check


@check("1", seconds=20)
def passes(bench):
    return Finding(True, "all right", {"figure": 3})


@check("1", seconds=20)
def raises(bench):
    raise ValueError("a bug\nin a check")


@check("1", seconds=20)
def is_wrong(bench):
    return Finding(False, "off by 1")


@check("1", seconds=1)
def hangs(bench):
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    time.sleep(600)


@check("1", seconds=20)
def dies(bench):
    os.kill(os.getpid(), signal.SIGSEGV)


@check("1", seconds=20, good_end="worker 3 was lost")
def ends_by_itself(bench):
    print("worker 0: worker 3 was lost", flush=True)
    os._exit(1)


@check("1", seconds=20)
def has_no_memory(bench):
    raise NotHere("needs 10^6 GB")


@check("1", seconds=20, cuda_only="it is about GPUs")
def needs_a_gpu(bench):
    return Finding(True, "")


@check("1", seconds=20)
def is_last(bench):
    return Finding(True, f"in process {os.getpid()}")


@check("2", seconds=20)
def one_of_two_raises(bench):
    if bench.rank == 1:
        raise RuntimeError("only here")
    bench.meet()
    time.sleep(600)


@check("2", seconds=20)
def both_agree(bench):
    return Finding(bench.everywhere(bench.rank) == [0, 1], "0 and 1")


CHECKS = (
    passes, raises, is_wrong, hangs, dies, ends_by_itself, has_no_memory, needs_a_gpu, is_last,
    one_of_two_raises, both_agree,
)  # fmt: skip
