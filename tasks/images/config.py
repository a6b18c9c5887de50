"""Settings of the image task."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from dsgdac_accel import GossipConfig
from dsgdac_accel.checks import LARGEST_FLOAT32, check_integer, check_number
from tasks.common.config_checks import check_below_one, check_run
from tasks.common.diagnostics import CurvatureConfig
from tasks.common.limits import MOST_LOADER_PROCESSES
from tasks.common.weight_average import WeightAverageConfig
from tasks.images.decoding import Resampling
from tasks.images.models import parse_model_name

_LARGEST_IMAGE = 4096  # pixels a side


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Images and labels."""

    name: str | None = "digits"
    """Data set: digits (part of scikit-learn, needs no network), cifar10, cifar100, or the name of one on the Hub."""

    path: Path | None = None
    """Folder of local data, used instead of name: train*.parquet and test*.parquet, train/<class>/ and test/<class>/,
    or the result of save_to_disk of `datasets`."""

    image_column: str | None = None
    """Column of the images. null finds it by type and name."""

    label_column: str | None = None
    """Column of the labels. null finds it by type and name."""

    test_split: str | None = None
    """Split to evaluate on. null takes test, or else validation."""

    test_fraction: float | None = None
    """Part of the training split, in (0, 1), that is held out as the test split."""

    image_size: int | None = None
    """Resize all images to squares of this many pixels a side."""

    resampling: Resampling = "bilinear"
    """How image_size resizes: bilinear, or box, which averages the area that each new pixel covers."""

    train_limit: int | None = None
    """Number of training images to use. They are the first ones unless draw_by_seed is true; null uses all."""

    test_limit: int | None = None
    """Number of test images to use. They are the first ones unless draw_by_seed is true; null uses all."""

    validation_limit: int | None = None
    """Number of test images to set aside as a validation split, even over the classes, for choosing settings. They give
    validation_loss and validation_accuracy, and the remaining ones the test figures. null sets none aside."""

    shards: Literal["reshuffled", "fixed"] = "reshuffled"
    """reshuffled deals the training images out anew in each epoch; fixed gives each worker the same shard throughout,
    in a new order in each epoch."""

    draw_by_seed: bool = False
    """Let the seed of the run choose the held-out test split (test_fraction, digits) and the images within the limits.
    false gives every seed the images of seed 0 and the first ones."""

    def __post_init__(self) -> None:
        for name in ("train_limit", "test_limit", "validation_limit"):
            if getattr(self, name) is not None:
                check_integer(name, getattr(self, name), minimum=1, advice="Leave it out to use all.")
        if self.test_fraction is not None and not 0 < self.test_fraction < 1:
            raise ValueError(f"test_fraction must be in (0, 1), exclusive; got {self.test_fraction}. Use 0.1, say.")
        if self.image_size is not None:
            advice = "It is the number of pixels a side."
            check_integer("image_size", self.image_size, minimum=1, maximum=_LARGEST_IMAGE, advice=advice)


