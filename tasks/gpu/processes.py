"""Part 2, right results: several processes, each with a GPU of its own and NCCL, or on the CPU with gloo."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

from dsgdac_accel import Mixer, WorkerLostError, build_topology
from tasks.gpu.algorithm import Training, difference_found, simulated
from tasks.gpu.bench import Bench, NotHere
from tasks.gpu.check import Check, Finding, check
from tasks.gpu.one_process import LONG

FAULT_TIMEOUT = {"cpu": 5.0, "cuda": 20.0}
"""Seconds after which a lost worker is noticed at the latest, in checks that lose one."""
NOTICE_SECONDS = 10.0
"""Seconds beyond the timeout to find out which worker was lost."""


@check("2", seconds=90, cuda_only="gloo needs no GPU memory")
def communicators_take_little_memory(bench: Bench) -> Finding:
    """Suspicion: the communicators of one accelerator take 300 MiB of GPU memory or more."""
    if bench.connected:
        raise NotHere("another check has connected these processes; name it alone with --only")
    before = torch.cuda.mem_get_info(bench.device)[0]
    mixer = Mixer(nn.Parameter(torch.zeros(1, device=bench.device)), build_topology("ring", bench.size), bench.group)
    mixer.start_exchange()
    mixer.add(mixer.consensus_update(1.0))
    used = max(bench.everywhere((before - torch.cuda.mem_get_info(bench.device)[0]) / 2**20))
    mixer.release()
    return Finding(used < 300, f"{used:.0f} MiB (limit 300)", {"mebibytes": used})


@check("2", seconds=60)
def first_exchange_does_not_block(bench: Bench) -> Finding:
    """Suspicion: the first exchange over an edge blocks the host until the neighbor is there, without a timeout."""
    late = 3.0 if bench.cuda else 1.0
    values = nn.Parameter(torch.full((1024,), float(bench.rank), device=bench.device))
    topology = build_topology("ring", bench.size)
    mixer = Mixer(values, topology, bench.group)
    bench.meet()
    time.sleep(late * (bench.rank == 1))
    started = time.perf_counter()
    mixer.start_exchange()
    took = max(bench.everywhere(time.perf_counter() - started))
    mixer.add(mixer.consensus_update(1.0))
    expected = topology.matrix(0)[bench.rank] @ torch.arange(bench.size, dtype=torch.float64, device="cpu")
    error = max(bench.everywhere(float((values.detach().cpu() - expected).abs().max())))
    mixer.release()
    ok = took < late / 2 and error < 1e-6
    figure = f"posted in {took:.3f} s though a neighbor is {late:g} s late (limit {late / 2:g} s)"
    figure += f", mixed value off by {error:.0e}"
    return Finding(ok, figure, {"seconds": took, "difference": error})


@check("2", seconds=90)
def processes_follow_algorithm_1(bench: Bench) -> Finding:
    """Suspicion: exchanges between processes mix otherwise than the simulation, when workers are late at random."""
    worst = 0.0
    for topology, optimizer, settings in (
        ("one_peer_ring", "sgd", {}),
        ("complete", "adam", {}),
        ("ring", "sgd", {"overlap": False}),
        ("ring", "adam", {}),
    ):
        training = Training.prepared(bench, optimizer, topology=topology, **settings).run(delays=0.02)
        expected = simulated(bench.size, topology, optimizer)[bench.rank]
        worst = max(worst, *bench.everywhere(float((training.parameters()[0] - expected).abs().max())))
    return difference_found(bench, worst)


def _mixed_beside_collectives(bench: Bench, comm_dtype: str, limit: float) -> Finding:
    """Mix one large parameter, without training, while the script reduces tensors of its own.

    Each worker starts at a ramp plus its rank r and subtracts 0.1 r in each step. The ramp is the same for all and
    stays, so that v <- W v - 0.1 r tells every value; without it int8 would have nothing to round.
    """
    elements = 2**26 if bench.cuda else 2**20
    accelerator = bench.accelerator(topology="ring", power=0.0, comm_dtype=comm_dtype)
    parameter = nn.Parameter(torch.zeros(elements, device=bench.device))
    optimizer = accelerator.prepare(torch.optim.SGD([parameter], lr=0.1, fused=True))
    ramp = torch.linspace(0.0, 1.0, elements, device=bench.device)
    parameter.data.copy_(ramp + bench.rank)
    mixing = build_topology("ring", bench.size).matrix(0).double()
    ranks = torch.arange(bench.size, dtype=torch.float64, device="cpu")
    expected = ranks.clone()
    for step in range(10):
        parameter.grad = torch.full_like(parameter, float(bench.rank))
        bench.delay(7 * bench.rank + step, 0.05)
        optimizer.step()
        dist.all_reduce(torch.ones(2**18, device=bench.device))
        expected = mixing @ expected - 0.1 * ranks
    accelerator.gossip_steps[0].mixer.drain()
    error = max(bench.everywhere(float((parameter.detach() - ramp - expected[bench.rank]).abs().max())))
    figure = f"{parameter.nbytes / 2**20:.0f} MiB, off by {error:.0e} (limit {limit:g})"
    return Finding(error <= limit, figure, {"difference": error})


@check("2", seconds=60)
def full_messages_beside_collectives(bench: Bench) -> Finding:
    """Suspicion: exchanges in flight beside the script's own collectives deadlock, or mix wrongly."""
    return _mixed_beside_collectives(bench, "full", 1e-5)


