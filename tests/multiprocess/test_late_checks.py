"""Gradients and parameters that are not finite where the host does not wait for the device, as on a GPU.

Here on the CPU, where the same code runs when told to; on a GPU only the way of a figure to the host is another.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dsgdac_accel import GossipAccelerator, GossipConfig, NonFiniteError, VirtualWorkers
from dsgdac_accel.core.gradients import nonfinite_flag, nonfinite_flags, skips_on_device
from dsgdac_accel.pytorch import Gossip
from tests.multiprocess.small_model import FAST, flat, inputs, make_model
from tests.selection import slow_except
from tests.workers import run_workers, try_workers

pytestmark = pytest.mark.multiprocess

FUSED = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=5e-2, fused=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.02, weight_decay=1e-2, fused=True),
}
OPTIMIZERS = {
    **FUSED,
    "foreach": lambda p: torch.optim.AdamW(p, lr=0.02, weight_decay=1e-2, foreach=True),  # the host is asked
}

# ---- gradients


def poison(rank: int, optimizer_name: str, late: bool, steps: set[int], limit: int, folder: str | None = None) -> dict:
    accelerator = GossipAccelerator(
        gossip=GossipConfig(topology="complete", power=0, max_consecutive_nonfinite=limit, **FAST)
    )
    model = make_model()
    model, optimizer = accelerator.prepare(model, OPTIMIZERS[optimizer_name](model.parameters()))
    (gossip,) = accelerator.gossip_steps
    gossip.mixer.agreement.late = late
    history = []
    for step in range(6):
        loss = model(inputs(rank, step)).square().mean()
        accelerator.backward(loss * float("nan") if rank == 1 and step in steps else loss)
        optimizer.step()
        optimizer.zero_grad()
        history.append(flat(model).clone())
        assert not hasattr(gossip.optimizer, "found_inf"), "somebody else's step would be skipped, too"
    if folder is not None:
        accelerator.save_state(folder)
        accelerator.load_state(folder)
    return {"x": torch.stack(history), "skipped": gossip.guard.skipped, "state": gossip.state_dict()}


@pytest.mark.parametrize(
    ("steps", "optimizer"),
    slow_except(
        [({0, 1}, "adam"), ({2, 4}, "sgd"), ({2, 4}, "foreach")],
        [(steps, optimizer) for optimizer in OPTIMIZERS for steps in ({0, 1}, {2, 4}, {5})],
    ),
    ids=str,
)
def test_a_nan_gradient_is_skipped_as_where_the_host_waits(optimizer, steps, tmp_path):
    waiting = run_workers(poison, 2, optimizer, False, steps, 10)
    late = run_workers(poison, 2, optimizer, True, steps, 10, str(tmp_path / "state"))
    for one, other in zip(waiting, late, strict=True):
        torch.testing.assert_close(one["x"], other["x"], rtol=1e-9, atol=1e-12)
        assert torch.isfinite(other["x"]).all()
        for count in ("nonfinite_steps", "consecutive_nonfinite"):
            assert one["state"][count] == other["state"][count]
    assert (late[0]["skipped"], late[1]["skipped"]) == (0, len(steps))


@pytest.mark.parametrize("optimizer_name", ["foreach", "adam"])
def test_a_worker_of_several_skips_its_update_as_where_the_host_sees_it_at_once(optimizer_name):
    def trained(late: bool) -> tuple[torch.Tensor, dict]:
        model = VirtualWorkers(make_model(), 3)
        optimizer = OPTIMIZERS[optimizer_name](model.parameters())
        gossip = Gossip(model, optimizer, GossipConfig(power=0, log_every=0, workers_per_process=3))
        gossip.steps[0].mixer.agreement.late = late
        for step in range(4):
            torch.manual_seed(step)
            model(torch.randn(12, 4, dtype=torch.float64)).square().mean().backward()
            for worker in {1: [2], 2: [0, 1, 2]}.get(step, []):
                next(model.replicas[worker].parameters()).grad.view(-1)[3] = torch.nan
            optimizer.step()
            optimizer.zero_grad()
        return torch.stack([p.detach().flatten()[0] for p in model.parameters()]), gossip.steps[0].guard.state_dict()

    (x, counts), (late_x, late_counts) = trained(False), trained(True)
    assert torch.equal(x, late_x)
    assert counts == late_counts == {"nonfinite_steps": 4, "consecutive_nonfinite": [0, 0, 0]}


def test_too_many_nan_gradients_in_a_row_stop_the_run_a_step_later():
    first, second = try_workers(poison, 2, "adam", True, {1, 2, 3}, 3)
    for worker in (first, second):
        assert worker.exit_code == 1
        assert "worker 1, step 3: 3 steps in a row" in worker.error


def with_gradients(*gradients: torch.Tensor | None) -> list[nn.Parameter]:
    parameters = []
    for gradient in gradients:
        like = torch.zeros(3) if gradient is None else gradient
        parameter = nn.Parameter(torch.zeros(like.shape, dtype=like.dtype))
        parameter.grad = gradient
        parameters.append(parameter)
    return parameters


@pytest.mark.parametrize(
    ("gradients", "expected"),
    [
        ([torch.ones(3), torch.zeros(0), None], 0.0),
        ([torch.full((5000,), 3e38), torch.ones(2)], 0.0),
        ([torch.ones(4), torch.tensor([1.0, float("nan")])], 1.0),
        ([torch.tensor(float("-inf"))], 1.0),
        ([torch.ones(2), torch.full((5000,), float("inf"), dtype=torch.float64)], 1.0),
        ([torch.ones(2).to_sparse()], 0.0),
        ([torch.tensor([[0.0, 0.0], [float("nan"), 1.0]]).to_sparse(1)], 1.0),
        ([None, torch.zeros(0)], 0.0),
    ],
    ids=range(8),
)
def test_a_flag_says_which_worker_has_a_gradient_that_is_not_finite(gradients, expected):
    by_worker = [with_gradients(None), with_gradients(*gradients), with_gradients(torch.ones(2))]
    flags = nonfinite_flags(by_worker, torch.device("cpu"))
    assert flags.tolist() == [0.0, expected, 0.0]
    assert flags.dtype == torch.float32
    if not any(gradient is not None and gradient.is_sparse for gradient in gradients):  # as on a GPU
        on_device = nonfinite_flag([gradient for gradient in gradients if gradient is not None], torch.device("cpu"))
        assert (on_device.shape, float(on_device)) == ((), expected)


def test_what_an_optimizer_cannot_skip_by_itself_is_asked_of_the_host():
    def made(kind: type, **options: object) -> torch.optim.Optimizer:
        return kind(with_gradients(torch.ones(2)), lr=0.1, **options)

    assert not skips_on_device(made(torch.optim.Adam))
    assert skips_on_device(made(torch.optim.Adam, fused=True))
    assert skips_on_device(made(torch.optim.SGD, fused=True))
    momentum = made(torch.optim.SGD, fused=True, momentum=0.9)
    assert not skips_on_device(momentum), "its first step would make a buffer of whatever is in memory"
    momentum.step()
    assert skips_on_device(momentum)
    (newcomer,) = with_gradients(torch.ones(3))
    momentum.add_param_group({"params": [newcomer]})
    assert not skips_on_device(momentum)
    loaded = made(torch.optim.Adam, fused=True)
    loaded.load_state_dict(made(torch.optim.Adam).state_dict())
    assert not skips_on_device(loaded), "the state dict says that it is not fused"


# ---- parameters


def diverge(rank: int, topology: str, options: dict, then: str) -> str:
    accelerator = GossipAccelerator(gossip=GossipConfig(topology=topology, **FAST, **options))
    model = make_model()
    model, optimizer = accelerator.prepare(model, OPTIMIZERS["adam"](model.parameters()))
    (gossip,) = accelerator.gossip_steps
    gossip.mixer.agreement.late = True
    try:
        for step in range(4 if then else 6):
            accelerator.backward(model(inputs(rank, step)).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            if step == 2:
                optimizer.optimizer.param_groups[0]["lr"] = 0.0
            if rank == 1 and step == 2:
                with torch.no_grad():
                    next(model.parameters()).view(-1)[0] = torch.nan
        if then == "save":
            gossip.state_dict()
        if then == "average":
            gossip.average.form()
        if then == "release":
            gossip.mixer.release()
    except NonFiniteError as error:
        assert rank == 1 or torch.isfinite(flat(model)).all(), "it was mixed"
        return str(error)
    return "no error"


RUNS = [
    ("complete", {"overlap": False}),
    ("complete", {"overlap": False, "comm_dtype": "int8"}),
    ("ring", {"overlap": False, "order": "mix_first"}),
]
ENDS = ("", "save", "average", "release")


@pytest.mark.parametrize(
    ("topology", "options", "then"),
    slow_except(
        [(*RUNS[0], "save"), (*RUNS[0], "average"), (*RUNS[1], ""), (*RUNS[2], "release")],
        [(*run, then) for run in RUNS for then in ENDS],
    ),
)
def test_parameters_that_are_not_finite_are_never_mixed_and_stop_the_run(topology, options, then):
    for rank, message in enumerate(run_workers(diverge, 3, topology, options, then)):
        assert "not finite at step 3" in message
        assert ("worker 1 " if rank == 1 else "one of workers [") in message
