"""Settings of the translation task."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from accelerate.utils import LoggerType

from dsgdac_accel import GossipConfig
from dsgdac_accel.checks import LARGEST_FLOAT32, LARGEST_SEED, check_choice, check_integer, check_number
from tasks.common.diagnostics import CurvatureConfig


@dataclass(frozen=True, kw_only=True)
class TextConfig:
    """Which sentence pairs, and in which tokens."""

    name: str | None = "grammar"
    """grammar (embedded English-German sentences, no network), wmt14, or a data set's name on the Hub."""

    path: Path | None = None
    """Local data instead: a folder of train, validation and test as *.parquet, *.jsonl, or pairs like train.en and
    train.de; or what save_to_disk of `datasets` wrote."""

    source: str = "en"
    """Language to translate from: key of the translation column, name of the column, or ending of the text files."""

    target: str = "de"
    """Language to translate into."""

    target_language: str | None = None
    """Two-letter code of the target language, for the tokeniser of compound-split BLEU; null takes `target`."""

    subset: str | None = None
    """Configuration of a data set on the Hub; null takes de-en for wmt14."""

    source_column: str | None = None
    """Column of the sources; null finds it by language."""

    target_column: str | None = None
    """Column of the translations; null finds it by language."""

    validation_split: str | None = None
    """Split for the evaluations during training; null takes validation, valid, val or dev."""

    test_split: str | None = None
    """Split to translate and score at the end; null takes test."""

    train_limit: int | None = None
    """Train on the first so many pairs only; null uses all."""

    max_length: int = 256
    """Leave out training pairs with a longer side, in tokens; evaluation leaves out and cuts nothing."""

    vocab_size: int = 37_000
    """Most tokens in the joint vocabulary that is trained on the training pairs; few data may give fewer."""

    tokenizer: Path | None = None
    """A ready tokenizer.json, or a folder with one, instead of training."""

    invalid_utf8: Literal["error", "replace"] = "error"
    """Stop at bytes that are no UTF-8, or put U+FFFD in their place, which is done in local training data only."""

    cache_dir: Path | None = None
    """Where tokenizers and tokenised pairs are kept, by content; null is ~/.cache/dsgdac_accel (or below
    $XDG_CACHE_HOME). May be deleted at any time between runs."""

    def __post_init__(self) -> None:
        check_integer("vocab_size", self.vocab_size, minimum=258, advice="256 bytes and two special tokens must fit.")
        check_integer("max_length", self.max_length, minimum=2, advice="The end of the sentence counts.")
        if self.train_limit is not None:
            check_integer("train_limit", self.train_limit, minimum=1)
        if self.source == self.target:
            raise ValueError(f"source and target must be different languages; both are {self.source!r}.")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A Marian encoder-decoder (post-norm Transformer, sinusoidal positions, one embedding for everything)."""

    size: Literal["tiny", "small", "base", "big"] = "big"
    """big and base as in Vaswani et al. 2017; small for minutes on a CPU, tiny for tests."""

    d_model: int | None = None
    """Width; null takes that of the size."""

    heads: int | None = None
    """Attention heads; null takes those of the size."""

    ffn: int | None = None
    """Width of the feed-forward layers; null takes that of the size."""

    encoder_layers: int | None = None
    """Layers of the encoder; null takes those of the size."""

    decoder_layers: int | None = None
    """Layers of the decoder; null takes those of the size."""

    dropout: float = 0.1
    """On embeddings and on the output of every sub-layer."""

    attention_dropout: float = 0.0
    """On attention weights."""

    activation_dropout: float = 0.0
    """Inside the feed-forward layers."""

    attention: Literal["sdpa", "eager", "flash_attention_2"] = "sdpa"
    """Attention kernel, as Transformers offers it."""

    def __post_init__(self) -> None:
        for name in ("d_model", "heads", "ffn", "encoder_layers", "decoder_layers"):
            if getattr(self, name) is not None:
                check_integer(name, getattr(self, name), minimum=1)
        for name in ("dropout", "attention_dropout", "activation_dropout"):
            check_number(name, getattr(self, name), minimum=0, maximum=1)
            if getattr(self, name) == 1:
                raise ValueError(f"{name} must be below 1, which drops everything; got 1.")


@dataclass(frozen=True, kw_only=True)
class DecodingConfig:
    """How translations are searched for."""

    beams: int = 4
    """Hypotheses kept per sentence; 1 is greedy."""

    length_penalty: float = 0.6
    """Hypotheses are compared by log-probability / length^penalty, as Transformers does."""

    extra_length: int = 50
    """A translation has at most as many tokens as its source and so many more, its end included."""

    batch_tokens: int = 8192
    """Tokens per worker and batch in evaluation: padded source tokens, times beams when decoding."""

    def __post_init__(self) -> None:
        for name in ("beams", "extra_length", "batch_tokens"):
            check_integer(name, getattr(self, name), minimum=1)
        check_number("length_penalty", self.length_penalty)


@dataclass(frozen=True, kw_only=True)
class TranslationConfig:
    """A run of the translation task. Steps, batch, rate and betas are by default the paper's for decentralized Adam."""

    algorithm: Literal["adam", "dadam", "dadam_ac"] = "dadam_ac"
    """adam averages gradients (stock DDP), dadam gossips with gamma 1, dadam_ac with controlled disagreement."""

    gossip: GossipConfig = field(default_factory=lambda: GossipConfig(power=2.0))
    """Topology and gamma schedule of dadam and dadam_ac."""

    data: TextConfig = field(default_factory=TextConfig)
    """Sentence pairs and vocabulary."""

    model: ModelConfig = field(default_factory=ModelConfig)
    """Size and regularisation of the Transformer."""

    decoding: DecodingConfig = field(default_factory=DecodingConfig)
    """Beam search over the test split."""

    num_train_epochs: int = 20
    """Passes over the training data."""

    max_steps: int | None = None
    """Stop after so many optimizer steps; null trains all epochs."""

    batch_tokens: int = 50_000
    """GLOBAL batch: source and target tokens, padding and sentence ends included, per optimizer step over all workers
    and accumulation steps."""

    gradient_accumulation_steps: int = 1
    """Micro-batches that make up one optimizer step on each worker."""

    learning_rate: float = 1.3e-3
    """Peak learning rate a0, reached at the last step of the warm-up."""

    warmup_steps: int = 4000
    """Optimizer steps of linear warm-up; from there on the rate is a0 (warmup_steps / t)^0.5 at step t = 1, 2, ..."""

    betas: tuple[float, float] = (0.974, 0.999)
    """Adam's decay rates; the moments are local to each worker."""

    adam_epsilon: float = 1e-9
    """Adam's epsilon."""

    weight_decay: float = 0.0
    """L2 penalty on all parameters."""

    max_grad_norm: float | None = None
    """Clip this worker's gradient to this norm; null does not clip."""

    label_smoothing: float = 0.1
    """Weight of the uniform distribution in the target of the loss, over real tokens only."""

    mixed_precision: Literal["no", "bf16", "fp16"] = "no"
    """Autocast for forward and backward; parameters stay float32. Evaluation is in float32."""

    compile: bool = False
    """torch.compile the model, with dynamic shapes."""

    eval_every: int = 1
    """Epochs between evaluations on the validation split (loss and greedy BLEU); the last epoch is always evaluated."""

    average_last: int = 1
    """Deploy the average of the last so many deployed models, as is usual for this benchmark; 1 takes the last."""

    average_every: int | None = None
    """Optimizer steps between the models to average, the last step's always among them; null takes one per epoch."""

    show_translations: int = 3
    """Test sentences to print with their translations at the end."""

    logging_steps: int = 50
    """Optimizer steps between records in metrics.jsonl and the trackers."""

    report_to: tuple[str, ...] = ("tensorboard",)
    """Accelerate trackers to log to; an empty list for none."""

    dataloader_num_workers: int = 0
    """Processes per worker that read batches."""

    seed: int = 0
    """Of initialisation, data order and, per worker, dropout."""

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

    output_dir: Path = Path("runs/wmt14")
    """Where config, metrics, summary, plots, translations and the deployed model go."""

    def __post_init__(self) -> None:
        for name in (
            "num_train_epochs",
            "batch_tokens",
            "gradient_accumulation_steps",
            "warmup_steps",
            "eval_every",
            "logging_steps",
            "average_last",
            "save_total_limit",
        ):
            check_integer(name, getattr(self, name), minimum=1)
        for name in ("max_steps", "average_every", "save_steps"):
            if getattr(self, name) is not None:
                check_integer(name, getattr(self, name), minimum=1)
        for name in ("show_translations", "dataloader_num_workers"):
            check_integer(name, getattr(self, name), minimum=0)
        check_integer("seed", self.seed, minimum=0, maximum=LARGEST_SEED)
        for name in ("learning_rate", "adam_epsilon"):
            check_number(name, getattr(self, name), above=0, maximum=LARGEST_FLOAT32)
        check_number("weight_decay", self.weight_decay, minimum=0, maximum=LARGEST_FLOAT32)
        check_number("label_smoothing", self.label_smoothing, minimum=0, maximum=1)
        if self.label_smoothing == 1:
            raise ValueError("label_smoothing must be below 1, which ignores the references; got 1.")
        if self.average_every is not None and self.average_last == 1:
            raise ValueError(
                f"average_every spaces the models of an average; got {self.average_every} with average_last = 1, which "
                f"averages none. Set average_last, or leave average_every out."
            )
        if self.max_grad_norm is not None:
            check_number("max_grad_norm", self.max_grad_norm, above=0)
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas must be two numbers in [0, 1), below 1; got {self.betas}.")
        for tracker in self.report_to:
            check_choice("report_to", tracker, [known.value for known in LoggerType])
        if self.gossip.start_epoch is not None and self.gossip.start_epoch > self.num_train_epochs:
            raise ValueError(
                f"gossip.start_epoch must be at most num_train_epochs = {self.num_train_epochs}, or adaptive consensus "
                f"never begins; got {self.gossip.start_epoch}. Use algorithm: dadam for none."
            )
