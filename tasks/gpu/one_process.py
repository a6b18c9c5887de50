"""Part 1, right results: one process, with several workers in it."""

from __future__ import annotations

import tempfile

import torch
from torch import nn

from dsgdac_accel import Mixer, NonFiniteError, build_topology
from dsgdac_accel.core.host_copy import HostCopy
from tasks.gpu.algorithm import OPTIMIZERS, Training, difference_found, limit_of, simulated
from tasks.gpu.bench import Bench
from tasks.gpu.check import Check, Finding, check

WORKERS = 4


@check("1", seconds=60)
def virtual_workers_follow_algorithm_1(bench: Bench) -> Finding:
    """Suspicion: workers of one process mix otherwise on the GPU than in the simulation.

    Fused optimizers, several topologies, and a worker that skips its local update because its gradient is NaN.
    """
    worst, skipped = 0.0, []
    cases = [(topology, optimizer) for topology in ("one_peer_ring", "complete", "ring") for optimizer in OPTIMIZERS]
    for topology, optimizer in [*cases, ("one_peer_exponential", "sgd")]:
        training = Training.prepared(bench, optimizer, topology=topology, workers_per_process=WORKERS).run()
        worst = max(worst, _distance(training, simulated(WORKERS, topology, optimizer)))
        skipped.append(training.accelerator.gossip_steps[0].guard.skipped)
    poison = {2: [1]}
    training = Training.prepared(bench, "sgd", topology="one_peer_ring", workers_per_process=WORKERS)
    training.run(nonfinite=poison)
    worst = max(worst, _distance(training, simulated(WORKERS, "one_peer_ring", "sgd", poison)))
    skipped.append(training.accelerator.gossip_steps[0].guard.skipped)
    finding = difference_found(bench, worst)
    return finding if skipped == [*(0 for _ in skipped[1:]), 1] else Finding(False, f"skipped {skipped} local updates")


def _distance(training: Training, expected: torch.Tensor) -> float:
    difference = (training.parameters() - expected).abs().max()
    return float(difference) if difference.isfinite() else float("inf")


@check("1", seconds=20)
def nan_parameters_stop_the_run(bench: Bench) -> Finding:
    """Suspicion: the device lets NaN parameters of one worker through to another, because the host reads late."""
    training = Training.prepared(bench, "sgd", topology="one_peer_ring", workers_per_process=2).run()
    with torch.no_grad():
        next(training.model.replicas[1].parameters()).data.fill_(float("nan"))
    error = ""
    try:
        for step in range(3):
            training.step(step)
    except NonFiniteError as raised:
        error = str(raised)
    clean = bool(training.parameters()[0].isfinite().all())
    figure = f"{'an error' if error else 'no error'}, worker 0 {'stays finite' if clean else 'became NaN'}"
    return Finding(bool(error) and clean, figure)


@check("1", seconds=20)
def nan_gradients_change_nothing(bench: Bench) -> Finding:
    """Suspicion: a fused optimizer that is told to skip still moves parameters, moments or its count of steps."""
    kept = {}
    for optimizer in OPTIMIZERS:
        training = Training.prepared(bench, optimizer)
        training.step(0)
        before = _everything(training)
        training.step(1, nonfinite=[0])
        kept[optimizer] = torch.equal(before, _everything(training))
        training.step(2)
        moves = not torch.equal(before, _everything(training))
        kept[optimizer] &= moves and training.accelerator.gossip_steps[0].guard.skipped == 1
    wrong = [optimizer for optimizer, right in kept.items() if not right]
    figure = f"wrong for {', '.join(wrong)}" if wrong else "parameters and state kept, then moved again"
    return Finding(not wrong, figure)


def _everything(training: Training) -> torch.Tensor:
    states = training.optimizer.optimizer.state.values()
    moments = [value.double().cpu().flatten() for state in states for value in state.values() if torch.is_tensor(value)]
    return torch.cat([training.parameters().flatten(), *moments])


