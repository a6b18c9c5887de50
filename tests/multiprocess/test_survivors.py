"""Workers that continue when another one is lost, at many different moments, against the simulation."""

import os
import signal
import time
from dataclasses import dataclass, replace

import pytest
import torch
from torch import nn
from transformers import Trainer, TrainingArguments

from dsgdac_accel import GossipAccelerator, GossipCallback, GossipConfig
from dsgdac_accel.checkpoint import CheckpointError, is_complete, newest_checkpoint, read_manifest
from dsgdac_accel.core import exchange
from dsgdac_accel.simulation import gossip_step
from dsgdac_accel.topology import build_topology
from tests.selection import slow_except
from tests.workers import Launch, LaunchesAhead, run_workers, try_workers

STEPS = 12
RATE, MOMENTUM = 0.2, 0.9


@dataclass(frozen=True)
class Case:
    """Which worker is lost, when, and in which run."""

    victim: int
    moment: int
    """Number of the victim's communication at which it is lost, from 1."""
    after: bool = False
    """Whether it is lost right after that communication, not before."""
    workers: int = 4
    topology: str = "one_peer_ring"
    per_process: int = 1


def make_model(number):
    torch.manual_seed(number)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.BatchNorm1d(8), nn.Linear(8, 3)).double()


def make_batch(number, step):
    generator = torch.Generator().manual_seed(1000 * number + step)
    return (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((5, 6), (5, 3)))


def lr(step):
    return RATE * (1 - step / STEPS) ** 0.5


def lose_at(group, case):
    """Kill this process at its n-th communication."""
    counted, guarded = [0], group.guarded

    def counting(communicate, *args, **kwargs):
        counted[0] += 1
        if counted[0] == case.moment and not case.after:
            os.kill(os.getpid(), signal.SIGKILL)
        result = guarded(communicate, *args, **kwargs)
        if counted[0] == case.moment and case.after:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    group.guarded = counting
    return counted


def train(rank, case, folder, config):
    """Everything that workers do together: steps, radii, evaluations, checkpoints in the background."""
    if case.moment % 2:
        exchange._FEW_BYTES = -1  # posted by the other thread, although the model is small
    accelerator = GossipAccelerator(gossip=config)
    model = make_model(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: lr(step) / RATE)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    group, here = accelerator.group, case.per_process
    counted = lose_at(group, case) if rank == case.victim else None
    gammas, evaluations = [], []
    for step in range(STEPS):
        batches = [list(make_batch(here * rank + worker, step)) for worker in range(here)]
        x, y = (torch.cat(parts) for parts in zip(*batches, strict=True))
        accelerator.backward(((model(x) - y) ** 2).mean())
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        gammas.append(accelerator.gossip_steps[0].gamma)
        if step % 5 == 4:
            evaluations.append(group.retry_after_loss(lambda: evaluate(accelerator, model)))
            accelerator.save_state(folder / f"step-{step + 1:02d}", wait=False)
    saved = accelerator.finish_saving()
    with accelerator.deployed_model(model) as deployed:
        average = [parameter.detach().clone() for parameter in deployed.parameters()]
    mixer = accelerator.gossip_steps[0].mixer
    parameters = [[p.detach().clone() for p in flat.parameters] for flat in mixer.buckets.flats]
    return {
        "parameters": parameters, "average": average, "skipped_steps": mixer.skipped_steps,
        "mixes_from": mixer._mixes_from, "numbers": group.members.original_ranks, "evaluations": evaluations,
        "gammas": gammas,
        "saved": saved and saved.name, "communications": counted and counted[0], "main": accelerator.is_main_process,
        "steps": mixer.step,
    }  # fmt: skip


@torch.no_grad()
def evaluate(accelerator, model):
    group = accelerator.group
    with accelerator.deployed_model(model, calibrate=[next(make_batch(group.rank, 99))]) as deployed:
        mine = sum(float(deployed(next(make_batch(0, part))).sum()) for part in range(group.rank, 12, group.size))
        return sum(group.all_gather_object(mine, "evaluating"))


