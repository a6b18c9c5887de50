"""A Trainer with GossipCallback evaluates, saves, compares and ends with the average of the workers."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.nn.parallel import DistributedDataParallel
from transformers import EarlyStoppingCallback, Trainer, TrainerCallback

from dsgdac_accel import GossipCallback, GossipConfig
from tests.multiprocess.trainer_model import Model, Rows, arguments, flat
from tests.workers import run_workers

pytestmark = pytest.mark.multiprocess

GOSSIP = GossipConfig(power=2.0, timeout=30)
EVALUATION = Rows(16, seed=1)
EVERY_3 = {"eval_strategy": "steps", "eval_steps": 3, "save_strategy": "steps", "save_steps": 3}


class Weights(TrainerCallback):
    """Records this worker's weights after every optimizer step."""

    def __init__(self) -> None:
        self.weights: dict[int, torch.Tensor] = {}

    def on_optimizer_step(self, args, state, control, **kwargs):
        self.weights[state.global_step + 1] = flat(kwargs["model"])


def make_trainer(rank: int, folder: Path | str, *callbacks: TrainerCallback, **settings) -> tuple[Trainer, Weights]:
    model = Model(dropout=0.2, batch_norm=True)
    weights = Weights()
    trainer = Trainer(
        model,
        arguments(str(folder), **settings),
        train_dataset=Rows(40),
        eval_dataset=EVALUATION,
        optimizers=(torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9), None),
        callbacks=[weights, GossipCallback(GOSSIP), *callbacks],
    )
    return trainer, weights


def loss_of(state: dict[str, torch.Tensor]) -> float:
    model = Model(dropout=0.2, batch_norm=True)
    model.load_state_dict(state)
    with torch.no_grad():
        return model.eval()(EVALUATION.x, EVALUATION.y)["loss"].item()


# ---- training is not changed


