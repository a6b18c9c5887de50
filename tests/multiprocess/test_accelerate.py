"""GossipAccelerator behaves like Accelerate: steps, schedules, clipping, other users of the process group, refusals."""

from __future__ import annotations

import itertools
import math
import re
import subprocess
import sys
from functools import partial

import pytest
import torch
import torch.distributed as dist
import transformers
from accelerate import Accelerator
from accelerate.local_sgd import LocalSGD
from accelerate.utils import DataLoaderConfiguration, DDPCommunicationHookType, DistributedDataParallelKwargs
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, TensorDataset

from dsgdac_accel import Gossip, GossipAccelerator, GossipConfig, build_topology
from dsgdac_accel.core import consensus
from dsgdac_accel.schedule import AdaptiveConsensus
from dsgdac_accel.simulation import Simulation
from tests.launching import free_port
from tests.multiprocess.small_model import FAST, Trailing, flat, inputs, make_model
from tests.workers import run_workers, try_workers

pytestmark = pytest.mark.multiprocess

# ---- gradients stay local


def train_without_mixing(rank: int, launched: bool) -> tuple[torch.Tensor, bool]:
    """Train with gamma = 0 throughout; every worker must equal a one-process run."""
    torch.manual_seed(0)
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    wrapped = False
    if launched:
        accelerator = GossipAccelerator(gossip=GossipConfig(constant=0.0, start_step=0, **FAST))
        model, optimizer = accelerator.prepare(model, optimizer)
        wrapped = any(isinstance(module, DistributedDataParallel) for module in model.modules())
    for step in range(3):
        loss = model(inputs(rank, step)).square().mean()
        accelerator.backward(loss) if launched else loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return flat(model), wrapped


def test_with_gamma_0_each_worker_equals_its_own_one_process_run():
    (x_0, wrapped_0), (x_1, wrapped_1) = run_workers(train_without_mixing, 2, True)
    for rank, x in enumerate((x_0, x_1)):
        assert torch.equal(x, train_without_mixing(rank, launched=False)[0])
    assert not torch.equal(x_0, x_1)
    assert not wrapped_0
    assert not wrapped_1


# ---- schedules


def tick(rank: int, kind: str, steps: int) -> tuple[list[float], list[float]]:
    accelerator = GossipAccelerator(gossip=GossipConfig(power=1, max_lr="run", **FAST), gradient_accumulation_steps=2)
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedulers = {
        "inverse": partial(torch.optim.lr_scheduler.LambdaLR, lr_lambda=lambda s: 1 / (1 + s)),
        "cosine": partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=steps),
        "one cycle": partial(torch.optim.lr_scheduler.OneCycleLR, max_lr=0.1, total_steps=steps + 1),
    }
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, schedulers[kind](optimizer))
    used, gammas = [], []
    for micro in range(2 * steps):
        with accelerator.accumulate(model):
            accelerator.backward(model(inputs(rank, micro)).sum())
            if accelerator.sync_gradients:
                used.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            gammas.append(accelerator.gossip_steps[0].gamma)
    return [*used, scheduler.get_last_lr()[0]], gammas


def test_the_scheduler_ticks_once_per_optimizer_step():
    for used, gammas in run_workers(tick, 2, "inverse", 4):
        assert used == pytest.approx([0.1, 0.05, 0.1 / 3, 0.025, 0.02])
        assert gammas == pytest.approx([1, 0.5, 1 / 3, 0.25])


def test_a_cosine_of_20_steps_ends_at_step_20():
    for used, gammas in run_workers(tick, 3, "cosine", 20):
        assert used == pytest.approx([0.05 * (1 + math.cos(math.pi * t / 20)) for t in range(21)], abs=1e-12)
        assert gammas == pytest.approx([lr / 0.1 for lr in used[:-1]])


def test_gamma_looks_ahead_where_the_schedule_declares_its_length():
    for used, gammas in run_workers(tick, 2, "one cycle", 10):
        assert max(used) == pytest.approx(0.1, rel=0.05)
        assert used[0] < 0.01
        assert gammas == pytest.approx([lr / max(used) for lr in used[:-1]])


