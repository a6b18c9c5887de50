"""Trees of state are loaded bit by bit as they were saved, and a checkpoint is complete or absent."""

from __future__ import annotations

import hashlib
import io
import json
import math
import os
import pickle
import random
import re
import struct
import threading
import time
from collections import Counter, OrderedDict
from pathlib import Path

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import nn

import dsgdac_accel.checkpoint.serialization
from dsgdac_accel import WorkerGroup
from dsgdac_accel.checkpoint import (
    CheckpointError,
    CheckpointWriter,
    WorkerCountError,
    is_complete,
    load_checkpoint,
    load_model_state,
    load_worker,
    model_state,
    newest_checkpoint,
    prune_checkpoints,
    read_manifest,
    save_checkpoint,
    worker_parameters,
)
from dsgdac_accel.checkpoint.common import take_common, tensors_of
from dsgdac_accel.checkpoint.local_shards import placed
from dsgdac_accel.checkpoint.manifest import Manifest
from dsgdac_accel.checkpoint.rescale import average_of_workers, fit_to_processes
from dsgdac_accel.checkpoint.resharding import Targets, leaves
from dsgdac_accel.checkpoint.serialization import (
    Encoded,
    Reference,
    decode,
    encode,
    read_state,
    safetensors_parts,
    write_whole,
)
from tests.multiprocess.small_model import Scaled


@pytest.fixture
def alone():
    return WorkerGroup(torch.device("cpu"))


def same(one, other):
    """Assert equal types, structure and bits."""
    assert type(one) is type(other)
    if isinstance(one, torch.Tensor):
        assert (one.dtype, one.shape, bits(one)) == (other.dtype, other.shape, bits(other))
    elif isinstance(one, np.ndarray | np.generic):
        assert (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes())
    elif isinstance(one, dict):
        assert list(one) == list(other)
        for key in one:
            same(one[key], other[key])
    elif isinstance(one, list | tuple):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            same(a, b)
    elif isinstance(one, float):
        assert struct.pack(">d", one) == struct.pack(">d", other)
    else:
        assert one == other


def bits(tensor):
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).tolist() if tensor.numel() else []


# ---- trees

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool, torch.complex64, torch.complex128,
]  # fmt: skip


@st.composite
def tensors(draw):
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    tensor = (torch.arange(math.prod(shape)) % 7 - 2).reshape(shape).to(draw(st.sampled_from(DTYPES)))
    return tensor.transpose(0, -1) if draw(st.booleans()) and shape else tensor


@st.composite
def arrays(draw):
    shape = draw(st.lists(st.integers(0, 3), max_size=2))
    return np.arange(math.prod(shape)).reshape(shape).astype(draw(st.sampled_from(["<u4", ">f8", "?", "<i2", "<c8"])))


LEAVES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.binary(max_size=20), tensors(), arrays(),
    st.sampled_from([np.float64(0.1), np.int32(-3), np.bool_(True), 1 << 5000, -(1 << 2000), math.nan, -0.0, "\ud800"]),
)  # fmt: skip
KEYS = st.one_of(
    st.text(max_size=4), st.integers(), st.none(), st.booleans(), st.just("$tensor"), st.just("__metadata__")
)
TREES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(KEYS, inner, max_size=3),
        st.dictionaries(KEYS, inner, max_size=2).map(OrderedDict),
        st.dictionaries(st.text(max_size=3), st.integers(), max_size=2).map(Counter),
    ),
    max_leaves=12,
)


@settings(max_examples=150, deadline=None)
@given(TREES)
def test_any_tree_comes_back_bit_by_bit(tmp_path_factory, tree):
    folder = tmp_path_factory.mktemp("tree")
    save_checkpoint(folder / "c", tree, WorkerGroup(torch.device("cpu")), step=0)
    same(load_worker(folder / "c", 0), tree)


def test_integers_come_back_that_are_longer_than_python_prints():
    for value in (1 << 20_000, -(1 << 20_000)):
        assert decode(encode([value])) == [value]


def test_values_with_the_same_name_are_kept_apart():
    tree = {"a": {"b": torch.zeros(2)}, "a/b": torch.ones(2), "1": torch.zeros(1), 1: torch.ones(1)}
    same(decode(encode(tree)), tree)


def test_conjugate_and_negative_views_are_saved_as_what_they_show(tmp_path, alone):
    numbers = torch.tensor([1 + 2j, 3 - 4j])
    views = [numbers.conj(), numbers.conj().imag, torch._neg_view(torch.ones(2))]
    assert [view.is_conj() or view.is_neg() for view in views] == [True] * 3
    save_checkpoint(tmp_path / "c", views, alone, step=1)
    back = load_worker(tmp_path / "c", 0)
    assert [view.tolist() for view in back] == [[1 - 2j, 3 + 4j], [-2, 4], [-1, -1]]


def test_arrays_can_be_written_to_again():
    back = decode(encode(np.zeros(2)))
    back += 1
    assert back.tolist() == [1, 1]


