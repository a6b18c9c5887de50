"""Stopping a Trainer with GossipCallback and resuming from its checkpoints, in new processes."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch.utils.data import WeightedRandomSampler
from transformers import Trainer, TrainerCallback

from dsgdac_accel import GossipCallback, GossipConfig
from dsgdac_accel.checkpoint import CheckpointError
from dsgdac_accel.distributed.stopping import StoppedBySignal
from tests.multiprocess.test_trainer_step import Lengths, Stream, by_length, collate
from tests.multiprocess.trainer_model import Model, Rows, arguments, flat
from tests.workers import run_workers, try_workers

pytestmark = pytest.mark.multiprocess


class Watched(TrainerCallback):
    """Records this worker's weights and buffers, gamma, and the partner after every optimizer step."""

    def __init__(self, kill_at: int | None = None) -> None:
        self.seen: dict[int, tuple] = {}
        self.kill_at = kill_at

    def on_optimizer_step(self, args, state, control, **kwargs):
        gossip = self.trainer.accelerator.gossip_steps[0]
        model = kwargs["model"]
        buffers = torch.cat([buffer.double().flatten() for buffer in model.buffers()])
        partner = gossip.mixer.topology.neighbors(gossip.mixer.step - 1, gossip.group.rank)
        self.seen[state.global_step + 1] = (flat(model), buffers, gossip.gamma, partner)
        if self.kill_at == state.global_step + 1 and gossip.group.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)


RUNS: dict[str, dict[str, Any]] = {
    # 44 rows by batches of 3 over 2 workers: 8 micro-batches an epoch
    "odd step in mid-epoch": {"save_steps": 5},
    "end of an epoch": {"save_strategy": "epoch", "eval_strategy": "epoch"},
    "accumulation": {"save_steps": 4, "gradient_accumulation_steps": 3},
    "before the start": {"save_steps": 3, "gossip": {"start_step": 10}},
    "before the starting epoch": {"save_steps": 3, "gossip": {"start_epoch": 1, "max_lr": "active"}},
    "grouped by length": {"save_steps": 11, **by_length(), "remove_unused_columns": False},
    "a sampler of its own": {"save_steps": 13},
    "loader process": {"save_steps": 5, "dataloader_num_workers": 1},
    "worker 0 reads for all": {
        "save_steps": 11,
        "accelerator_config": {"dispatch_batches": True},
        "dataloader_drop_last": True,
    },
    # 15 batches of 3 rows, of which the workers get 8 and 7
    "uneven lengths": {"save_steps": 11, "accelerator_config": {"even_batches": False}},
    # 40 rows and no length: 7 micro-batches a pass
    "stream": {"save_steps": 5, "max_steps": 8},
    "stream, second pass": {"save_steps": 9, "max_steps": 12},
    "stream, between passes": {"save_steps": 7, "max_steps": 12},
    "stream, each reads its own": {"save_steps": 9, "max_steps": 16, "accelerator_config": {"dispatch_batches": False}},
    "stream, accumulation": {"save_steps": 5, "max_steps": 8, "gradient_accumulation_steps": 2},
}


def run(rank: int, folder: Path, names: list[str], resume: str, kill_at: int | None = None) -> dict[str, dict]:
    found = {}
    for name in names:
        settings = dict(RUNS[name])
        gossip = GossipConfig(**{"power": 2.0, "timeout": 20, **settings.pop("gossip", {})})
        model = Model(dropout=0.3, batch_norm=True)
        watched = Watched(kill_at)
        grouped = "grouped" in name
        trainer = Trainer(
            model,
            arguments(
                str(folder / name),
                **{
                    "num_train_epochs": 3,
                    "max_steps": -1,
                    "save_strategy": "steps",
                    "logging_strategy": "steps",
                    "logging_steps": 1,
                    "lr_scheduler_type": "cosine",
                    "warmup_steps": 2,
                    **settings,
                },
            ),
            train_dataset=Stream() if "stream" in name else (Lengths if grouped else Rows)(44),
            eval_dataset=Rows(16, 1),
            data_collator=collate,
            optimizers=(torch.optim.Adam(model.parameters(), lr=0.05), None),
            callbacks=[watched, GossipCallback(gossip)],
        )
        watched.trainer = trainer
        if name == "a sampler of its own":
            trainer._get_train_sampler = lambda *_: WeightedRandomSampler(
                [1.0 + row for row in range(44)], 44, generator=torch.Generator().manual_seed(7)
            )
        checkpoints = sorted((folder / name).glob("checkpoint-*"), key=lambda path: int(path.name[11:]))
        trainer.train(resume_from_checkpoint={"no": None, "oldest": str(*checkpoints[:1]), "newest": True}[resume])
        gammas = [(r["step"], r["gossip/gamma"]) for r in trainer.state.log_history if "loss" in r]
        found[name] = {"seen": watched.seen, "deployed": flat(model), "rows": model.rows, "gammas": gammas}
    return found


