"""An unmodified Hugging Face Trainer with GossipCallback, on gloo workers, against the simulation of Algorithm 1."""

from __future__ import annotations

import pytest
import torch
from transformers import Trainer

from dsgdac_accel import AdaptiveConsensus, GossipCallback, GossipConfig, build_topology
from dsgdac_accel.simulation import Simulation
from tests.multiprocess.trainer_model import Model, Rows, arguments, flat
from tests.workers import run_workers

pytestmark = pytest.mark.multiprocess

ROWS, BATCH, EPOCHS = 44, 3, 3
GOSSIP = {"power": 2.0, "start_step": 3, "timeout": 30}


class Watched(GossipCallback):
    """Records this worker's weights and gamma after every optimizer step."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.weights: list[torch.Tensor] = []
        self.gammas: list[float] = []

    def on_optimizer_step(self, args, state, control, **kwargs):
        self.weights.append(flat(kwargs["model"]))
        self.gammas.append(self.trainer.accelerator.gossip_steps[0].gamma)


def optimizer_of(name: str, model: torch.nn.Module) -> torch.optim.Optimizer:
    if name == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-2)
    return torch.optim.Adam(model.parameters(), lr=0.02)


def train(rank: int, folder: str, cases: list[tuple[str, int]]) -> list[dict]:
    results = []
    for name, accumulation in cases:
        model = Model(seed=rank)  # different models: the callback starts all workers from worker 0's
        callback = Watched(GossipConfig(**GOSSIP))
        settings = arguments(
            folder, per_device_train_batch_size=BATCH, gradient_accumulation_steps=accumulation, max_steps=-1,
            num_train_epochs=EPOCHS, max_grad_norm=0.5,
        )  # fmt: skip
        trainer = Trainer(
            model,
            settings,
            train_dataset=Rows(ROWS),
            optimizers=(optimizer_of(name, model), None),
            callbacks=[callback],
        )
        trainer.train()
        results.append(
            {
                "weights": torch.stack(callback.weights),
                "gammas": callback.gammas,
                "rows": model.rows,
                "deployed": flat(model),
                "steps": trainer.state.global_step,
                "rate": trainer.lr_scheduler.get_last_lr()[0],
            }
        )
    return results


def windows(rows: list[list[int]], accumulation: int) -> list[list[list[int]]]:
    """Return the micro-batches of each optimizer step: `accumulation` each, and the rest in an epoch's last step."""
    per_epoch = len(rows) // EPOCHS
    epochs = [rows[start : start + per_epoch] for start in range(0, len(rows), per_epoch)]
    return [epoch[i : i + accumulation] for epoch in epochs for i in range(0, per_epoch, accumulation)]


def simulate(results: list[dict], name: str, accumulation: int) -> tuple[torch.Tensor, list[float]]:
    """Return the weights of all workers after every step, shape (T, n, D), from the rows that each has read."""
    data = Rows(ROWS)
    models = [Model(seed=0) for _ in results]
    optimizers = [optimizer_of(name, model) for model in models]
    steps = [windows(result["rows"], accumulation) for result in results]
    total = len(steps[0])
    simulation = Simulation(
        models, optimizers, build_topology("one_peer_ring", len(results)), AdaptiveConsensus(power=2.0, start_step=3)
    )
    base = optimizers[0].param_groups[0]["lr"]
    weights = []
    for step in range(total):
        for worker, model in enumerate(models):
            optimizers[worker].param_groups[0]["lr"] = base * (total - step) / total  # Trainer's linear schedule
            model.zero_grad()
            for rows in steps[worker][step]:
                (model(data.x[rows], data.y[rows])["loss"] / len(steps[worker][step])).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        simulation.step()
        weights.append(torch.stack([flat(model) for model in models]))
    return torch.stack(weights), simulation.gammas


@pytest.mark.parametrize("num_workers", [1, 2, 3, 4])
def test_trainer_follows_algorithm_1(num_workers, tmp_path):
    cases = [(name, accumulation) for name in ("sgd", "adam") for accumulation in (1, 3)]
    outcomes = run_workers(train, num_workers, str(tmp_path), cases)
    for number, (name, accumulation) in enumerate(cases):
        results = [outcome[number] for outcome in outcomes]
        weights, gammas = simulate(results, name, accumulation)
        assert gammas[0] == 1.0
        assert min(gammas) < 0.2, "gamma has to change in this test"
        if num_workers > 1:
            assert (weights[-1] - weights[-1].mean(0)).norm() > 1e-2, "the workers have to differ in this test"
        micro_batches = -(-ROWS // BATCH)
        per_worker = -(-micro_batches // num_workers)
        assert results[0]["steps"] == len(weights) == EPOCHS * -(-per_worker // accumulation)
        for worker, result in enumerate(results):
            torch.testing.assert_close(result["weights"], weights[:, worker], rtol=0, atol=1e-6)
            assert result["gammas"] == pytest.approx(gammas, abs=1e-12)
            torch.testing.assert_close(result["deployed"], weights[-1].mean(0), rtol=0, atol=1e-9)
            assert result["rate"] == pytest.approx(0.0, abs=1e-12), "the schedule ends at its last step"
