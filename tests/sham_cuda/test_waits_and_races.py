"""Where the host waits for a GPU, which accesses to memory race, and how much a step launches: on the sham device."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState, PartialState
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from dsgdac_accel import GossipAccelerator, GossipConfig, VirtualWorkers, WorkerGroup
from dsgdac_accel.core import headers
from dsgdac_accel.core import mixer as mixer_module
from dsgdac_accel.core.copies import Use
from dsgdac_accel.core.host_copy import HostCopy
from dsgdac_accel.core.mixer import Mixer
from dsgdac_accel.core.nonfinite import ParameterGuard
from dsgdac_accel.core.step import GossipStep
from dsgdac_accel.distributed.transport import Nccl
from dsgdac_accel.pytorch import Gossip
from tests.sham_cuda import cuda
from tests.sham_cuda.recorder import Counted, Recorder

pytestmark = pytest.mark.multiprocess

CUDA = torch.device("cuda")
ASKED = "core/nonfinite.py allows_step"
"""Where the host looks whether an optimizer may step that cannot skip on the device."""
OPTIMIZERS: Mapping[str, Callable[[Any], torch.optim.Optimizer]] = {
    "fused SGD": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, fused=True),
    "fused AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "not fused": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=False),
    "foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
}


# ---- the recorder


def number_in_brackets(x: Tensor) -> None:
    x[0] = 5


OPERATIONS: Mapping[str, tuple[Callable[[Tensor], object], int]] = {
    "a number in brackets": (number_in_brackets, 1),
    "fill_": (lambda x: x[0].fill_(5), 0),
    "item": (lambda x: x[0].item(), 1),
    "tolist": (Tensor.tolist, 1),
    "bool": (lambda x: bool(x[0]), 1),
    "cpu": (Tensor.cpu, 1),
    "copy into pinned memory": (lambda x: torch.empty(4, pin_memory=True).copy_(x, non_blocking=True), 0),
    "copy into pinned memory that blocks": (lambda x: torch.empty(4, pin_memory=True).copy_(x), 1),
    "copy into other memory": (lambda x: torch.empty(4).copy_(x, non_blocking=True), 1),
    "upload": (lambda x: torch.ones(4).to(x.device), 1),
    "upload of a number": (lambda x: torch.tensor(1.0, device=x.device), 1),
    "upload from pinned memory": (lambda x: torch.ones(4).pin_memory().to(x.device, non_blocking=True), 0),
    "several uploads": (lambda x: torch._foreach_copy_([x], [torch.ones(4)]), 1),
    "a number of the host": (lambda x: x + torch.tensor(1.0), 0),
    "nonzero": (torch.nonzero, 1),
    "equal": (lambda x: torch.equal(x, x), 1),
    "mask": (lambda x: x[x > 0], 1),
    "masked_select": (lambda x: x.masked_select(x > 0), 1),
    "unique": (torch.unique, 1),
    "places of the device": (lambda x: x[torch.zeros(2, dtype=torch.int64, device=x.device)], 0),
    "places of the host": (lambda x: x[torch.zeros(2, dtype=torch.int64)], 1),
    "device synchronize": (lambda x: torch.cuda.synchronize(), 1),
    "event": (lambda x: torch.cuda.current_stream().record_event().synchronize(), 1),
    "event that is asked once": (lambda x: torch.cuda.current_stream().record_event().query(), 0),
}


def waits_of_operations(rank: int) -> dict[str, int]:
    recorder, found = Recorder(), {}
    with recorder.recording():
        for name, (operation, _) in OPERATIONS.items():
            x = torch.arange(4.0, device=CUDA)
            with recorder.counting() as counted:
                operation(x)
            found[name] = sum(counted.waits.values())
    assert not recorder.races
    return found


def test_the_recorder_knows_what_waits(sham):
    (found,) = sham.run(waits_of_operations, 1)
    assert found == {name: waits for name, (_, waits) in OPERATIONS.items()}


def races_with_messages(rank: int) -> list[list[str]]:
    """Return the races with a message in flight: of writing what it reads, and of writing it when it was freed."""
    found = []
    for frees in (False, True):
        recorder = Recorder()
        with recorder.recording():
            sent = torch.zeros(2**10, device=CUDA)
            place = range(sent.data_ptr(), sent.data_ptr() + sent.nbytes)
            recorder.posted(None, [sent], [])
            if frees:
                del sent
                later = [torch.zeros(2**6, device=CUDA) for _ in range(100)]
                assert any(tensor.data_ptr() in place for tensor in later), "the memory is used again"
            else:
                sent.fill_(1.0)
        found.append(recorder.races)
    return found


def test_memory_that_was_freed_may_be_written(sham):
    ((written, freed),) = sham.run(races_with_messages, 1)
    assert len(written) == 1
    assert freed == []


# ---- steps

# fmt: off
STEPS: Mapping[tuple[Any, ...], int] = {
    # topology, comm_dtype, optimizer, masters, log_every, overlap, optimizers: the most launches of a step
    ("one_peer_ring", "full", "fused SGD", False, 0, True, 1): 39,
    ("one_peer_ring", "bf16", "fused AdamW", False, 1, False, 2): 142,
    ("one_peer_ring", "int8", "not fused", True, 0, True, 2): 208,
    ("one_peer_ring", "int4", "foreach", True, 1, False, 1): 122,
    ("ring", "full", "fused AdamW", True, 1, True, 2): 142,
    ("ring", "bf16", "fused SGD", True, 0, False, 1): 63,
    ("ring", "int8", "foreach", False, 1, True, 1): 107,
    ("ring", "int4", "not fused", False, 0, False, 2): 346,
    ("complete", "full", "not fused", False, 1, False, 1): 115,
    ("complete", "bf16", "foreach", False, 0, True, 2): 136,
    ("complete", "int8", "fused SGD", True, 1, False, 2): 250,
    ("complete", "int4", "fused AdamW", True, 0, True, 1): 185,
    ("one_peer_exponential", "full", "foreach", True, 0, False, 2): 94,
    ("one_peer_exponential", "bf16", "not fused", True, 1, True, 1): 125,
    ("one_peer_exponential", "int8", "fused AdamW", False, 0, False, 1): 58,
    ("one_peer_exponential", "int4", "fused SGD", False, 1, True, 2): 212,
    ("one_peer_ring", "int2", "not fused", True, 0, True, 1): 140,
    ("ring", "int2", "fused SGD", False, 0, False, 1): 139,
    ("complete", "int2", "fused AdamW", False, 0, False, 2): 374,
    ("one_peer_exponential", "int2", "foreach", False, 1, False, 2): 232,
    ("exponential", "full", "fused SGD", True, 0, False, 2): 92,
    ("exponential", "bf16", "foreach", True, 1, False, 2): 208,
    ("exponential", "int8", "not fused", False, 1, True, 1): 165,
    ("exponential", "int4", "foreach", False, 0, True, 1): 183,
    ("exponential", "int2", "fused AdamW", True, 0, False, 2): 386,
    ("base_graph", "full", "fused AdamW", False, 0, True, 2): 74,
    ("base_graph", "bf16", "foreach", True, 1, False, 1): 85,
    ("base_graph", "int8", "not fused", False, 0, False, 1): 102,
    ("base_graph", "int4", "fused SGD", False, 1, True, 1): 110,
    ("base_graph", "int2", "foreach", True, 1, True, 2): 252,
}
# fmt: on
WORKERS = {"base_graph": 3}  # one sits out in each round
FAST = [case for number, case in enumerate(STEPS) if number in (0, 3, 4, 10, 14)]
OTHERS: Mapping[str, tuple[dict[str, Any], dict[str, int], int]] = {
    "several workers in a process": ({"workers": 2}, {ASKED: 1}, 51),
    "GradScaler": ({"optimizer": "foreach", "scaled": True}, {ASKED: 1, "pytorch.py _take_scaled_step": 1}, 54),
}
"""Options, waits (the second one is torch's own), and launches."""
SHARDED: Mapping[tuple[str, int], int] = {("fused AdamW", 1): 79, ("foreach", 0): 50}
"""Optimizer, log_every: launches."""
LAUNCHES_TO_SPARE = 4
"""Versions of torch differ. One launch more for each parameter of the model would be six."""


def see_one_gpu() -> None:
    """Let this process have a GPU of its own, which is all that it sees."""
    os.environ["LOCAL_RANK"] = "0"


def make_model(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.Tanh(), nn.Linear(32, 1)).to(CUDA, dtype)


@dataclass
class Found:
    """Of the last two of four steps: the first one compares settings, and momentum has no buffers yet."""

    waits: list[dict[str, int]]
    launches: int
    races: list[str]
    """Of all four."""


def taken(recorder: Recorder, backward: Callable[[], None], step: Callable[[], None]) -> Found:
    """Take five steps, and count in the third and the last one: the fourth looks at the optimizer's state."""
    counts = []
    with recorder.recording():
        for _ in range(5):
            recorder.next_step()
            backward()
            with recorder.counting() if len(counts) in (2, 4) else contextlib.nullcontext(Counted()) as counted:
                step()
            counts.append(counted)
    last = counts[2::2]
    return Found([each.places for each in last], max(len(each.launches) for each in last), recorder.races)


def steps_of(
    topology: str = "one_peer_ring",
    comm_dtype: str = "full",
    optimizer: str = "fused AdamW",
    masters: bool = False,
    log_every: int = 0,
    overlap: bool = True,
    optimizers: int = 1,
    workers: int = 1,
    scaled: bool = False,
    strict: bool = True,
) -> Found:
    """Train by `Gossip`; with `strict`, the mix must be queued whenever the host waits."""
    dtype = torch.bfloat16 if masters else torch.float32
    models: list[Any] = [make_model(dtype) for _ in range(optimizers)]
    if workers > 1:
        models = [VirtualWorkers(models[0], workers)]
    made = [OPTIMIZERS[optimizer](part.parameters()) for part in models]
    scaler = torch.amp.GradScaler("cuda", init_scale=4.0, enabled=scaled)
    config = GossipConfig(
        topology=topology, comm_dtype=comm_dtype, log_every=log_every, overlap=overlap, workers_per_process=workers,
        power=0, timeout=20,
    )  # fmt: skip
    gossip = Gossip(models[0] if workers > 1 else nn.ModuleList(models), made, config, scaler=scaler)

    def backward() -> None:
        x = torch.randn(4 * workers, 8, device=CUDA, dtype=dtype)
        for part in models:
            scaler.scale(part(x).float().square().mean()).backward()

    def step() -> None:
        torch.nn.utils.clip_grad_norm_(gossip.model.parameters(), 1.0)
        for each in made:
            scaler.step(each)
            each.zero_grad()
        scaler.update()

    def is_mix_queued() -> None:
        queued = any(step.mixer.copies.use is Use.UPDATE for step in gossip.steps)
        assert queued or not strict, "the device runs dry"

    return taken(Recorder(on_wait=is_mix_queued), backward, step)


def sharded_steps_of(optimizer: str, log_every: int) -> Found:
    """Train two workers of two processes each."""
    for state in (AcceleratorState, PartialState, GradientState):
        state._reset_state()
    mesh = init_device_mesh("cuda", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    accelerator = GossipAccelerator(
        device_mesh=mesh, gossip=GossipConfig(log_every=log_every, power=0, timeout=20, overlap=False)
    )
    model: Any = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1)).to(CUDA)
    fully_shard(model[0], mesh=mesh["dp_shard"])
    fully_shard(model, mesh=mesh["dp_shard"])
    model, prepared = accelerator.prepare(model, OPTIMIZERS[optimizer](model.parameters()))

    def backward() -> None:
        prepared.zero_grad()
        accelerator.backward(model(torch.randn(4, 8, device=CUDA)).square().mean())

    return taken(Recorder(), backward, prepared.step)


