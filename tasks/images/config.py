"""Settings of the image task."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from accelerate.utils import LoggerType

from dsgdac_accel import GossipConfig
from dsgdac_accel.checks import LARGEST_FLOAT32, LARGEST_SEED, check_choice, check_integer, check_number
from tasks.common.diagnostics import CurvatureConfig
from tasks.images.decoding import Resampling


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Which images."""

    name: str | None = "digits"
    """digits (embedded in scikit-learn, no network), cifar10, cifar100, or a data set's name on the Hub."""

    path: Path | None = None
    """Local data instead: a folder of train*.parquet and test*.parquet, or of train/<class>/ and test/<class>/, or what
    save_to_disk of `datasets` wrote."""

    image_column: str | None = None
    """Column of the images; null finds it by type and name."""

    label_column: str | None = None
    """Column of the labels; null finds it by type and name."""

    test_split: str | None = None
    """Split to evaluate on; null takes test, else validation."""

    test_fraction: float | None = None
    """Hold out this part of the training split as the test split."""

    image_size: int | None = None
    """Resize all images to this square."""

    resampling: Resampling = "bilinear"
    """How image_size resizes: bilinear, or box, the mean over the area that each new pixel covers (pooling)."""

    train_limit: int | None = None
    """Train on so many images of the training split only, the first ones unless draw_by_seed; null uses all."""

    test_limit: int | None = None
    """Evaluate on so many images of the test split only, the first ones unless draw_by_seed; null uses all."""

    draw_by_seed: bool = False
    """Let the run's seed draw the held-out test split (test_fraction, digits) and the images that the limits keep: runs
    of one seed share them, other seeds have others. By default all seeds have those of seed 0 and the first ones."""

    def __post_init__(self) -> None:
        for name in ("image_size", "train_limit", "test_limit"):
            if getattr(self, name) is not None:
                check_integer(name, getattr(self, name), minimum=1)


