"""TRL's trainers on a tiny Llama, with and without LoRA."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import BitsAndBytesConfig, LlamaForCausalLM, LlamaForSequenceClassification, Trainer

from dsgdac_accel import GossipCallback, GossipConfig
from tests.llm.tiny import PAIRS, Steps, arguments, build_model, build_tokenizer, trainable

peft = pytest.importorskip("peft")
trl = pytest.importorskip("trl")

GOSSIP = {"power": 2.0, "timeout": 60}


def lora(task: str, **changes: Any) -> Any:
    """Return the settings of an adapter with dropout."""
    settings = {"r": 4, "lora_alpha": 16, "lora_dropout": 0.1, "target_modules": "all-linear", "task_type": task}
    return peft.LoraConfig(**{**settings, **changes})


ADAPTERS = {
    "lora": lora,
    "dora": lambda task: lora(task, use_dora=True),
    "lora and a whole module": lambda task: lora(task, target_modules=["q_proj"], modules_to_save=["lm_head"]),
    "lora and tokens": lambda task: lora(task, target_modules=["q_proj"], trainable_token_indices=[3, 4, 5]),
    "ia3": lambda task: peft.IA3Config(
        task_type=task, target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"]
    ),
    "vera": lambda task: peft.VeraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type=task),
    "prompt tuning": lambda task: peft.PromptTuningConfig(num_virtual_tokens=4, task_type=task),
}
"""Adapters of PEFT by name, as functions of the task type."""

TORCHAO = ("adamw_torch_8bit", "adamw_torch_4bit")


def length_reward(completions: list[str], **columns: Any) -> list[float]:
    """Reward many different letters."""
    return [len(set(text)) / 10 for text in completions]


def rows(kind: str) -> Dataset:
    """Return the training data in the form that a trainer of this kind takes."""
    examples = []
    for (english, german), (_, wrong) in zip(PAIRS, PAIRS[7:] + PAIRS[:7], strict=True):
        if kind == "sft":
            examples.append({"prompt": english, "completion": german})
        elif kind == "dpo":
            examples.append({"prompt": english, "chosen": german, "rejected": wrong})
        elif kind == "reward":
            examples.append({"chosen": f"{english} {german}", "rejected": f"{english} {wrong}"})
        else:
            examples.append({"prompt": english})
    return Dataset.from_list(examples)


def build_trainer(
    kind: str,
    adapter: str,
    callbacks: Sequence[Any],
    folder: Path,
    *,
    dtype: torch.dtype = torch.float32,
    bits: int = 0,
    **changes: Any,
) -> Trainer:
    """Return a trainer of TRL.

    Args:
        kind: sft, dpo, grpo or reward.
        adapter: a key of ADAPTERS; "" trains all parameters.
        callbacks: callbacks of the trainer.
        folder: output folder.
        dtype: dtype of the model's parameters.
        bits: 4 or 8 loads the model from `base` beside the folder and quantizes its layers; 0 builds it.
        **changes: training arguments.
    """
    more: dict[str, Any] = {}
    trainers = {"sft": trl.SFTTrainer, "dpo": trl.DPOTrainer, "grpo": trl.GRPOTrainer, "reward": trl.RewardTrainer}
    configs = {"sft": trl.SFTConfig, "dpo": trl.DPOConfig, "grpo": trl.GRPOConfig, "reward": trl.RewardConfig}
    label = {"num_labels": 1} if kind == "reward" else {}
    if bits:
        model = load_quantized(folder.parent / "base", bits, dtype)
    else:
        model = build_model(LlamaForSequenceClassification if label else LlamaForCausalLM, dtype, **label)
    if adapter:
        more["peft_config"] = ADAPTERS[adapter]("SEQ_CLS" if kind == "reward" else "CAUSAL_LM")
    elif kind == "dpo":
        more["ref_model"] = build_model(LlamaForCausalLM)
    if kind == "grpo":
        more["reward_funcs"] = length_reward
        changes = {"num_generations": 4, "max_completion_length": 8, **changes}
    torch.manual_seed(0)  # adapters begin at random
    return trainers[kind](
        model,
        args=configs[kind](**arguments(folder, **changes)),
        train_dataset=rows(kind),
        eval_dataset=rows(kind).select(range(12)),
        processing_class=build_tokenizer(),
        callbacks=list(callbacks),
        **more,
    )


def load_quantized(folder: Path, bits: int, dtype: torch.dtype) -> Any:
    """Load a language model whose linear layers bitsandbytes quantizes to 4 or 8 bits."""
    settings: dict[str, Any] = {"load_in_4bit": bits == 4, "load_in_8bit": bits == 8}
    if bits == 4:
        settings |= {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True, "bnb_4bit_compute_dtype": dtype}
    return LlamaForCausalLM.from_pretrained(
        folder, quantization_config=BitsAndBytesConfig(**settings), device_map={"": "cpu"}, dtype=dtype
    )


def train(rank: int, folder: Path, kind: str, adapter: str, resume: Any, changes: dict[str, Any]) -> dict[str, Any]:
    """Train with gossip and return what a worker's steps did."""
    steps = Steps()
    trainer = build_trainer(kind, adapter, [steps, GossipCallback(GossipConfig(**GOSSIP))], folder, **changes)
    steps.trainer = trainer
    # Compiling the step of torchao's optimizers takes half a minute.
    with torch.compiler.set_stance("force_eager" if trainer.args.optim in TORCHAO else "default"):
        trainer.train(resume_from_checkpoint=resume)
    return {"steps": steps.recorded, "deployed": trainable(trainer.model), "logs": trainer.state.log_history}