def all_steps(rank: int, cases: Sequence[tuple[Any, ...]], more: bool) -> dict[Any, Found]:
    see_one_gpu()
    found: dict[Any, Found] = {case: steps_of(*case) for case in cases}
    if more:
        found |= {name: steps_of(**options) for name, (options, _, _) in OTHERS.items()}
        found |= {case: sharded_steps_of(*case) for case in SHARDED}
    return found


@pytest.fixture(scope="module")
def steps(sham: Any) -> Callable[[Any], list[Found]]:
    """Returns what was found in a case on each worker; few launches have many cases."""

    def workers_of(case: Any) -> int:
        return WORKERS.get(case[0], 4)

    @functools.cache
    def launched(workers: int, is_fast: bool) -> list[dict[Any, Found]]:
        cases = [case for case in STEPS if (workers_of(case), case in FAST) == (workers, is_fast)]
        return sham.run(all_steps, workers, cases, is_fast)

    return lambda case: [found[case] for found in launched(workers_of(case), case in FAST or case not in STEPS)]


def check(name: object, found: Sequence[Found], waits: dict[str, int], launches: int) -> None:
    most = max(each.launches for each in found)
    print(f"\n{most:4} launches, {sum(waits.values())} waits: {name}", end="")
    for each in found:
        assert each.waits == [waits] * 2
        assert not each.races
    assert most <= launches + LAUNCHES_TO_SPARE


