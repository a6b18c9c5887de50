"""Task scripts started as their users start them, and what they leave behind."""

import contextlib
import gc
import json
import multiprocessing
import multiprocessing.connection
import os
import random
import re
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.workers import fork

ROOT = Path(__file__).resolve().parents[1]
_BESIDE = [folder / "shared" / "clients" for folder in ROOT.parents]
CLIENTS = next((folder for folder in _BESIDE if folder.exists()), _BESIDE[0])
"""Programs of other people to run the product on; tests that need them skip where they are absent."""
LAUNCH_FILE = str(ROOT / "configs" / "accelerate" / "cpu_4_workers.yaml")
ACCELERATE = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", LAUNCH_FILE]
PLAIN = [sys.executable]
_HELD = []  # the sockets of free_port()
LAUNCHER_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def torchrun(num_workers):
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(num_workers)]


def free_port():
    """A port that is free, below those that the system gives to connections of other tests meanwhile.

    No other process of tests gets it while this one lives: a UDP socket, which does not bar those of TCP, holds it.
    """
    for port in random.SystemRandom().sample(range(20_000, 32_000), 100):  # tests seed the global stream
        held = socket.socket(type=socket.SOCK_DGRAM)
        with socket.socket() as probe, contextlib.suppress(OSError):
            held.bind(("127.0.0.1", port))
            probe.bind(("127.0.0.1", port))
            _HELD.append(held)
            return port
        held.close()
    raise RuntimeError("100 ports are taken")


def forked(num_workers=1):
    """Launches scripts in processes that have imported everything, which saves 5 s of processor time for each."""
    return ["forked", num_workers]


def start(command, cwd, **variables):
    if command[0] == "forked":
        return ForkedScript(command[1], command[2:], cwd, variables)
    inherited = {key: value for key, value in os.environ.items() if key not in LAUNCHER_VARIABLES}
    return subprocess.Popen(
        command, cwd=cwd, env=inherited | {"OMP_NUM_THREADS": "1"} | variables, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip


class ForkedScript:
    """A script in forked processes, with the interface of `Popen` that `finish` needs; all end when one fails."""

    def __init__(self, num_workers, arguments, cwd, variables):
        self.folder = tempfile.TemporaryDirectory()
        self.returncode = None
        variables = {"OMP_NUM_THREADS": "1"} | variables
        if num_workers > 1:
            # As torchrun's agent, this process serves the rendezvous, on a port that the system chooses.
            self.store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
            variables |= {
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": self.store.port, "TORCHELASTIC_USE_AGENT_STORE": "True",
                "TORCHELASTIC_RESTART_COUNT": "0", "WORLD_SIZE": num_workers, "LOCAL_WORLD_SIZE": num_workers,
            }  # fmt: skip
        self.outputs = [
            [f"{self.folder.name}/{stream}{rank}" for stream in ("out", "err")] for rank in range(num_workers)
        ]
        for file in (file for files in self.outputs for file in files):
            Path(file).touch()  # a worker may be ended before it opens them
        self.processes = []
        for rank, outputs in enumerate(self.outputs):
            own = dict.fromkeys(("RANK", "LOCAL_RANK"), rank) if num_workers > 1 else {}
            environment = {key: str(value) for key, value in (variables | own).items()}
            self.processes.append(fork(_run_script, [*map(str, arguments)], str(cwd), environment, outputs))
        self.pid = self.processes[0].pid

    def communicate(self, timeout=None):
        deadline = None if timeout is None else time.monotonic() + timeout
        while running := [process.sentinel for process in self.processes if process.exitcode is None]:
            if any(process.exitcode for process in self.processes):
                break
            patience = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not multiprocessing.connection.wait(running, patience):
                raise subprocess.TimeoutExpired("a forked script", timeout)
        self.returncode = next((process.exitcode for process in self.processes if process.exitcode), 0)
        for process in self.processes:
            process.kill()
            process.join()
        with self.folder:
            texts = [[Path(file).read_text(encoding="utf-8") for file in files] for files in self.outputs]
        return tuple("".join(streams) for streams in zip(*texts, strict=True))


def _run_script(arguments, cwd, variables, outputs):
    """In a forked process: become what `python arguments...` in `cwd` is."""
    gc.freeze()
    os.setsid()
    os.chdir(cwd)
    for descriptor, file in enumerate(outputs, start=1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
    for name in LAUNCHER_VARIABLES:
        os.environ.pop(name, None)
    os.environ.update(variables)
    torch.set_num_threads(1)
    multiprocessing.set_start_method("fork", force=True)
    sys.argv = arguments
    sys.path.insert(0, os.path.dirname(os.path.abspath(arguments[0])))
    runpy.run_path(arguments[0], run_name="__main__")


def finish(process, timeout=90):
    """Exit status and output; past the deadline the process and its children are killed and the test fails."""
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
        pytest.fail(f"still running after {timeout} s\n{out}\n{err}")
    return process.returncode, out, err


def records(run, key):
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return {record["step"]: record[key] for record in map(json.loads, lines) if key in record}


def summary(run):
    return json.loads((run / "summary.json").read_text(encoding="utf-8"))


def error_lines(text):
    assert not re.search(r'tasks/[\w/]+\.py", line', text), text  # no traceback of a worker
    return [line for line in text.splitlines() if line.startswith("error: ")]
