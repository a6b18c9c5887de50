"""The way out for an unknown key: the setting that was meant."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Iterable

_NAMES = {
    "learning_rate": "lr rate peak_lr base_lr",
    "gossip.max_lr": "max_rate gossip.lr gossip.lr_max gossip.rate gossip.max_rate",
    "num_train_epochs": "epochs max_epochs num_epochs",
    "gradient_accumulation_steps": (
        "accumulation_steps grad_accum grad_accum_steps accumulate_grad_batches update_freq"
    ),
    "save_steps": "save_every save_interval checkpoint_every checkpointing_steps",
    "save_total_limit": "keep_checkpoints max_checkpoints",
    "logging_steps": "log_every log_interval log_steps",
    "resume_from_checkpoint": "resume resume_from",
    "report_to": "tracker trackers log_with",
    "dataloader_num_workers": "loader_workers num_workers",
    "adam_epsilon": "eps epsilon",
    "global_batch_size": "batch_size bs batch",
    "batch_tokens": "batch_size bs batch tokens_per_batch max_tokens",
    "max_steps": "max_updates max_update num_train_steps train_steps",
    "warmup_epochs": "warmup",
    "warmup_steps": "warmup warmup_updates num_warmup_steps",
    "weight_decay": "wd",
    "max_grad_norm": "clip clip_norm grad_clip clip_grad_norm gradient_clip_val max_norm",
    "betas": "adam_betas",
    "label_smoothing": "label_smoothing_factor smoothing",
    "algorithm": "optim optimizer",
    "mixed_precision": "precision",
    "compile": "torch_compile",
    "eval_batch_size": "per_device_eval_batch_size test_batch_size",
    "decoding.batch_tokens": "per_device_eval_batch_size test_batch_size",
    "eval_every": "eval_interval",
    "seed": "data_seed random_seed",
    "output_dir": "output out_dir save_dir logging_dir",
    "model": "model_name model_name_or_path arch",
    "model.size": "model_name model_name_or_path arch",
    "data.name": "dataset dataset_name",
    "data.path": "data_dir data_path",
    "data.train_limit": "max_train_samples",
    "data.test_limit": "max_eval_samples",
    "decoding.beams": "num_beams beam beam_size",
    "decoding.length_penalty": "lenpen",
    "gossip.power": "p gamma exponent gossip.p gossip.gamma",
    "gossip.topology": "graph gossip.graph",
    "gossip.start_step": "gossip.warmup",
    "gossip.log_every": "gossip.logging_steps",
    "gossip.workers_per_process": "gossip.num_workers",
}
"""Settings with the old and usual names that stand for them. If a name is in two rows, the first setting that the
configuration has is suggested."""

MEANT = {
    name: [setting for setting, names in _NAMES.items() if name in names.split()]
    for name in " ".join(_NAMES.values()).split()
}
"""The settings that each of these names can stand for."""

_BATCH = {
    "global_batch_size": "Use global_batch_size (all workers together).",
    "batch_tokens": "Use batch_tokens (all workers together).",
}
_WARMUP = {
    "warmup_epochs": "Use warmup_epochs: the warm-up is counted in epochs here.",
    "warmup_steps": "Use warmup_steps: the warm-up is counted in optimizer steps here.",
}
_BETAS = {"betas": "Use betas: [beta1, beta2]."}
_WORKERS = {
    "gossip.workers_per_process": "The launcher starts processes; use gossip.workers_per_process for several in each."
}

USE: dict[str, dict[str, str]] = {
    "fp16": {"mixed_precision": "Use mixed_precision: fp16."},
    "bf16": {"mixed_precision": "Use mixed_precision: bf16."},
    "amp": {"mixed_precision": "Use mixed_precision: bf16 or fp16."},
    "per_device_train_batch_size": _BATCH,
    "train_batch_size": _BATCH,
    "micro_batch_size": _BATCH,
    "max_steps": {"num_train_epochs": "Use num_train_epochs: the length of a run is counted in epochs here."},
    "warmup_steps": {"warmup_epochs": _WARMUP["warmup_epochs"]},
    "warmup_epochs": {"warmup_steps": _WARMUP["warmup_steps"]},
    "warmup_ratio": _WARMUP,
    "eval_steps": {"eval_every": "Use eval_every: evaluations are counted in epochs here."},
    "beta1": _BETAS,
    "beta2": _BETAS,
    "adam_beta1": _BETAS,
    "adam_beta2": _BETAS,
    "nesterov": {"momentum": "Use momentum: it is plain momentum here."},
    "lr_scheduler_type": {
        "warmup_epochs": "Use warmup_epochs: after the warm-up the learning rate follows a cosine to 0.",
        "warmup_steps": "Use warmup_steps: after the warm-up the learning rate falls as 1 / sqrt(step).",
    },
    "run_name": {"output_dir": "Use output_dir: its last folder names the run."},
    "workers": _WORKERS,
    "nproc_per_node": _WORKERS,
    "num_processes": _WORKERS,
}
"""Names that no setting matches one to one: a setting, and the sentence to say if the configuration has it."""


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
    """
    plain = path.lower().replace("-", "_")
    parent, _, name = plain.rpartition(".")
    if plain in known:
        return f"Did you mean {plain}?"
    for setting in MEANT.get(plain, []):
        if setting in known:
            return f"Did you mean {setting}?"
    for setting, sentence in USE.get(plain, {}).items():
        if setting in known:
            return sentence
    elsewhere = [candidate for candidate in known if _last(candidate) == name]
    if elsewhere:
        return f"It belongs at {' or '.join(elsewhere)}."
    return _nearest_or_all(path, parent, name, known)


def _nearest_or_all(path: str, parent: str, name: str, known: Collection[str]) -> str:
    siblings = [candidate for candidate in known if candidate.rpartition(".")[0] == parent]
    alike = [candidate for candidate in known if candidate.count(".") == path.count(".")]
    near = _nearest(name, siblings, _last) or _nearest(path, alike, str, 0.8) or _nearest(name, known, _last)
    if near:
        return f"Did you mean {near}?"
    place = f"The keys of {parent} are" if parent else "The keys are"
    return f"{place} {', '.join(map(_last, siblings))}." if siblings else "See --help for all keys."


def _last(path: str) -> str:
    return path.rpartition(".")[2]


def _nearest(word: str, paths: Iterable[str], spelling: Callable[[str], str], cutoff: float = 0.6) -> str:
    """The path that is spelled most like the word, or "" if none is near."""
    plain = {spelling(path).lower(): path for path in paths}
    matches = difflib.get_close_matches(word.lower().replace("-", "_"), plain, n=1, cutoff=cutoff)
    return plain[matches[0]] if matches else ""
