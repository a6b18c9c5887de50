"""DAdam-AC on a Transformer and token batches: four real workers against Algorithm 1 with Adam as its local step."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from datasets import Dataset
from torch.utils.data import DataLoader

from dsgdac_accel import AdaptiveConsensus, GossipConfig, build_topology
from dsgdac_accel.simulation import Simulation
from tasks.common.algorithms import make_accelerator
from tasks.common.lr_schedules import inverse_square_root
from tasks.translation.batches import Collate, TokenBatches, TokenizedPairs
from tasks.translation.config import ModelConfig
from tasks.translation.loss import smoothed_loss
from tasks.translation.model import build_model
from tests.workers import run_workers

pytestmark = pytest.mark.multiprocess

WORKERS, EPOCHS, WARMUP, ACCUMULATION = 4, 3, 3, 2


def pairs() -> TokenizedPairs:
    random = np.random.default_rng(0)

    def sentence() -> list[int]:
        return [*random.integers(2, 40, random.integers(1, 7)).tolist(), 1]

    rows = [{"source_ids": sentence(), "target_ids": sentence()} for _ in range(150)]
    return TokenizedPairs(Dataset.from_list(rows))


def token_batches(data: TokenizedPairs) -> TokenBatches:
    source, target = ([len(ids) for ids in data.rows[name]] for name in ("source_ids", "target_ids"))
    return TokenBatches(source, target, tokens=320, workers=WORKERS, accumulation_steps=ACCUMULATION, seed=1)


def make_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return build_model(ModelConfig(size="tiny", dropout=0.0), 40, pad=0, end=1, positions=16).double()


def make_optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.Adam(trained, lr=5e-3, betas=(0.974, 0.999), eps=1e-9)


def make_scheduler(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: inverse_square_root(step, WARMUP))


def flat(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters() if p.requires_grad])


def loss_of(model: torch.nn.Module, batch: dict, tokens: int) -> torch.Tensor:
    labels = batch["labels"]
    logits = model(**{name: value for name, value in batch.items() if name != "labels"}).logits
    return smoothed_loss(logits, labels, 0.1) / tokens


def train(rank: int) -> dict:
    from accelerate.utils import DataLoaderConfiguration

    gossip = GossipConfig(power=2.0, start_step=WARMUP - 1, timeout=60)
    accelerator = make_accelerator(
        "dadam_ac",
        gossip,
        gradient_accumulation_steps=ACCUMULATION,
        dataloader_config=DataLoaderConfiguration(split_batches=False, even_batches=False),
    )
    data = pairs()
    batches = token_batches(data)
    model = make_model()
    optimizer = make_optimizer(model)
    loader = DataLoader(data, batch_sampler=batches, collate_fn=Collate(pad=0, start=0))
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, make_scheduler(optimizer))
    gammas, seen = [], []
    for epoch in range(EPOCHS):
        batches.set_epoch(epoch)
        totals = batches.epoch_tokens()[1][:, :, rank].sum(axis=1)
        for number, batch in enumerate(loader):
            with accelerator.accumulate(model):
                accelerator.backward(loss_of(model, batch, totals[number // ACCUMULATION]) * ACCUMULATION)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            seen.append(int((batch["labels"] >= 0).sum()))
            if accelerator.sync_gradients:
                gammas.append(accelerator.gossip_steps[0].gamma)
    with accelerator.deployed_model(model):
        deployed = flat(model).clone()
    return {"x": flat(model), "deployed": deployed, "gammas": gammas, "seen": seen}


def simulate() -> tuple[torch.Tensor, list[float]]:
    """The batches dealt out by hand: worker w takes every fourth micro-batch from the w-th."""
    data = pairs()
    batches = token_batches(data)
    collate = Collate(pad=0, start=0)
    models = [make_model() for _ in range(WORKERS)]
    optimizers = [make_optimizer(model) for model in models]
    schedulers = [make_scheduler(optimizer) for optimizer in optimizers]
    schedule = AdaptiveConsensus(power=2.0, start_step=WARMUP - 1)
    simulation = Simulation(models, optimizers, build_topology("one_peer_ring", WORKERS), schedule)
    for epoch in range(EPOCHS):
        batches.set_epoch(epoch)
        order = list(batches)
        for step in range(batches.steps_per_epoch):
            for worker, model in enumerate(models):
                model.zero_grad()
                first = step * WORKERS * ACCUMULATION + worker
                mine = [collate(data.__getitems__(order[first + WORKERS * k])) for k in range(ACCUMULATION)]
                tokens = sum(int((batch["labels"] >= 0).sum()) for batch in mine)
                for batch in mine:
                    loss_of(model, batch, tokens).backward()
            simulation.step()
            for scheduler in schedulers:
                scheduler.step()
    return torch.stack([flat(model) for model in models]), simulation.gammas


def test_dadam_ac_on_a_transformer_follows_algorithm_1_with_adam():
    x, gammas = simulate()
    assert min(gammas) < 0.25 < max(gammas) == 1.0, "gamma has to change in this test"
    assert (x - x.mean(0)).norm() > 1e-2, "the workers have to differ in this test"
    results = run_workers(train, WORKERS, timeout=120)
    for result, mine in zip(results, x, strict=True):
        assert result["gammas"] == pytest.approx(gammas, abs=1e-12)
        torch.testing.assert_close(result["x"], mine, rtol=0, atol=1e-6)
        torch.testing.assert_close(result["deployed"], x.mean(0), rtol=0, atol=1e-6)
