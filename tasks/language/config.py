"""Settings of the language task."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from dsgdac_accel import GossipConfig
from dsgdac_accel.checks import LARGEST_FLOAT32, LARGEST_SEED, check_integer, check_number


@dataclass(frozen=True, kw_only=True)
class LanguageConfig:
    """A causal language model, trained from scratch or fine-tuned."""

    algorithm: Literal["sgd", "dsgd", "dsgd_ac", "adam", "dadam", "dadam_ac"] = "dadam_ac"
    """sgd averages gradients (DDP), dsgd mixes with gamma 1, dsgd_ac mixes with adaptive consensus; adam, dadam and
    dadam_ac do the same with AdamW."""

    gossip: GossipConfig = field(default_factory=GossipConfig)
    """Topology and gamma schedule of dsgd, dsgd_ac, dadam and dadam_ac."""

    text: Literal["numpy", "python"] = "python"
    """Text to train on: the docstrings of the installed NumPy, or the reference of the Python language."""

    model: Path | None = None
    """Folder of a saved causal language model and its tokenizer, to fine-tune. null trains a Llama of 2 layers and
    width 96 from scratch, with a tokenizer of 1,024 pieces."""

    block_size: int = 128
    """Tokens per training sequence."""

    num_train_epochs: int = 4
    """Passes over the training text."""

    global_batch_size: int = 16
    """Sequences per optimizer step, over all workers."""

    learning_rate: float = 1e-3
    """Peak learning rate. A cosine to 0 follows the warm-up."""

    warmup_steps: int = 0
    """Optimizer steps of linear warm-up."""

    momentum: float = 0.9
    """Momentum of sgd, dsgd and dsgd_ac, in [0, 1). Each worker has its own."""

    seed: int = 0
    """Draws the held-out sections, the initial weights, and the order of the batches."""

    output_dir: Path = Path("runs/language")
    """Folder for config.yaml, summary.json and deployed/."""

    def __post_init__(self) -> None:
        for name in ("num_train_epochs", "global_batch_size"):
            check_integer(name, getattr(self, name), minimum=1)
        check_integer("block_size", self.block_size, minimum=2, maximum=4096)
        check_integer("warmup_steps", self.warmup_steps, minimum=0)
        check_integer("seed", self.seed, minimum=0, maximum=LARGEST_SEED)
        check_number("learning_rate", self.learning_rate, above=0, maximum=LARGEST_FLOAT32)
        check_number("momentum", self.momentum, minimum=0, maximum=1)