@pytest.mark.parametrize(
    "case", [case if case in FAST else pytest.param(case, marks=pytest.mark.slow) for case in STEPS], ids=str
)
def test_a_step_waits_only_for_optimizers_that_cannot_skip_it_and_nothing_races(steps, case):
    _, _, optimizer, *_, optimizers = case
    check(case, steps(case), {} if optimizer.startswith("fused") else {ASKED: optimizers}, STEPS[case])


@pytest.mark.parametrize("name", OTHERS)
def test_several_workers_and_loss_scales_wait_once(steps, name):
    _, waits, launches = OTHERS[name]
    check(name, steps(name), waits, launches)


@pytest.mark.parametrize("case", SHARDED, ids=str)
def test_a_step_of_shards_waits_only_for_optimizers_that_cannot_skip_it(steps, case):
    check(case, steps(case), {} if case[0].startswith("fused") else {ASKED: 1}, SHARDED[case])


def test_every_two_values_occur_together():
    def pairs(case: Sequence[Any]) -> set[Any]:
        return set(itertools.combinations(enumerate(case), 2))

    values = [set(column) for column in zip(*STEPS, strict=True)]
    assert set().union(*map(pairs, STEPS)) == set().union(*map(pairs, itertools.product(*values)))


# ---- passes over all that is mixed, and launches