@check("2", seconds=60)
def bf16_messages_beside_collectives(bench: Bench) -> Finding:
    """Suspicion: as for full messages, with bf16 messages."""
    return _mixed_beside_collectives(bench, "bf16", 2e-3)


@check("2", seconds=60)
def int8_messages_beside_collectives(bench: Bench) -> Finding:
    """Suspicion: as for full messages, with int8 messages."""
    return _mixed_beside_collectives(bench, "int8", 2e-3)


@check("2", seconds=40)
def late_peer_shows_in_wait_seconds(bench: Bench) -> Finding:
    """Suspicion: `wait_seconds` stays near 0 though a neighbor is late, because only streams wait."""
    training = Training.prepared(bench, "sgd", topology="ring")
    waits = []
    for step in range(6):
        time.sleep(0.2 * (bench.rank == 1))
        training.step(step)
        bench.synchronize()
        waits.append(training.accelerator.gossip_steps[0].metrics()["wait_seconds"])
    seen = bench.everywhere(max(waits[2:]))[0]
    figure = f"worker 0 waited {seen:.3f} s for a peer that is 0.2 s late (at least 0.1)"
    return Finding(seen > 0.1, figure, {"seconds": seen})


@check("2", seconds=60, cuda_only="everything is on the CPU there")
def cpu_tensors_of_a_gpu_model(bench: Bench) -> Finding:
    """Suspicion: a buffer that stays on the CPU reaches an NCCL group, which knows no CPU tensors."""
    accelerator = bench.accelerator(topology="ring")
    model = nn.Linear(4, 4).to(bench.device)
    model.register_buffer("table", torch.full((3,), float(bench.rank), device="cpu"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        accelerator.prepare(model, optimizer, device_placement=[False, False])
    except ValueError as error:
        return Finding(True, f"refused: {error}"[:150], spent=True)
    table = model.get_buffer("table")
    equal = all(bench.everywhere(bool((table == 0).all())))
    return Finding(equal, "equal to worker 0's on all workers" if equal else "NOT equal on the workers")


@check("2", seconds=60, cuda_only="gloo does not coalesce messages", environment={"TORCH_DISTRIBUTED_DEBUG": "DETAIL"})
def detail_debugging_does_not_deadlock(bench: Bench) -> Finding:
    """Suspicion: `TORCH_DISTRIBUTED_DEBUG=DETAIL` wraps NCCL without coalescing, and receives posted first hang.

    Older versions of torch do; they have to be refused.
    """
    try:
        training = Training.prepared(bench, "sgd", topology="ring").run()
    except ValueError as refusal:
        return Finding(True, f"refused: {refusal}"[:150], spent=True)
    expected = simulated(bench.size, "ring", "sgd")[bench.rank]
    error = max(bench.everywhere(float((training.parameters()[0] - expected).abs().max())))
    return difference_found(bench, error)


@check("2", seconds=60)
def optimizers_in_another_order(bench: Bench) -> Finding:
    """Suspicion: workers that step two optimizers in different orders mix one's parameters with the other's.

    NCCL ignores tags. Right values and an error are both fine; wrong values are not.
    """
    accelerator = bench.accelerator(topology="ring", power=0.0)
    starts = (bench.rank, 100.0 + bench.rank)
    parameters = [nn.Parameter(torch.zeros(4096, device=bench.device)) for _ in starts]
    optimizers = [accelerator.prepare(torch.optim.SGD([parameter], lr=0.1)) for parameter in parameters]
    mixing = build_topology("ring", bench.size).matrix(0).double()
    expected = torch.arange(bench.size, dtype=torch.float64, device="cpu")
    for parameter, start in zip(parameters, starts, strict=True):
        parameter.data.fill_(start)
        parameter.grad = torch.zeros_like(parameter)
    try:
        for step in range(4):  # the first step waits for the neighbor's first exchange, so it has one order
            for optimizer in optimizers if bench.rank % 2 == 0 or step == 0 else optimizers[::-1]:
                optimizer.step()
            bench.synchronize()
            expected = mixing @ expected
    except RuntimeError as refusal:
        return Finding(True, f"refused: {type(refusal).__name__}: {refusal}"[:150], spent=True)
    found = torch.stack([parameter.detach().mean().double().cpu() for parameter in parameters])
    error = max(
        bench.everywhere(float((found - expected[bench.rank] - torch.tensor([0.0, 100.0], device="cpu")).abs().max()))
    )
    return Finding(error < 1e-3, f"mixed values off by {error:.0e} (limit 1e-03)", {"difference": error})


@check("2", seconds=90, cuda_only="it is about NCCL, and kernels that count in 32 bits")
def messages_beyond_2_31_elements(bench: Bench) -> Finding:
    """Suspicion: many messages hang in one NCCL group (pytorch issue 174288), or long buffers mix wrongly.

    In messages of 64 MiB, a buffer of 2^31 float32 elements would be 128 to send and 128 or more to receive.
    """
    bench.require_memory(50)
    topology = build_topology("ring", bench.size)
    values = nn.Parameter(torch.full((LONG,), float(bench.rank), device=bench.device))
    mixer = Mixer(values, topology, bench.group)
    expected = torch.arange(bench.size, dtype=torch.float64, device="cpu")
    for step in range(2):
        mixer.add(mixer.consensus_update(1.0))
        expected = topology.matrix(step).double() @ expected
    mine = float(expected[bench.rank])
    wrong = sum(int((part - mine).abs().gt(1e-5).count_nonzero()) for part in values.detach().split(2**28))
    wrong = sum(bench.everywhere(wrong))
    mixer.release()
    figure = f"{wrong} elements wrong after 2 exchanges of {values.nbytes / 1e9:.1f} GB"
    return Finding(wrong == 0, figure, {"wrong": wrong})


def _fault_timeout(bench: Bench) -> float:
    return FAULT_TIMEOUT["cuda" if bench.cuda else "cpu"]


def _error_within(training: Training, steps: int, after_step: Callable[[], object]) -> tuple[Exception | None, float]:
    """Take steps until an error, and return it with the seconds that this took."""
    started = time.perf_counter()
    try:
        for step in range(steps):
            training.step(step)
            after_step()
        training.accelerator.gossip_steps[0].state_dict()  # waits for what is in flight
    except Exception as error:
        return error, time.perf_counter() - started
    return None, time.perf_counter() - started


@check("2", seconds=60)
def worker_one_step_off_is_noticed(bench: Bench) -> Finding:
    """Suspicion: a worker that is one step ahead mixes silently with the others, since NCCL ignores tags."""
    timeout = _fault_timeout(bench)
    training = Training.prepared(bench, "sgd", topology="ring", timeout=timeout)
    for step in range(2):
        training.step(step)
    mixer = training.accelerator.gossip_steps[0].mixer
    if bench.rank == 1:
        mixer.start_at(mixer.step + 2)  # discards the exchange of this step, and is one step ahead of the others then
    error, took = _error_within(training, 4, lambda: None)
    ok = isinstance(error, RuntimeError) and took < timeout + NOTICE_SECONDS
    what = type(error).__name__ if error else "no error"
    figure = f"{what} after {took:.1f} s (limit {timeout + NOTICE_SECONDS:g} s)"
    return Finding(ok, figure, {"seconds": took}, spent=True)


@check("2", seconds=60)
def lost_worker_is_named(bench: Bench) -> Finding:
    """Suspicion: without a lost worker the others hang until a watchdog aborts them, and nobody says who it was."""
    return _without_the_last_worker(bench, lambda: None)


@check("2", seconds=60, cuda_only="the host hangs nowhere there", good_end=r"worker \d+\b.*(lost|not answer)")
def lost_worker_ends_a_script_that_hangs(bench: Bench) -> Finding:
    """Suspicion: where the script itself waits for the GPU, as in `loss.item()`, a lost worker hangs it for ever.

    Such a wait cannot be interrupted, so the process may end with a message instead of an error.
    """
    return _without_the_last_worker(bench, bench.synchronize)


def _without_the_last_worker(bench: Bench, after_step: Callable[[], object]) -> Finding:
    timeout, lost = _fault_timeout(bench), bench.size - 1
    training = Training.prepared(bench, "sgd", topology="ring", timeout=timeout)
    for step in range(3):
        training.step(step)
    if bench.rank == lost:
        bench.leave()
    error, took = _error_within(training, 6, after_step)
    named = isinstance(error, WorkerLostError) and f"worker {lost}" in str(error)
    what = f"{type(error).__name__} {'names' if named else 'does NOT name'} worker {lost}" if error else "no error"
    figure = f"{what}, after {took:.1f} s (limit {timeout + NOTICE_SECONDS:g} s)"
    return Finding(named and took < timeout + NOTICE_SECONDS, figure, {"seconds": took}, spent=True)


CHECKS: tuple[Check, ...] = (
    communicators_take_little_memory,
    first_exchange_does_not_block,
    processes_follow_algorithm_1,
    full_messages_beside_collectives,
    bf16_messages_beside_collectives,
    int8_messages_beside_collectives,
    late_peer_shows_in_wait_seconds,
)

FAULTS: tuple[Check, ...] = (
    messages_beyond_2_31_elements,
    optimizers_in_another_order,
    cpu_tensors_of_a_gpu_model,
    lost_worker_is_named,
    lost_worker_ends_a_script_that_hangs,
    worker_one_step_off_is_noticed,
    detail_debugging_does_not_deadlock,
)
"""Those that may leave their processes unusable, and the one in processes of its own."""
