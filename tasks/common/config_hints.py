"""The way out for an unknown key: the setting that was meant."""

from __future__ import annotations

import difflib
from collections.abc import Collection

from dsgdac_accel.config import OTHER_NAMES, REMOVED

MEANT = {
    "learning_rate": "lr rate peak_lr base_lr",
    "gossip.max_lr": "max_rate",
    "num_train_epochs": "epochs max_epochs",
    "gradient_accumulation_steps": "grad_accum accumulate_grad_batches update_freq",
    "save_steps": "save_every checkpoint_every checkpointing_steps",
    "save_total_limit": "keep_checkpoints max_checkpoints",
    "logging_steps": "log_every log_interval",
    "resume_from_checkpoint": "resume",
    "report_to": "tracker trackers log_with wandb tensorboard",
    "adam_epsilon": "eps",
    "global_batch_size": "batch_size bs batch",
    "batch_tokens": "batch_size bs batch tokens_per_batch",
    "max_steps": "num_train_steps",
    "warmup_learning_rate": "warmup_lr",
    "weight_decay": "wd",
    "no_decay": "no_weight_decay exclude_norm_and_bias_from_weight_decay",
    "sam_rho": "rho",
    "sam_per_worker": "m_sam msam",
    "max_grad_norm": "clip clip_norm grad_clip gradient_clip_val",
    "algorithm": "optim optimizer",
    "eval_batch_size": "per_device_eval_batch_size test_batch_size",
    "decoding.batch_tokens": "per_device_eval_batch_size test_batch_size",
    "seed": "random_seed",
    "output_dir": "save_dir logging_dir",
    "model": "model_name_or_path arch",
    "model.size": "model_name_or_path arch",
    "data.name": "dataset dataset_name",
    "data.path": "data_dir data_path",
    "data.train_limit": "max_train_samples",
    "data.test_limit": "max_eval_samples",
    "data.truncation": "truncate data.truncate",
    "data.validation_fraction": "val_fraction data.val_fraction validation_size",
    "decoding.beams": "beam beam_size",
    "gossip.power": "p gamma exponent",
    "gossip.topology": "graph",
    "weight_average.kind": "ema swa lawa use_ema model_ema averaging",
    "weight_average.decay": "ema_decay model_ema_decay",
    "weight_average.start_epoch": "swa_start swa_epoch_start ema_start",
    "data.validation_limit": "validation_size val_size",
    "decoupled_weight_decay": "adamw",
}
"""Settings with the old and usual names that stand for them. If a name is in two rows, the first setting that the
configuration has is suggested. Names that are spelled like their setting need no row."""

_BATCH = "per_device_train_batch_size train_batch_size micro_batch_size"
_PROCESSES = "The launcher starts processes; use gossip.workers_per_process for several in each."

USE = [
    ("mixed_precision", "fp16", "Use mixed_precision: fp16."),
    ("mixed_precision", "bf16", "Use mixed_precision: bf16."),
    ("mixed_precision", "amp", "Use mixed_precision: bf16 or fp16."),
    ("global_batch_size", _BATCH, "Use global_batch_size (all workers together)."),
    ("batch_tokens", _BATCH, "Use batch_tokens (all workers together)."),
    ("num_train_epochs", "max_steps", "Use num_train_epochs: the length of a run is counted in epochs here."),
    ("warmup_epochs", "warmup_steps warmup_ratio", "Use warmup_epochs: the warm-up is counted in epochs here."),
    ("warmup_steps", "warmup_epochs warmup_ratio", "Use warmup_steps: the warm-up is counted in optimizer steps here."),
    ("eval_every", "eval_steps", "Use eval_every: evaluations are counted in epochs here."),
    ("betas", "beta1 beta2 adam_beta1 adam_beta2", "Use betas: [beta1, beta2]."),
    ("momentum", "nesterov", "Use momentum: it is plain momentum here."),
    ("warmup_epochs", "lr_scheduler_type", "Use warmup_epochs: after it the learning rate follows a cosine to 0."),
    ("warmup_steps", "lr_scheduler_type", "Use warmup_steps: after it the learning rate falls as 1 / sqrt(step)."),
    (
        "model.norm",
        "pre_norm model.pre_norm norm_first model.norm_first normalize_before",
        "Use model.norm: pre or post.",
    ),
    ("output_dir", "run_name", "Use output_dir: its last folder names the run."),
    (
        "weight_average",
        "average_last average_every average_checkpoints checkpoint_averaging",
        "Use weight_average.kind: lawa, with weight_average.last and weight_average.every.",
    ),
    ("variants", "compute_ms slow_workers slow_factor stalls", "It was removed: variants train a model that computes."),
    ("gossip.workers_per_process", "workers nproc_per_node num_processes", _PROCESSES),
]
"""A setting, names that it does not match one to one, and the sentence to say if the configuration has it."""


def hint(path: str, known: Collection[str]) -> str:
    """Return one sentence on what the writer of an unknown key may have meant.

    >>> hint("lr", ["learning_rate", "seed"])
    'Did you mean learning_rate?'
    >>> hint("gossip.gama_power", ["gossip", "gossip.power", "seed"])
    'Did you mean gossip.power?'
    >>> hint("power", ["gossip", "gossip.power", "seed"])
    'It belongs at gossip.power.'
    >>> hint("gossip.x", ["gossip", "gossip.power", "seed"])
    'The keys of gossip are power.'
    >>> hint("gossip.on_worker_loss", ["gossip", "gossip.power", "seed"])[:28]
    'on_worker_loss was removed. '
    """
    plain = path.lower().replace("-", "_")
    parent, _, name = plain.rpartition(".")
    usual = [setting for setting, names in MEANT.items() if plain in names.split() and setting in known]
    if parent == "gossip" and name in OTHER_NAMES:
        usual.append(f"gossip.{OTHER_NAMES[name]}")
    if meant := [plain] * (plain in known) + usual:
        return f"Did you mean {meant[0]}?"
    if name in REMOVED and parent in ("gossip", ""):
        return f"{name} was removed. {REMOVED[name]}"
    for setting, names, sentence in USE:
        if plain in names.split() and setting in known:
            return sentence
    last = {key: key.rpartition(".")[2] for key in known}
    if elsewhere := [key for key in known if last[key] == name]:
        return f"It belongs at {' or '.join(elsewhere)}."
    siblings = [key for key in known if key.rpartition(".")[0] == parent]
    for paths in (siblings, known):
        ends = {last[path].lower(): path for path in paths}
        if near := difflib.get_close_matches(name, ends, n=1):
            return f"Did you mean {ends[near[0]]}?"
    place = f"The keys of {parent} are" if parent else "The keys are"
    return f"{place} {', '.join(last[key] for key in siblings)}." if siblings else "See --help for all keys."
