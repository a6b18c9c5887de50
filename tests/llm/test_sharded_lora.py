"""LoRA on a base that the processes of a worker shard by FSDP2, against the simulation of Algorithm 1."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.multiprocess.test_sharded import batch, make_model, plain, require_equal, simulate, train
from tests.workers import run_workers

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]

peft = pytest.importorskip("peft")


def train_adapter(rank: int, folder: str) -> dict[str, Any]:
    result = train(rank, 2, 2, kind="lora", parts=2, peek=True)
    accelerator, model = result["accelerator"], result["model"]
    state = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        model.save_pretrained(folder, state_dict=state)
    return plain(result) | {"trained": sum(p.numel() for p in model.parameters() if p.requires_grad)}


def test_adapters_follow_algorithm_1_and_the_average_loads_into_an_ordinary_base(tmp_path):
    results = run_workers(train_adapter, 4, str(tmp_path / "adapter"))
    expected = simulate(2, 2, kind="lora", parts=2)
    require_equal(results, expected, shards=2)
    assert [result["trained"] for result in results] == [3 * (5 + 4 + 4 + 5)] * 4
    loaded = peft.PeftModel.from_pretrained(make_model(), str(tmp_path / "adapter")).double()
    mean = make_model("lora")
    torch.nn.utils.vector_to_parameters(expected["mean"], mean.parameters())
    x, _ = batch(0, 0)
    torch.testing.assert_close(loaded(x), mean(x), rtol=0, atol=1e-6)  # PEFT loads in float32
