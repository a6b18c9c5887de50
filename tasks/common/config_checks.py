"""Checks of the settings that both tasks have."""

from __future__ import annotations

from typing import Any

from accelerate.utils import LoggerType

from dsgdac_accel.checks import LARGEST_FLOAT32, LARGEST_SEED, check_choice, check_integer, check_number

_COUNTS = ("num_train_epochs", "gradient_accumulation_steps", "eval_every", "logging_steps", "save_total_limit")


def check_run(config: Any, plain_algorithm: str) -> None:
    """Check the settings that every run has.

    Args:
        config: a configuration of a task.
        plain_algorithm: the algorithm without adaptive consensus, for the way out.

    Raises:
        ValueError: a value is out of range.
    """
    for name in _COUNTS:
        check_integer(name, getattr(config, name), minimum=1)
    if config.save_steps is not None:
        check_integer("save_steps", config.save_steps, minimum=1, advice="Use null to save no checkpoints.")
    check_integer("dataloader_num_workers", config.dataloader_num_workers, minimum=0)
    check_integer("seed", config.seed, minimum=0, maximum=LARGEST_SEED)
    for name in ("learning_rate", "adam_epsilon"):
        check_number(name, getattr(config, name), above=0, maximum=LARGEST_FLOAT32)
    check_number("weight_decay", config.weight_decay, minimum=0, maximum=LARGEST_FLOAT32)
    if not all(0 <= beta < 1 for beta in config.betas):
        raise ValueError(f"betas must be two numbers in [0, 1), below 1; got {config.betas}. Use 0.9, 0.999, say.")
    for tracker in config.report_to:
        check_choice("report_to", tracker, [known.value for known in LoggerType])
    averaged_from = config.weight_average.start_epoch
    if averaged_from is not None and averaged_from >= config.num_train_epochs:
        raise ValueError(
            f"weight_average.start_epoch must be below num_train_epochs = {config.num_train_epochs}, or nothing is "
            f"averaged; got {averaged_from}. Lower it, or use weight_average.kind: none."
        )
    start = config.gossip.start_epoch
    if start is not None and start > config.num_train_epochs:
        raise ValueError(
            f"gossip.start_epoch must be at most num_train_epochs = {config.num_train_epochs}; got {start}, so that "
            f"adaptive consensus would never start. Lower it (--gossip.start_epoch 0), or use algorithm: "
            f"{plain_algorithm} for none."
        )


def check_below_one(name: str, value: float, reason: str) -> None:
    """Require a number in [0, 1).

    >>> check_below_one("dropout", 1.0, "drops everything")
    Traceback (most recent call last):
    ValueError: dropout must be in [0, 1), below 1; got 1.0. 1 drops everything.
    """
    if check_number(name, value, minimum=0, maximum=1) == 1:
        raise ValueError(f"{name} must be in [0, 1), below 1; got {value}. 1 {reason}.")