def mixed_step(parameters: Sequence[nn.Parameter], topology: str, comm_dtype: str = "full") -> Counted:
    """Return what the library launches in the last of three steps, without those of the optimizer."""
    optimizer = torch.optim.SGD(parameters, lr=0.1, fused=True)
    config = GossipConfig(topology=topology, comm_dtype=comm_dtype, log_every=0, power=0, timeout=20)
    step, recorder = GossipStep(optimizer, WorkerGroup(CUDA, 20), config), Recorder()
    with recorder.recording():
        for _ in range(3):
            for parameter in parameters:
                parameter.grad = torch.full_like(parameter, 0.01)
            with recorder.counting() as counted:
                step.before_local_step()
                step.after_local_step()
    return counted


PASSES: Mapping[str, tuple[str, ...]] = {
    "one_peer_ring": ("sub", "linalg_vector_norm", "_fused_sgd_", "_foreach_copy_"),
    "complete": ("sub", "linalg_vector_norm", "_fused_sgd_", "_foreach_copy_", "copy_"),
    "ring": ("add", "sub", "linalg_vector_norm", "_fused_sgd_", "_foreach_copy_"),
}
"""The operations on a whole copy: difference and norm, adding, reading; and before an all-reduce, or by neighbor."""


def passes(rank: int, topology: str) -> list[list[str]]:
    """Return the operations on whole copies, for one dtype and for two; one for the gradients comes first."""
    size, found = 2**19, []
    for dtypes in ([torch.float32], [torch.float32, torch.float64]):
        parameters = [nn.Parameter(torch.randn(size, device=CUDA, dtype=dtype)) for dtype in dtypes]
        found.append([name for name, nbytes in mixed_step(parameters, topology).launches if nbytes >= size * 4])
    return found


@pytest.mark.parametrize(
    ("topology", "workers"), [("one_peer_ring", 2), ("complete", 3), pytest.param("ring", 4, marks=pytest.mark.slow)]
)
def test_a_mix_passes_as_often_over_each_copy_as_is_written(sham, topology, workers):
    for one, two in sham.run(passes, workers, topology):
        assert one == ["_foreach_norm", *PASSES[topology]]
        assert sorted(two) == sorted(2 * one)


MANY, MOST_LAUNCHES = 400, 60
CASES_OF_MANY = [("one_peer_ring", "full"), ("ring", "full"), ("complete", "full"), ("one_peer_ring", "bf16")]


def launches_of_many(rank: int) -> dict[tuple[str, str], int]:
    parameters = [nn.Parameter(torch.randn(8, device=CUDA)) for _ in range(MANY)]
    return {case: len(mixed_step(parameters, *case).launches) for case in CASES_OF_MANY}


