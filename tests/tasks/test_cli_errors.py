"""How a failed run ends: one line, a status that says why, and no traceback."""

import os
import sys

import pytest
import torch

from dsgdac_accel import EXIT_STOPPED, NonFiniteError, StoppedBySignal, WorkerLostError
from dsgdac_accel.checkpoint import CheckpointError
from tasks.common import cli_errors
from tests.workers import fork


def _end(folder, context, error, rank):
    descriptor = os.open(f"{folder}/said", os.O_WRONLY | os.O_CREAT)
    os.dup2(descriptor, 2)
    os.environ["RANK"] = str(rank)
    cli_errors.GRACE_SECONDS = 0.0
    reported = lambda text: print("reported", text, file=sys.stderr)  # noqa: E731
    with context(reported) if context is cli_errors.training else context():
        raise error


def ended(folder, context, error, rank=0):
    """Exit status of a process that fails in `context`, and its lines on stderr."""
    process = fork(_end, folder, context, error, rank)
    process.join(30)
    return process.exitcode, (folder / "said").read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize("error", [WorkerLostError("worker 1 was\nlost"), NonFiniteError("x"), CheckpointError("y")])
def test_a_run_that_cannot_continue_ends_with_one_line_and_status_1(tmp_path, error):
    assert ended(tmp_path, cli_errors.training, error) == (1, [f"error: {' '.join(str(error).split())}"])


def test_a_file_that_cannot_be_written_is_reported_to_the_others(tmp_path):
    status, lines = ended(tmp_path, cli_errors.training, OSError("no space left"), rank=2)
    assert status == 1
    assert lines == ["reported worker 2 ended: no space left", "error: worker 2: no space left"]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_stopped_run_says_so_once_and_has_a_status_of_its_own(tmp_path, rank):
    status, lines = ended(tmp_path, cli_errors.training, StoppedBySignal("stopped at step 3"), rank)
    assert (status, lines) == (EXIT_STOPPED, ["stopped at step 3"][rank:])


@pytest.mark.parametrize("context", [cli_errors.training, cli_errors.quiet_ends])
def test_an_interrupt_is_status_130(tmp_path, context):
    assert ended(tmp_path, context, KeyboardInterrupt()) == (130, ["interrupted"])


@pytest.mark.parametrize(("rank", "line"), [(0, "error: bad setting"), (1, "error: worker 1: bad setting")])
def test_what_cannot_be_used_is_status_2_and_worker_0_needs_no_name(tmp_path, rank, line):
    assert ended(tmp_path, cli_errors.starting_up, ValueError("bad\nsetting"), rank) == (2, [line])


@pytest.mark.parametrize(
    ("error", "asked"),
    [
        (MemoryError(), ""),
        (
            RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes. Error code 12"),
            "9 bytes",
        ),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has"), "2.00 GiB"),
    ],
)
@pytest.mark.parametrize(("context", "status"), [(cli_errors.starting_up, 2), (cli_errors.training, 1)])
def test_a_lack_of_memory_is_called_so(tmp_path, error, asked, context, status):
    found, lines = ended(tmp_path, context, error)
    asked = f": {asked} were asked for" if asked else ""
    assert found == status
    assert lines[-1].endswith(f"memory does not suffice{asked}. Use a smaller model, batch or image_size.")


def test_a_mistake_keeps_its_traceback(tmp_path):
    status, lines = ended(tmp_path, cli_errors.starting_up, TypeError("a bug"))
    assert (status, lines[-1]) == (1, "TypeError: a bug")
    assert len(lines) > 2


def _write_until_the_reader_ends(folder, context):
    end, descriptor = os.pipe()
    os.close(end)
    os.dup2(descriptor, 1)
    sys.stdout = os.fdopen(1, "w")
    os.dup2(os.open(f"{folder}/said", os.O_WRONLY | os.O_CREAT), 2)
    with context():
        print("a line", flush=True)


@pytest.mark.parametrize("context", [cli_errors.starting_up, cli_errors.quiet_ends])
def test_a_reader_that_ends_early_is_no_error(tmp_path, context):
    process = fork(_write_until_the_reader_ends, tmp_path, context)
    process.join(30)
    assert (process.exitcode, (tmp_path / "said").read_text(encoding="utf-8")) == (0, "")
