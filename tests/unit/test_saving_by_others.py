"""Savers, copiers and picklers that look at storages find every parameter of a prepared model, and nothing else."""

import copy
import io
import pickle

import pytest
import torch
from safetensors.torch import load_file, save_model
from torch import nn

from dsgdac_accel import GossipAccelerator, GossipConfig


def prepared(workers: int) -> tuple:
    accelerator = GossipAccelerator(cpu=True, gossip=GossipConfig(workers_per_process=workers))
    model = nn.Sequential(nn.Linear(4, 3), nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last), nn.Linear(4, 2))
    model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return accelerator, model


def save_with_accelerate(accelerator, model, file):
    accelerator.save(accelerator.unwrap_model(model).state_dict(), str(file), safe_serialization=True)
    return load_file(file)


def save_with_safetensors(accelerator, model, file):
    save_model(accelerator.unwrap_model(model), str(file))
    return load_file(file)


def save_with_torch(accelerator, model, file):
    torch.save(accelerator.unwrap_model(model).state_dict(), file.with_suffix(".pt"))
    return torch.load(file.with_suffix(".pt"))


@pytest.mark.parametrize("deployed", [False, True])
@pytest.mark.parametrize("save", [save_with_accelerate, save_with_safetensors, save_with_torch])
def test_a_saved_file_holds_every_tensor_once(save, deployed, tmp_path):
    accelerator, model = prepared(1)
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    file = tmp_path / "model.safetensors"
    if deployed:
        with accelerator.deployed_model(model) as average:
            found = save(accelerator, average, file)
    else:
        found = save(accelerator, model, file)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    accelerator.end_training()


def test_a_compiled_part_is_saved_under_the_names_of_the_eager_model(tmp_path):
    accelerator = GossipAccelerator(cpu=True, gossip=GossipConfig())
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    names = model.state_dict().keys()
    model[1] = torch.compile(model[1], backend="eager")
    model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    accelerator.save_model(model, tmp_path)
    assert load_file(tmp_path / "model.safetensors").keys() == names
    assert accelerator.get_state_dict(model).keys() == names
    accelerator.end_training()


def test_a_single_parameter_is_saved_and_copied_without_the_others():
    accelerator, model = prepared(1)
    buffer = io.BytesIO()
    torch.save(model[0].bias, buffer)
    plain = io.BytesIO()
    torch.save(nn.Parameter(model[0].bias.detach().clone()), plain)
    assert len(buffer.getvalue()) == len(plain.getvalue())
    assert copy.deepcopy(model)[0].bias.untyped_storage().nbytes() == 3 * 4
    assert pickle.loads(pickle.dumps(model.state_dict()))["0.bias"].equal(model[0].bias)
    accelerator.end_training()