def rates_apart(rank: int, kind: str, topology: str) -> None:
    model = make_model()
    groups = [{"params": [p], "lr": 0.1 / (1 + number)} for number, p in enumerate(model.parameters())]
    raw = torch.optim.SGD(groups)
    scheduler = ReduceLROnPlateau(raw, patience=0, factor=0.5, min_lr=[0.1, 0.05, 0.1 / 3, 0.0])  # of the last alone
    config = GossipConfig(log_every=0, topology=topology, **FAST)
    if kind == "accelerator":
        model, optimizer, scheduler = GossipAccelerator(gossip=config).prepare(model, raw, scheduler)
    else:
        Gossip(model, raw, config)
        optimizer = raw
    for step in range(8):
        model(inputs(rank, step)).sum().backward()
        optimizer.step()
        scheduler.step(float(step) if rank == 2 else -float(step))


@pytest.mark.parametrize(
    ("kind", "topology"), [("accelerator", "one_peer_ring"), ("accelerator", "complete"), ("gossip", "ring")]
)
def test_learning_rates_that_differ_are_an_error_on_all_workers(kind, topology):
    outcomes = try_workers(rates_apart, 3, kind, topology)
    assert [outcome.exit_code for outcome in outcomes] == [1] * 3
    for outcome in outcomes:  # sent with what step 2 has made, and met within a period of 3 rounds
        assert re.search(
            r"same learning rate; at step [345] worker . has 0\.\d+ and worker . has 0\.\d+", outcome.error
        )
        assert "accelerator.reduce(loss, 'mean')" in outcome.error


# ---- accumulation and clipping


def accumulate_and_clip(rank: int, batches: int) -> tuple[torch.Tensor, list[float]]:
    accelerator = GossipAccelerator(
        gossip=GossipConfig(topology="complete", power=0, **FAST), gradient_accumulation_steps=2
    )
    model = make_model()
    data = torch.cat([inputs(0, number) for number in range(2 * batches)])
    loader = DataLoader(TensorDataset(data), batch_size=3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    norms = []
    for (batch,) in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(batch).square().mean())
            if accelerator.sync_gradients:
                norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.1)))
            optimizer.step()
            optimizer.zero_grad()
    return flat(model), norms


def test_accumulation_with_a_left_over_window_clips_once_per_step_on_the_summed_local_gradient():
    batches = 5  # per worker: windows of 2, 2 and 1
    models = [make_model() for _ in range(2)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    simulation = Simulation(models, optimizers, build_topology("complete", 2), AdaptiveConsensus(power=0))
    norms: list[list[float]] = [[], []]
    for window in ([0, 1], [2, 3], [4]):
        for rank, model in enumerate(models):
            model.zero_grad()
            for number in window:
                (model(inputs(0, 2 * number + rank)).square().mean() / 2).backward()
            norms[rank].append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.1)))
        simulation.step()
    for rank, (x, clipped) in enumerate(run_workers(accumulate_and_clip, 2, batches)):
        torch.testing.assert_close(x, flat(models[rank]), rtol=0, atol=1e-12)
        assert clipped == pytest.approx(norms[rank])


# ---- other users of the process


def beside_others(rank: int) -> float:
    """Run user collectives between backward and step with two accelerators, then use the user's group again."""
    total = 0.0
    for _ in range(2):
        accelerator = GossipAccelerator(gossip=GossipConfig(**FAST))
        model = make_model()
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for step in range(3):
            accelerator.backward(model(inputs(rank, step)).sum())
            mine = torch.tensor([float(rank + step)])
            dist.all_reduce(mine)
            optimizer.step()
            total += float(accelerator.gather(torch.tensor([rank])).sum()) + float(mine)
        accelerator.end_training()
    last = torch.tensor([1.0])
    dist.all_reduce(last)
    return total + float(last)


def test_other_users_of_the_process_group_are_not_disturbed():
    assert run_workers(beside_others, 3) == [2 * (3 * 3 + 3 + 6 + 9) + 3.0] * 3