def test_the_states_of_random_streams_come_back(tmp_path, alone):
    state = {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}
    generator = np.random.default_rng(3)
    state["generator"] = generator.bit_generator.state
    save_checkpoint(tmp_path / "c", state, alone, step=1)
    loaded = load_checkpoint(tmp_path / "c", alone)
    expected = (random.random(), np.random.rand(), torch.rand(()), generator.random())
    random.setstate(loaded["python"])
    np.random.set_state(loaded["numpy"])
    torch.set_rng_state(loaded["torch"])
    generator.bit_generator.state = loaded["generator"]
    assert expected == (random.random(), np.random.rand(), torch.rand(()), generator.random())


SCHEDULERS = torch.optim.lr_scheduler


@pytest.mark.parametrize(
    "make",
    [
        lambda o: SCHEDULERS.MultiStepLR(o, [2, 2, 4]),  # keeps a Counter
        lambda o: SCHEDULERS.OneCycleLR(o, 0.5, total_steps=9),
        lambda o: SCHEDULERS.CosineAnnealingWarmRestarts(o, 3),
        lambda o: SCHEDULERS.ReduceLROnPlateau(o),  # inf
        lambda o: SCHEDULERS.CyclicLR(o, 0.1, 0.4, step_size_up=2),
        lambda o: SCHEDULERS.SequentialLR(o, [SCHEDULERS.LinearLR(o), SCHEDULERS.ExponentialLR(o, 0.5)], [2]),
        lambda o: SCHEDULERS.ChainedScheduler([SCHEDULERS.StepLR(o, 2), SCHEDULERS.PolynomialLR(o, 4)]),
        lambda o: SCHEDULERS.LambdaLR(o, lambda step: 1 / (1 + step)),
    ],
)
def test_every_scheduler_resumes_where_it_was(make):
    def build():
        optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1, momentum=0.9)
        return optimizer, make(optimizer)

    def step(optimizer, scheduler):
        optimizer.step()
        scheduler.step(*([1.0] if isinstance(scheduler, SCHEDULERS.ReduceLROnPlateau) else []))
        return optimizer.param_groups[0]["lr"]

    one = build()
    for _ in range(3):
        step(*one)
    saved = placed(decode(encode([part.state_dict() for part in one])))
    other = build()
    for part, state in zip(other, saved, strict=True):
        part.load_state_dict(state)
    assert [step(*one) for _ in range(5)] == [step(*other) for _ in range(5)]


def test_the_order_in_memory_is_kept():
    """Fused optimizers iterate over parameters and states in memory order at once."""
    image = torch.arange(120.0).reshape(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    back = decode(encode([image, image.permute(3, 1, 0, 2)]))
    assert back[0].is_contiguous(memory_format=torch.channels_last)
    assert back[1].stride() == image.permute(3, 1, 0, 2).stride()
    assert torch.equal(back[0], image)


def test_a_view_writes_its_own_values_only(tmp_path, alone):
    buffer = torch.arange(100_000.0)
    one = buffer[3:5:2]  # contiguous, with a stride of 2
    state = {"few": buffer[5:8], "sparse": buffer[:10:2], "one": one, "complex": torch.full((2,), 1j)[::2][:1]}
    save_checkpoint(tmp_path / "c", state, alone, step=1)
    assert (tmp_path / "c" / "workers" / "00000.safetensors").stat().st_size < 1000
    back = load_worker(tmp_path / "c", 0)
    assert [back[name].tolist() for name in state] == [[5, 6, 7], [0, 2, 4, 6, 8], [3], [1j]]


def test_files_are_plain_safetensors(tmp_path, alone):
    save_checkpoint(tmp_path / "c", {"model": {"weight": torch.ones(2, 3)}, "count": 3}, alone, step=1)
    file = tmp_path / "c" / "workers" / "00000.safetensors"
    assert load_file(file)["model/weight"].tolist() == [[1.0] * 3] * 2
    assert struct.unpack("<Q", file.read_bytes()[:8])[0] % 8 == 0  # tensors begin at a multiple of their own size


def test_every_byte_is_written_where_the_system_takes_a_part_at_a_time(tmp_path, alone, monkeypatch):
    class Slow(io.FileIO):
        def write(self, content):
            return super().write(content[:1000])

    monkeypatch.setattr(Path, "open", lambda path, mode, buffering: Slow(path, mode))
    values = torch.arange(5000)
    save_checkpoint(tmp_path / "c", values, alone, step=1)
    monkeypatch.undo()
    assert torch.equal(load_worker(tmp_path / "c", 0), values)


def test_files_are_on_disk_before_they_get_their_names_and_names_before_the_manifest(tmp_path, alone, monkeypatch):
    events, fsync, replace = [], os.fsync, os.replace

    def note_fsync(handle):
        events.append(f"sync {Path(os.readlink(f'/proc/self/fd/{handle}')).name}")
        fsync(handle)

    def note_replace(source, target):
        events.append(f"name {target.name}")
        replace(source, target)

    monkeypatch.setattr(dsgdac_accel.checkpoint.serialization.os, "fsync", note_fsync)
    monkeypatch.setattr(dsgdac_accel.checkpoint.serialization.os, "replace", note_replace)
    save_checkpoint(tmp_path / "c", 1, alone, step=1)
    assert [event for event in events if event != f"sync {tmp_path.name}"] == [
        "sync 00000.safetensors.partial", "name 00000.safetensors", "sync workers",
        "sync gossip.json.partial", "name gossip.json", "sync c",
    ]  # fmt: skip


def test_plain_values_beyond_what_the_format_holds_are_refused(monkeypatch):
    monkeypatch.setattr(dsgdac_accel.checkpoint.serialization, "MAX_HEADER_BYTES", 1000)
    with pytest.raises(CheckpointError, match=r"may take 1,000 bytes as JSON; these take [\d,]+. Give long lists"):
        list(safetensors_parts(encode([0] * 1000)))


class Stranger:
    pass


class Subclass(torch.Tensor):
    pass


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (Stranger(), r"state\['a'\]\[1\] is a .*Stranger"),
        (lambda: None, "function"),
        ({1, 2}, "builtins.set"),
        (np.array(["text"], dtype=object), r"numpy.ndarray"),
        (torch.ones(2).to_sparse(), "whole, dense tensors"),
        (torch.ones(2, device="meta"), "on meta"),
        (torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged), "whole, dense tensors; .* NestedTensor"),
        (nn.UninitializedParameter(), "whole, dense tensors; .* UninitializedParameter"),
        ({torch.ones(2): 1}, r"keys of state\['a'\]\[1\] are tensors"),
        (torch.ones(2).as_subclass(Subclass), "whole, dense tensors; .* is a Subclass"),
    ],
)
def test_values_that_would_need_pickle_are_refused_by_their_place(value, message):
    with pytest.raises(CheckpointError, match=message):
        encode({"a": [0, value]})


