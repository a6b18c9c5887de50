"""TRL's trainers with GossipCallback on gloo workers: Algorithm 1, the average in checkpoints, exact resuming."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaForCausalLM

from dsgdac_accel import GossipCallback, GossipConfig
from tests.llm.fine_tuning import ADAPTERS, GOSSIP, build_trainer, train
from tests.llm.tiny import Steps, assert_algorithm_1, assert_close, build_model
from tests.workers import run_workers

pytestmark = pytest.mark.multiprocess

SAVED_AT, LAST = 3, 5


def assert_exact(folder: Path, kind: str, adapter: str, **changes: Any) -> list[dict[str, Any]]:
    """Train with a checkpoint in the middle, resume from it in new processes, and compare every step."""
    saving = {"save_strategy": "steps", "save_steps": SAVED_AT}
    workers = run_workers(train, 2, folder / "run", kind, adapter, None, {**saving, **changes})
    averages = assert_algorithm_1(build_trainer(kind, adapter, [], folder / "stock", **changes), workers)
    checkpoint = folder / "run" / f"checkpoint-{SAVED_AT}"
    assert_saved(checkpoint, averages[SAVED_AT - 1])
    resumed = run_workers(train, 2, folder / "resumed", kind, adapter, str(checkpoint), changes)
    for whole, rest in zip(workers, resumed, strict=True):
        assert [step["step"] for step in rest["steps"]] == list(range(SAVED_AT + 1, LAST + 1))
        for expected, step in zip(whole["steps"][SAVED_AT:], rest["steps"], strict=True):
            assert step["gamma"] == expected["gamma"]
            for name, value in step["after"].items():
                assert torch.equal(value, expected["after"][name]), f"{name} after step {step['step']}"
        for name, value in rest["deployed"].items():
            assert torch.equal(value, whole["deployed"][name]), name
    return workers


def assert_saved(checkpoint: Path, average: dict[str, torch.Tensor]) -> None:
    """Compare the model or adapter in a checkpoint with the average of the workers, where PEFT keeps the names."""
    (file,) = checkpoint.glob("*model.safetensors")
    saved = load_file(file)
    names = {name: short for name in average if (short := name.replace(".default", "")) in saved}
    assert names or not any("lora" in name for name in average)
    assert_close({name: saved[short] for name, short in names.items()}, average)


def test_sft_of_a_bf16_model_with_lora_and_gradient_checkpointing_resumes_exactly(tmp_path):
    workers = assert_exact(tmp_path, "sft", "lora", dtype=torch.bfloat16, bf16=True, gradient_checkpointing=True)
    logged = [record for record in workers[0]["logs"] if "mean_token_accuracy" in record and "loss" in record]
    assert all({"entropy", "gossip/gamma", "gossip/radius"} <= record.keys() for record in logged)


@pytest.mark.slow
@pytest.mark.parametrize("adapter", ["", "lora"], ids=["full", "lora"])
@pytest.mark.parametrize("kind", ["sft", "dpo", "grpo", "reward"])
def test_every_trainer_follows_algorithm_1_and_resumes_exactly(kind, adapter, tmp_path):
    beta = {"beta": 0.1} if kind == "grpo" and adapter else {}  # the adapter switched off is the reference model
    assert_exact(tmp_path, kind, adapter, **beta)


@pytest.mark.slow
@pytest.mark.parametrize("adapter", [name for name in ADAPTERS if name != "lora"])
def test_every_adapter_follows_algorithm_1_and_resumes_exactly(adapter, tmp_path):
    assert_exact(tmp_path, "sft", adapter)


@pytest.mark.slow
def test_a_bf16_model_is_trained_by_float32_masters(tmp_path):
    assert_exact(tmp_path, "sft", "", dtype=torch.bfloat16, bf16=True)


@pytest.mark.slow
@pytest.mark.parametrize("bits", [4, 8])
def test_an_adapter_of_a_quantized_model_follows_algorithm_1_and_resumes_exactly(bits, tmp_path):
    """TRL makes such adapters bf16, and PEFT makes them float32 where the Trainer loads a checkpoint."""
    pytest.importorskip("bitsandbytes")
    build_model(LlamaForCausalLM).save_pretrained(tmp_path / "base")
    workers = assert_exact(tmp_path, "sft", "lora", dtype=torch.bfloat16, bits=bits, bf16=True)
    assert {value.dtype for value in workers[0]["deployed"].values()} == {torch.bfloat16}


@pytest.mark.slow
def test_a_compiled_model_follows_algorithm_1_and_is_saved_under_its_own_names(tmp_path):
    changes = {"torch_compile": True, "torch_compile_backend": "eager", "gradient_checkpointing": False}
    saving = {"save_strategy": "steps", "save_steps": SAVED_AT}
    workers = run_workers(train, 2, tmp_path, "sft", "lora", None, {**changes, **saving}, timeout=200)
    averages = assert_algorithm_1(build_trainer("sft", "lora", [], tmp_path / "stock"), workers)
    assert_saved(tmp_path / f"checkpoint-{SAVED_AT}", averages[SAVED_AT - 1])


def several_in_a_process(rank: int, folder: Path) -> list[str]:
    said = []
    for kind in ("dpo", "grpo", "reward", "sft"):
        try:
            build_trainer(kind, "", [GossipCallback(GossipConfig(workers_per_process=2))], folder)
            said.append("accepted")
        except ValueError as error:
            said.append(str(error))
    return said


def test_a_trainer_that_compares_rows_of_a_batch_is_refused_with_several_workers_in_a_process(tmp_path):
    ((*said, sft),) = run_workers(several_in_a_process, 1, tmp_path)
    assert sft == "accepted"
    for kind, message in zip(("DPOTrainer", "GRPOTrainer", "RewardTrainer"), said, strict=True):
        assert message.startswith(kind)
        assert "workers_per_process=1" in message


OPTIMIZERS = {
    "sgd": "torch", "adamw_torch_fused": "torch", "adafactor": "torch", "rmsprop": "torch", "stable_adamw": "optimi",
    "adamw_torch_8bit": "torchao", "adamw_bnb_8bit": "bitsandbytes", "lion_8bit": "bitsandbytes",
    "paged_adamw_8bit": "bitsandbytes",
}  # fmt: skip
"""Values of `optim`, and the package that each needs."""


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_follows_algorithm_1_and_resumes_exactly(name, tmp_path):
    pytest.importorskip(OPTIMIZERS[name])
    assert_exact(tmp_path, "sft", "", optim=name, learning_rate=0.5 if name == "sgd" else 0.01)


def best(rank: int, folder: Path) -> dict[str, Any]:
    """Train with a learning rate that is too high, and evaluate at every step."""
    steps = Steps()
    every = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1, "max_steps": 4}
    trainer = build_trainer(
        "sft", "lora", [steps, GossipCallback(GossipConfig(**GOSSIP))], folder, load_best_model_at_end=True,
        learning_rate=0.3, **every,
    )  # fmt: skip
    steps.trainer = trainer
    trainer.train()
    losses = [record["eval_loss"] for record in trainer.state.log_history if "eval_loss" in record]
    merged = trainer.model.merge_and_unload().state_dict()
    return {"steps": steps.recorded, "losses": losses, "best": trainer.state.best_model_checkpoint, "merged": merged}


@pytest.mark.slow
def test_the_best_deployed_adapter_is_loaded_in_the_end_and_merges_alike_on_all_workers(tmp_path):
    workers = run_workers(best, 2, tmp_path)
    first, second = workers
    assert first["losses"] == second["losses"]
    number = 1 + first["losses"].index(min(first["losses"]))
    assert first["best"] == second["best"] == str(tmp_path / f"checkpoint-{number}")
    steps = [worker["steps"][number - 1]["after"] for worker in workers]
    assert_saved(tmp_path / f"checkpoint-{number}", {name: (steps[0][name] + steps[1][name]) / 2 for name in steps[0]})
    torch.testing.assert_close(first["merged"], second["merged"], rtol=0, atol=0)
    base = build_model(LlamaForCausalLM).state_dict()
    adapter = load_file(tmp_path / f"checkpoint-{number}" / "adapter_model.safetensors")
    layer = "model.layers.0.self_attn.q_proj"
    low, high = (adapter[f"base_model.model.{layer}.lora_{part}.weight"] for part in "AB")
    torch.testing.assert_close(first["merged"][f"{layer}.weight"], base[f"{layer}.weight"] + 16 / 4 * high @ low)
