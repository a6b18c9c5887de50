"""A worker's sharded tensors are read by ranks that cut them in any other way, value by value.

The ranks are threads: torch's fake process group gives each of them its part of a DTensor without communication.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.testing._internal.two_tensor import TwoTensor

from dsgdac_accel import GossipAccelerator
from dsgdac_accel.checkpoint import (
    CheckpointError,
    CheckpointWriter,
    is_complete,
    load_checkpoint,
    load_worker,
    local_shards,
    prune_checkpoints,
    read_manifest,
    save_checkpoint,
    writer,
)
from dsgdac_accel.checkpoint.common import take_common
from dsgdac_accel.checkpoint.local_shards import LocalShard, placed
from dsgdac_accel.checkpoint.manifest import Manifest
from dsgdac_accel.checkpoint.reader import load_state
from dsgdac_accel.checkpoint.rescale import fit_to_processes
from dsgdac_accel.checkpoint.resharding import Targets, leaves, put_together
from dsgdac_accel.checkpoint.serialization import Reference, SavedFile, decode, encode, read_state
from dsgdac_accel.distributed.processes import members_by_worker
from dsgdac_accel.distributed.shards import is_sharded, local_of, whole_of

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

WORKERS = 2
SHAPES = {"weight": (7, 5), "bias": (7,), "thin": (1, 3), "norm": (5,)}
"""Uneven parts, and ranks that hold nothing."""
MESHES: dict[str, tuple[dict[str, int], dict[str, list[Any] | None]]] = {
    "one process": ({}, {}),
    "one": ({"dp_shard": 1}, {}),
    "two": ({"dp_shard": 2}, {}),
    "three": ({"dp_shard": 3}, {}),
    "columns": ({"dp_shard": 2}, {"weight": [Shard(1)], "thin": [Shard(1)]}),
    "copies": ({"dp_shard": 2}, {"bias": None, "norm": [Replicate()]}),
    "four": ({"dp_shard": 4}, {}),
}
"""Dimensions, and placements of tensors: None for ordinary ones. Default: cut along the first dimension."""


class Together:
    """One of several threads, in place of a group of processes."""

    def __init__(self, rank: int, size: int, values: list[Any], barrier: threading.Barrier) -> None:
        self.members = members_by_worker(rank, WORKERS, size // WORKERS)
        self.rank, self.size = rank, size
        self.values, self.barrier = values, barrier

    def all_gather_object(self, value: Any, what: str) -> list[Any]:
        self.values[self.rank] = value
        self.barrier.wait(120)
        gathered = list(self.values)
        self.barrier.wait(120)
        return gathered


class Meeting:
    """Where the threads of a group meet."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.values: list[Any] = [None] * size
        self.barrier = threading.Barrier(size)

    def member(self, rank: int) -> Together:
        return Together(rank, self.size, self.values, self.barrier)


def in_threads(size: int, work: Callable[[Together], Any]) -> list[Any]:
    meeting = Meeting(size)

    def run(rank: int) -> Any:
        try:
            return work(meeting.member(rank))
        except CheckpointError as error:
            return error
        except threading.BrokenBarrierError:
            return None  # another thread has raised
        except BaseException:
            meeting.barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))


@contextmanager
def rank_of(mesh: Mapping[str, int], place: int) -> Iterator[Any]:
    """The device mesh of a worker, as its rank at `place` sees it."""
    sizes = tuple(mesh.values())
    dist.init_process_group("fake", store=FakeStore(), rank=place, world_size=torch.Size(sizes).numel())
    try:
        yield init_device_mesh("cpu", sizes, mesh_dim_names=tuple(mesh))
    finally:
        dist.destroy_process_group()


