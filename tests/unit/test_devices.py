"""Accelerators, faked: which devices are refused, what the host reads from them, and what NCCL says of them."""

from __future__ import annotations

import ast
import logging
import re
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate.utils import DistributedType, str_to_bool
from torch import nn
from torch.distributed import DistBackendError
from torch.utils.data import BatchSampler, DataLoader, SubsetRandomSampler, WeightedRandomSampler

from dsgdac_accel import Gossip, GossipConfig, WorkerGroup, WorkerLostError, devices, randomness
from dsgdac_accel.cli import join_workers
from dsgdac_accel.compatibility import refuse_unsupported_launch
from dsgdac_accel.core.compression import Rounding
from dsgdac_accel.core.copies import Layout
from dsgdac_accel.core.formats import Bf16
from dsgdac_accel.core.gamma import GammaSchedule
from dsgdac_accel.core.host_copy import HostCopy
from dsgdac_accel.core.slots import Slots
from dsgdac_accel.core.step import GossipStep
from dsgdac_accel.data.dataloader_state import order_state, set_order_state
from dsgdac_accel.data.loaders import SharedStream
from dsgdac_accel.deployed_model import deployed_model
from dsgdac_accel.devices import (
    Placement,
    cpu_is_demanded,
    default_device,
    identity_of,
    refuse_misplaced,
)
from dsgdac_accel.distributed import failure_reports
from dsgdac_accel.distributed.failure_detection import FailureDetector, short_cause
from dsgdac_accel.distributed.failure_reports import FailureReports, this_kernel, this_machine
from dsgdac_accel.distributed.members import Members
from dsgdac_accel.features import Setup, refuse_combinations
from dsgdac_accel.schedule import current_lr

CPU = torch.device("cpu")


class OnXpu(torch.Tensor):
    """A tensor that says it is on an XPU."""

    @property
    def device(self):
        return torch.device("xpu:0")

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is torch.Tensor.to:  # it arrives on the host
            return args[0].as_subclass(torch.Tensor).clone()
        return super().__torch_function__(func, types, args, kwargs or {})


# ---- which devices


@pytest.mark.parametrize("kind", ["xpu", "mps", "hpu", "meta"])
def test_an_accelerator_that_cannot_be_used_is_refused_with_the_reason(kind):
    device = torch.device(kind)
    with pytest.raises(ValueError, match=rf"device '{kind}' .*4 processes.*workers_per_process"):
        refuse_combinations(Setup(processes=4, device=device))
    with pytest.raises(ValueError, match=f"cannot run on '{kind}': .*Train on CPU or CUDA"):
        WorkerGroup(device)


def test_before_anything_changes():
    model = nn.ParameterList([torch.empty(2, device="meta")])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = {**vars(optimizer)}
    with pytest.raises(ValueError, match="cannot run on 'meta'"):
        Gossip(model, optimizer, GossipConfig())
    assert vars(optimizer) == before


def find_shortcoming(kind):
    return devices._shortcoming.__wrapped__(kind)


def test_one_rule_tries_out_what_the_core_needs(monkeypatch):
    assert find_shortcoming("cpu") is None
    with monkeypatch.context() as patched:
        patched.setattr(torch.Tensor, "double", lambda x: 1 / 0)
        assert "does not sum in float64" in find_shortcoming("cpu")
    assert "meta" in find_shortcoming("meta")


def test_a_parameter_on_another_gpu_is_refused():
    class OnTheSecond(nn.Parameter):
        device = torch.device("cuda:1")

    slots = Slots([OnTheSecond(torch.ones(2))])
    with pytest.raises(ValueError, match=r"is on cuda:1, but this run communicates on cuda:0\. Keep all"):
        slots.select(torch.device("cuda:0"))


def launched(kind, name, processes=2):
    """As an Accelerator sees a launch."""
    return SimpleNamespace(
        distributed_type=DistributedType(name), device=torch.device(kind), num_processes=processes,
        mixed_precision="no", parallelism_config=None,
    )  # fmt: skip


