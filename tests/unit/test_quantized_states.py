"""Checkpoints of optimizer states of a tensor subclass (torchao's), or of integer codes (those of bitsandbytes)."""

from __future__ import annotations

import json
import logging

import pytest
import torch
from torch import nn

from dsgdac_accel import GossipAccelerator
from dsgdac_accel.checkpoint.manifest import Manifest
from dsgdac_accel.checkpoint.rescale import average_of_workers
from dsgdac_accel.checkpoint.serialization import CheckpointError, Encoded, decode, encode
from tests.held import held

aten = torch.ops.aten


class Rounded(torch.Tensor):
    """int8 codes and one scale; shows another dtype, and knows few operations, like the states of torchao."""

    @staticmethod
    def __new__(cls, codes, scale, dtype):
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=dtype, device=codes.device)

    def __init__(self, codes, scale, dtype):
        self.codes, self.scale = codes, scale

    def __tensor_flatten__(self):
        return ["codes", "scale"], [self.dtype, self.codes.shape, self.codes.device]

    @classmethod
    def __tensor_unflatten__(cls, parts, context, size, stride):
        assert (context[1], size) == (parts["codes"].shape, parts["codes"].shape)
        return cls(parts["codes"], parts["scale"], context[0])

    @classmethod
    def of(cls, values, dtype=torch.float32):
        scale = values.abs().max() / 127 + 1e-12
        return cls((values / scale).round().to(torch.int8), scale, dtype)

    def dequantize(self):
        return self.codes.float() * self.scale

    @classmethod
    def __torch_dispatch__(cls, function, types, args, kwargs=None):
        if function is aten.copy_.default:
            new = cls.of(args[1])
            args[0].codes.copy_(new.codes), args[0].scale.copy_(new.scale)
            return args[0]
        if function in (aten._to_copy.default, aten.detach.default):
            return cls(args[0].codes, args[0].scale, (kwargs or {}).get("dtype", args[0].dtype))
        raise NotImplementedError(function)


class RoundedMomentum(torch.optim.Optimizer):
    """SGD with a momentum that is kept as `Rounded`."""

    def __init__(self, parameters, lr=0.1):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            before = self.state[parameter].get("momentum")
            momentum = parameter.grad + (0 if before is None else 0.9 * before.dequantize())
            parameter.add_(momentum, alpha=-self.param_groups[0]["lr"])
            self.state[parameter]["momentum"] = Rounded.of(momentum, parameter.dtype)


def train(accelerator, model, optimizer, first, last):
    for step in range(first, last):
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(step)).bfloat16()
        accelerator.backward(model(x).float().square().mean())
        optimizer.step()
        optimizer.zero_grad()
    return [held(accelerator, parameter).detach().clone() for parameter in model.parameters()]


def prepared():
    accelerator = GossipAccelerator(cpu=True)
    torch.manual_seed(0)
    model = nn.Linear(4, 2).bfloat16()
    return accelerator, *accelerator.prepare(model, RoundedMomentum(model.parameters()))


@pytest.mark.parametrize("wait", [True, False])
def test_training_with_states_of_a_subclass_resumes_bit_by_bit(tmp_path, wait):
    run = prepared()
    train(*run, 0, 3)
    run[0].save_state(tmp_path / "c", wait=wait)
    whole = train(*run, 3, 6)
    run[0].finish_saving()
    other = prepared()
    other[0].load_state(tmp_path / "c")
    momentum = next(iter(other[2].state.values()))["momentum"]
    assert (type(momentum), momentum.codes.dtype) == (Rounded, torch.int8)
    assert all(map(torch.equal, whole, train(*other, 3, 6)))


@pytest.mark.parametrize(("module", "name"), [("os", "system"), ("antigravity", "Rounded"), ("torch", "nn.Linear")])
def test_a_file_cannot_name_anything_but_a_tensor_class_that_is_there(module, name):
    encoded = encode({"momentum": Rounded.of(torch.ones(3))})
    tree = json.loads(encoded.text)
    tree["momentum"]["$subclass"][:2] = module, name
    with pytest.raises(CheckpointError, match=f"no tensor class {module}.{name}.*Import it"):
        decode(Encoded(json.dumps(tree), encoded.tensors))


def test_a_subclass_that_nobody_could_find_again_is_refused():
    class Local(Rounded):
        pass

    with pytest.raises(CheckpointError, match=r"state\['m'\] is a Local.*no tensor class"):
        encode({"m": Local.of(torch.ones(2))})


def test_the_average_dequantizes_and_codes_start_anew(tmp_path, monkeypatch, caplog):
    values = [torch.tensor([1.0, -0.5]), torch.tensor([0.2, 0.7])]

    def state_of(rank):
        moments = {
            0: {"momentum": Rounded.of(values[rank]), "step": torch.tensor(2.0)},
            1: {"step": 2, "wrapped": {"state1": torch.tensor([3, 4], dtype=torch.uint8), "absmax1": torch.ones(1)}},
            2: {"step": 2, "wrapped": {"state1": values[rank]}},
            3: {"momentum": torch.ones(2), "count": torch.tensor(rank)},
        }
        return {
            "models": {}, "optimizers": [{"state": moments}], "loose": [[]], "window": None, "loaders": [],
            "kinds_of_optimizers": ["AdamW8bit"], "gossip": [],
        }  # fmt: skip

    rescale = "dsgdac_accel.checkpoint.rescale"
    monkeypatch.setattr(
        f"{rescale}.load_state",
        lambda folder, manifest, rank, targets, common=True: decode(encode(state_of(rank))),
    )
    manifest = Manifest(2, step=1, facts={}, files=())
    with caplog.at_level(logging.WARNING):
        found = average_of_workers(tmp_path, manifest)["optimizers"][0]["state"]
    assert sorted(found) == [0, 2, 3]
    mean = torch.stack([Rounded.of(value).dequantize() for value in values]).mean(0)
    assert torch.equal(found[0]["momentum"].dequantize(), Rounded.of(mean).dequantize())
    torch.testing.assert_close(found[2]["wrapped"]["state1"], torch.stack(values).mean(0))
    assert [record.getMessage() for record in caplog.records] == [
        "the AdamW8bit states of 1 parameters are integer codes, whose average means nothing: they start anew"
    ]