def test_import_has_no_side_effects():
    script = (
        "import dsgdac_accel, torch, accelerate.state as s; "
        "assert not torch.distributed.is_initialized() and not torch.cuda.is_initialized(); "
        "assert not s.AcceleratorState._shared_state and not s.PartialState._shared_state"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


NOTEBOOK = """
def train():
    import os

    import torch
    from dsgdac_accel import GossipAccelerator

    def threads():
        return len(os.listdir("/proc/self/task"))

    before = threads()
    accelerator = GossipAccelerator()
    model = torch.nn.Linear(2, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    accelerator.backward(model(torch.ones(1, 2)).sum())
    optimizer.step()
    accelerator.end_training()
    assert threads() <= before + 2, "torch's threads that outlive the groups may abort the process at its end"
    print(f"worker {accelerator.process_index} of {accelerator.num_processes}", flush=True)

if __name__ == "__main__":
    import sys
    import dsgdac_accel
    from accelerate import notebook_launcher

    notebook_launcher(train, num_processes=2, use_port=sys.argv[1])
"""


@pytest.mark.slow
def test_a_notebook_can_launch_it_after_the_import(tmp_path):
    script = tmp_path / "notebook.py"
    script.write_text(NOTEBOOK)
    words = [sys.executable, script, str(free_port())]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "worker 0 of 2" in done.stdout
    assert "worker 1 of 2" in done.stdout


def test_a_single_process_equals_the_plain_optimizer_to_the_bit():
    model, plain = make_model(), make_model()
    accelerator = GossipAccelerator(gossip=GossipConfig(topology="one_peer_exponential"), cpu=True)
    raw = torch.optim.Adam(plain.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, torch.optim.Adam(model.parameters(), lr=0.1))
    for step in range(4):
        accelerator.backward(model(inputs(0, step)).square().mean())
        plain(inputs(0, step)).square().mean().backward()
        for each in (optimizer, raw):
            each.step()
            each.zero_grad()
    assert torch.equal(flat(model), flat(plain))
    metrics = accelerator.measure_consensus()
    assert metrics["gossip/radius"] == metrics["gossip/neighbor_disagreement"] == 0.0
    with accelerator.deployed_model(model) as deployed:
        assert torch.equal(flat(deployed), flat(plain))


def by_closure(rank: int, closures: bool) -> tuple:
    accelerator = GossipAccelerator(gossip=GossipConfig(**FAST), gradient_accumulation_steps=2)
    model = make_model()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    calls, losses = [], []
    for step in range(3):

        def closure(step: int = step) -> torch.Tensor:
            calls.append(torch.is_grad_enabled())
            optimizer.zero_grad()
            loss = model(inputs(rank, step)).square().mean()
            accelerator.backward(2 * loss)
            return loss

        accelerator.gradient_state._set_sync_gradients(True)
        if closures:
            with torch.no_grad():
                losses.append(optimizer.step(closure))
        else:
            losses.append(closure())
            optimizer.step()
    return flat(model), calls, [float(loss.detach()) for loss in losses]


def test_a_closure_is_called_once_before_the_step():
    for (x, calls, losses), (reference, _, expected) in zip(
        run_workers(by_closure, 2, True), run_workers(by_closure, 2, False), strict=True
    ):
        assert torch.equal(x, reference)
        assert (calls, losses) == ([True] * 3, expected)


# ---- refusals


def adafactor_with_its_schedule(parameters):
    optimizer = transformers.Adafactor(parameters)
    transformers.optimization.AdafactorSchedule(optimizer)  # sets an lr that the optimizer does not read
    return optimizer


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (torch.optim.LBFGS, "LBFGS: .*several points.*AdamW"),
        (transformers.Adafactor, r"Adafactor chooses its step sizes.*lr=1e-3.*constant=0\.5.*power=0"),
        (adafactor_with_its_schedule, "Adafactor chooses"),
    ],
)
def test_optimizers_that_cannot_gossip_are_refused(make, words):
    accelerator = GossipAccelerator(cpu=True)
    model = make_model()
    with pytest.raises(ValueError, match=words):
        accelerator.prepare(model, make(model.parameters()))
    assert accelerator._models == accelerator._optimizers == []


class Sharpness(torch.optim.SGD):
    """Evaluates the loss twice in a step."""

    def step(self, closure=None):
        return [closure(), super().step(closure)]


def test_a_closure_is_not_evaluated_at_a_second_point():
    accelerator = GossipAccelerator(cpu=True)
    model = make_model()
    model, optimizer = accelerator.prepare(model, Sharpness(model.parameters(), lr=0.1))
    with pytest.raises(ValueError, match=r"several points.*AdamW"):
        optimizer.step(lambda: model(inputs(0, 0)).sum())


class Wrapper(torch.optim.Optimizer):
    """Another optimizer inside, which `second_step` steps by itself, as SAM does."""

    def __init__(self, parameters, kind=torch.optim.SGD):
        super().__init__(parameters, {"lr": 0.1})
        self.inner = [kind(self.param_groups, lr=0.1)]

    def step(self, closure=None):
        self.inner[0].step()

    second_step = step