def test_launches_do_not_grow_with_the_number_of_parameters(sham):
    """An operation on a list of tensors counts as one launch: the recorder sees the call, before the fallback to the
    CPU takes the list apart. A kernel of CUDA takes some tens of them at once.
    """
    for found in sham.run(launches_of_many, 3):
        print(f"\n{found}", end="")
        assert max(found.values()) <= MOST_LAUNCHES


# ---- what a script does beside an exchange


def in_turn(gossip: Gossip, take_step: Callable[[], None]) -> None:
    last = torch.cuda.current_stream()
    for stream in itertools.islice(itertools.cycle([torch.cuda.Stream(), torch.cuda.Stream()]), 4):
        stream.wait_stream(last)
        with torch.cuda.stream(stream):
            take_step()
        last = stream


def without_order(gossip: Gossip, take_step: Callable[[], None]) -> None:
    for stream in itertools.islice(itertools.cycle([torch.cuda.Stream(), torch.cuda.Stream()]), 4):
        with torch.cuda.stream(stream):
            take_step()


def restarting(gossip: Gossip, take_step: Callable[[], None]) -> None:
    """Call a method that changes nothing of the script's on a stream that nobody waits for."""
    aside = torch.cuda.Stream()
    for _ in range(3):
        take_step()
        with torch.cuda.stream(aside):
            gossip.restart_exchange()


def editing(gossip: Gossip, take_step: Callable[[], None]) -> None:
    for _ in range(3):
        take_step()
        for parameter in gossip.model.parameters():
            parameter.data.mul_(1.0)
            parameter.data = parameter.data.clone()


SCRIPTS = {"in turn": in_turn, "without order": without_order, "restarting": restarting, "editing": editing}