def whole(worker: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(worker)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def cut(mesh_name: str, tensors: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    """What each rank of a worker holds of these tensors."""
    mesh, placements = MESHES[mesh_name]
    found = []
    for place in range(torch.Size(mesh.values()).numel()) if mesh else ():
        with rank_of(mesh, place) as device_mesh:
            found.append(
                {
                    name: tensor
                    if (placed := placements.get(name, [Shard(0)])) is None
                    else distribute_tensor(tensor, device_mesh, placed, src_data_rank=None)
                    for name, tensor in tensors.items()
                }
            )
    return found or [dict(tensors)]


def state_of(own: Mapping[str, Tensor]) -> dict[str, Any]:
    return {
        "models": {0: {"parameters": dict(own), "buffers": {}, "caches": {}, "extra": {}}},
        "optimizers": [
            {
                "state": {
                    number: {
                        "step": torch.tensor(3.0),
                        "exp_avg": 2 * tensor,
                        "plain": torch.full(tuple(tensor.shape), 4.0),  # in a sharded run whole on every rank
                    }
                    for number, tensor in enumerate(own.values())
                }
            }
        ],
        "registered": [{"ema": own["weight"] + 1, "best": own["thin"] - 1}],
    }


def targets(own: Mapping[str, Tensor], place: int, mesh_name: str) -> Targets:
    by_path: dict[tuple, Tensor] = {("models", 0, "parameters", name): tensor for name, tensor in own.items()}
    by_path |= {("optimizers", 0, "state", number): tensor for number, tensor in enumerate(own.values())}
    by_path[("registered", 0, "best")] = own["thin"]
    return Targets(by_path, place, torch.Size(MESHES[mesh_name][0].values()).numel())


@pytest.fixture(scope="module")
def parts() -> dict[str, list[list[dict[str, Tensor]]]]:
    """[mesh][worker][place]"""
    return {name: [cut(name, whole(worker)) for worker in range(WORKERS)] for name in MESHES}


def save(folder, name, parts, step=5) -> list[Any]:
    mesh, _ = MESHES[name]
    ranks = len(parts[name][0])

    def work(group: Together) -> None:
        state = state_of(parts[name][group.rank // ranks][group.rank % ranks])
        save_checkpoint(folder, state, group, step=step, shards=mesh.get("dp_shard", 0))

    return in_threads(WORKERS * ranks, work)


def load(folder, name, parts) -> list[Any]:
    ranks = len(parts[name][0])

    def work(group: Together) -> Any:
        own = parts[name][group.rank // ranks][group.rank % ranks]
        return placed(load_checkpoint(folder, group, targets=targets(own, group.rank % ranks, name)))

    return in_threads(WORKERS * ranks, work)


def placements_of(tensor: Tensor) -> Any:
    return getattr(tensor, "placements", None)


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


@pytest.mark.parametrize("saved", MESHES)
def test_every_mesh_reads_what_every_other_one_saved(tmp_path, parts, saved):
    assert save(tmp_path / "c", saved, parts) == [None] * (WORKERS * len(parts[saved][0]))
    for mesh in MESHES:
        ranks = len(parts[mesh][0])
        for rank, state in enumerate(load(tmp_path / "c", mesh, parts)):
            assert not isinstance(state, Exception), state
            own = parts[mesh][rank // ranks][rank % ranks]
            expected = state_of(own)
            for name, tensor in expected["models"][0]["parameters"].items():
                found = state["models"][0]["parameters"][name]
                assert (type(found), getattr(found, "placements", None)) == (type(tensor), placements_of(tensor))
                assert torch.equal(local(found), local(tensor)), (saved, mesh, rank, name)
            for number, values in expected["optimizers"][0]["state"].items():
                found = state["optimizers"][0]["state"][number]
                assert found["step"] == 3
                mine, theirs = list(own.values())[number], list(parts[saved][0][0].values())[number]
                assert placements_of(found["exp_avg"]) == placements_of(mine)
                assert torch.equal(local(found["exp_avg"]), local(values["exp_avg"]))
                assert is_sharded(found["plain"]) is (is_sharded(mine) and not is_sharded(theirs))
            best = state["registered"][0]["best"]
            assert placements_of(best) == placements_of(own["thin"])
            assert torch.equal(local(best), local(own["thin"]) - 1)
            kept = state["registered"][0]["ema"]
            if mesh == saved:
                assert placements_of(kept) == placements_of(own["weight"])
                assert torch.equal(local(kept), local(own["weight"]) + 1)
    for worker in range(WORKERS):
        state = load_worker(tmp_path / "c", worker)
        for name, tensor in whole(worker).items():
            assert torch.equal(state["models"][0]["parameters"][name], tensor)
        assert torch.equal(state["registered"][0]["ema"], whole(worker)["weight"] + 1)


def test_what_is_quantized_in_blocks_loads_on_the_same_mesh_only(tmp_path):
    def quantized(values: Tensor) -> Tensor:
        return TwoTensor(values.to(torch.int8), values.sum(0, keepdim=True).to(torch.int8).expand_as(values).clone())

    with rank_of({"dp_shard": 2}, 0) as mesh:
        parameter = distribute_tensor(torch.zeros(4, 3), mesh, [Shard(0)], src_data_rank=None)
        blocks = quantized(torch.arange(6.0).view(2, 3))
        sharded = DTensor.from_local(blocks, mesh, [Shard(0)], run_check=False, shape=(4, 3), stride=(3, 1))
    for name, moment, shards in (("whole", quantized(torch.ones(4, 3)), 0), ("c", sharded, 2)):
        ranks = max(1, shards)

        def save(group: Together, name=name, moment=moment, shards=shards) -> None:
            state = {"optimizers": [{"state": {0: {"exp_avg": moment}}}]}
            save_checkpoint(tmp_path / name, state, group, step=5, shards=shards)

        assert in_threads(WORKERS * ranks, save) == [None] * WORKERS * ranks

    target = ("optimizers", 0, "state", 0)

    def resume(group: Together) -> Any:
        return load_checkpoint(tmp_path / "c", group, targets=Targets({target: parameter}, 0, 2))

    for state in in_threads(WORKERS * 2, resume):
        found = local_of(placed(state)["optimizers"][0]["state"][0]["exp_avg"])
        assert torch.equal(found.a, blocks.a)
        assert torch.equal(found.b, blocks.b)
    for name, own in (("whole", parameter), ("c", torch.zeros(4, 3))):
        manifest = read_manifest(tmp_path / name)
        with pytest.raises(CheckpointError, match=r"\['exp_avg'\] is quantized in blocks, and this run cuts it"):
            load_state(tmp_path / name, manifest, 0, Targets({target: own}, 0, 2 if is_sharded(own) else 1))


def test_a_rank_on_the_same_mesh_reads_its_own_file_only(tmp_path, parts, monkeypatch):
    save(tmp_path / "c", "four", parts)
    read: list[str] = []
    whole_file = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda path: read.append("/".join(path.parts[-2:])) or whole_file(path))
    load(tmp_path / "c", "four", parts)
    assert sorted(set(read)) == sorted(
        ["c/gossip.json", *(f"{worker:05d}/{place:03d}.safetensors" for worker in range(WORKERS) for place in range(4))]
    )
    assert len([name for name in read if name != "c/gossip.json"]) == WORKERS * 4


def test_what_the_background_writes_is_a_copy_of_the_shards():
    own = cut("two", whole(0))[1]
    saved = {name: local_of(tensor).clone() for name, tensor in own.items()}
    encoded = encode(own, copy=True)
    for tensor in own.values():
        local_of(tensor).zero_()
    assert all(torch.equal(part.values, saved[name]) for name, part in decode(encoded).items())


# ---- tensors that are equal on all workers


def frozen(worker: int) -> dict[str, Tensor]:
    """Equal on all workers but for the end of one tensor. Shards of two tensors have the same shape and bytes."""
    ends = torch.arange(300.0)
    ends[-1] += worker
    return {
        "base": torch.arange(320.0).view(40, 8),
        "zeros": torch.zeros(300),
        "zeros again": torch.zeros(300),
        "more zeros": torch.zeros(299),
        "ends": ends,
    }


@pytest.mark.parametrize("saved", ["two", "three", "four"])
def test_a_frozen_base_is_stored_once_in_its_parts(tmp_path, parts, saved):
    ranks = len(parts[saved][0])
    own = [cut(saved, frozen(worker)) for worker in range(WORKERS)]

    def work(group: Together) -> None:
        worker, place = divmod(group.rank, ranks)
        trained = {name: t.detach().clone().requires_grad_() for name, t in parts[saved][worker][place].items()}
        state = state_of({**trained, **own[worker][place]})
        common = take_common(state["models"], group, {}, ranks)
        save_checkpoint(tmp_path / "c", state, group, step=5, common=common, shards=ranks)

    assert in_threads(WORKERS * ranks, work) == [None] * WORKERS * ranks
    for file in read_manifest(tmp_path / "c").files:
        references = {path[-1] for path, _ in leaves(read_state(tmp_path / "c", file), Reference)}
        assert references == {"base", "zeros", "zeros again", "more zeros"}
    stored = list((tmp_path / "c" / "workers" / "common").iterdir())
    assert len(stored) == ranks
    numel = sum(tensor.numel() for file in stored for tensor in load_file(file).values())
    assert numel == 320 + 300 + 299
    for worker in range(WORKERS):
        parameters = load_worker(tmp_path / "c", worker)["models"][0]["parameters"]
        assert all(torch.equal(parameters[name], tensor) for name, tensor in frozen(worker).items())
    for loading in ("one process", "two", "four"):
        others = [cut(loading, frozen(worker)) for worker in range(WORKERS)]
        places = len(others[0])

        def resume(group: Together, loading=loading, others=others, places=places) -> Any:
            worker, place = divmod(group.rank, places)
            mine = {**parts[loading][worker][place], **others[worker][place]}
            return load_checkpoint(tmp_path / "c", group, targets(mine, place, loading))

        for rank, state in enumerate(in_threads(WORKERS * places, resume)):
            assert not isinstance(state, Exception), state
            for name, tensor in others[rank // places][rank % places].items():
                found = state["models"][0]["parameters"][name]
                if loading == saved:
                    assert (found is tensor) == (name != "ends")  # it is not read then
                assert found is tensor or torch.equal(local(placed(found)), local(tensor)), (loading, name)


# ---- damage


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("missing", "00001/001.safetensors cannot be read"),
        ("altered", "was altered since it was written"),
        ("another part", r"parts of state\['models'\]\[0\]\['parameters'\]\['weight'\] are in none of the files"),
        ("another mesh", "its files are not those of its workers"),
        ("tensor parallelism", "its mesh is {'tp': 2}, and only 'dp_shard' may split a worker"),
        ("no ranks", "its mesh is {'dp_shard': 0}"),
        ("swapped", "its files are not those of its workers"),
    ],
)
def test_a_damaged_part_is_a_clear_error_on_all_ranks(tmp_path, parts, damage, message):
    folder = tmp_path / "c"
    save(folder, "two", parts)
    manifest = json.loads((folder / "gossip.json").read_text())
    part = folder / "workers" / "00001" / "001.safetensors"
    if damage == "missing":
        part.unlink()
    elif damage == "altered":
        content = part.read_bytes()
        part.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    elif damage == "another part":
        part.write_bytes((folder / "workers" / "00001" / "000.safetensors").read_bytes())
        manifest["files"][3] = manifest["files"][2] | {"name": manifest["files"][3]["name"]}
    elif damage == "another mesh":
        manifest["mesh"] = {"dp_shard": 4}
    elif damage == "tensor parallelism":
        manifest["mesh"] = {"tp": 2}
    elif damage == "no ranks":
        manifest["mesh"] = {"dp_shard": 0}
    else:
        manifest["files"][2:] = reversed(manifest["files"][2:])
    (folder / "gossip.json").write_text(json.dumps(manifest))
    for loading in ("two", "one process"):
        for error in load(folder, loading, parts):
            assert isinstance(error, CheckpointError)
            assert re.search(message, str(error))
    assert is_complete(folder) is (damage in ("altered", "another part"))


def test_a_forged_placement_is_a_clear_error(tmp_path, parts, monkeypatch):
    monkeypatch.setattr(local_shards, "_described", lambda placement: "everywhere 0")
    save(tmp_path / "c", "two", parts)
    for error in load(tmp_path / "c", "two", parts):
        assert re.search(r"is damaged: .* not as this library writes them .*everywhere", str(error))


@pytest.mark.parametrize("wait", [True, False])
def test_a_rank_that_cannot_write_is_the_same_error_on_all_ranks(tmp_path, parts, monkeypatch, wait):
    folder, really = tmp_path / "c", writer.write_whole
    save(folder, "two", parts)

    def full_disk(path: Path, content: Any) -> Any:
        if path.as_posix().endswith("00001-1/001.safetensors"):
            raise OSError(28, "No space left on device")
        return really(path, content)

    def work(group: Together) -> None:
        state = state_of(parts["two"][group.rank // 2][group.rank % 2])
        for name in ("c", "new"):
            if wait:
                save_checkpoint(tmp_path / name, state, group, step=6, shards=2)
            else:
                writing = CheckpointWriter(group, 2)
                writing.save(tmp_path / name, state, step=6)
                assert writing.finish() == tmp_path / name

    monkeypatch.setattr(writer, "write_whole", full_disk)
    errors = in_threads(4, work)
    assert {str(error) for error in errors} == {str(errors[0])}
    assert re.search(
        r"Rank 1 of worker 1: .*00001-1/001\.safetensors: No space left on device\. Free space", str(errors[0])
    )
    assert read_manifest(folder).step == 5
    assert is_complete(folder)
    assert len(list((folder / "workers").rglob("*.*"))) == 4
    monkeypatch.undo()
    assert in_threads(4, work) == [None] * 4
    assert read_manifest(folder).step == read_manifest(tmp_path / "new").step == 6
    assert len(list((folder / "workers").rglob("*.*"))) == 4, "the files of step 5 are deleted"


def test_old_checkpoints_and_what_interrupted_saves_left_are_deleted(tmp_path, parts):
    for name in ("00000/001.safetensors.partial", "00001-2/000.safetensors", "common/001.safetensors"):
        left = tmp_path / "step-1" / "workers" / name
        left.parent.mkdir(parents=True)
        left.touch()
    for step in (2, 3, 4):
        save(tmp_path / f"step-{step}", "two", parts)
    manifest = json.loads((tmp_path / "step-2" / "gossip.json").read_text())
    assert [file["name"] for file in manifest["files"]] == [
        f"workers/{worker:05d}/{place:03d}.safetensors" for worker in range(2) for place in range(2)
    ]
    prune_checkpoints(tmp_path, keep=2)
    assert sorted(folder.name for folder in tmp_path.iterdir()) == ["step-3", "step-4"]


@pytest.mark.parametrize(
    ("saved", "launched", "shards", "taken"),
    [(2, 2, 1, 12), (0, 2, 3, 2), (4, 1, 4, 12)],
)
def test_the_consumed_batches_are_those_of_as_many_samples(saved, launched, shards, taken):
    manifest = Manifest(2, 5, {}, (SavedFile("", 0, ""),) * 2 * max(1, saved), shards=saved)
    position = {"running": {"taken": 6, "fetched_at": 3}, "global_batches": False}
    state = {"gossip": [{"mixer": {"step": 5, "references": [], "references_of": []}}], "loaders": [None, position]}
    fit_to_processes(state, manifest, launched, shards)
    assert position["running"] == {"taken": taken, "fetched_at": None}
    assert state["gossip"] == [{"mixer": {"step": 5, "workers": launched}}]


def test_an_ordinary_state_of_a_frozen_shard_that_the_model_has_stays_as_it_is():
    with rank_of({"dp_shard": 2}, 0) as mesh:
        weight = distribute_tensor(torch.zeros(4, 3), mesh, [Shard(0)], src_data_rank=None)
    seen = torch.ones(4, 3)
    state = {"models": {0: {"parameters": {"w": weight}}}, "optimizers": [{"state": {0: {"seen": seen}}}]}
    own = {("models", 0, "parameters", "w"): weight, ("optimizers", 0, "state", 0): weight}
    found = put_together([lambda: state], Targets(own, 0, 2), sharded=True)
    assert found["optimizers"][0]["state"][0]["seen"] is seen


def test_parts_that_overlap_are_a_clear_error():
    files = [partial(dict, long=LocalShard(torch.arange(5.0), (8,), (first,))) for first in (0, 3)]
    with pytest.raises(CheckpointError, match=r"parts of state\['long'\] overlap"):
        put_together(files, Targets(), sharded=True)


# ---- through an accelerator


class Average:
    """A user's moving average of the parameters, registered for checkpoints."""

    def __init__(self, model: nn.Module) -> None:
        self.values = [p.detach().clone() for p in model.parameters()]

    def update(self, model: nn.Module) -> None:
        for mine, parameter in zip(self.values, model.parameters(), strict=True):
            mine.lerp_(parameter.detach(), 0.5)

    def state_dict(self) -> dict[str, Any]:
        return {"values": self.values}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for mine, saved in zip(self.values, state["values"], strict=True):
            mine.copy_(saved)


class Training:
    """A worker of one process, sharded over itself or not."""

    def __init__(self, sharded: bool) -> None:
        mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp_replicate", "dp_shard")) if sharded else None
        self.accelerator = GossipAccelerator(cpu=True, device_mesh=mesh, gradient_accumulation_steps=2)
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 4), nn.Dropout(0.3), nn.Linear(4, 1))
        if mesh is not None:
            fully_shard(model, mesh=mesh["dp_shard"])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)
        self.average = Average(model)
        self.accelerator.register_for_checkpointing(self.average)

    def run(self, first: int, last: int) -> None:
        for step in range(first, last):
            x = torch.randn(3, 5, generator=torch.Generator().manual_seed(step))
            with self.accelerator.accumulate(self.model):
                self.accelerator.backward(self.model(x).square().mean())
                self.optimizer.step()
                self.optimizer.zero_grad()
            self.average.update(self.model)

    def end(self) -> list[Tensor]:
        momenta = [state["momentum_buffer"] for state in self.optimizer.state.values()]
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        values = [*self.model.parameters(), *momenta, *gradients, *self.average.values]
        return [*(whole_of(value.detach()).clone() for value in values), torch.get_rng_state()]


@pytest.mark.filterwarnings("ignore:.*barrier.*")
def test_an_accelerator_resumes_a_sharded_run_and_one_of_another_kind(tmp_path):
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        for saving in (True, False):
            training = Training(saving)
            training.run(0, 3)  # the gradient of the second step is half there
            training.accelerator.save_state(tmp_path / str(saving), wait=False)
            saved = training.end()
            training.run(3, 5)
            training.accelerator.finish_saving()
            expected = training.end()
            training.accelerator.free_memory()
            for loading in (True, False):
                resumed = Training(loading)
                resumed.accelerator.load_state(tmp_path / str(saving))
                assert len(resumed.end()) == len(saved) == 4 * 4 + 1
                assert all(map(torch.equal, resumed.end(), saved))
                resumed.run(3, 5)
                assert all(map(torch.equal, resumed.end(), expected))
                resumed.accelerator.free_memory()
    finally:
        dist.destroy_process_group()