def test_a_state_that_contains_itself_is_refused():
    state = []
    state.append(state)
    with pytest.raises(CheckpointError, match="contains itself"):
        encode(state)


def test_a_copy_does_not_change_with_the_original():
    tensor = torch.zeros(3)
    copied, shared = encode(tensor, copy=True), encode(tensor)
    tensor.fill_(1)
    assert copied.tensors["state"].tolist() == [0, 0, 0]
    assert shared.tensors["state"].tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    "text",
    [
        "{",
        '{"$call": ["os.system", "true"]}',
        '{"$array": ["state", "O", [1]]}',
        '{"$cast": ["state", "load", [1]]}',
        '{"$tensor": "elsewhere"}',
        '{"$tensor": "state", "more": 1}',
        '{"$scalar": ["<f8", ""]}',
        '{"$scalar": ["f4,(2", "00"]}',
        '{"$scalar": ["V1", "00"]}',
        '{"$float": "00"}',
        '{"$permuted": [{"$tensor": "state"}, [7]]}',
        '{"$cast": ["empty", "complex64", [1000, 1000]]}',
        "[" * 100_000,
    ],
)
def test_a_hostile_tree_is_an_error_and_runs_nothing(text):
    with pytest.raises(CheckpointError, match="not a tree of values"):
        decode(Encoded(text, {name: torch.zeros(n, dtype=torch.uint8) for name, n in (("state", 8), ("empty", 0))}))


# ---- complete or absent


def saved_steps(parent):
    return [read_manifest(folder).step for folder in sorted(parent.iterdir()) if is_complete(folder)]


@pytest.mark.parametrize("replaced", [0, 1])
@pytest.mark.parametrize("overwrite", [0, 1, 2])  # how often the folder was saved to before
def test_interrupted_between_two_files_there_is_no_checkpoint_or_the_old_one(
    tmp_path, alone, monkeypatch, replaced, overwrite
):
    for _ in range(overwrite):
        save_checkpoint(tmp_path / "c", torch.zeros(3), alone, step=1)
    count = 0
    really = os.replace

    def replace(source, target):
        nonlocal count
        if count == replaced:
            raise KeyboardInterrupt  # like a kill, it leaves no time to clean up
        count += 1
        really(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(dsgdac_accel.checkpoint.serialization.os, "replace", replace)
        with pytest.raises(KeyboardInterrupt):
            save_checkpoint(tmp_path / "c", torch.ones(3), alone, step=2)
    assert saved_steps(tmp_path) == ([1] if overwrite else [])
    if overwrite:
        assert load_checkpoint(tmp_path / "c", alone).tolist() == [0, 0, 0]
    save_checkpoint(tmp_path / "c", torch.ones(3), alone, step=2)
    assert load_checkpoint(tmp_path / "c", alone).tolist() == [1, 1, 1]
    assert len(list((tmp_path / "c" / "workers").iterdir())) == 1


@pytest.mark.parametrize("fails_at", ["00000", "gossip.json"])
def test_a_full_disk_is_one_error_and_leaves_nothing(tmp_path, alone, monkeypatch, fails_at):
    save_checkpoint(tmp_path / "old", torch.zeros(3), alone, step=1)
    really = os.fsync
    opened = []

    def fsync(handle):
        if Path(os.readlink(f"/proc/self/fd/{handle}")).name.startswith(fails_at):
            opened.append(handle)
            raise OSError(28, "No space left on device")
        really(handle)

    monkeypatch.setattr(dsgdac_accel.checkpoint.serialization.os, "fsync", fsync)
    with pytest.raises(CheckpointError, match=r"step 2 could not be saved.*Worker 0: .*No space left.*Free space"):
        save_checkpoint(tmp_path / "new", torch.ones(3), alone, step=2)
    assert opened
    assert not (tmp_path / "new").exists()
    assert saved_steps(tmp_path) == [1]


def test_a_failed_save_leaves_a_folder_that_was_there_and_a_good_one_files_that_are_not_ours(tmp_path, alone):
    (tmp_path / "c").mkdir()
    with pytest.raises(CheckpointError, match="Stranger"):
        save_checkpoint(tmp_path / "c", Stranger(), alone, step=1)
    assert list((tmp_path / "c").iterdir()) == []
    save_checkpoint(tmp_path / "c", 1, alone, step=1)
    (tmp_path / "c" / "workers" / "notes.txt").write_text("mine")
    save_checkpoint(tmp_path / "c", 2, alone, step=2)
    assert sorted(file.name for file in (tmp_path / "c" / "workers").iterdir()) == [
        "00000-1.safetensors",
        "notes.txt",
    ]


def test_a_file_that_worker_0_does_not_see_is_an_error(tmp_path, alone, monkeypatch):
    def write_elsewhere(path, parts):  # as on a disk that only this machine sees
        written = write_whole(path, parts)
        path.unlink()
        return written

    monkeypatch.setattr("dsgdac_accel.checkpoint.writer.VISIBLE_SECONDS", 0.1)
    monkeypatch.setattr("dsgdac_accel.checkpoint.writer.write_whole", write_elsewhere)
    with pytest.raises(CheckpointError, match=r"worker 0 does not see it\. Save to a folder on a file system that all"):
        save_checkpoint(tmp_path / "c", 1, alone, step=1)


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path, alone):
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(CheckpointError, match="Not a directory"):
        save_checkpoint(tmp_path / "file" / "c", torch.ones(3), alone, step=2)


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path, alone):
    save_checkpoint(tmp_path / "c", 1, alone, step=1)
    (tmp_path / "c" / "workers" / "00000.receipt").mkdir()
    for name, message in (("c", "00000.receipt: Is a directory"), ("n" * 300, "File name too long")):
        with pytest.raises(CheckpointError, match=f"worker 0 cannot save the checkpoint of step 2: .*{message}"):
            save_checkpoint(tmp_path / name, 2, alone, step=2)
    assert load_checkpoint(tmp_path / "c", alone) == 1


