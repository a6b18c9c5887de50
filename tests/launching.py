"""Task scripts started as their users start them, and what they leave behind."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LAUNCH_FILE = str(ROOT / "configs" / "accelerate" / "cpu_4_workers.yaml")
ACCELERATE = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", LAUNCH_FILE]
PLAIN = [sys.executable]
LAUNCHER_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def torchrun(num_workers):
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(num_workers)]


def start(command, cwd, **variables):
    inherited = {key: value for key, value in os.environ.items() if key not in LAUNCHER_VARIABLES}
    return subprocess.Popen(
        command, cwd=cwd, env=inherited | {"OMP_NUM_THREADS": "1"} | variables, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip


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