def test_launches_on_other_accelerators_are_not_mistaken_for_split_models(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    for kind, name in (("xpu:0", "MULTI_XPU"), ("hpu:0", "MULTI_HPU")):
        with pytest.raises(ValueError, match=rf"device '{kind}' .*2 processes.*workers_per_process"):
            refuse_unsupported_launch(launched(kind, name))
    with pytest.raises(ValueError, match="cannot run on 'xpu'"):
        refuse_unsupported_launch(launched("xpu", "NO", 1))
    with pytest.raises(ValueError, match=r"DistributedType.FSDP was configured.*device_mesh="):
        refuse_unsupported_launch(launched("cuda:0", "FSDP"))
    refuse_unsupported_launch(launched("cuda:0", "MULTI_GPU"))


def test_workers_whose_buffers_are_on_different_devices_share_none(monkeypatch):
    """They would wait for each other in different process groups."""
    model, group = nn.Linear(1, 1), WorkerGroup(CPU)
    model.register_buffer("table", torch.zeros(2))
    elsewhere = {"table": ((2,), "torch.float32", "cuda")}
    monkeypatch.setattr(group, "all_gather_object", lambda mine, what: [mine, (elsewhere, mine[1])])
    with (
        pytest.raises(ValueError, match="table of the deployed model has different shapes, dtypes or devices"),
        deployed_model(model, [], group),
    ):
        pass


def placed(gpu="PCI 0000:3b:00", kernel="kernel", host="node", device="cuda:0"):
    return Placement(kernel, host, device, gpu)


def test_two_processes_on_one_gpu_are_named():
    refuse_misplaced([placed(), placed(gpu="PCI 0000:5e:00"), placed(kernel="another")])
    refuse_misplaced([placed(None, device="cpu")] * 3)
    for container in ("node", "container"):
        with pytest.raises(ValueError, match=r"workers 0 and 2 have the same one \(PCI 0000:3b:00\).*CUDA_VISIBLE"):
            refuse_misplaced([placed(), placed(gpu="PCI 0000:5e:00"), placed(host=container)])
    with pytest.raises(ValueError, match="same kind of device; worker 0 is on cuda:0 of node and worker 1 on cpu"):
        refuse_misplaced([placed(), placed(None, device="cpu")])


def test_a_gpu_is_known_by_its_pci_address_or_its_uuid(monkeypatch):
    class Properties:
        uuid = "GPU-1"

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)
    assert identity_of(torch.device("cuda:0")) == "GPU-1"
    Properties.pci_domain_id, Properties.pci_bus_id, Properties.pci_device_id = 1, 0x3B, 0
    assert identity_of(torch.device("cuda:0")) == "PCI 0001:3b:00"
    assert identity_of(CPU) is None


PARTITIONS = [({}, 3, "3"), ({"CUDA_VISIBLE_DEVICES": "5,3"}, 1, "3"), ({"HIP_VISIBLE_DEVICES": "3"}, 0, "3")]
PARTITIONS += [({"HIP_VISIBLE_DEVICES": "1", "CUDA_VISIBLE_DEVICES": "7", "ROCR_VISIBLE_DEVICES": "2,3"}, 0, "3")]
PARTITIONS += [({"ROCR_VISIBLE_DEVICES": "GPU-a,GPU-b"}, 1, "GPU-b")]


@pytest.mark.parametrize(("variables", "index", "number"), PARTITIONS)
def test_partitions_of_an_amd_gpu_are_told_apart_by_their_number(variables, index, number, monkeypatch):
    """Their PCI addresses differ in the function alone, of which torch does not tell."""
    for variable in ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
        monkeypatch.delenv(variable, raising=False)
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(pci_bus_id=0x3B))
    assert identity_of(torch.device("cuda", index)) == f"PCI 0000:3b:00, device {number}"


@pytest.mark.parametrize("word", ["y", "Yes", "t", "TRUE", "on", "1", "n", "No", "f", "False", "off", "0"])
def test_the_environment_asks_for_the_cpu_in_accelerates_words(word):
    assert cpu_is_demanded({"ACCELERATE_USE_CPU": word}) == str_to_bool(word)


