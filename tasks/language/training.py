"""Trains or fine-tunes a causal language model with a Hugging Face Trainer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Trainer,
    TrainingArguments,
)

from dsgdac_accel import GossipCallback
from tasks.common.algorithms import SYNCHRONOUS, WITHOUT_CONTROL
from tasks.common.config import dump_config
from tasks.common.output_dir import write_json
from tasks.language.config import LanguageConfig
from tasks.language.data import sections, sequences, split, train_tokenizer


def build_trainer(config: LanguageConfig) -> Trainer:
    """Return the Trainer of a run.

    Raises ValueError if there is no model to fine-tune, or the batch cannot be divided among the workers.
    """
    if config.model is not None and not (config.model / "config.json").is_file():
        raise ValueError(f"model must be the folder of a saved language model; {config.model} is none. Train it first.")
    torch.manual_seed(config.seed)
    training, held_out = split(sections(config.text), config.seed)
    model, tokenizer = _model_and_tokenizer(config, training)
    train, test = (sequences(texts, tokenizer, config.block_size) for texts in (training, held_out))
    args = TrainingArguments(
        str(config.output_dir),
        num_train_epochs=config.num_train_epochs,
        learning_rate=config.learning_rate,
        lr_scheduler_type="cosine",
        warmup_steps=config.warmup_steps,
        per_device_eval_batch_size=64,
        dataloader_drop_last=True,
        logging_strategy="epoch",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        seed=config.seed,
        use_cpu=not torch.cuda.is_available(),
    )
    if config.global_batch_size % (args.world_size * config.gossip.workers_per_process):
        raise ValueError(
            f"global_batch_size must be a multiple of the number of workers; got {config.global_batch_size} for "
            f"{args.world_size} processes of {config.gossip.workers_per_process} workers."
        )
    args.per_device_train_batch_size = config.global_batch_size // args.world_size
    optimizer = (
        torch.optim.SGD(model.parameters(), config.learning_rate, momentum=config.momentum)
        if "sgd" in config.algorithm
        else torch.optim.AdamW(model.parameters(), config.learning_rate, weight_decay=0.0)
    )
    gossip = replace(config.gossip, power=0) if config.algorithm in WITHOUT_CONTROL else config.gossip
    return Trainer(
        model,
        args,
        train_dataset=train,
        eval_dataset=test,
        processing_class=tokenizer,
        optimizers=(optimizer, None),
        callbacks=[] if config.algorithm in SYNCHRONOUS else [GossipCallback(gossip)],
    )


def train_language_model(config: LanguageConfig, trainer: Trainer) -> None:
    """Train, measure the losses of the deployed model on all sequences, and write the output folder."""
    if trainer.is_world_process_zero():
        (config.output_dir / "summary.json").unlink(missing_ok=True)  # of an earlier run
    result = trainer.train()
    trainer.save_model(str(config.output_dir / "deployed"))
    trainer.args.dataloader_drop_last = False  # it leaves out sequences of evaluations, too
    train: Any = trainer.train_dataset
    train_loss, test_loss = (trainer.evaluate(rows)["eval_loss"] for rows in (train, trainer.eval_dataset))
    if not trainer.is_world_process_zero():
        return
    logged = {name: value for record in trainer.state.log_history for name, value in record.items()}  # the last ones
    summary = {
        "algorithm": config.algorithm,
        "seed": config.seed,
        "workers": trainer.args.world_size * config.gossip.workers_per_process,
        "steps": trainer.state.global_step,
        "tokens": train.num_rows * config.block_size,
        "train_loss": train_loss,
        "test_loss": test_loss,
        "radius": logged.get("gossip/radius", 0.0),
        "gamma": logged.get("gossip/gamma"),
        "train_seconds": result.metrics["train_runtime"],
    }
    (config.output_dir / "config.yaml").write_text(dump_config(config), encoding="utf-8")
    write_json(config.output_dir / "summary.json", summary)
    print(json.dumps(summary), flush=True)


def _model_and_tokenizer(
    config: LanguageConfig, training: Sequence[str]
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    if config.model is not None:
        loaded: Any = AutoModelForCausalLM.from_pretrained(config.model, dtype=torch.float32)
        return loaded, AutoTokenizer.from_pretrained(config.model)
    tokenizer = train_tokenizer(training)
    settings = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=96, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=config.block_size, tie_word_embeddings=True, bos_token_id=tokenizer.eos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    return LlamaForCausalLM(settings), tokenizer