FAST = ["accumulation", "before the starting epoch", "stream, second pass"]


@pytest.mark.parametrize(
    "names", [FAST, pytest.param([name for name in RUNS if name not in FAST], marks=pytest.mark.slow)], ids=["", "more"]
)
def test_a_resumed_run_equals_the_unbroken_one_to_the_bit(tmp_path, names):
    unbroken = run_workers(run, 2, tmp_path, names, "no", timeout=150.0)
    resumed = run_workers(run, 2, tmp_path, names, "oldest", timeout=150.0)
    for whole, rest in zip(unbroken, resumed, strict=True):
        for name in names:
            steps = rest[name]["seen"].keys()
            assert 2 < min(steps) <= max(steps) == max(whole[name]["seen"]), name
            for step, (weights, buffers, gamma, partner) in rest[name]["seen"].items():
                expected = whole[name]["seen"][step]
                assert torch.equal(weights, expected[0]), f"{name}: weights of step {step}"
                assert torch.equal(buffers, expected[1]), f"{name}: buffers of step {step}"
                assert (gamma, partner) == expected[2:], f"{name}: step {step}"
            assert torch.equal(rest[name]["deployed"], whole[name]["deployed"]), name
            assert rest[name]["gammas"] == whole[name]["gammas"], "the log has a gap"
            assert rest[name]["rows"] == whole[name]["rows"][-len(rest[name]["rows"]) :]
    for name in names:
        first, second = (result[name]["seen"][max(result[name]["seen"])][0] for result in unbroken)
        assert not torch.equal(first, second), "the workers have to differ in this test"


# ---- killed


def test_a_killed_run_resumes_from_its_newest_complete_checkpoint(tmp_path):
    name = "odd step in mid-epoch"
    unbroken = run_workers(run, 2, tmp_path / "unbroken", [name], "no")
    outcomes = try_workers(run, 2, tmp_path / "killed", [name], "no", 13)
    assert outcomes[1].exit_code == -signal.SIGKILL
    assert "WorkerLostError" in outcomes[0].error
    assert "worker 1" in outcomes[0].error.splitlines()[-1]
    folder = tmp_path / "killed" / name
    assert {path.name for path in folder.glob("checkpoint-*")} == {"checkpoint-5", "checkpoint-10"}
    # A third checkpoint whose save was killed: it has the worker files but not the Trainer's.
    shutil.copytree(folder / "checkpoint-10", folder / "checkpoint-12")
    (folder / "checkpoint-12" / "trainer_state.json").unlink()
    resumed = run_workers(run, 2, tmp_path / "killed", [name], "newest")
    for whole, rest in zip(unbroken, resumed, strict=True):
        assert min(rest[name]["seen"]) == 11
        for step, values in rest[name]["seen"].items():
            assert torch.equal(values[0], whole[name]["seen"][step][0]), f"step {step}"
        assert torch.equal(rest[name]["deployed"], whole[name]["deployed"])


# ---- stopped by a signal


class Sender(TrainerCallback):
    """Sends SIGTERM to its own worker at one step."""

    def __init__(self, step: int | None) -> None:
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            os.kill(os.getpid(), signal.SIGTERM)