def test_other_words_are_refused():
    with pytest.raises(ValueError, match="must be true or false; got 'cpu'"):
        cpu_is_demanded({"ACCELERATE_USE_CPU": "cpu"})


def test_the_default_device_is_one_that_is_there_and_wanted(monkeypatch):
    monkeypatch.delenv("ACCELERATE_USE_CPU", raising=False)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))  # as torch was built
    for available, word, expected in ((False, "no", "cpu"), (True, "no", "cuda"), (True, "yes", "cpu")):
        monkeypatch.setattr(torch.accelerator, "is_available", lambda available=available: available)
        monkeypatch.setenv("ACCELERATE_USE_CPU", word)
        assert default_device().type == expected


def test_an_address_of_ipv6_is_in_brackets(monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "::1")
    monkeypatch.setenv("MASTER_PORT", "9")
    with pytest.raises(WorkerLostError, match=r"does not serve the rendezvous at \[::1\]:9:"):
        join_workers(1, 2, timeout=0.1)


def names_cuda(source: str) -> list[int]:
    """Return the lines that ask torch for streams, events, the current device or pinned memory of CUDA themselves."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            words = {word.arg for word in node.keywords}
            pins = getattr(node.func, "attr", "") == "pin_memory"
            found |= {node.lineno} if pins or ("pin_memory" in words and of_torch(node.func)) else set()
        elif isinstance(node, ast.ImportFrom):
            found |= {node.lineno} if (node.module or "").startswith("torch.cuda") else set()
        elif of_torch(node) and node.attr in ("cuda", "get_device_module"):
            found.add(node.lineno)
    return sorted(found)


def of_torch(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == "torch"


def test_only_devices_names_cuda():
    wrong = ["torch.cuda.Event()", "torch.ones(1, pin_memory=True)", "x.pin_memory()", "from torch.cuda import Event"]
    assert names_cuda("\n".join([*wrong, "DataLoader(x, pin_memory=x.pin_memory)"])) == [1, 2, 3, 4]
    files = set(Path(devices.__file__).parent.rglob("*.py")) - {Path(devices.__file__)}
    assert [f"{path}:{line}" for path in files for line in names_cuda(path.read_text())] == []


# ---- machines


def test_machines_of_one_name_are_told_apart_by_their_boot(monkeypatch, tmp_path):
    kernels = [tmp_path / name for name in ("one", "other")]
    machines = []
    for kernel in kernels:
        kernel.write_text(f"{kernel.name}\n")
        monkeypatch.setattr(failure_reports, "_BOOT_ID", kernel)
        machines.append(this_machine())
        assert this_kernel() == kernel.name
    assert machines[0] != machines[1] == this_machine()
    reports = FailureReports(Members(0, 2))
    reports.processes = [(machines[1], 1), (machines[0], 2**30)]
    assert reports.is_alive(1) is None, "it is a process of another machine, and looked dead"
    (tmp_path / "container").symlink_to("pid:[4026532999]")
    monkeypatch.setattr(failure_reports, "_PID_NAMESPACE", tmp_path / "container")
    assert this_machine() != machines[1], "of a container"
    monkeypatch.setattr(failure_reports, "_BOOT_ID", tmp_path / "missing")
    assert this_machine() != this_machine(), "nobody is known to be here"


# ---- what NCCL says

NCCL = """NCCL error in: /pytorch/NCCLUtils.cpp:77, {} (run with NCCL_DEBUG=WARN for details), NCCL version 2.27.3
nccl{}: This usually means something.
Last error:
{}"""
TWICE = "Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 3b000"
REMOTE = NCCL.format("remote process exited", "RemoteError", "socketProgress: Connection closed by remote peer node1")


def failure_in(error):
    return FailureDetector(Members(0, 2), 3.0).failure_in(DistBackendError(error), "connecting", 0)


def test_the_last_error_of_nccl_is_kept():
    error = RuntimeError(NCCL.format("invalid usage", "InvalidUsage", TWICE))
    assert short_cause(error).endswith(f"NCCL version 2.27.3: {TWICE}")
    assert failure_in(REMOTE).cause.endswith("Connection closed by remote peer node1")
    assert len(short_cause(RuntimeError(NCCL.format("a", "b", "long " * 1000)))) < 600
    assert short_cause(RuntimeError("NCCL error: x\nLast error:\n")) == "NCCL error: x"


@pytest.mark.parametrize("kind", ["InvalidUsage", "InvalidArgument", "UnhandledCudaError"])
def test_a_mistake_of_this_process_is_not_a_lost_worker_and_is_told_to_the_others(kind):
    detector, error = FailureDetector(Members(0, 2), 3.0), DistBackendError(NCCL.format("x", kind, TWICE))
    detector.reports.store = torch.distributed.HashStore()
    assert detector.failure_in(error, "connecting", 0) is None
    assert detector.reports.first() == f"worker 0 failed in connecting: {short_cause(error)}"


# ---- large buffers, and what is where


def test_fused_kernels_get_at_most_2_30_elements_of_a_parameter():
    sizes = (3, 2**30), (3, 2**30 + 1)
    values = [[torch.empty(size, device="meta") for size in each] for each in sizes]
    assert [Layout(each).dense for each in values] == [[True], [False]]


def test_an_empty_bucket_has_its_square_on_its_device():
    bucket = torch.empty(0, device="meta")
    assert Rounding(Bf16(), bucket).advance([], bucket).device.type == "meta"


def test_the_host_gets_plain_tensors_from_any_accelerator():
    values = torch.tensor([1.0, 2.0]).as_subclass(OnXpu)
    copied = HostCopy(values).read()
    assert type(copied) is torch.Tensor
    assert copied.tolist() == [1.0, 2.0]


def test_a_mean_that_is_taken_again_after_a_loss_starts_from_the_same_values():
    group = WorkerGroup(CPU)
    group.collective = lambda communicate, what: (communicate(), communicate())[1]
    x = torch.tensor([1.0, 2.0], dtype=torch.float64)
    assert group.all_reduce_mean_(x, "a test", others=[x + 2]).tolist() == [2.0, 3.0]


# ---- random streams of an accelerator


class FakeModule:
    """As torch.xpu: one stream."""

    def __init__(self):
        self.generator = torch.Generator()

    def get_rng_state(self):
        return self.generator.get_state()

    def set_rng_state(self, state):
        self.generator.set_state(state)

    def draw(self):
        return float(torch.rand(1, generator=self.generator))


def test_streams_of_any_accelerator_are_saved_and_separate(monkeypatch):
    xpu, generator = FakeModule(), torch.Generator
    monkeypatch.setattr(randomness, "accelerator_streams", lambda: ("xpu", xpu))
    monkeypatch.setattr(torch, "Generator", lambda device="cpu": generator())
    state = randomness.random_state()
    first = xpu.draw()
    randomness.set_random_state(state)
    assert xpu.draw() == first
    outer = xpu.get_rng_state()
    streams, alone = randomness.WorkerStreams(7, [0, 1]), randomness.WorkerStreams(7, [1])
    with streams.swapped() as use:
        use(0)
        others = [xpu.draw()]
        use(1)
        others.append(xpu.draw())
        use(0)
        assert xpu.draw() != others[0], "its stream went on"
    assert torch.equal(outer, xpu.get_rng_state())
    with alone.swapped() as use:
        use(0)
        assert xpu.draw() == others[1] != others[0]
    assert set(streams.state_dict()) == {"cpu", "xpu"}
    resumed = randomness.WorkerStreams(8, [0, 1])
    resumed.load_state_dict(streams.state_dict())
    drawn = []
    for mine in (streams, resumed):
        with mine.swapped() as use:
            use(1)
            drawn.append(xpu.draw())
    assert drawn[0] == drawn[1]


# ---- learning rates in tensors, and CUDA graphs


def schedule_of(*groups, power=2.0, **options):
    optimizer = torch.optim.SGD([{"params": [torch.zeros(1)], "lr": lr} for lr in groups])
    return GammaSchedule(optimizer, WorkerGroup(CPU), GossipConfig(power=power, max_lr=0.5, **options)), optimizer


def test_gamma_follows_a_learning_rate_in_a_tensor():
    schedule, optimizer = schedule_of(torch.tensor(0.5))
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    gammas = []
    for step in range(3):
        gammas.append(schedule.next_gamma(step))
        optimizer.step()
        scheduler.step()
    assert gammas == [1.0, 0.25, 0.0625]
    assert type(schedule.lr) is float


def test_waiting_for_a_learning_rate_is_said_once(caplog):
    schedule, _ = schedule_of(torch.tensor(0.25).as_subclass(OnXpu), 0.125)
    with caplog.at_level(logging.WARNING):
        assert schedule.next_gamma(0) == schedule.next_gamma(1) == 0.25
    assert [record.message.startswith("the learning rate is a tensor on xpu:0") for record in caplog.records] == [True]


def test_of_one_group_only_its_present_learning_rate_is_read():
    _, optimizer = schedule_of(0.25)
    optimizer.param_groups[0]["initial_lr"] = torch.empty((), device="meta")  # reading it would fail
    assert current_lr(optimizer) == 0.25


def test_a_step_in_a_cuda_graph_is_refused_before_it_changes_anything(monkeypatch):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)
    step = GossipStep(optimizer, WorkerGroup(CPU), GossipConfig())
    monkeypatch.setattr(step.group, "device", torch.device("cuda:0"))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match=r"cannot be captured in a CUDA graph.*outside"):
        step.step()
    assert step.steps_taken == 0


# ---- the default device

FACTORIES = {
    "arange", "as_tensor", "asarray", "empty", "empty_strided", "eye", "full", "linspace", "logspace", "ones", "rand",
    "randint", "randn", "randperm", "range", "scalar_tensor", "tensor", "tril_indices", "triu_indices", "zeros",
}  # fmt: skip
"""Functions of torch whose result is on the default device."""


def without_device(source: str) -> list[int]:
    """Return the lines that make a tensor on the default device, unless it is a parameter of a model."""
    if not re.search(rf"\btorch\.({'|'.join(FACTORIES)})\b", source):
        return []
    nodes = list(ast.walk(ast.parse(source)))
    calls = [node for node in nodes if isinstance(node, ast.Call)]
    given = {id(call.func) for call in calls if any(word.arg == "device" for word in call.keywords)}
    given |= {id(node) for call in calls if getattr(call.func, "attr", "") == "Parameter" for node in ast.walk(call)}
    return [
        node.lineno
        for node in nodes
        if isinstance(node, ast.Attribute) and node.attr in FACTORIES and id(node) not in given
        if getattr(node.value, "id", "") == "torch"
    ]


def test_every_tensor_of_the_library_has_its_device_named():
    """`torch.set_default_device` would put others where the host cannot read them, or a CPU generator cannot draw."""
    assert without_device("a = torch.zeros(1)\nb = map(torch.tensor, c)\nd = torch.ones(2, device=e)") == [1, 2]
    root = Path(devices.__file__).parents[1]
    files = [path for folder in ("dsgdac_accel", "tasks") for path in (root / folder).rglob("*.py")]
    assert len(files) > 150
    assert [f"{path}:{line}" for path in files for line in without_device(path.read_text())] == []


def test_generators_of_samplers_and_loaders_are_where_these_draw(monkeypatch):
    """As by Accelerate; torch refuses a generator of another device than what it fills."""
    made = []

    class Recorded(torch.Generator):
        def __new__(cls, device="cpu"):
            made.append(torch.device(device).type)
            return super().__new__(cls)

    monkeypatch.setattr(torch, "Generator", Recorded)
    monkeypatch.setattr(torch, "get_default_device", lambda: torch.device("xpu"))
    data = list(range(4))
    for sampler in (SubsetRandomSampler(data), WeightedRandomSampler([1.0] * 4, 4)):  # the weights are on the CPU
        with suppress(RuntimeError):  # there is no such device
            next(iter(SharedStream(BatchSampler(sampler, 2, False), 0)))
    assert made == ["xpu", "cpu"]
    loader = DataLoader(data, shuffle=True, generator=Recorded())
    state = order_state(loader)
    made.clear()
    loader.generator = loader.sampler.generator = None
    set_order_state(loader, state)
    assert made == ["xpu", "xpu"]