@dataclass(frozen=True, kw_only=True)
class CifarConfig:
    """A run of the image task. The defaults are the paper's CIFAR settings for 8 workers."""

    algorithm: Literal["sgd", "dsgd", "dsgd_ac", "sam", "adam", "dadam", "dadam_ac"] = "dsgd_ac"
    """sgd averages gradients (stock DDP), dsgd gossips with gamma 1, dsgd_ac with controlled disagreement; adam, dadam
    and dadam_ac are the same with Adam. sam is sgd with sharpness-aware minimization, at twice the compute."""

    gossip: GossipConfig = field(default_factory=GossipConfig)
    """Topology and gamma schedule of dsgd, dsgd_ac, dadam and dadam_ac."""

    data: DataConfig = field(default_factory=DataConfig)
    """Images and labels."""

    model: str = "wrn-28-10"
    """wrn-<depth>-<width> (Zagoruyko and Komodakis), transformer-<layers>-<width> (4 heads, the rows of the image as
    tokens; transformer is transformer-2-32), cnn-<channels>-<channels>-... (with max-pooling), cnn or mlp."""

    dropout: float = 0.0
    """Dropout inside the blocks of a wide ResNet or a Transformer."""

    num_train_epochs: int = 200
    """Passes over the training data."""

    global_batch_size: int = 128
    """GLOBAL batch: images per optimizer step over all workers and accumulation steps."""

    gradient_accumulation_steps: int = 1
    """Micro-batches that make up one optimizer step on each worker."""

    learning_rate: float = 0.1
    """Peak learning rate at this batch_size (the paper: 0.1 at 128, scaled linearly)."""

    warmup_epochs: float = 10.0
    """Epochs of linear warm-up, per step, before the cosine to 0."""

    momentum: float = 0.9
    """Momentum of SGD, and of sam; local to each worker."""

    betas: tuple[float, float] = (0.974, 0.999)
    """Adam's decay rates; the moments are local to each worker."""

    adam_epsilon: float = 1e-9
    """Adam's epsilon."""

    weight_decay: float = 5e-4
    """L2 penalty on all parameters, added to the gradient, also Adam's."""

    sam_rho: float = 0.05
    """Distance that sam ascends along the gradient before it takes the one to descend by."""

    label_noise: float = 0.0
    """Fraction of the training labels drawn anew, uniformly over all classes; test labels stay clean."""

    crop_padding: int = 4
    """Pixels of zero padding for the random crop; 0 switches it off."""

    flip: bool = True
    """Random horizontal flips; switch off where mirror images are another class (digits)."""

    mixed_precision: Literal["no", "bf16", "fp16"] = "no"
    """Autocast for forward and backward; parameters stay float32."""

    channels_last: bool = False
    """Memory format of model and images; faster convolutions on GPUs and often on CPUs."""

    compile: bool = False
    """torch.compile the model."""

    eval_every: int = 1
    """Epochs between evaluations of the deployed model; the last epoch is always evaluated."""

    eval_batch_size: int = 500
    """Images per worker and batch in evaluation."""

    calibrate: bool = True
    """Measure the deployed model's BatchNorm statistics on the training data before each evaluation."""

    logging_steps: int = 10
    """Optimizer steps between records in metrics.jsonl and the trackers."""

    report_to: tuple[str, ...] = ("tensorboard",)
    """Accelerate trackers to log to; an empty list for none."""

    dataloader_num_workers: int = 0
    """Processes per worker that read batches; the data is in memory, so 0 is fastest."""

    seed: int = 0
    """Of initialisation, data order, label noise and, per worker, augmentation."""

    curvature: CurvatureConfig = field(default_factory=CurvatureConfig)
    """When and how to measure the curvature at the deployed model."""

    save_steps: int | None = None
    """Optimizer steps between checkpoints of all workers in output_dir/checkpoints, the last step's always among them;
    null saves none."""

    save_total_limit: int = 2
    """Newest checkpoints to keep; older ones are deleted once a newer one is complete."""

    resume_from_checkpoint: Literal["auto", "never"] | Path = "auto"
    """auto goes on from the newest complete checkpoint in output_dir/checkpoints, if there is one, as if the run had
    not stopped; a path goes on from that checkpoint; never begins anew."""

    output_dir: Path = Path("runs/cifar")
    """Where config, metrics, summary, plots and the deployed model go."""

    def __post_init__(self) -> None:
        for name in (
            "num_train_epochs",
            "global_batch_size",
            "gradient_accumulation_steps",
            "eval_every",
            "eval_batch_size",
            "logging_steps",
        ):
            check_integer(name, getattr(self, name), minimum=1)
        for name in ("crop_padding", "dataloader_num_workers"):
            check_integer(name, getattr(self, name), minimum=0)
        check_integer("seed", self.seed, minimum=0, maximum=LARGEST_SEED)
        check_integer("save_total_limit", self.save_total_limit, minimum=1)
        if self.save_steps is not None:
            check_integer("save_steps", self.save_steps, minimum=1)
        for name in ("learning_rate", "adam_epsilon"):
            check_number(name, getattr(self, name), above=0, maximum=LARGEST_FLOAT32)
        advice = "algorithm: sgd is the limit of 0."
        check_number("sam_rho", self.sam_rho, above=0, maximum=LARGEST_FLOAT32, advice=advice)
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas must be two numbers in [0, 1), below 1; got {self.betas}.")
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum must be in [0, 1), below 1; got {self.momentum}. The paper's is 0.9.")
        check_number("weight_decay", self.weight_decay, minimum=0, maximum=LARGEST_FLOAT32)
        for name in ("warmup_epochs", "dropout"):
            check_number(name, getattr(self, name), minimum=0)
        check_number("label_noise", self.label_noise, minimum=0, maximum=1)
        for tracker in self.report_to:
            check_choice("report_to", tracker, [known.value for known in LoggerType])
        if self.gossip.start_epoch is not None and self.gossip.start_epoch > self.num_train_epochs:
            raise ValueError(
                f"gossip.start_epoch must be at most num_train_epochs = {self.num_train_epochs}, or adaptive consensus "
                f"never begins; got {self.gossip.start_epoch}. Use algorithm: dsgd for none."
            )