def damaged(folder, how):
    file = folder / "workers" / "00000.safetensors"
    content = before = bytearray(file.read_bytes())
    if how == "missing":
        file.unlink()
    elif how == "truncated":
        file.write_bytes(content[:-1])
    elif how == "altered":
        content[-1] ^= 1
        file.write_bytes(content)
    elif how == "no manifest":
        (folder / "gossip.json").unlink()
    elif how == "a nested manifest":
        (folder / "gossip.json").write_text("[" * 100_000)
    elif how == "another format of the file":
        content = file.read_bytes().replace(b'"dsgdac_accel.format":"7"', b'"dsgdac_accel.format":"5"')
        file.write_bytes(content)
        manifest = (folder / "gossip.json").read_text()
        digests = [hashlib.sha256(text).hexdigest() for text in (bytes(before), content)]
        (folder / "gossip.json").write_text(manifest.replace(*digests))
    elif how == "half a manifest":
        (folder / "gossip.json").write_text((folder / "gossip.json").read_text()[:50])
    else:
        manifest = json.loads((folder / "gossip.json").read_text())
        changes = {
            "a newer format": {"format": 99, "library": "9.9"}, "an older format": {"format": 5, "library": "0.1"},
            "worker missing": {"workers": 2},
            "too many workers": {"workers": 10**12}, "no workers": {"workers": 0, "files": []},
            "no facts": {"facts": 1},
        }  # fmt: skip
        manifest.update(changes.get(how, {}))
        ways_out = {"lead out": "../../secret", "lead out of the workers": "workers/../../00000.safetensors"}
        if how in ways_out:
            (folder.parent / "00000.safetensors").write_bytes(content)
            manifest["files"][0]["name"] = ways_out[how]
        (folder / "gossip.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    ("how", "message", "complete"),
    [
        ("missing", "cannot be read", False),
        ("truncated", "has .* bytes, and .* were written", False),
        ("altered", "sha256 differs", True),
        ("no manifest", "no complete checkpoint", False),
        ("half a manifest", "is damaged", False),
        ("a newer format", "has format 99, written by dsgdac_accel 9.9.* reads format 7", False),
        ("an older format", "has format 5, written by dsgdac_accel 0.1.* reads format 7.*commit c05c811", False),
        ("worker missing", "is damaged", False),
        ("too many workers", "is damaged", False),
        ("no workers", "is damaged", False),
        ("no facts", "is damaged", False),
        ("lead out", "is damaged", False),
        ("lead out of the workers", "is damaged", False),
        ("a nested manifest", "is damaged", False),
        ("another format of the file", "has format 5; this version reads format 7.*commit c05c811", True),
    ],
)
def test_a_damaged_checkpoint_is_a_clear_error(tmp_path, alone, how, message, complete):
    save_checkpoint(tmp_path / "c", torch.ones(3), alone, step=2)
    assert is_complete(tmp_path / "c")
    damaged(tmp_path / "c", how)
    assert is_complete(tmp_path / "c") is complete
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(tmp_path / "c", alone)