class Exchanging(torch.optim.SGD):
    """Each worker updates every second matrix and sends it to the others, as the original Muon does."""

    def step(self, closure=None):
        super().step(closure)
        for number, parameter in enumerate(self.param_groups[0]["params"]):
            dist.broadcast(parameter.data, number % 2)


def from_zero(parameters):
    """Adam of a matrix that starts at 0, as LoRA's second one does: its state is near 0, too."""
    matrix = list(parameters)[2]
    nn.init.zeros_(matrix)
    return torch.optim.AdamW([matrix], lr=0.01)


class Rprop(torch.optim.Rprop):
    """Its steps are as large as all entries of its only matrix."""

    def __init__(self, parameters):
        matrix = list(parameters)[2]
        nn.init.constant_(matrix, 0.1)
        super().__init__([matrix], lr=0.1)


class OnRows(torch.optim.SparseAdam):
    """Has sparse gradients."""

    def __init__(self, parameters):
        matrix = list(parameters)[2]
        matrix.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", p.grad.to_sparse(1)))
        super().__init__([matrix], lr=0.01)


OWN_STEPS = {"inner": Wrapper.second_step, "raw": lambda raw: type(raw).step(raw)}
KINDS = {
    "trailing": Trailing, "exchanging": Exchanging, "inner": Wrapper, "raw": torch.optim.SGD,
    "works": Rprop, "sparse": OnRows, "asgd": partial(Wrapper, kind=torch.optim.ASGD),
    "wrapped": partial(Wrapper, kind=torch.optim.NAdam), "zero": from_zero,
}  # fmt: skip


def step_by(rank: int, kind: str, how: str) -> str:
    model = make_model()
    raw = KINDS[kind](model.parameters())
    when = ""
    try:
        if how == "gossip":
            Gossip(model, raw, GossipConfig(**FAST))
            optimizer = raw
        else:
            model, optimizer = GossipAccelerator(gossip=GossipConfig(**FAST)).prepare(model, raw)
        for step in range(4):
            model(inputs(rank, step)).sum().backward()
            optimizer.step()
        if kind in OWN_STEPS:
            before, when = flat(model), "at lr 0: "
            stepped = raw.inner[0] if kind == "inner" else raw
            stepped.param_groups[0]["lr"] = 0.0
            OWN_STEPS[kind](raw)  # a step that changes nothing, as of DCP, which makes an optimizer's state so
            assert torch.equal(flat(model), before)
            when = ""
            stepped.param_groups[0]["lr"] = 0.1
            OWN_STEPS[kind](raw)
    except (ValueError, RuntimeError) as error:
        return f"{when}{error}"
    return "ok"


def step_by_all(rank: int) -> dict[tuple[str, str], str]:
    return {(kind, how): step_by(rank, kind, how) for kind in KINDS for how in ("accelerator", "gossip")}


def test_optimizers_that_undo_the_mix_or_go_without_it_are_errors():
    expected = {
        "trailing": "Trailing, in 'mean': .*another copy of the weights", "asgd": "ASGD: .*another copy",
        "exchanging": "Exchanging: .*exchanges parameters", "works": "ok", "sparse": "ok",
        "wrapped": "ok", "zero": "ok",
        "inner": "SGD.step.. was called by itself.*prepare", "raw": "SGD.step.. was called by itself.*Gossip",
    }  # fmt: skip
    for said in run_workers(step_by_all, 2):
        for (kind, how), message in said.items():
            assert re.match(expected[kind], message), (kind, how, message)


def equal_workers(rank: int) -> list[int]:
    """Return how often a log warns that the workers are equal, for each case and way."""
    said: list[str] = []
    consensus.logger.warning = lambda message, *args: said.append(message)
    found = []
    cases = [("reduced", {}), ("same", {}), ("lr 0", {}), ("own", {"topology": "complete", "power": 0}), ("start", {})]
    for (case, settings), how in itertools.product(cases, ("accelerator", "gossip")):
        config = GossipConfig(log_every=2, **settings, **FAST)
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0 if case == "lr 0" else 0.1)
        if how == "accelerator":
            accelerator = GossipAccelerator(gossip=config)
            model, optimizer = accelerator.prepare(model, optimizer)
            log, equal = partial(accelerator.log, {"loss": 1.0}), partial(accelerator.make_equal, [model])
            measure = accelerator.measure_consensus
        else:
            gossip = Gossip(model, optimizer, config)
            log, equal, measure = gossip.metrics, partial(gossip.training.make_equal, [model]), gossip.measure_consensus
        for step in range(1 if case == "start" else 5):
            model(inputs(0 if case == "same" else rank, step)).sum().backward()
            for parameter in model.parameters() if case == "reduced" else ():
                dist.all_reduce(parameter.grad)
            optimizer.step()
            optimizer.zero_grad()
            log()
        if case == "start":
            equal()
            measure()
        found.append(len(said))
        said.clear()
    return found


