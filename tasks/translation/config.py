"""Settings of the translation task."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from dsgdac_accel import GossipConfig
from dsgdac_accel.checks import LARGEST_FLOAT32, check_integer, check_number
from tasks.common.config_checks import check_below_one, check_run
from tasks.common.diagnostics import CurvatureConfig
from tasks.common.limits import MOST_LOADER_PROCESSES, check_parameters
from tasks.common.weight_average import WeightAverageConfig

_LARGEST_VOCABULARY = 10_000_000
_MOST_BEAMS = 1000
_LONGEST = 10_000  # tokens

LengthPenaltyKind = Literal["power", "gnmt"]


@dataclass(frozen=True, kw_only=True)
class TextConfig:
    """Sentence pairs and their tokens."""

    name: str | None = "grammar"
    """Data set: grammar (embedded English-German sentences, needs no network), wmt14, or the name of one on the Hub."""

    path: Path | None = None
    """Folder of local data, used instead of name: train, validation and test as *.parquet, *.jsonl, or pairs such as
    train.en and train.de; or the result of save_to_disk of `datasets`."""

    source: str = "en"
    """Source language: key of the translation column, name of the column, or suffix of the text files."""

    target: str = "de"
    """Target language, given like source."""

    target_language: str | None = None
    """Two-letter code of the target language for the tokenizer of compound-split BLEU. null takes `target`."""

    subset: str | None = None
    """Configuration of a data set on the Hub. null takes de-en for wmt14."""

    source_column: str | None = None
    """Column of the sources. null finds it by language."""

    target_column: str | None = None
    """Column of the translations. null finds it by language."""

    validation_split: str | None = None
    """Split for evaluations during training. null takes validation, valid, val or dev."""

    test_split: str | None = None
    """Split to translate and score at the end. null takes test."""

    train_limit: int | None = None
    """Number of training pairs to use, the first ones. null uses all."""

    max_length: int = 256
    """Longest side of a training pair, in tokens, its end included. Longer pairs are left out; evaluation uses every
    pair uncut."""

    truncation: bool = False
    """Cut the sides of training pairs to max_length tokens instead of leaving longer pairs out."""

    validation_fraction: float | None = None
    """Part of the training pairs, in (0, 0.5] and evenly spaced, to hold out as the validation split."""

    vocab_size: int = 37_000
    """Largest size of the joint vocabulary, trained on the training pairs. Little data can give fewer tokens."""

    tokenizer: Path | None = None
    """A tokenizer.json, or a folder with one, to use instead of training a tokenizer."""

    invalid_utf8: Literal["error", "replace"] = "error"
    """Treatment of bytes that are not UTF-8. error stops; replace writes U+FFFD in their place, in local training
    data only."""

    cache_dir: Path | None = None
    """Folder for tokenizers and tokenized pairs, stored by content. null is ~/.cache/dsgdac_accel (or below
    $XDG_CACHE_HOME). It may be deleted between runs."""

    def __post_init__(self) -> None:
        advice = "256 bytes and two special tokens must fit."
        check_integer("vocab_size", self.vocab_size, minimum=258, maximum=_LARGEST_VOCABULARY, advice=advice)
        check_integer("max_length", self.max_length, minimum=2, advice="The end of the sentence counts.")
        if self.train_limit is not None:
            check_integer("train_limit", self.train_limit, minimum=1, advice="Leave it out to use all.")
        if self.validation_fraction is not None:
            advice = "Leave it out to use the validation split of the data."
            check_number("validation_fraction", self.validation_fraction, above=0, maximum=0.5, advice=advice)
            if self.validation_split is not None:
                raise ValueError(
                    f"validation_fraction holds out training pairs, and validation_split names a split; got both, "
                    f"{self.validation_fraction} and {self.validation_split!r}. Leave one out."
                )
        if self.source == self.target:
            raise ValueError(f"source and target must be different languages; both are {self.source!r}. Change one.")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """An encoder-decoder Transformer of the transformers library: sinusoidal positions, one embedding for both
    languages."""

    size: Literal["tiny", "small", "base", "big"] = "big"
    """big and base are those of Vaswani et al. 2017; small takes minutes on a CPU, tiny is for tests."""

    norm: Literal["pre", "post"] = "post"
    """Place of the layer norms: post normalizes the output of each residual sum (Marian; Vaswani et al. 2017), pre the
    input of each sub-layer, with a last norm after each stack (Pegasus), which allows higher learning rates."""

    d_model: int | None = None
    """Width. null takes that of the size."""

    heads: int | None = None
    """Attention heads. null takes those of the size."""

    ffn: int | None = None
    """Width of the feed-forward layers. null takes that of the size."""

    encoder_layers: int | None = None
    """Layers of the encoder. null takes those of the size."""

    decoder_layers: int | None = None
    """Layers of the decoder. null takes those of the size."""

    dropout: float = 0.1
    """Dropout on embeddings and on the output of each sub-layer, in [0, 1)."""

    attention_dropout: float = 0.0
    """Dropout on attention weights, in [0, 1)."""

    activation_dropout: float = 0.0
    """Dropout inside the feed-forward layers, in [0, 1)."""

    attention: Literal["sdpa", "eager", "flash_attention_2"] = "sdpa"
    """Attention kernel of Transformers."""

    def __post_init__(self) -> None:
        for name, largest in _LARGEST.items():
            if getattr(self, name) is not None:
                check_integer(
                    name, getattr(self, name), minimum=1, maximum=largest, advice="Leave it out for the size."
                )
        d_model, heads = self.d_model or SIZES[self.size]["d_model"], self.heads or SIZES[self.size]["heads"]
        if d_model % (2 * heads):
            raise ValueError(
                f"d_model must be a multiple of 2 x heads, for equal heads and for sines with cosines; got d_model "
                f"{d_model} and {heads} heads. Change one of them."
            )
        sizes = {name: getattr(self, name) or size for name, size in SIZES[self.size].items()}
        ffn = 2 * d_model * sizes["ffn"]
        layers = sizes["encoder_layers"] * (4 * d_model**2 + ffn) + sizes["decoder_layers"] * (8 * d_model**2 + ffn)
        check_parameters("size", f"{self.size}, d_model {d_model}, ffn {sizes['ffn']}", layers)
        for name in ("dropout", "attention_dropout", "activation_dropout"):
            check_below_one(name, getattr(self, name), "drops everything")


SIZES: dict[str, dict[str, int]] = {
    "tiny": {"d_model": 32, "heads": 2, "ffn": 64, "encoder_layers": 1, "decoder_layers": 1},
    "small": {"d_model": 128, "heads": 4, "ffn": 256, "encoder_layers": 2, "decoder_layers": 2},
    "base": {"d_model": 512, "heads": 8, "ffn": 2048, "encoder_layers": 6, "decoder_layers": 6},
    "big": {"d_model": 1024, "heads": 16, "ffn": 4096, "encoder_layers": 6, "decoder_layers": 6},
}
"""Base and big are those of Vaswani et al. 2017, table 3."""

_LARGEST = {"d_model": 65_536, "heads": 1024, "ffn": 262_144, "encoder_layers": 1000, "decoder_layers": 1000}


@dataclass(frozen=True, kw_only=True)
class DecodingConfig:
    """Beam search."""

    beams: int = 4
    """Hypotheses kept per sentence. 1 is greedy search."""

    length_penalty: float = 0.6
    """Exponent in [-10, 10] of the length by which log-probabilities are divided to rank hypotheses."""

    length_penalty_kind: LengthPenaltyKind = "power"
    """The divisor for a hypothesis of L tokens: power is L^length_penalty, as in Transformers; gnmt is
    ((5 + L) / 6)^length_penalty (Wu et al. 2016, Vaswani et al. 2017)."""

    extra_length: int = 50
    """How many tokens longer than its source a translation can be, its end included."""

    batch_tokens: int = 8192
    """Tokens per worker and batch in evaluation: padded source tokens, times beams when decoding."""

    def __post_init__(self) -> None:
        check_integer("beams", self.beams, minimum=1, maximum=_MOST_BEAMS)
        check_integer("extra_length", self.extra_length, minimum=1, maximum=_LONGEST)
        check_integer("batch_tokens", self.batch_tokens, minimum=1)
        check_length_penalty(self.length_penalty)


def check_length_penalty(value: float) -> None:
    """Check an exponent of the length: large ones overflow, and 0 already ignores the length.

    >>> check_length_penalty(1e300)
    Traceback (most recent call last):
    ValueError: length_penalty must be a number in [-10, 10]; got 1e+300. Use 0.6, say; 0 ignores the length.
    """
    advice = "Use 0.6, say; 0 ignores the length."
    check_number("length_penalty", value, minimum=-10, maximum=10, advice=advice)


@dataclass(frozen=True, kw_only=True)
class TranslationConfig:
    """A run of the translation task. Steps, batch, learning rate and betas are the paper's for decentralized Adam."""

    algorithm: Literal["adam", "dadam", "dadam_ac"] = "dadam_ac"
    """adam averages gradients (DDP), dadam mixes with gamma 1, dadam_ac mixes with adaptive consensus."""

    gossip: GossipConfig = field(default_factory=lambda: GossipConfig(power=2.0))
    """Topology and gamma schedule of dadam and dadam_ac."""

    data: TextConfig = field(default_factory=TextConfig)
    """Sentence pairs and vocabulary."""

    model: ModelConfig = field(default_factory=ModelConfig)
    """Size and regularization of the Transformer."""

    decoding: DecodingConfig = field(default_factory=DecodingConfig)
    """Beam search over the test split."""

    num_train_epochs: int = 20
    """Passes over the training data."""

    max_steps: int | None = None
    """Optimizer steps after which to stop. null trains all epochs."""

    batch_tokens: int = 50_000
    """Source and target tokens per optimizer step over all workers and accumulation steps, with padding and sentence
    ends."""

    group_by_length: bool = True
    """Put pairs of similar lengths into a batch, which saves padding. false draws the pairs of a batch at random, and
    batch_tokens then counts tokens without padding."""

    gradient_accumulation_steps: int = 1
    """Micro-batches per optimizer step on each worker."""

    learning_rate: float = 1.3e-3
    """Learning rate a0 of the decay a0 (warmup_steps / t)^0.5 that follows the warm-up at steps t = 1, 2, ..."""

    warmup_steps: int = 4000
    """Optimizer steps of linear warm-up, at most max_steps."""

    warmup_learning_rate: float | None = None
    """Learning rate at the last step of the warm-up. null takes learning_rate; otherwise the learning rate jumps in the
    step after it."""

    betas: tuple[float, float] = (0.974, 0.999)
    """Decay rates of Adam's moments. Each worker has its own moments."""

    adam_epsilon: float = 1e-9
    """Epsilon in Adam's denominator."""

    weight_decay: float = 0.0
    """L2 penalty on all parameters."""

    max_grad_norm: float | None = None
    """Clip the gradient of each worker to this norm. null does not clip."""

    label_smoothing: float = 0.1
    """Weight of the uniform distribution in the target of the loss, in [0, 1). Padding is left out of the loss."""

    mixed_precision: Literal["no", "bf16", "fp16"] = "no"
    """Autocast type of forward and backward. Parameters stay float32, and evaluation is in float32."""

    compile: bool = False
    """Compile the model with torch.compile, for dynamic shapes."""

    eval_every: int = 1
    """Epochs between evaluations on the validation split (loss and greedy BLEU). The last epoch is always evaluated."""

    weight_average: WeightAverageConfig = field(default_factory=WeightAverageConfig)
    """Average of the weights over the steps (EMA, SWA, LAWA), evaluated and deployed in place of the last weights. lawa
    is the average of the last checkpoints that is usual for this benchmark."""

    show_translations: int = 3
    """Test sentences to print with their translations at the end."""

    logging_steps: int = 50
    """Optimizer steps between records in metrics.jsonl and the trackers."""

    report_to: tuple[str, ...] = ("tensorboard",)
    """Trackers of Accelerate to log to. An empty list uses none."""

    dataloader_num_workers: int = 0
    """Loader processes per worker."""

    seed: int = 0
    """Seed of initialization, data order and, for each worker, dropout."""

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

    output_dir: Path = Path("runs/wmt14")
    """Folder for the configuration, metrics, summary, plots, translations and the deployed model."""

    overwrite_output_dir: bool = False
    """true lets a new run replace a finished one in output_dir. Without it that is an error."""

    def __post_init__(self) -> None:
        check_run(self, plain_algorithm="dadam")
        refuse_augmentation(self.curvature)
        for name in ("batch_tokens", "warmup_steps"):
            check_integer(name, getattr(self, name), minimum=1)
        if self.warmup_learning_rate is not None:
            advice = "Use null for learning_rate."
            check_number(
                "warmup_learning_rate", self.warmup_learning_rate, above=0, maximum=LARGEST_FLOAT32, advice=advice
            )
        if self.max_steps is not None:
            check_integer("max_steps", self.max_steps, minimum=1)
        check_integer("dataloader_num_workers", self.dataloader_num_workers, minimum=0, maximum=MOST_LOADER_PROCESSES)
        check_integer("show_translations", self.show_translations, minimum=0)
        if self.max_steps is not None and self.warmup_steps > self.max_steps:
            raise ValueError(
                f"warmup_steps must be at most max_steps = {self.max_steps}, or the learning rate never reaches its "
                f"peak; got {self.warmup_steps}. Lower warmup_steps too."
            )
        start = self.gossip.start_step or 0
        if self.algorithm == "dadam_ac" and self.max_steps is not None and start > self.max_steps:
            raise ValueError(
                f"gossip.start_step must be at most max_steps = {self.max_steps}; got {start}, so that adaptive "
                f"consensus would never start. Use algorithm: dadam for none."
            )
        check_below_one("label_smoothing", self.label_smoothing, "ignores the references")
        if self.max_grad_norm is not None:
            check_number("max_grad_norm", self.max_grad_norm, above=0, advice="Use null for no clipping.")


def refuse_augmentation(curvature: CurvatureConfig) -> None:
    """Raise ValueError for `curvature.augment`, which pairs of sentences do not have."""
    if curvature.augment:
        raise ValueError(
            "curvature.augment must be false for translation, whose training pairs are not augmented. Leave it out."
        )