def test_a_pickle_in_place_of_a_file_is_not_run(tmp_path, alone):
    class Bomb:
        def __reduce__(self):
            return Path.touch, (tmp_path / "exploded",)

    save_checkpoint(tmp_path / "c", torch.ones(3), alone, step=2)
    content = pickle.dumps(Bomb())
    (tmp_path / "c" / "workers" / "00000.safetensors").write_bytes(content)
    manifest = json.loads((tmp_path / "c" / "gossip.json").read_text())
    manifest["files"][0].update(size=len(content), sha256=hashlib.sha256(content).hexdigest())
    (tmp_path / "c" / "gossip.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match="not a state file"):
        load_checkpoint(tmp_path / "c", alone)
    assert not (tmp_path / "exploded").exists()


def test_another_number_of_workers_is_named(tmp_path, alone):
    save_checkpoint(tmp_path / "c", torch.ones(3), alone, step=2)
    manifest = json.loads((tmp_path / "c" / "gossip.json").read_text())
    manifest["workers"] = 2
    manifest["files"].append(manifest["files"][0] | {"name": "workers/00001.safetensors"})
    (tmp_path / "c" / "gossip.json").write_text(json.dumps(manifest))
    with pytest.raises(WorkerCountError, match="2 workers, but 1 were launched") as caught:
        load_checkpoint(tmp_path / "c", alone)
    assert (caught.value.saved, caught.value.launched) == (2, 1)


def test_one_worker_of_a_checkpoint_is_read_by_its_number(tmp_path, alone):
    model = nn.Linear(2, 1)
    save_checkpoint(tmp_path / "c", {"models": {0: model_state(model)}}, alone, step=2)
    (parameters,) = worker_parameters(tmp_path / "c")
    same(parameters, {name: value.detach() for name, value in model.named_parameters()})
    for rank in (-1, 1):
        with pytest.raises(CheckpointError, match=f"workers 0 to 0; asked was worker {rank}"):
            load_worker(tmp_path / "c", rank)
    with pytest.raises(CheckpointError, match=r"holds the models \[0\]; there is no model 1 in it"):
        worker_parameters(tmp_path / "c", model=1)


# ---- tensors that all workers share


def references_in(folder):
    """The references in the file of worker 0."""
    return list(leaves(read_state(folder, read_manifest(folder).files[0]), Reference))


def saved_with_base(folder, group, value=1.0, elsewhere=None):
    """Save a frozen layer of 16 KiB, and return the state as it was."""
    model = nn.Linear(64, 64).requires_grad_(False)
    nn.init.constant_(model.weight, value)
    whole, state = ({"models": {0: model_state(model)}, "step": 1} for _ in range(2))
    common = take_common(state["models"], group, elsewhere or {})
    save_checkpoint(folder, state, group, step=2, common=common)
    return whole


def test_common_tensors_are_in_a_file_of_their_own(tmp_path, alone):
    whole = saved_with_base(tmp_path / "c", alone)
    files = {file.name: load_file(file) for file in (tmp_path / "c" / "workers").iterdir()}
    assert [tensor.shape for tensor in files.pop("common.safetensors").values()] == [(64, 64)]
    (own,) = files.values()
    assert own.keys() == {"models/0/parameters/bias"}, "256 bytes are not worth a line"
    for loaded in (load_checkpoint(tmp_path / "c", alone), load_worker(tmp_path / "c", 0)):
        assert loaded["models"][0]["parameters"].keys() == {"weight", "bias"}
        same(loaded["models"][0]["parameters"]["weight"], whole["models"][0]["parameters"]["weight"].data)
    ((path, reference),) = references_in(tmp_path / "c")
    assert path == ("models", 0, "parameters", "weight")
    assert (reference.stored, reference.shape) == (True, (64, 64))
    saved_with_base(tmp_path / "c", alone, value=2.0)
    assert load_worker(tmp_path / "c", 0)["models"][0]["parameters"]["weight"][3, 5] == 2.0
    names = {"00000-1.safetensors", "common-1.safetensors"}
    assert {file.name for file in (tmp_path / "c" / "workers").iterdir()} == names, "the older files are gone"


@pytest.mark.parametrize(
    ("how", "message", "complete"),
    [
        ("missing", "cannot be read", False),
        ("truncated", "has .* bytes, and .* were written", False),
        ("altered", "sha256 differs", True),
        ("no common file", "is damaged: its common tensors are not those of its models", True),
        ("lead out", "is damaged", False),
        ("another base", "is damaged: its common tensors are not those of its models", True),
    ],
)
def test_damaged_common_tensors_are_a_clear_error(tmp_path, alone, how, message, complete):
    saved_with_base(tmp_path / "c", alone)
    file = tmp_path / "c" / "workers" / "common.safetensors"
    content = bytearray(file.read_bytes())
    if how == "missing":
        file.unlink()
    elif how in ("truncated", "altered"):
        content[-1] ^= 1
        file.write_bytes(content[:-1] if how == "truncated" else content)
    else:
        manifest = json.loads((tmp_path / "c" / "gossip.json").read_text())
        if how == "no common file":
            manifest["common_files"] = []
        elif how == "lead out":
            manifest["common_files"][0]["name"] = "workers/../../common.safetensors"
        else:
            saved_with_base(tmp_path / "other", alone, value=2.0)
            file.write_bytes((tmp_path / "other" / "workers" / "common.safetensors").read_bytes())
            manifest["common_files"] = json.loads((tmp_path / "other" / "gossip.json").read_text())["common_files"]
        (tmp_path / "c" / "gossip.json").write_text(json.dumps(manifest))
    assert is_complete(tmp_path / "c") is complete
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(tmp_path / "c", alone)


def test_common_tensors_that_the_model_has_are_not_read(tmp_path, alone):
    whole = saved_with_base(tmp_path / "c", alone)
    file = tmp_path / "c" / "workers" / "common.safetensors"
    file.write_bytes(bytes(file.stat().st_size))
    loaded = load_checkpoint(tmp_path / "c", alone, Targets(tensors_of(whole["models"])))
    assert loaded["models"][0]["parameters"]["weight"] is whole["models"][0]["parameters"]["weight"]


def test_a_save_that_fails_leaves_no_common_file(tmp_path, alone, monkeypatch):
    def full(path, parts):
        if path.name.startswith("00000"):
            raise OSError(28, "No space left on device")
        return write_whole(path, parts)

    monkeypatch.setattr("dsgdac_accel.checkpoint.writer.write_whole", full)
    with pytest.raises(CheckpointError, match="No space left"):
        saved_with_base(tmp_path / "c", alone)
    assert not (tmp_path / "c").exists()


def test_an_interrupted_common_file_is_a_leftover(tmp_path, alone):
    saved_with_base(tmp_path / "a" / "step-2", alone)
    left = tmp_path / "a" / "step-1" / "workers"
    left.mkdir(parents=True)
    (left / "common.safetensors.partial").touch()
    os.utime(left.parent, (1, 1))
    assert prune_checkpoints(tmp_path / "a", keep=1) == [left.parent]


def test_a_quantized_weight_takes_no_other_values(alone):
    """A state holds its bytes without their scales."""
    model = nn.Linear(2, 2)
    model.packed = Scaled(1.0)
    state = decode(encode(model_state(model), copy=True))
    load_model_state(model, state)
    state["parameters"]["packed"][3] = 77
    with pytest.raises(CheckpointError, match="'packed' is quantized in the model, and has other values"):
        load_model_state(model, state)


# ---- in the background


def test_writing_in_the_background_takes_the_state_of_the_moment(tmp_path, alone, monkeypatch):
    changed_since = threading.Event()

    def write_later(path, parts):
        assert changed_since.wait(20)
        return write_whole(path, parts)

    monkeypatch.setattr("dsgdac_accel.checkpoint.writer.write_whole", write_later)
    writer = CheckpointWriter(alone)
    state = {"x": torch.zeros(1000)}
    assert writer.save(tmp_path / "a", state, step=1) is None
    state["x"].fill_(1)
    changed_since.set()
    assert writer.save(tmp_path / "b", state, step=2) == tmp_path / "a"
    assert writer.finish() == tmp_path / "b"
    assert writer.finish() is None
    assert load_worker(tmp_path / "a", 0)["x"].sum() == 0
    assert load_worker(tmp_path / "b", 0)["x"].sum() == 1000


def test_a_checkpoint_in_the_background_becomes_complete_without_finish(tmp_path, alone):
    writer = CheckpointWriter(alone)
    writer.save(tmp_path / "a", torch.zeros(3), step=1)
    deadline = time.monotonic() + 20
    while not is_complete(tmp_path / "a"):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert writer.finish() == tmp_path / "a"


def test_the_next_save_raises_an_error_in_the_background(tmp_path, alone):
    (tmp_path / "file").write_text("no folder")
    writer = CheckpointWriter(alone)
    writer.save(tmp_path / "file" / "c", {}, step=1)
    with pytest.raises(CheckpointError, match="step 1 could not be saved"):
        writer.save(tmp_path / "b", {}, step=2)
    writer.save(tmp_path / "b", {}, step=3)
    writer.finish()
    assert saved_steps(tmp_path) == [3]


# ---- which to keep


def test_the_newest_is_the_complete_one_of_the_largest_step(tmp_path, alone, caplog):
    for step in (9, 100, 20, 300, 400):
        save_checkpoint(tmp_path / f"step-{step}", step, alone, step=step)
    save_checkpoint(tmp_path / "other", 1000, alone, step=1000)
    (tmp_path / "step-notes").mkdir()
    assert newest_checkpoint(tmp_path, "step-*") == tmp_path / "step-400"
    assert caplog.messages == []
    damaged(tmp_path / "step-9", "missing")
    damaged(tmp_path / "step-100", "truncated")
    damaged(tmp_path / "step-300", "half a manifest")
    damaged(tmp_path / "step-400", "no manifest")
    assert newest_checkpoint(tmp_path, "step-*") == tmp_path / "step-20"
    assert newest_checkpoint(tmp_path / "nowhere") is None
    reasons = [
        r"step-400 holds no complete checkpoint: gossip.json, which is written last, is missing\.",
        r"step-300/gossip.json is damaged \(.*\)\.",
        r"step-100/workers/00000.safetensors has .* bytes, and .* were written\.",
    ]
    for message, reason in zip(caplog.messages, reasons, strict=True):
        assert re.fullmatch(rf"skipped an unreadable checkpoint: \S*/{reason} Using the older \S*/step-20\.", message)


def test_a_folder_that_is_not_there_and_a_checkpoint_of_accelerate_are_told_apart(tmp_path):
    with pytest.raises(CheckpointError, match="absent does not exist"):
        read_manifest(tmp_path / "absent")
    Accelerator(cpu=True).save_state(tmp_path / "plain")
    with pytest.raises(CheckpointError, match="plain is a checkpoint of plain Accelerate"):
        read_manifest(tmp_path / "plain")


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("half a manifest", "step-1/gossip.json is damaged"),
        ("a newer format", "step-1/gossip.json has format 99, written by dsgdac_accel 9.9"),
        ("truncated", "step-1/workers/00000.safetensors has .* bytes, and .* were written"),
        ("no manifest", None),
    ],
)
def test_unusable_checkpoints_do_not_count_as_none(tmp_path, alone, how, message):
    save_checkpoint(tmp_path / "step-1", 1, alone, step=1)
    damaged(tmp_path / "step-1", how)
    if message is None:  # interrupted before it was complete
        assert newest_checkpoint(tmp_path) is None
    else:
        with pytest.raises(CheckpointError, match=message):
            newest_checkpoint(tmp_path)
    save_checkpoint(tmp_path / "step-0", 0, alone, step=0)
    assert newest_checkpoint(tmp_path) == tmp_path / "step-0"