def races_of_scripts(rank: int, workers: int = 1) -> dict[str, list[str]]:
    see_one_gpu()
    found = {}
    for name, script in SCRIPTS.items():
        model: Any = nn.Linear(8, 32, bias=False).to(CUDA)  # as large as its buffer
        model = VirtualWorkers(model, workers) if workers > 1 else model
        optimizer = OPTIMIZERS["fused AdamW"](model.parameters())
        config = GossipConfig(workers_per_process=workers, log_every=0, power=0, timeout=20)
        gossip, recorder = Gossip(model, optimizer, config), Recorder()

        def take_step(model: Any = model, optimizer: Any = optimizer) -> None:
            model(torch.randn(4 * workers, 8, device=CUDA)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        with recorder.recording():
            script(gossip, take_step)
        found[name] = recorder.races
    return found


@pytest.mark.parametrize(("processes", "workers"), [(2, 1), (1, 2)])
def test_no_script_races_with_the_copies(sham, processes, workers):
    """Streams without order make a script race with itself, over its parameters, but not the library."""
    for found in sham.run(races_of_scripts, processes, workers):
        alone = found.pop("without order")
        assert alone
        assert not [race for race in alone if race.count(" at core/") == 2]
        assert found == {name: [] for name in SCRIPTS if name != "without order"}


# ---- logs, evaluations, checkpoints


def logs_and_evaluations(rank: int, folder: str) -> dict[str, dict[str, int]]:
    see_one_gpu()
    config = GossipConfig(timeout=20, log_every=1, workers_per_process=2)
    accelerator = GossipAccelerator(gossip=config)
    first: Any = nn.Sequential(nn.Linear(8, 300), nn.BatchNorm1d(300), nn.BatchNorm1d(300))
    second: Any = nn.Linear(300, 300)
    parts = [OPTIMIZERS["foreach"](model.parameters()) for model in (first, second)]
    first, second, *optimizers = accelerator.prepare(first, second, *parts)
    records: list[dict[str, Any]] = []
    accelerator.consensus_logger.add_sink(lambda values, step: records.append(values))
    recorder, found = Recorder(), {}

    def step() -> None:
        accelerator.backward(first(inputs(8)).square().mean() + second(inputs(300)).square().mean())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    def inputs(width: int) -> Tensor:
        return torch.randn(8, width, device=CUDA)

    with recorder.recording():
        loss = torch.full((), 2.0, device=CUDA)
        step()
        step()
        with recorder.counting() as counted:
            figures = accelerator.training.metrics()
        found["metrics of two optimizers"] = counted.places
        step()
        with recorder.counting() as counted:
            accelerator.consensus_logger.log({"loss": loss + 1, "accuracy": loss * 2, "text": "x"}, step=1)
        found["log"] = counted.places
        with recorder.counting() as counted:
            accelerator.measure_consensus()
        found["radius"] = counted.places
        with recorder.counting() as counted, accelerator.deployed_model(first, calibrate=[inputs(8) for _ in range(5)]):
            pass
        found["calibration"] = counted.places
        with recorder.counting() as counted, accelerator.deployed_model(first):
            pass
        found["pooling"] = counted.places
        accelerator.save_state(folder, wait=False)  # the first one also copies the keys of digests to the device
        accelerator.finish_saving()
        with recorder.counting() as counted:
            accelerator.save_state(folder, wait=False)
        found["background save"] = counted.places
        accelerator.finish_saving()
    assert figures["gossip/radius"] > 0
    assert (records[-1]["loss"], records[-1]["accuracy"], records[-1]["text"]) == (3.0, 4.0, "x")
    assert not recorder.races
    return found


def test_logs_evaluations_and_saves_wait_rarely(sham, tmp_path):
    for found in sham.run(logs_and_evaluations, 2, str(tmp_path / "state")):
        assert found == {
            "metrics of two optimizers": {"core/consensus.py latest": 1},
            "log": {"metrics.py log": 1},
            "radius": {"core/consensus.py latest": 1},
            # Whether other buffers are equal on all workers.
            # The statistics of all layers on their way to the host, and back.
            # At the end, whether the script has written weights into the model.
            "calibration": {
                "tensor_bytes.py finish_digests": 1,
                "calibration.py _merge_over_workers": 1,
                "calibration.py _with_buffers": 1,
                "tensor_bytes.py on_host": 1,
            },
            "pooling": {
                "tensor_bytes.py finish_digests": 1,
                "calibration.py pooled_batch_norm": 1,
                "calibration.py _with_buffers": 1,
                "tensor_bytes.py on_host": 1,
            },
            "background save": {"tensor_bytes.py finish_digests": 1},
        }


# ---- what must be found


def with_more(patch: pytest.MonkeyPatch, owner: type, name: str, more: Callable[[Any], object]) -> None:
    """Let a method do more at its end."""
    original = getattr(owner, name)

    def longer(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        more(self)
        return result

    patch.setattr(owner, name, longer)


def parameters_of(mixer: Mixer) -> Tensor:
    return mixer.slots.values()[0][0]


def wait_of_host(patch: pytest.MonkeyPatch, wait: Callable[[Tensor], object]) -> None:
    with_more(patch, Mixer, "add", lambda mixer: wait(parameters_of(mixer)))


def blocking_copies(patch: pytest.MonkeyPatch) -> None:
    def begun(self: Any, values: Tensor) -> None:
        self._arrived, self._values = None, values.to("cpu")

    patch.setattr(HostCopy, "__init__", begun)


def numbers_in_brackets(patch: pytest.MonkeyPatch) -> None:
    def to_device(numbers: Sequence[float], device: torch.device) -> Tensor:
        values = torch.zeros(len(numbers), dtype=torch.float64, device=device)
        for place, number in enumerate(numbers):
            values[place] = number
        return values

    patch.setattr(headers, "to_device", to_device)


def uploads_that_block(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(headers, "to_device", lambda numbers, device: torch.tensor(numbers, dtype=torch.float64).to(device))


def arrived() -> None:
    """Let pinned copies arrive, although nobody has waited for them: the values are not what is tested."""
    cuda.device_module().deliver(sys.maxsize)


def events_before_copies(patch: pytest.MonkeyPatch) -> None:
    begin, read = HostCopy.__init__, HostCopy.read

    def begun(self: Any, values: Tensor) -> None:
        event = torch.cuda.current_stream().record_event()
        begin(self, values)
        self._arrived = event

    patch.setattr(HostCopy, "__init__", begun)
    patch.setattr(HostCopy, "read", lambda self: (arrived(), read(self))[1])


def reads_before_events(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(HostCopy, "read", lambda self: (arrived(), self._values)[1])


def exchanges_without_wait(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Nccl, "wait", lambda self, work, seconds: work.arrive())


def reductions_without_wait(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Nccl, "run", lambda self, collective, what: collective(async_op=True).arrive())


def writes_in_flight(patch: pytest.MonkeyPatch) -> None:
    with_more(patch, Mixer, "start_exchange", lambda mixer: mixer.copies.sent[0].buffers[0].mul_(1.0))


def reads_in_flight(patch: pytest.MonkeyPatch) -> None:
    with_more(patch, Mixer, "start_exchange", lambda mixer: mixer.copies.received[0][0][0].sum())


def parameters_that_are_sent(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Mixer, "_copies_of", lambda self, local, _: [x.detach().view(-1) for x in self.slots.values()[local]])


def streams_that_are_not_followed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(mixer_module, "follow", lambda last, device: None)


Patch = Callable[[pytest.MonkeyPatch], None]
WAITS: Mapping[str, tuple[Patch, str]] = {
    "a copy that blocks": (blocking_copies, "core/nonfinite.py find_nonfinite"),
    "a number in brackets": (numbers_in_brackets, "core/headers.py write"),
    "an upload that blocks": (uploads_that_block, "core/headers.py write"),
    "item": (lambda patch: wait_of_host(patch, lambda x: x.flatten()[0].item()), "core/step.py after_local_step"),
    "a mask": (lambda patch: wait_of_host(patch, lambda x: x[x > 0]), "core/step.py after_local_step"),
    "synchronize": (
        lambda patch: wait_of_host(patch, lambda x: torch.cuda.synchronize()),
        "core/step.py after_local_step",
    ),
    "a copy that is read at once": (
        lambda patch: with_more(patch, ParameterGuard, "let_skip", lambda guard: guard.disagreement),
        "core/nonfinite.py disagreement",
    ),
}
"""What makes the host wait, and where."""
RACES: Mapping[str, tuple[Patch, str, str]] = {
    "exchanges without a wait": (exchanges_without_wait, "subtract on the stream", "send_and_receive on comm"),
    "reductions without a wait": (reductions_without_wait, "all_reduce_mean_ on the stream", "guarded on communicator"),
    "a write in flight": (writes_in_flight, "after_local_step on the stream", "send_and_receive on comm"),
    "a read in flight": (reads_in_flight, "after_local_step on the stream", "send_and_receive on comm"),
    "events before their copies": (events_before_copies, "core/nonfinite.py", "on the host"),
    "reads before the event": (reads_before_events, "core/nonfinite.py", "on the host"),
}
"""What makes accesses race, and what the message about one of them says."""
RACES_OF_SCRIPTS: Mapping[str, tuple[Patch, set[str]]] = {
    "parameters that are sent": (parameters_that_are_sent, {"editing"}),
    "streams that are not followed": (streams_that_are_not_followed, {"restarting"}),
}
"""What makes scripts race, and which ones."""


def mutated(rank: int) -> dict[str, Found]:
    found = {}
    for name, (change, *_) in {**WAITS, **RACES}.items():
        with pytest.MonkeyPatch.context() as patch:
            change(patch)
            found[name] = steps_of(log_every=1, strict=False)
    return found


def mutated_scripts(rank: int) -> dict[str, dict[str, list[str]]]:
    found = {}
    for name, (change, _) in RACES_OF_SCRIPTS.items():
        with pytest.MonkeyPatch.context() as patch:
            change(patch)
            found[name] = races_of_scripts(rank)
    return found


@pytest.fixture(scope="module")
def mutations(sham: Any) -> list[dict[str, Found]]:
    return sham.run(mutated, 2)


@pytest.mark.parametrize("name", WAITS)
def test_a_wait_is_found_where_it_is(mutations, name):
    _, place = WAITS[name]
    for found in mutations:
        assert all(place in waits for waits in found[name].waits), found[name].waits
        assert not found[name].races


@pytest.mark.parametrize("name", RACES)
def test_a_race_is_found_where_it_is(mutations, name):
    _, *words = RACES[name]
    for found in mutations:
        assert any(all(word in race for word in words) for race in found[name].races), found[name].races
        assert found[name].waits == [{}] * 2


def test_a_race_of_a_script_is_found(sham):
    for mutant in sham.run(mutated_scripts, 2):
        for name, (_, scripts) in RACES_OF_SCRIPTS.items():
            assert {script for script, races in mutant[name].items() if races} == {"without order", *scripts}