def test_workers_that_are_equal_after_a_step_are_warned_of_once():
    assert run_workers(equal_workers, 2) == [[1] * 4 + [0] * 6, [0] * 10]


def other_ways_to_step(rank: int) -> dict[str, object]:
    found: dict[str, object] = {}
    for how, compiled in itertools.product(("accelerator", "gossip"), (None, "before", "after")):
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if compiled == "before":
            optimizer.step = torch.compile(optimizer.step, backend="eager")
        if how == "accelerator":
            model, optimizer = GossipAccelerator(gossip=GossipConfig(**FAST)).prepare(model, optimizer)
        else:
            Gossip(model, optimizer, GossipConfig(**FAST))
        take_step = torch.compile(optimizer.step, backend="eager") if compiled == "after" else optimizer.step
        for step in range(3):
            model(inputs(rank, step)).sum().backward()
            take_step()
        found[f"{how}, compiled {compiled}"] = flat(model)
    accelerator = GossipAccelerator(gossip=GossipConfig(**FAST))
    hook = DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType.FP16)
    for name, attempt in (
        ("LocalSGD", lambda: LocalSGD(accelerator, make_model(), 4)),
        ("hook", lambda: GossipAccelerator(kwargs_handlers=[hook])),
    ):
        with pytest.raises(ValueError, match="GossipConfig") as refusal:
            attempt()
        found[name] = str(refusal.value)
    data = [torch.full((4,), float(row), dtype=torch.float64) for row in range(7)]
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loaders = DataLoader(data), DataLoader(data)
    model, optimizer, training, evaluation = accelerator.prepare(model, optimizer, *loaders)
    with accelerator.join_uneven_inputs([model], even_batches=False):
        for row in training:
            with accelerator.no_sync(model), accelerator.trigger_sync_in_backward(model):
                model(row).sum().backward()
            optimizer.step()
    found["steps"] = accelerator.gossip_steps[0].steps_taken
    model.eval()
    rows = {True: [int(row[0, 0]) for row in evaluation]}
    with accelerator.join_uneven_inputs([model], even_batches=False):
        rows[False] = [int(row[0, 0]) for row in evaluation]
    found["rows"] = [rows[True], rows[False], [int(row[0, 0]) for row in evaluation]]
    return found


def test_ways_to_step_that_accelerate_and_torch_have():
    first, second = run_workers(other_ways_to_step, 2)
    for found in (first, second):
        for name in [name for name in found if "compiled" in name]:
            assert torch.equal(found[name], found["accelerator, compiled None"]), name
        assert "mix_every=k" in found["LocalSGD"]
        assert "comm_dtype" in found["hook"]
        assert found["steps"] == 4
    assert (first["rows"], second["rows"]) == ([[0, 2, 4, 6]] * 3, [[1, 3, 5, 0], [1, 3, 5], [1, 3, 5, 0]])


@pytest.mark.parametrize("settings", [{"constant": 0.5}, {"power": 0}])
def test_without_a_learning_rate_a_fixed_gamma_is_used(settings):
    accelerator = GossipAccelerator(cpu=True, gossip=GossipConfig(**settings))
    model = make_model().float()
    model, optimizer = accelerator.prepare(model, transformers.Adafactor(model.parameters()))
    accelerator.backward(model(inputs(0, 0).float()).sum())
    optimizer.step()
    assert (accelerator.gossip_steps[0].gamma, accelerator.gossip_steps[0].metrics()["lr"]) == (
        settings.get("constant", 1.0),
        0.0,
    )


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (lambda: nn.DataParallel(nn.Linear(1, 1)), "already wrapped in DataParallel"),
        (lambda: nn.Sequential(nn.Linear(2, 2), nn.SyncBatchNorm(2)), "Keep plain BatchNorm"),
        (lambda: nn.Sequential(nn.LazyLinear(2)), "Run one batch"),
        (lambda: nn.Linear(2, 2).to(torch.complex64), "float32 or float64"),
    ],
)
def test_models_that_cannot_gossip_are_refused(model, words):
    accelerator = GossipAccelerator(cpu=True)
    model = model()
    with pytest.raises(ValueError, match=words):
        accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_a_parameter_in_two_optimizers_is_refused():
    accelerator = GossipAccelerator(cpu=True)
    model = make_model()
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2)]
    with pytest.raises(ValueError, match="two optimizers"):
        accelerator.prepare(model, *optimizers)