@dataclass(frozen=True, kw_only=True)
class CifarConfig:
    """A run of the image task. The defaults are the paper's CIFAR settings for 8 workers."""

    algorithm: Literal["sgd", "dsgd", "dsgd_ac", "sam", "adam", "dadam", "dadam_ac"] = "dsgd_ac"
    """sgd averages gradients (DDP), dsgd mixes with gamma 1, dsgd_ac mixes with adaptive consensus; adam, dadam and
    dadam_ac do the same with Adam. sam is sgd with sharpness-aware minimization, at twice the compute."""

    gossip: GossipConfig = field(default_factory=GossipConfig)
    """Topology and gamma schedule of dsgd, dsgd_ac, dadam and dadam_ac."""

    data: DataConfig = field(default_factory=DataConfig)
    """Images and labels."""

    model: str = "wrn-28-10"
    """wrn-<depth>-<width> (Zagoruyko and Komodakis), transformer-<layers>-<width> (4 heads, the rows of the image are
    the tokens; transformer is transformer-2-32), cnn-<channels>-<channels>-... (with max-pooling), cnn or mlp."""

    dropout: float = 0.0
    """Dropout in the blocks of a wide ResNet or a Transformer, in [0, 1)."""

    num_train_epochs: int = 200
    """Passes over the training data."""

    global_batch_size: int = 128
    """Images per optimizer step, over all workers and accumulation steps."""

    gradient_accumulation_steps: int = 1
    """Micro-batches per optimizer step on each worker."""

    learning_rate: float = 0.1
    """Peak learning rate at this global_batch_size (in the paper 0.1 at 128, scaled linearly)."""

    warmup_epochs: float = 10.0
    """Epochs of linear warm-up, at most num_train_epochs. A cosine to 0 follows. Both change in every step."""

    momentum: float = 0.9
    """Momentum of sgd, dsgd, dsgd_ac and sam, in [0, 1). Each worker has its own."""

    betas: tuple[float, float] = (0.974, 0.999)
    """Decay rates of Adam's moments. Each worker has its own moments."""

    adam_epsilon: float = 1e-9
    """Epsilon in Adam's denominator."""

    weight_decay: float = 5e-4
    """L2 penalty on all parameters. It is added to the gradient, also with Adam unless decoupled_weight_decay."""

    decoupled_weight_decay: bool = False
    """Shrink the parameters by learning rate times weight_decay instead (AdamW), with adam, dadam and dadam_ac."""

    no_decay: bool = False
    """Leave biases and the parameters of normalization layers (all with one dimension) out of weight_decay."""

    sam_rho: float = 0.05
    """Radius of sam: the length of the ascent step along the gradient."""

    sam_per_worker: bool = False
    """Let each worker of sam ascend along the gradient of its own part of the batch (m-SAM, Foret et al. 2021) instead
    of the average gradient. The gradients at the points that they reach are averaged."""

    label_noise: float = 0.0
    """Fraction of the training labels to redraw uniformly from all classes. Test labels stay as they are."""

    crop_padding: int = 4
    """Pixels of zero padding for the random crop. 0 switches it off."""

    flip: bool = True
    """Random horizontal flips. Switch them off if a mirror image belongs to another class (digits)."""

    mixed_precision: Literal["no", "bf16", "fp16"] = "no"
    """Autocast type of forward and backward in training. Parameters stay float32, and evaluation is in float32."""

    channels_last: bool = False
    """Memory format of model and images. It speeds up convolutions on GPUs and often on CPUs."""

    compile: bool = False
    """Compile the model with torch.compile."""

    eval_every: int = 1
    """Epochs between evaluations of the deployed model. The last epoch is always evaluated."""

    eval_batch_size: int = 500
    """Images per worker and batch in evaluation."""

    calibrate: bool = True
    """Measure the BatchNorm statistics of the deployed model on the training data before each evaluation."""

    logging_steps: int = 10
    """Optimizer steps between records in metrics.jsonl and the trackers."""

    report_to: tuple[str, ...] = ("tensorboard",)
    """Trackers of Accelerate to log to. An empty list uses none."""

    dataloader_num_workers: int = 0
    """Loader processes per worker. The data is in memory, so 0 is fastest."""

    seed: int = 0
    """Seed of initialization, data order, label noise and, for each worker, augmentation."""

    weight_average: WeightAverageConfig = field(default_factory=WeightAverageConfig)
    """Average of the weights over the steps (EMA, SWA, LAWA), deployed in place of the last weights."""

    curvature: CurvatureConfig = field(default_factory=CurvatureConfig)
    """When and how to measure the curvature at the deployed model."""

    save_steps: int | None = None
    """Optimizer steps between checkpoints of all workers in output_dir/checkpoints. The last step is always saved; null
    saves none."""

    save_total_limit: int = 2
    """Number of checkpoints to keep. Older ones are deleted once a newer one is complete."""

    resume_from_checkpoint: Literal["auto", "never"] | Path = "auto"
    """auto resumes from the newest complete checkpoint in output_dir/checkpoints, if there is one, as if the run had
    not stopped. A path resumes from that checkpoint. never starts from the beginning."""

    output_dir: Path = Path("runs/cifar")
    """Folder for the configuration, metrics, summary, plots and the deployed model."""

    overwrite_output_dir: bool = False
    """true lets a new run replace a finished one in output_dir. Without it that is an error."""

    def __post_init__(self) -> None:
        check_run(self, plain_algorithm="dsgd")
        for name in ("global_batch_size", "eval_batch_size"):
            check_integer(name, getattr(self, name), minimum=1)
        check_integer("dataloader_num_workers", self.dataloader_num_workers, minimum=0, maximum=MOST_LOADER_PROCESSES)
        check_integer("crop_padding", self.crop_padding, minimum=0, advice="Use 0 for no random crop.")
        if self.data.image_size is not None and self.crop_padding >= self.data.image_size:
            raise ValueError(
                f"crop_padding must be below data.image_size = {self.data.image_size}, or a crop can miss the image; "
                f"got {self.crop_padding}. Use 0 for no random crop."
            )
        advice = "Use algorithm: sgd for the limit of 0."
        check_number("sam_rho", self.sam_rho, above=0, maximum=LARGEST_FLOAT32, advice=advice)
        if self.sam_per_worker and self.algorithm != "sam":
            raise ValueError(
                f"sam_per_worker is for algorithm: sam; got algorithm: {self.algorithm}. Leave sam_per_worker out."
            )
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum must be in [0, 1), below 1; got {self.momentum}. The paper uses 0.9.")
        check_number("label_noise", self.label_noise, minimum=0, maximum=1)
        check_number("warmup_epochs", self.warmup_epochs, minimum=0)
        if self.warmup_epochs > self.num_train_epochs:
            raise ValueError(
                f"warmup_epochs must be at most num_train_epochs = {self.num_train_epochs}, or the learning rate never "
                f"reaches its peak; got {self.warmup_epochs:g}. Lower warmup_epochs too."
            )
        check_below_one("dropout", self.dropout, "drops everything")
        if self.decoupled_weight_decay and "adam" not in self.algorithm:
            raise ValueError(
                f"decoupled_weight_decay is for adam, dadam and dadam_ac; got it with algorithm {self.algorithm}. "
                f"Leave it out, or choose one of them."
            )
        if self.weight_average.kind != "none" and not self.calibrate:
            raise ValueError(
                f"calibrate must be true with weight_average.kind = {self.weight_average.kind}, since no worker has "
                f"BatchNorm statistics of the averaged weights; got false. Leave it out."
            )
        parse_model_name(self.model, self.dropout)