def simulate(case, topology, outcomes):
    """The parameters that the survivors must have, given the rounds that each of them skipped."""
    total, here = case.workers * case.per_process, case.per_process
    models = [make_model(0) for _ in range(total)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM) for model in models]
    survivor = next(iter(outcomes.values()))
    left = [here * number + worker for number in survivor["numbers"] for worker in range(here)]
    fewer = topology.of_survivors(left)
    for step in range(STEPS):
        mixing = topology.matrix(step)
        if step >= survivor["mixes_from"] > 0:
            mixing = torch.eye(total, dtype=torch.float64)
            mixing[torch.tensor(left)[:, None], torch.tensor(left)] = fewer.matrix(step)
        for number, outcome in outcomes.items():
            for worker in range(here * number, here * (number + 1)):
                if step in outcome["skipped_steps"]:
                    mixing[worker] = torch.eye(total, dtype=torch.float64)[worker]
        for worker, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            x, y = make_batch(worker, step)
            optimizer.param_groups[0]["lr"] = lr(step)
            optimizer.zero_grad()
            ((model(x) - y) ** 2).mean().backward()
        gossip_step([m.parameters() for m in models], optimizers, mixing, survivor["gammas"][step])
    return {number: [list(m.parameters()) for m in models[here * number : here * (number + 1)]] for number in outcomes}


def check(case, outcomes, folder):
    topology = build_topology(case.topology, case.workers * case.per_process)
    others = [number for number in range(case.workers) if number != case.victim]
    assert {o.rank: o.exit_code for o in outcomes} == dict.fromkeys(others, 0) | {case.victim: -signal.SIGKILL}, [
        o.error for o in outcomes
    ]
    found = {o.rank: o.value for o in outcomes if o.rank != case.victim}
    expected = simulate(case, topology, found)
    for number, value in found.items():
        assert value["numbers"] == others
        assert value["steps"] == STEPS
        assert value["main"] == (number == others[0])
        # Only rounds around the loss are skipped, and only before all mix again.
        assert all(step < value["mixes_from"] for step in value["skipped_steps"])
        assert len(value["skipped_steps"]) <= case.workers
        assert value["gammas"] == found[others[0]]["gammas"]
        assert value["evaluations"] == found[others[0]]["evaluations"]
        for mine, right in zip(value["parameters"], expected[number], strict=True):
            for a, b in zip(mine, right, strict=True):
                torch.testing.assert_close(a, b, rtol=0, atol=1e-9)
        survivors = [list(model) for models in expected.values() for model in models]
        for a, *b in zip(value["average"], *survivors, strict=True):
            torch.testing.assert_close(a, torch.stack(b).mean(0), rtol=0, atol=1e-9)
    newest = newest_checkpoint(folder, "step-*")
    assert newest is not None
    assert newest.name == "step-10"
    assert read_manifest(newest).workers in (case.workers, len(others))


def config_of(case, **changes):
    return GossipConfig(
        topology=case.topology, timeout=30, on_worker_loss="continue", log_every=4, total_steps=STEPS,
        workers_per_process=case.per_process, **changes,
    )  # fmt: skip


def launch(case, folder):
    return Launch(train, case.workers, case, folder, config_of(case), timeout=90)


EVERYWHERE = [Case(victim, moment, after) for moment in range(1, 90) for victim in (0, 2) for after in (False, True)]
SOME = [
    *EVERYWHERE[3::37],
    Case(1, 17, workers=2), Case(2, 20, workers=3, topology="complete"), Case(4, 31, workers=5),
    Case(1, 23, topology="ring"), Case(3, 26, after=True, topology="one_peer_exponential"),
    Case(1, 19, workers=3, per_process=2, topology="one_peer_ring"),
    Case(0, 22, workers=2, per_process=3, topology="complete"),
]  # fmt: skip
IN_A_REDUCTION = Case(2, 29)  # which is done again, in the new process group
SLOW = [case for number, case in enumerate(SOME) if number % 4 and case != IN_A_REDUCTION]


