"""The small runs into which faults are injected, and the parts of a run that must not depend on faults."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy
import torch
from safetensors.torch import load_file

from dsgdac_accel.checkpoint import load_worker, newest_checkpoint, read_manifest
from tasks.translation.grammar import grammar_splits

SAVE_EVERY = 3
KEEP = 2

IMAGES = """
model: wrn-10-1
dropout: 0.3
num_train_epochs: 5
global_batch_size: 120
gradient_accumulation_steps: 2
learning_rate: 0.1
warmup_epochs: 0.5
crop_padding: 1
logging_steps: 2
eval_every: 2
data: {train_limit: 720}
"""  # 6 steps an epoch; 120 divides evenly over 2 to 5 workers and two micro-batches

TEXT = """
data: {path: text, vocab_size: 400, cache_dir: cache}
model: {size: tiny, dropout: 0.2}
decoding: {beams: 2, batch_tokens: 60}
num_train_epochs: 4
batch_tokens: 900
learning_rate: 5e-3
warmup_steps: 3
logging_steps: 3
eval_every: 2
weight_average: {kind: lawa, last: 2, every: 4}
max_grad_norm: 1.0
show_translations: 1
"""

TIMES = ("seconds", "train_seconds", "train_cpu_seconds", "data_share")
LOGGED_TIMES = ("gossip/wait_seconds", "train/tokens_per_second")
CLOCKS = ("waited", "train_seconds", "train_cpu_seconds", "seconds", "log_bytes")
"""Parts of the state that depend on time; the log's length depends on how its times are written."""


@dataclass(frozen=True)
class Setup:
    """One configuration of a task."""

    task: str
    algorithm: str
    workers: int
    topology: str = "base_graph"
    extra: tuple[str, ...] = field(default=())

    @property
    def name(self) -> str:
        """Name for folders and tables."""
        return "-".join((self.task, self.algorithm, self.topology, str(self.workers), *self.extra)).replace("--", "")

    @property
    def gossips(self) -> bool:
        """Whether its workers gossip, as opposed to the synchronous baselines."""
        return self.algorithm not in ("sgd", "sam", "adam")

    def arguments(self, output: Path, timeout: float) -> list[str]:
        """Arguments of the task's script."""
        start = ["--gossip.start_epoch", "1"] if self.algorithm.endswith("_ac") else []
        return [
            "--config", f"{self.task}.yaml", "--algorithm", self.algorithm, "--gossip.topology", self.topology,
            "--gossip.timeout", str(timeout), "--gossip.log_every", "4", *start, "--report_to", "[]",
            "--save_steps", str(SAVE_EVERY), "--save_total_limit", str(KEEP), "--output_dir", str(output), *self.extra,
        ]  # fmt: skip


SETUPS = (
    Setup("cifar", "dsgd_ac", 2, "one_peer_ring", ("--dataloader_num_workers", "1")),
    Setup("wmt14", "dadam_ac", 3),
    Setup("cifar", "dsgd_ac", 4, "one_peer_exponential"),
    Setup("wmt14", "dadam_ac", 5),
    Setup("cifar", "dsgd", 3, "ring"),
    Setup("wmt14", "dadam_ac", 2, "one_peer_ring", ("--dataloader_num_workers", "1")),
    Setup("cifar", "dadam_ac", 5),
    Setup("wmt14", "dadam", 4, "one_peer_ring"),
    Setup("cifar", "sgd", 2),
    Setup("wmt14", "adam", 2),  # with three, DDP sums in another order after resuming
)


def prepare(work: Path) -> None:
    """Write the configurations and the sentences."""
    (work / "text").mkdir(parents=True, exist_ok=True)
    (work / "cifar.yaml").write_text(IMAGES, encoding="utf-8")
    (work / "wmt14.yaml").write_text(TEXT, encoding="utf-8")
    for split, count in {"train": 160, "validation": 10, "test": 10}.items():
        for language, lines in zip(("en", "de"), zip(*grammar_splits()[split][:count], strict=True), strict=True):
            (work / "text" / f"{split}.{language}").write_text("\n".join(lines), encoding="utf-8")


def left_by(output: Path) -> dict[str, Any]:
    """The results of a finished run that must be the same after any number of faults."""
    summary = json.loads((output / "summary.json").read_text(encoding="utf-8"))
    lines = (output / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    newest = newest_checkpoint(output / "checkpoints", "step-*")
    assert newest is not None
    manifest = read_manifest(newest)
    states = [load_worker(newest, rank) for rank in range(manifest.workers)]
    for state in states:
        for own in state["registered"]:
            for key in CLOCKS:
                own.pop(key, None)
    return {
        "summary": {key: value for key, value in summary.items() if key not in TIMES},
        "log": [{k: v for k, v in json.loads(line).items() if k not in LOGGED_TIMES} for line in lines],
        "step": manifest.step,
        "workers": states,
        "deployed": {file.name: load_file(file) for file in sorted((output / "deployed").glob("*.safetensors"))},
    }


def differences(one: Any, other: Any, path: str = "") -> list[str]:
    """Where two trees differ, bit by bit."""
    if type(one) is not type(other):
        return [f"{path}: {type(one).__name__} and {type(other).__name__}"]
    if isinstance(one, dict):
        if one.keys() != other.keys():
            return [f"{path}: keys {sorted(map(str, one.keys() ^ other.keys()))}"]
        return [found for key in one for found in differences(one[key], other[key], f"{path}/{key}")]
    if isinstance(one, list | tuple):
        if len(one) != len(other):
            return [f"{path}: {len(one)} and {len(other)} entries"]
        return [
            found
            for number, pair in enumerate(zip(one, other, strict=True))
            for found in differences(*pair, f"{path}/{number}")
        ]
    if isinstance(one, torch.Tensor):
        same = one.dtype == other.dtype and one.shape == other.shape and _octets(one) == _octets(other)
    elif isinstance(one, numpy.ndarray):
        same = one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
    else:
        same = one == other or (one != one and other != other)
    return [] if same else [f"{path}: {str(one)[:60]} and {str(other)[:60]}"]


def _octets(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
