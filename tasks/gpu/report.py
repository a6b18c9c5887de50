"""The report of the checks: the machine, one line a check, the counts, and the same as a JSON file."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import accelerate
import torch

from dsgdac_accel import __version__
from tasks.gpu.launching import Machine, Outcome


def machine_facts(machine: Machine) -> dict[str, str]:
    """Return versions and hardware, by name, for the first lines."""
    facts = {
        "dsgdac_accel": f"{__version__}, torch {torch.__version__}, accelerate {accelerate.__version__}, "
        f"Python {platform.python_version()}",
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPU cores",
        "cards": "; ".join(_cards()) or "torch sees none",
    }
    if torch.version.cuda is not None and torch.cuda.is_available():
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
        facts["libraries"] = f"CUDA {torch.version.cuda}, NCCL {nccl}"
    facts["checks on"] = "GPUs, with NCCL between processes" if machine.cuda else "the CPU, with gloo between processes"
    return facts


def _cards() -> list[str]:
    """Name, memory, driver and compute capability of each GPU; through torch where nvidia-smi is missing."""
    if not torch.cuda.is_available():
        return []
    if shutil.which("nvidia-smi"):
        fields = "index,name,memory.total,driver_version,compute_cap,mig.mode.current"
        query = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"]
        answer = subprocess.run(query, capture_output=True, text=True, timeout=20, check=False)
        if answer.returncode == 0:
            names = ("", "", "", "driver ", "compute capability ", "MIG ")
            rows = [line.split(", ") for line in answer.stdout.splitlines()]
            return [", ".join(map("".join, zip(names, row, strict=False))) for row in rows]
    cards = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return [f"{number}, {card.name}, {card.total_memory >> 20} MiB" for number, card in enumerate(cards)]


def line_of(outcome: Outcome) -> str:
    """The line of a check."""
    took = f"  [{outcome.seconds:.1f} s]" if outcome.seconds else ""
    return f"{outcome.status}  {outcome.part}  {outcome.name}: {' '.join(outcome.figure.split())}{took}"


def counts_of(outcomes: Sequence[Outcome], seconds: float) -> str:
    """The last line."""
    counts = Counter(outcome.status for outcome in outcomes)
    return f"{counts['PASS']} passed, {counts['FAIL']} failed, {counts['SKIP']} skipped in {seconds:.0f} s"


def show_details(outcome: Outcome) -> None:
    """Print what explains a FAIL to stderr."""
    if outcome.status == "FAIL" and outcome.details:
        print(*(f"    {line}" for line in outcome.details.splitlines()), sep="\n", file=sys.stderr, flush=True)


def write_json(path: Path, facts: dict[str, str], outcomes: Sequence[Outcome], seconds: float) -> None:
    """Write everything that was found."""
    found = {"machine": facts, "checks": [asdict(outcome) for outcome in outcomes], "seconds": seconds}
    path.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