@check("1", seconds=30)
def deployed_model_and_checkpoint_are_exact(bench: Bench) -> Finding:
    """Suspicion: the average is wrong on the GPU, or a worker does not get every byte back, or resumes otherwise."""
    training = Training.prepared(bench, "adam", topology="ring", workers_per_process=WORKERS).run()
    own = training.parameters()
    with training.accelerator.deployed_model(training.model):
        error = float((training.parameters() - own.mean(0)).abs().max())
    restored = torch.equal(own, training.parameters())
    with tempfile.TemporaryDirectory() as folder:
        training.accelerator.save_state(f"{folder}/state")
        ends = []
        for _ in range(2):
            for step in range(3):
                training.step(step)
            ends.append(training.parameters())
            training.accelerator.load_state(f"{folder}/state")
    resumed = torch.equal(*ends)
    ok = error <= limit_of(bench) and restored and resumed
    figure = f"average off by {error:.0e}, bytes {'' if restored else 'NOT '}restored, "
    return Finding(ok, f"{figure}{'resumed bit by bit' if resumed else 'resumed DIFFERENTLY'}", {"difference": error})


@check("1", seconds=20, cuda_only="it is about streams")
def late_copies_follow_side_streams(bench: Bench) -> Finding:
    """Suspicion: a figure that is copied to the host for later is read before a side stream has written it."""
    value = torch.zeros(1, device=bench.device)
    bench.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(200_000_000)  # about 0.1 s
        value.fill_(1.0)
        copied = HostCopy(value)
    read = copied.is_set()
    return Finding(read, "read after it was written" if read else "read BEFORE it was written")


@check("1", seconds=30, cuda_only="the default device is then the CPU anyway")
def default_device_may_be_the_gpu(bench: Bench) -> Finding:
    """Suspicion: `torch.set_default_device("cuda")` breaks pinned copies, generators of the CPU, or checkpoints."""
    torch.set_default_device("cuda")
    try:
        training = Training.prepared(bench, "sgd", topology="one_peer_ring", workers_per_process=WORKERS)
        training.run()
        with tempfile.TemporaryDirectory() as folder:
            training.accelerator.save_state(f"{folder}/state")
            training.accelerator.load_state(f"{folder}/state")
        found = training.parameters()
    finally:
        torch.set_default_device(None)
    return difference_found(bench, float((found - simulated(WORKERS, "one_peer_ring", "sgd")).abs().max()))


LONG = 2**31 + 100


@check("1", seconds=60, cuda_only="indices of the CPU's kernels have 64 bits")
def buckets_beyond_2_31_elements(bench: Bench) -> Finding:
    """Suspicion: kernels that count in 32 bits (fused SGD's) mix wrongly in a bucket of more than 2^31 elements."""
    bench.require_memory(60)
    parameters = [nn.Parameter(torch.full((LONG,), float(worker), device=bench.device)) for worker in range(2)]
    numbers = {id(parameter): worker for worker, parameter in enumerate(parameters)}
    mixer = Mixer(
        parameters,
        build_topology("one_peer_ring", 2),
        bench.group,
        local_workers=2,
        worker_of=lambda parameter: numbers[id(parameter)],
    )
    mixer.add(mixer.consensus_update(0.5))  # x_0 <- 0 + 0.5 * 0.5 * (1 - 0), and x_1 the other way
    expected = (0.25, 0.75)
    pairs = zip(parameters, expected, strict=True)
    wrong = sum(int((part != value).count_nonzero()) for p, value in pairs for part in p.detach().split(2**28))
    mixer.release()
    return Finding(wrong == 0, f"{wrong} of {2 * LONG} elements wrong", {"wrong": wrong})


@check("1", seconds=60, cuda_only="it is about NCCL", processes=2, one_card=True)
def two_processes_on_one_gpu_are_told_so(bench: Bench) -> Finding:
    """Suspicion: two processes on one GPU, which NCCL refuses, are reported as a lost worker."""
    try:
        bench.accelerator(topology="ring")
    except ValueError as error:
        return Finding(True, f"ValueError: {error}"[:150], spent=True)
    except Exception as error:
        return Finding(False, f"{type(error).__name__} instead of a ValueError: {error}"[:150], spent=True)
    return Finding(False, "no error, though NCCL needs a GPU for each process", spent=True)


CHECKS: tuple[Check, ...] = (
    virtual_workers_follow_algorithm_1,
    nan_parameters_stop_the_run,
    nan_gradients_change_nothing,
    deployed_model_and_checkpoint_are_exact,
    late_copies_follow_side_streams,
    default_device_may_be_the_gpu,
    two_processes_on_one_gpu_are_told_so,
)
"""Those that need little memory."""

LARGE: tuple[Check, ...] = (buckets_beyond_2_31_elements,)
