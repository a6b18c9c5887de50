"""`Gossip` in a plain PyTorch loop, on gloo workers, against the simulation of Algorithm 1."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from dsgdac_accel import AdaptiveConsensus, Gossip, GossipConfig, build_topology
from dsgdac_accel.simulation import Simulation
from tests.multiprocess.small_model import FAST, flat, make_model
from tests.workers import run_workers

pytestmark = pytest.mark.multiprocess

EPOCHS, BATCHES = 3, 3


def loader_of(rank: int, num_workers: int) -> DataLoader:
    generator = torch.Generator().manual_seed(1)
    size = 4 * BATCHES * num_workers
    data = TensorDataset(
        torch.randn(size, 4, generator=generator, dtype=torch.float64),
        torch.randn(size, 1, generator=generator, dtype=torch.float64),
    )
    return DataLoader(data, batch_size=4, sampler=DistributedSampler(data, num_workers, rank, seed=3))


def loss_of(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    return (model(batch[0]) - batch[1]).square().mean()


def parts(kind: str):
    model = make_model()
    make = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}[kind]
    optimizer = make(model.parameters(), lr=0.05, weight_decay=0.01)
    return model, optimizer, torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=EPOCHS * BATCHES + 1)


def epochs(rank: int, num_workers: int, numbers=range(EPOCHS)):
    loader = loader_of(rank, num_workers)
    for epoch in numbers:
        loader.sampler.set_epoch(epoch)
        yield epoch, loader


def run(rank: int, num_workers: int, kind: str, closures: bool, folder: str) -> dict:
    model, optimizer, scheduler = parts(kind)
    with torch.no_grad():
        model[0].bias += rank  # all start from worker 0's
    gossip = Gossip(model, optimizer, GossipConfig(power=2, start_epoch=1, **FAST), scheduler=scheduler)
    for epoch, loader in epochs(rank, num_workers):
        gossip.set_epoch(epoch)
        if epoch == 2:
            state = {"gossip": gossip, "model": model, "optimizer": optimizer, "scheduler": scheduler}
            torch.save({name: part.state_dict() for name, part in state.items()}, f"{folder}/{rank}.pt")
        for batch in loader:

            def closure(batch=batch):
                optimizer.zero_grad()
                loss = loss_of(model, batch)
                loss.backward()
                return loss

            if closures:
                optimizer.step(closure)
            else:
                closure()
                optimizer.step()
            scheduler.step()
        with gossip.deployed_model() as deployed:
            mean = flat(deployed).clone()
    metrics = gossip.metrics()
    own = flat(model).clone()
    gossip.deploy()
    assert torch.equal(flat(model), mean)
    model(torch.ones(1, 4, dtype=torch.float64)).sum().backward()
    optimizer.step()  # is the optimizer's own again
    return {"x": own, "mean": mean, "gamma": metrics["gossip/gamma"], "radius": gossip_radius(metrics)}


def gossip_radius(metrics: dict[str, float]) -> float:
    return metrics["gossip/radius"]


def resume(rank: int, num_workers: int, kind: str, folder: str) -> torch.Tensor:
    model, optimizer, scheduler = parts(kind)
    gossip = Gossip(model, optimizer, GossipConfig(power=2, start_epoch=1, **FAST), scheduler=scheduler)
    saved = torch.load(f"{folder}/{rank}.pt")
    for name, part in {"gossip": gossip, "model": model, "optimizer": optimizer, "scheduler": scheduler}.items():
        part.load_state_dict(saved[name])
    for epoch, loader in epochs(rank, num_workers, [2]):
        gossip.set_epoch(epoch)
        for batch in loader:
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            optimizer.step()
            scheduler.step()
    return flat(model)


@pytest.mark.parametrize(("num_workers", "kind", "closures"), [(3, "sgd", False), (2, "adam", True)])
def test_a_plain_loop_follows_algorithm_1_and_resumes(num_workers, kind, closures, tmp_path):
    models, optimizers, schedulers = zip(*(parts(kind) for _ in range(num_workers)), strict=True)
    lrs = []
    _, twin, planned = parts(kind)
    for _ in range(EPOCHS * BATCHES):
        lrs.append(twin.param_groups[0]["lr"])
        twin.step()  # without gradients
        planned.step()
    schedule = AdaptiveConsensus(power=2, start_epoch=1, planned_lrs=lrs)
    simulation = Simulation(models, optimizers, build_topology("one_peer_ring", num_workers), schedule)
    for epoch in range(EPOCHS):
        each = [loader_of(rank, num_workers) for rank in range(num_workers)]
        for loader in each:
            loader.sampler.set_epoch(epoch)
        for batches in zip(*each, strict=True):
            for model, batch in zip(models, batches, strict=True):
                model.zero_grad()
                loss_of(model, batch).backward()
            simulation.step(epoch=epoch)
            for scheduler in schedulers:
                scheduler.step()
    assert simulation.gammas[0] == 1.0 > simulation.gammas[-1]
    results = run_workers(run, num_workers, num_workers, kind, closures, str(tmp_path))
    for result, model in zip(results, models, strict=True):
        torch.testing.assert_close(result["x"], flat(model), rtol=0, atol=1e-12)
        torch.testing.assert_close(result["mean"], torch.stack(list(map(flat, models))).mean(0), rtol=0, atol=1e-12)
        assert result["gamma"] == pytest.approx(simulation.gammas[-1], abs=1e-12)
        assert result["radius"] == pytest.approx(simulation.radius(), abs=1e-9)
    resumed = run_workers(resume, num_workers, num_workers, kind, str(tmp_path))
    for result, again in zip(results, resumed, strict=True):
        assert torch.equal(again, result["x"])


# ---- updates that are skipped


def overflow(rank: int, scaled: bool) -> tuple[torch.Tensor, float, float]:
    model = make_model().float()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0) if scaled else None
    gossip = Gossip(model, optimizer, GossipConfig(power=0, topology="complete", **FAST), scaler=scaler)
    with torch.no_grad():
        model[0].bias.fill_(rank)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)  # wraps `step`, too
    loss = model(torch.ones(1, 4)).sum() * (float("inf") if rank else 1.0)
    if scaled:
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    else:
        loss.backward()
        optimizer.step()
    skipped = gossip.metrics()["gossip/nonfinite_steps"]
    return model[0].bias.detach().clone(), skipped, scaler.get_scale() if scaled else 0.0


def test_a_gradient_that_is_not_finite_skips_the_local_update_and_never_the_mix():
    (own, skipped, _), (other, skipped_there, _) = run_workers(overflow, 2, False)
    assert (skipped, skipped_there) == (0, 1)
    assert torch.equal(other, torch.full((6,), 0.5))
    assert not torch.equal(own, other)


def test_an_overflow_of_fp16_training_skips_the_update_of_all_workers():
    for bias, _, scale in run_workers(overflow, 2, True):
        assert torch.equal(bias, torch.full((6,), 0.5))
        assert scale == 4.0


# ---- refusals


class Twice(torch.optim.SGD):
    def step(self, closure):
        closure()
        return closure()


def test_what_cannot_gossip_is_refused_with_the_way_out(monkeypatch):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(TypeError, match="torch optimizers; got float"):
        Gossip(model, [0.1])
    with pytest.raises(TypeError, match="must be a GossipConfig; got float"):
        Gossip(model, optimizer, 3.0)
    with pytest.raises(ValueError, match=r"LBFGS: .*several points.*evaluates it once"):
        Gossip(model, torch.optim.LBFGS(model.parameters()))
    with pytest.raises(ValueError, match=r"Pass VirtualWorkers\(model, 2\), or leave"):
        Gossip(model, optimizer, GossipConfig(workers_per_process=2))
    twice = Twice(model.parameters(), lr=0.1)
    gossip = Gossip(model, twice)
    with pytest.raises(ValueError, match="several points"):
        twice.step(lambda: torch.zeros(()))
    with pytest.raises(ValueError, match="state is of 2 optimizers, but this Gossip has 1"):
        gossip.load_state_dict({"steps": [{}, {}]})
    later = torch.optim.SGD(make_model().parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"Call gossip\.set_epoch\(epoch\)"):
        Gossip(make_model(), later, GossipConfig(start_epoch=1)) and later.step()
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match=r"2 processes were launched.*init_process_group"):
        Gossip(model, optimizer)


def wrapped(rank: int) -> str:
    model = DistributedDataParallel(make_model())
    with pytest.raises(ValueError, match="already wrapped in DistributedDataParallel") as refusal:
        Gossip(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return str(refusal.value)


def test_a_model_in_ddp_is_refused():
    assert all("bare module" in message for message in run_workers(wrapped, 2))
