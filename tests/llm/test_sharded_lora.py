"""LoRA on a base that the processes of a worker shard by FSDP2, against the simulation of Algorithm 1."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from dsgdac_accel import GossipAccelerator
from tests.multiprocess.scenarios import Net, Scenario, World, batch, require_equal, train
from tests.workers import run_workers

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]

peft = pytest.importorskip("peft")


WORLD, SCENARIO = World(4, shards=2), Scenario(optimizer="adamw", edit="evaluated")


def adapted(scenario: Scenario) -> torch.nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        adapters = peft.LoraConfig(r=3, target_modules=["layers.1", "layers.2"])
        return peft.get_peft_model(Net(scenario), adapters).double()


def save_adapter(folder: str, accelerator: GossipAccelerator, model: Any) -> int:
    state = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        model.save_pretrained(folder, state_dict=state)
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


def train_adapter(rank: int, folder: str) -> dict[str, Any]:
    return train(rank, WORLD, SCENARIO, adapted, after=partial(save_adapter, folder))


def test_adapters_follow_algorithm_1_and_the_average_loads_into_an_ordinary_base(tmp_path):
    results = run_workers(train_adapter, 4, str(tmp_path / "adapter"))
    require_equal(WORLD, SCENARIO, results, adapted)
    assert [result["after"] for result in results] == [3 * (7 + 7 + 7 + 7)] * 4
    loaded = peft.PeftModel.from_pretrained(Net(SCENARIO), str(tmp_path / "adapter")).double()
    mean = adapted(SCENARIO)
    torch.nn.utils.vector_to_parameters(results[0]["mean"], mean.parameters())
    x, _ = batch(0, 0)
    torch.testing.assert_close(loaded(x), mean(x), rtol=0, atol=1e-6)  # PEFT loads in float32