def test_pruning_keeps_the_newest_and_what_is_not_ours(tmp_path, alone):
    (tmp_path / "step-notes").mkdir()
    (tmp_path / "step-notes" / "notes.txt").write_text("mine")
    for step in (1, 2, 3, 4):
        save_checkpoint(tmp_path / f"step-{step}", step, alone, step=step)
        if step == 2:  # interrupted before the newer ones were saved
            damaged(tmp_path / "step-2", "no manifest")
    assert prune_checkpoints(tmp_path, keep=2, pattern="step-*") == [tmp_path / "step-1", tmp_path / "step-2"]
    assert sorted(folder.name for folder in tmp_path.iterdir()) == ["step-3", "step-4", "step-notes"]
    with pytest.raises(ValueError, match="at least 1"):
        prune_checkpoints(tmp_path, keep=0)


def test_pruning_leaves_damaged_checkpoints_and_those_being_written(tmp_path, alone):
    for step in range(5):
        save_checkpoint(tmp_path / f"step-{step}", step, alone, step=step)
    damaged(tmp_path / "step-0", "truncated")  # a user may want to look into it
    damaged(tmp_path / "step-1", "no manifest")
    (tmp_path / "step-1" / "workers" / "notes.txt").write_text("mine")
    damaged(tmp_path / "step-2", "no manifest")  # another run may be writing it
    newest = (tmp_path / "step-4" / "gossip.json").stat().st_mtime
    os.utime(tmp_path / "step-1", (newest - 1, newest - 1))
    os.utime(tmp_path / "step-2", (newest + 1, newest + 1))
    assert prune_checkpoints(tmp_path, keep=1) == [tmp_path / "step-3"]
    os.utime(tmp_path / "step-2", (newest - 1, newest - 1))
    assert prune_checkpoints(tmp_path, keep=1) == [tmp_path / "step-2"]