def stream(rank: int, folder: Path, stop_at: int | None) -> tuple[int, torch.Tensor]:
    model = Model(dropout=0.3)
    sender = Sender(stop_at if rank == 1 else None)
    trainer = Trainer(
        model,
        arguments(str(folder), max_steps=100, accelerator_config={"dispatch_batches": False}),
        train_dataset=Stream(),
        callbacks=[sender, GossipCallback(GossipConfig(timeout=20), stop_on_signals=True)],
    )
    with contextlib.suppress(StoppedBySignal):
        trainer.train(resume_from_checkpoint="auto")
    return trainer.state.global_step, flat(model)


def test_a_signal_stops_in_the_middle_of_a_stream(tmp_path):
    unbroken = run_workers(stream, 2, tmp_path / "unbroken", None)
    stopped = run_workers(stream, 2, tmp_path / "stopped", 4)
    assert stopped[0][0] == stopped[1][0] <= 20
    for whole, rest in zip(unbroken, run_workers(stream, 2, tmp_path / "stopped", None), strict=True):
        assert rest[0] == whole[0] == 100
        assert torch.equal(rest[1], whole[1])


# ---- another number of workers, checkpoints of others, damage


def try_to_resume(rank: int, folder: Path, checkpoint: str, count: str = "refuse") -> Any:
    model = Model(dropout=0.3, batch_norm=True)
    start: list[torch.Tensor] = []

    class Start(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            start.append(flat(kwargs["model"]))

    trainer = Trainer(
        model,
        arguments(str(folder / "other"), num_train_epochs=3, max_steps=-1),
        train_dataset=Rows(44),
        optimizers=(torch.optim.Adam(model.parameters(), lr=0.05), None),
        callbacks=[Start(), GossipCallback(GossipConfig(timeout=20, on_other_worker_count=count))],
    )
    try:
        trainer.train(resume_from_checkpoint=checkpoint)
    except CheckpointError as error:
        return str(error)
    return start[0], flat(model), len(start)


def stock(rank: int, folder: Path) -> None:
    model = Model(dropout=0.3, batch_norm=True)
    settings = arguments(str(folder / "stock"), max_steps=5, save_strategy="steps", save_steps=5)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    Trainer(model, settings, train_dataset=Rows(44), optimizers=(optimizer, None)).train()


def test_another_number_of_workers_is_refused_or_starts_from_the_deployed_model(tmp_path):
    name = "odd step in mid-epoch"
    run_workers(run, 2, tmp_path, [name], "no")
    checkpoint = tmp_path / name / "checkpoint-5"
    for said in run_workers(try_to_resume, 3, tmp_path, str(checkpoint)):
        assert "holds the state of 2 workers, but 3 were launched" in said
        assert "on_other_worker_count" in said
    deployed = load_file(checkpoint / "model.safetensors")
    names = [name for name, _ in Model(batch_norm=True).named_parameters()]
    mean = torch.cat([deployed[name].flatten() for name in names])
    results = run_workers(try_to_resume, 3, tmp_path, str(checkpoint), "deployed")
    for start, end, steps in results:
        torch.testing.assert_close(start, mean, rtol=0, atol=1e-12)
        assert torch.equal(end, results[0][1])
        assert steps == 3 * 5 - 5, "5 micro-batches of 3 rows are a third of 44"

    manifest = json.loads((checkpoint / "gossip.json").read_text())
    (checkpoint / manifest["files"][1]["name"]).write_bytes(b"cut off")
    for said in run_workers(try_to_resume, 2, tmp_path, str(checkpoint)):
        assert manifest["files"][1]["name"] in said


@pytest.mark.skipif(
    transformers.__version__.startswith("5.0."), reason="5.0 itself cannot resume several processes on CPU"
)
def test_a_checkpoint_of_a_trainer_without_gossip_is_refused_or_starts_all_workers(tmp_path):
    run_workers(stock, 2, tmp_path)
    checkpoint = tmp_path / "stock" / "checkpoint-5"
    for said in run_workers(try_to_resume, 2, tmp_path, str(checkpoint)):
        assert "holds no states of workers" in said
    names = [name for name, _ in Model(batch_norm=True).named_parameters()]
    saved = load_file(checkpoint / "model.safetensors")
    for start, _, steps in run_workers(try_to_resume, 2, tmp_path, str(checkpoint), "deployed"):
        assert torch.equal(start, torch.cat([saved[name].flatten() for name in names]))
        assert steps == 3 * 8 - 5
