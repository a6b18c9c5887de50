"""Trackers of a Trainer with GossipCallback, offline: each receives the consensus metrics once, from worker 0."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM, Trainer, TrainingArguments

from dsgdac_accel import GossipCallback, GossipConfig
from tests.llm.tiny import arguments, build_model
from tests.workers import run_workers

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]


def read_tensorboard(folder: Path) -> list[float]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (file,) = folder.rglob("events.out.tfevents.*")
    return [event.value for event in EventAccumulator(str(file)).Reload().Scalars("train/gossip/radius")]


def read_wandb(folder: Path) -> list[float]:
    import wandb

    assert wandb.run is not None
    last = wandb.run.summary["train/gossip/radius"]
    wandb.finish()
    (file,) = folder.rglob("*.wandb")
    assert file.stat().st_size > 0
    return [last]


def read_mlflow(folder: Path) -> list[float]:
    import mlflow

    run = mlflow.last_active_run()
    history = mlflow.MlflowClient().get_metric_history(run.info.run_id, "gossip/radius")
    return [metric.value for metric in history]


def read_trackio(folder: Path) -> list[float]:
    from trackio.sqlite_storage import SQLiteStorage

    records = SQLiteStorage.get_logs("gossip", "one")
    return [record["train/gossip/radius"] for record in records if "train/gossip/radius" in record]


READERS = {"tensorboard": read_tensorboard, "wandb": read_wandb, "mlflow": read_mlflow, "trackio": read_trackio}


class Rows(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 48

    def __getitem__(self, row: int) -> dict[str, Any]:
        ids = (torch.arange(8) * (row + 3)) % 300
        return {"input_ids": ids, "labels": ids}


def train(rank: int, tracker: str, folder: Path) -> Any:
    os.environ |= {
        "WANDB_MODE": "offline", "WANDB_DIR": str(folder), "WANDB_SILENT": "true", "TRACKIO_DIR": str(folder),
        "MLFLOW_TRACKING_URI": f"sqlite:///{folder}/mlflow.db", "TENSORBOARD_LOGGING_DIR": str(folder),
    }  # fmt: skip
    more = {
        "report_to": [tracker],
        "logging_steps": 1,
        "project": "gossip",
        "trackio_space_id": None,
        "run_name": "one",
    }
    trainer = Trainer(
        build_model(LlamaForCausalLM),
        TrainingArguments(**arguments(folder / "out", **more)),
        train_dataset=Rows(),
        callbacks=[GossipCallback(GossipConfig(power=2, timeout=60))],
    )
    trainer.train()
    radii = [record["gossip/radius"] for record in trainer.state.log_history]
    return radii, READERS[tracker](folder) if rank == 0 else None


@pytest.mark.parametrize("tracker", READERS)
def test_a_tracker_receives_the_radius_of_every_logged_step(tracker, tmp_path):
    pytest.importorskip(tracker)
    (radii, recorded), _ = run_workers(train, 2, tracker, tmp_path, timeout=150)
    assert len(radii) == 6, "5 steps, and the end of training"
    assert min(radii) > 0
    assert recorded == pytest.approx(radii[-len(recorded) :], rel=1e-6)