def test_pruning_leaves_protected_folders_and_targets_of_links(tmp_path, alone, monkeypatch):
    checkpoints = tmp_path / "checkpoints"
    save_checkpoint(tmp_path / "elsewhere", 1, alone, step=1)
    for step in (2, 3, 4):
        save_checkpoint(checkpoints / f"step-{step}", step, alone, step=step)
    (checkpoints / "step-1").symlink_to(tmp_path / "elsewhere")
    unlink = Path.unlink

    def protected(path, missing_ok=False):  # as in a folder without write permission, which root would not notice
        if path.parent.name == "step-2":
            raise PermissionError(13, "Permission denied", str(path))
        unlink(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", protected)
    assert prune_checkpoints(checkpoints, keep=1) == [checkpoints / "step-1", checkpoints / "step-3"]
    assert saved_steps(checkpoints) == [2, 4]
    assert is_complete(tmp_path / "elsewhere")


def test_pruning_deletes_nothing_where_nothing_is_complete(tmp_path, alone):
    save_checkpoint(tmp_path / "step-1", 1, alone, step=1)
    damaged(tmp_path / "step-1", "missing")
    assert prune_checkpoints(tmp_path, keep=1) == []
    assert (tmp_path / "step-1").exists()


def test_pruning_after_going_back_deletes_later_steps(tmp_path, alone):
    for step in (1, 5, 9):
        save_checkpoint(tmp_path / f"step-{step}", step, alone, step=step)
    save_checkpoint(tmp_path / "step-2", 2, alone, step=2)
    prune_checkpoints(tmp_path, keep=2, saved=tmp_path / "step-2")
    assert sorted(folder.name for folder in tmp_path.iterdir()) == ["step-1", "step-2"]


# ---- models


class Tied(nn.Module):
    def __init__(self, width=3):
        super().__init__()
        self.first = nn.Linear(width, width)
        self.second = nn.Linear(width, width)
        self.second.weight = self.first.weight
        self.norm = nn.BatchNorm1d(width)
        self.register_buffer("cache", torch.zeros(2), persistent=False)


def changed(model):
    with torch.no_grad():
        for number, tensor in enumerate((*model.parameters(), *model.buffers())):
            tensor.fill_(number + 1)
    return model


@pytest.mark.parametrize("compiled", [(False, True), (True, False), (False, False)])
def test_a_model_is_loaded_in_place_compiled_or_not(compiled):
    saved, fresh = changed(Tied()), Tied()
    views = [parameter.data_ptr() for parameter in fresh.parameters()]
    one, other = (torch.compile(m) if c else m for m, c in zip((saved, fresh), compiled, strict=True))
    load_model_state(other, decode(encode(model_state(one))))
    assert [parameter.data_ptr() for parameter in fresh.parameters()] == views
    assert fresh.second.weight is fresh.first.weight
    for a, b in zip((*saved.parameters(), *saved.buffers()), (*fresh.parameters(), *fresh.buffers()), strict=True):
        assert torch.equal(a, b)


def test_part_of_a_model_may_be_compiled():
    saved, fresh = changed(Tied()), Tied()
    fresh.first = torch.compile(fresh.first)
    load_model_state(fresh, model_state(saved))
    assert torch.equal(fresh.first.bias, saved.first.bias)


def test_buffers_that_repeat_one_value_are_loaded():
    def model(value):
        module = nn.Module()
        module.register_buffer("kept", torch.full((1, 2), value).expand(3, 2))
        module.register_buffer("cache", torch.full((2, 1), value).expand(2, 4), persistent=False)
        return module

    own = model(0.0)
    load_model_state(own, model_state(model(5.0)))
    assert own.kept.tolist() == [[5.0] * 2] * 3
    assert own.cache.tolist() == [[5.0] * 4] * 2
    assert (own.kept.stride(0), own.cache.stride(1)) == (0, 0)


def test_a_cache_may_have_grown():
    saved, fresh = changed(Tied()), Tied()
    saved.cache = torch.arange(5.0)
    saved.norm.register_buffer("scratch", torch.ones(1), persistent=False)
    load_model_state(fresh, model_state(saved))
    assert fresh.cache.tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (lambda: Tied(4), r"parameter 'first.weight' is float32\[3, 3\] in the checkpoint and float32\[4, 4\]"),
        (lambda: Tied().double(), r"float64\[3, 3\] in the model; .*and \d more"),
        (lambda: nn.Linear(3, 3), "parameter 'weight' is not in the checkpoint"),
    ],
)
def test_another_model_is_refused_before_anything_changes(other, message):
    model = changed(other())
    before = [parameter.clone() for parameter in model.parameters()]
    with pytest.raises(CheckpointError, match=f"of another model: .*{message}"):
        load_model_state(model, model_state(Tied()))
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