def communications(tmp_path):
    """How often worker 0 communicates in an undisturbed run."""
    case = Case(0, 10**9)
    return run_workers(train, 4, case, tmp_path, config_of(case))[0]["communications"]


@pytest.fixture(scope="module")
def launches(request, tmp_path_factory):
    here = [item for item in request.session.items if getattr(item, "module", None) is request.module]
    selected = [item.callspec.params["case"] for item in here if "launches" in item.fixturenames]
    folders = {case: tmp_path_factory.mktemp("survivors") for case in selected}
    ahead = LaunchesAhead(lambda case: launch(case, folders[case]), selected, ahead=2)
    yield lambda case: (ahead.outcomes(case), folders[case])
    ahead.stop()


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.slow) if case in SLOW else case for case in SOME], ids=str
)
def test_the_survivors_of_a_loss_finish_as_the_simulation_does(launches, case):
    check(case, *launches(case))


# ---- other ways to be lost


def train_on(rank, case, lost, at):
    """Steps only. `lost` maps a worker to the step at which it gets the signal."""
    accelerator = GossipAccelerator(gossip=replace(config_of(case), timeout=at.get("timeout", 30.0)))
    model = make_model(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    model, optimizer = accelerator.prepare(model, optimizer)
    for step in range(STEPS):
        if lost.get(rank) == step:
            os.kill(os.getpid(), at["signal"])
        x, y = make_batch(rank, step)
        accelerator.backward(((model(x) - y) ** 2).mean())
        optimizer.step()
        optimizer.zero_grad()
    radius = accelerator.measure_consensus()["gossip/radius"]
    members = accelerator.group.members
    return members.original_ranks, members.lost, accelerator.gossip_steps[0].mixer.step, radius


@pytest.mark.parametrize(
    ("workers", "topology", "lost"),
    [
        (5, "one_peer_ring", {1: 4, 3: 4}),  # at once
        pytest.param(5, "complete", {0: 3, 4: 7}, marks=pytest.mark.slow),  # one after the other
        (4, "one_peer_exponential", {0: 2, 1: 5, 2: 8}),  # all but one
    ],
)
def test_several_workers_may_be_lost(workers, topology, lost):
    case = Case(-1, 0, workers=workers, topology=topology)
    outcomes = try_workers(train_on, workers, case, lost, {"signal": signal.SIGKILL}, timeout=60)
    left = [number for number in range(workers) if number not in lost]
    values = [outcome.value for outcome in outcomes if outcome.rank in left]
    assert [outcome.exit_code for outcome in outcomes] == [-9 if o.rank in lost else 0 for o in outcomes], [
        o.error for o in outcomes
    ]
    for numbers, gone, steps, radius in values:
        assert (numbers, sorted(gone), steps) == (left, sorted(lost), STEPS)
        assert radius == values[0][3]
        assert (radius > 0) == (len(left) > 1)


@pytest.mark.slow
def test_a_silent_worker_is_dropped_and_ends_by_an_error_when_it_wakes_up():
    case = Case(-1, 0, workers=3)
    launched = Launch(train_on, 3, case, {1: 4}, {"signal": signal.SIGSTOP, "timeout": 3.0}, timeout=60)
    for rank in (0, 2):
        launched.processes[rank].join(45)
    assert not any(launched.processes[rank].is_alive() for rank in (0, 2))
    os.kill(launched.processes[1].pid, signal.SIGCONT)
    outcomes = launched.outcomes()
    assert [outcome.exit_code for outcome in outcomes] == [0, 1, 0], [outcome.error for outcome in outcomes]
    assert outcomes[0].value[:3] == outcomes[2].value[:3] == ([0, 2], [1], STEPS)
    assert "WorkerLostError" in outcomes[1].error
    assert "others continue without this worker" in outcomes[1].error


def resume(rank, folder, policy, workers):
    config = GossipConfig(timeout=30, on_worker_loss="continue", log_every=4, total_steps=STEPS)
    accelerator = GossipAccelerator(gossip=replace(config, on_other_worker_count=policy))
    model = make_model(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: lr(step) / RATE)
    accelerator.prepare(model, optimizer, scheduler)
    try:
        accelerator.load_state(folder)
    except CheckpointError as error:
        return str(error)
    return [parameter.detach().clone() for parameter in model.parameters()], accelerator.gossip_steps[0].mixer.step


def test_survivors_checkpoints_resume_from_their_average_only(tmp_path):
    case = Case(1, 60, workers=3)
    outcomes = [o for o in try_workers(train, 3, case, tmp_path, config_of(case), timeout=60) if o.rank != case.victim]
    assert [o.exit_code for o in outcomes] == [0, 0], [o.error for o in outcomes]
    newest = newest_checkpoint(tmp_path, "step-*")
    assert read_manifest(newest).facts["lost"] == [1]
    for refusal in run_workers(resume, 2, newest, "refuse", 2):
        assert "continued without worker 1" in refusal
        assert "on_other_worker_count='deployed'" in refusal
    for launched in (2, 3):
        for parameters, step in run_workers(resume, launched, newest, "deployed", launched):
            assert step == 10
            assert all(torch.isfinite(parameter).all() for parameter in parameters)


def test_the_trainer_refuses_to_continue(tmp_path):
    config = GossipConfig(on_worker_loss="continue")
    arguments = TrainingArguments(str(tmp_path), use_cpu=True, report_to=[])
    with pytest.raises(ValueError, match="is not supported with the Trainer"):
        Trainer(nn.Linear(1, 1), arguments, callbacks=[GossipCallback(config)])


def lost_while_writing(rank, victim, dies_at, folder):
    accelerator = GossipAccelerator(gossip=GossipConfig(on_worker_loss="continue", timeout=15, log_every=0))
    model = make_model(0)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=RATE))

    def steps(count):
        for step in range(count):
            if rank == victim and step == dies_at:
                os.kill(os.getpid(), signal.SIGKILL)
            x, y = make_batch(rank, step)
            accelerator.backward(((model(x) - y) ** 2).mean())
            optimizer.step()
            optimizer.zero_grad()

    steps(3)
    accelerator.save_state(folder)
    if rank == victim:
        monkey = pytest.MonkeyPatch()
        monkey.setattr("dsgdac_accel.checkpoint.writer.PendingCheckpoint.write", lambda self, state: time.sleep(60))
    steps(2)
    accelerator.save_state(folder, wait=False)
    steps(8)
    finished = accelerator.finish_saving()
    again = accelerator.save_state(folder.with_name("next"))
    with accelerator.deployed_model(model) as deployed:
        average = next(deployed.parameters()).detach().clone()
    accelerator.save_model(model, folder.with_name("model"))
    accelerator.deploy(model)
    assert torch.equal(next(model.parameters()), average)
    return finished, is_complete(folder) and read_manifest(folder).step, is_complete(again)


# In the last steps, one survivor waits for the victim while the other is already finishing the checkpoint.
@pytest.mark.parametrize(("victim", "dies_at"), slow_except([(1, 7)], [(0, 5), (0, 7), (1, 6), (1, 7)]))
def test_a_loss_while_a_checkpoint_is_written_keeps_the_older_one(tmp_path, victim, dies_at):
    outcomes = try_workers(lost_while_writing, 3, victim, dies_at, tmp_path / "checkpoint", timeout=60)
    survivors = [outcome for outcome in outcomes if outcome.rank != victim]
    assert [outcome.exit_code for outcome in survivors] == [0, 0], [outcome.error for outcome in outcomes]
    assert [outcome.value for outcome in survivors] == [(None, 3, True)] * 2
    assert (tmp_path / "model" / "model.safetensors").exists()