class Meddler(TrainerCallback):
    """Evaluates, predicts, saves and forces a checkpoint at unusual moments, also inside an accumulation window."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.trainer: Trainer
        self.seen: list[tuple[int, float, float, float]] = []

    def on_substep_end(self, args, state, control, **kwargs):
        self._use(state.global_step)

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step % 2:
            self._use(state.global_step)
        control.should_save = state.global_step == 5  # after GossipCallback, which comes first

    def _use(self, step: int) -> None:
        loss = self.trainer.evaluate()["eval_loss"]
        predicted = self.trainer.predict(EVALUATION)
        by_hand = (torch.tensor(predicted.predictions) - EVALUATION.y).square().mean().item()
        self.trainer.save_model(str(self.folder / "meddled"))
        torch.distributed.barrier()
        self.seen.append((step, loss, by_hand, loss_of(load_file(self.folder / "meddled" / "model.safetensors"))))


def train_and_meddle(rank: int, folder: Path) -> dict:
    settings = {"gradient_accumulation_steps": 2, "max_steps": 6}
    quiet, alone = make_trainer(rank, folder / "quiet", **settings)
    quiet.train()
    meddler = Meddler(folder)
    meddled, disturbed = make_trainer(rank, folder / "meddled", meddler, **settings)
    meddler.trainer = meddled
    meddled.train()
    return {
        "alone": alone.weights,
        "disturbed": disturbed.weights,
        "seen": meddler.seen,
        "deployed": flat(meddled.model),
    }


def test_evaluating_and_saving_do_not_change_training(tmp_path):
    results = run_workers(train_and_meddle, 2, tmp_path)
    for result in results:
        assert result["alone"].keys() == result["disturbed"].keys() == set(range(1, 7))
        for step, weights in result["alone"].items():
            assert torch.equal(weights, result["disturbed"][step]), f"step {step} was disturbed"
        assert len(result["seen"]) == 5 + 3, "the fourth window of an epoch of 7 micro-batches has only one"
        for _, loss, by_hand, saved in result["seen"]:
            assert loss == pytest.approx(by_hand, rel=1e-9)
            assert loss == pytest.approx(saved, rel=1e-9)
    assert not torch.equal(results[0]["alone"][6], results[1]["alone"][6])
    forced = load_file(tmp_path / "meddled" / "checkpoint-5" / "model.safetensors")
    mean = (results[0]["disturbed"][5] + results[1]["disturbed"][5]) / 2
    names = [name for name, _ in Model(batch_norm=True).named_parameters()]
    torch.testing.assert_close(torch.cat([forced[name].flatten() for name in names]), mean, rtol=0, atol=1e-12)


class Growing(Model):
    """Has a cache as long as the longest batch so far, like a position table."""

    def __init__(self) -> None:
        super().__init__(batch_norm=True)
        self.register_buffer("cache", torch.zeros(1), persistent=False)

    def forward(self, x, labels, row=None):
        if len(x) > len(self.cache):
            self.cache = torch.zeros(len(x))
        return super().forward(x, labels, row)


def train_growing(rank: int, folder: Path) -> int:
    trainer = Trainer(
        Growing(),
        arguments(str(folder), max_steps=6, **EVERY_3),
        train_dataset=Rows(40),
        eval_dataset=EVALUATION,
        callbacks=[GossipCallback(GOSSIP)],
    )
    trainer.train()
    return len(trainer.accelerator._dataloaders)


def test_a_buffer_may_grow_in_evaluation_and_loaders_do_not_pile_up(tmp_path):
    assert run_workers(train_growing, 2, tmp_path) == [1, 1]


# ---- best model, early stop, slow disks


def noisy_metric(prediction) -> dict[str, float]:
    """Differs between the workers, like a metric measured on a clock, and only falls after its third call."""
    noisy_metric.calls += 1
    return {"score": min(noisy_metric.calls, 3) - torch.distributed.get_rank() * noisy_metric.calls}


def stop_early(rank: int, folder: Path) -> dict:
    noisy_metric.calls = 0
    trainer, _ = make_trainer(
        rank,
        folder,
        EarlyStoppingCallback(early_stopping_patience=2),
        **EVERY_3,
        max_steps=60,
        load_best_model_at_end=True,
        metric_for_best_model="score",
        greater_is_better=True,
        save_total_limit=2,
    )
    trainer.compute_metrics = noisy_metric
    trainer.train()
    return {
        "step": trainer.state.global_step,
        "best": trainer.state.best_model_checkpoint,
        "metric": trainer.state.best_metric,
        "deployed": flat(trainer.model),
        "loss": trainer.evaluate()["eval_loss"],
    }


def test_all_workers_agree_on_the_best_model_and_the_early_stop(tmp_path):
    results = run_workers(stop_early, 2, tmp_path)
    for result in results:
        assert (result["step"], result["metric"]) == (15, 3)
        assert result["best"] == str(tmp_path / "checkpoint-9")
        assert torch.equal(result["deployed"], results[0]["deployed"])
    best = load_file(tmp_path / "checkpoint-9" / "model.safetensors")
    assert results[0]["loss"] == pytest.approx(loss_of(best), rel=1e-9)
    assert {path.name for path in tmp_path.glob("checkpoint-*")} == {"checkpoint-9", "checkpoint-15"}


def save_slowly(rank: int, folder: Path) -> dict:
    trainer, _ = make_trainer(
        rank, folder, **EVERY_3, max_steps=3, load_best_model_at_end=True, metric_for_best_model="loss",
        save_only_model=True,
    )  # fmt: skip
    write = trainer._save

    def slow(*args, **kwargs):
        time.sleep(1 if rank == 0 else 0)
        write(*args, **kwargs)

    trainer._save = slow
    trainer.train()
    history = [record for record in trainer.state.log_history if "eval_loss" in record]
    return {"deployed": flat(trainer.model), "loss": trainer.evaluate()["eval_loss"], "logged": history[0]["eval_loss"]}


def test_no_worker_reads_the_best_model_before_it_is_written(tmp_path):
    results = run_workers(save_slowly, 3, tmp_path)
    assert all(torch.equal(result["deployed"], results[0]["deployed"]) for result in results)
    assert all(result["loss"] == pytest.approx(result["logged"], rel=1e-12) for result in results)
    assert not (tmp_path / "checkpoint-3" / "gossip.json").exists(), "save_only_model keeps no states of workers"


# ---- logs


def log(rank: int, folder: Path) -> dict:
    trainer, weights = make_trainer(
        rank, folder, logging_strategy="steps", logging_steps=2, logging_first_step=True, eval_strategy="steps",
        eval_steps=4, max_steps=8, report_to=["tensorboard"],
    )  # fmt: skip
    trainer.train()
    after = trainer.evaluate()
    return {"history": trainer.state.log_history, "weights": weights.weights, "after": after}


def test_consensus_metrics_are_in_the_logs_of_the_trainer(tmp_path):
    results = run_workers(log, 2, tmp_path)
    training = [record for record in results[0]["history"] if "loss" in record]
    assert [record["step"] for record in training] == [1, 2, 4, 6, 8]
    evaluations = [record for record in results[0]["history"] if "eval_loss" in record]
    assert [(record["step"], "gossip/radius" in record) for record in evaluations] == [(4, True), (8, True), (8, False)]
    for record in training:
        lr = 0.2 * (8 - record["step"] + 1) / 8
        assert record["gossip/lr"] == pytest.approx(lr)
        assert record["gossip/gamma"] == pytest.approx((lr / 0.2) ** 2)
        own = [result["weights"][record["step"]] for result in results]
        assert record["gossip/radius"] == pytest.approx((own[0] - own[1]).norm().item() / 2, rel=1e-9)
        assert (record["gossip/neighbor_disagreement"] > 0) == (record["step"] > 1), "all workers start alike"
        assert record["gossip/wait_seconds"] >= 0
    assert "epoch" in results[0]["after"]
    assert not any(name.startswith("gossip/") for name in results[0]["after"]), "evaluate returns what it always did"
    written = next(file for file in tmp_path.rglob("events.out.tfevents*"))
    events = EventAccumulator(str(written.parent)).Reload()
    assert {"train/gossip/gamma", "train/gossip/radius", "train/gossip/wait_seconds"} <= set(events.Tags()["scalars"])
    assert len(events.Scalars("train/gossip/radius")) >= len(training)
    json.dumps(results[0]["history"])


# ---- after training


def use_afterwards(rank: int, folder: Path) -> dict:
    trainer, weights = make_trainer(rank, folder, max_steps=4)
    trainer.train()
    model = trainer.model
    ordinary = all(parameter.untyped_storage().resizable() for parameter in model.parameters())
    if rank == 0:
        trainer.save_model(str(folder / "alone"))  # not collective any more
    first = flat(model)
    trainer.train()
    return {
        "weights": weights.weights[4],
        "first": first,
        "ordinary": ordinary,  # memory inside a bucket cannot be resized
        "again": flat(model),
    }


def test_the_average_stays_in_ordinary_memory_and_can_be_trained_further(tmp_path):
    results = run_workers(use_afterwards, 2, tmp_path)
    saved = load_file(tmp_path / "alone" / "model.safetensors")
    names = [name for name, _ in Model(batch_norm=True).named_parameters()]
    for result in results:
        assert result["ordinary"]
        assert torch.equal(result["first"], torch.cat([saved[name].flatten() for name in names]))
        assert torch.equal(result["again"], results[0]["again"])
        assert not torch.equal(result["again"], result["first"])


def plain_after_gossip(rank: int, folder: Path, gossip_fails: bool) -> tuple[bool, torch.Tensor]:
    trainer, _ = make_trainer(rank, folder, max_steps=4)
    if gossip_fails:
        trainer.add_callback(Fails())
        with pytest.raises(ZeroDivisionError):
            trainer.train()
    else:
        trainer.train()
    model = trainer.model
    plain = Trainer(model, arguments(str(folder), max_steps=4), train_dataset=Rows(40))
    plain.train()
    return isinstance(plain.model_wrapped, DistributedDataParallel), flat(model)


class Fails(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        raise ZeroDivisionError


@pytest.mark.parametrize("gossip_fails", [False, True])
def test_a_later_trainer_without_gossip_averages_gradients(gossip_fails, tmp_path):
    (wrapped, first), (_, second) = run_workers(plain_after_gossip, 2, tmp_path, gossip_fails)
    assert wrapped
    assert torch.equal(first, second)