def test_a_launch_that_accelerate_does_not_see_is_refused(monkeypatch):
    accelerator = Accelerator(cpu=True)
    assert accelerator.num_processes == 1
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ValueError, match="4 processes were launched"):
        GossipAccelerator(cpu=True)


def different_models(rank: int) -> str:
    accelerator = GossipAccelerator(gossip=GossipConfig(**FAST))
    model = nn.Linear(2 + rank, 1)
    with pytest.raises(ValueError, match="same model") as caught:
        accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return str(caught.value)


def test_workers_with_different_models_are_refused_on_all_of_them():
    for message in run_workers(different_models, 2):
        assert "(1, 2)" in message
        assert "(1, 3)" in message


def impossible_topology(rank: int) -> str:
    accelerator = GossipAccelerator(gossip=GossipConfig(topology="one_peer_exponential", **FAST))
    model = make_model()
    with pytest.raises(ValueError, match="base_graph") as caught:
        accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return str(caught.value)


def test_a_topology_that_needs_a_power_of_two_is_refused_for_three():
    assert all("3" in message for message in run_workers(impossible_topology, 3))


def test_gossip_must_be_a_gossip_config():
    with pytest.raises(TypeError, match="GossipConfig"):
        GossipAccelerator(gossip={"power": 3}, cpu=True)


# ---- warnings and metrics


def rates_seen(lrs: list[float], caplog: pytest.LogCaptureFixture) -> list[str]:
    accelerator = GossipAccelerator(gossip=GossipConfig(start_step=1), cpu=True)
    model = make_model()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=lrs[0]))
    for lr in lrs:
        optimizer.param_groups[0]["lr"] = lr
        accelerator.backward(model(inputs(0, 0)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    return [record.message for record in caplog.records if "learning rate rises" in record.message]


def test_a_learning_rate_above_the_largest_seen_is_warned_of_once(caplog):
    assert len(rates_seen([0.1, 0.1, 0.2, 0.3], caplog)) == 1


@pytest.mark.parametrize("lrs", [[0.1, 0.3, 0.2, 0.1], [0.3, 0.3, 0.0, 0.1, 0.2]], ids=["falls", "begins anew"])
def test_a_learning_rate_below_the_largest_seen_is_not_warned_of(lrs, caplog):
    assert rates_seen(lrs, caplog) == []


def disagreements(rank: int) -> list[float]:
    accelerator = GossipAccelerator(gossip=GossipConfig(topology="one_peer_ring", **FAST))
    model = make_model()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    found = []
    for step in range(6):
        accelerator.backward(model(inputs(rank, step)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        found.append(accelerator.gossip_steps[0].metrics()["neighbor_disagreement"])
    return found


def test_a_worker_that_sits_out_a_round_keeps_its_last_disagreement():
    sat_out = 0
    for found in run_workers(disagreements, 3):
        assert all(value > 0 for value in found[2:])
        sat_out += sum(a == b for a, b in itertools.pairwise(found))
    assert sat_out >= 4


def skipped_and_whole(rank: int) -> list[list[float]]:
    configuration = DataLoaderConfiguration(dispatch_batches=True, use_seedable_sampler=True)
    accelerator = GossipAccelerator(cpu=True, dataloader_config=configuration)
    loader = accelerator.prepare(DataLoader(torch.arange(24.0), batch_size=2))
    return [[batch.tolist() for batch in part] for part in (loader, accelerator.skip_first_batches(loader, 2))]


def test_skip_first_batches_counts_per_worker_also_if_worker_0_reads_for_all():
    for whole, rest in run_workers(skipped_and_whole, 2):
        assert rest == whole[2:]


def train_again_without_gossip(rank: int) -> bool:
    accelerator = GossipAccelerator(gossip=GossipConfig(**FAST))
    model = make_model()
    model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    accelerator.deploy(model)
    accelerator.free_memory()
    return isinstance(Accelerator(cpu=True).prepare(model), DistributedDataParallel)


def test_ddp_can_train_a_deployed_model_further():
    assert run_workers(train_again_without_gossip, 2) == [True, True]