# ---- another number of workers


def state_of(rank):
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    optimizer = torch.optim.Adam(model.parameters())
    for step in range(2 + rank):
        model(torch.randn(4, 2, generator=torch.Generator().manual_seed(10 * rank + step))).square().sum().backward()
        optimizer.step()
    position = {"running": {"order": [{"counters": {}}], "taken": 7, "fetched_at": {}, "passes": 1}}
    return {
        "models": {0: model_state(model)}, "optimizers": [optimizer.state_dict()], "loose": [[]], "window": None,
        "gossip": [{"mixer": {"workers": 3}, "nonfinite_steps": rank, "consecutive_nonfinite": 0}],
        "loaders": [position | {"global_batches": False}, None],
    }  # fmt: skip


def test_another_number_of_workers_starts_from_the_average(tmp_path, monkeypatch):
    states = [state_of(rank) for rank in range(3)]
    saved = "dsgdac_accel.checkpoint.rescale.load_state"
    monkeypatch.setattr(saved, lambda folder, manifest, rank, targets, common=True: decode(encode(states[rank])))
    manifest = Manifest(3, step=1, facts={"lost": []}, files=())
    average = average_of_workers(tmp_path, manifest)
    fit_to_processes(average, manifest, launched=2, shards=1)

    def stack(take):
        return torch.stack([take(state).double() for state in states])

    for name in ("0.weight", "1.bias"):
        expected = stack(lambda state, name=name: state["models"][0]["parameters"][name]).mean(0)
        assert torch.equal(average["models"][0]["parameters"][name], expected.float())
    means = stack(lambda state: state["models"][0]["buffers"]["1.running_mean"])
    variances = stack(lambda state: state["models"][0]["buffers"]["1.running_var"])
    buffers = average["models"][0]["buffers"]
    torch.testing.assert_close(buffers["1.running_mean"], means.mean(0).float())
    torch.testing.assert_close(
        buffers["1.running_var"], (variances.mean(0) + means.var(0, correction=0)).float(), rtol=1e-6, atol=1e-7
    )
    assert buffers["1.num_batches_tracked"] == 2  # worker 0's
    moments = average["optimizers"][0]["state"][0]
    assert torch.equal(
        moments["exp_avg"], stack(lambda state: state["optimizers"][0]["state"][0]["exp_avg"]).mean(0).float()
    )
    assert moments["step"] == 2  # a count, not a quantity to average
    assert average["gossip"][0]["mixer"]["workers"] == 2
    assert average["loaders"][0]["running"]["taken"] == 10  # 3 x 7 batches are 10 for each of 2 workers, rounded down
