"""A training run of the translation task."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import numpy as np
import torch
from accelerate.utils import DataLoaderConfiguration, TorchDynamoPlugin, set_seed
from torch import Tensor, nn
from torch.utils.data import DataLoader

from dsgdac_accel.curvature import CurvatureReport
from dsgdac_accel.distributed.model_state import cloned
from tasks.common.algorithms import make_accelerator
from tasks.common.checkpoints import checkpoint_to_resume, step_of_own
from tasks.common.diagnostics import curvature_line, curvature_metrics, measure_in_training
from tasks.common.limits import check_steps
from tasks.common.lr_schedules import inverse_square_root
from tasks.common.output_dir import OutputDir, writing_model
from tasks.common.precision import check_precision
from tasks.common.progress import say
from tasks.common.training_loop import Prepared, TrainingLoop
from tasks.translation.batches import Collate, TokenBatches
from tasks.translation.config import TranslationConfig
from tasks.translation.curvature import curvature_batches, translation_loss
from tasks.translation.data import load_translation_data
from tasks.translation.decoding import Translations
from tasks.translation.evaluation import Evaluator, write_translations
from tasks.translation.model import (
    DEFAULT_POSITIONS,
    Translator,
    build_model,
    decoder_start,
    save_translator,
    trained_parameters,
)
from tasks.translation.scores import check_language, one_line
from tasks.translation.step_loss import StepLoss

TASK = "wmt14"
MAY_CHANGE = ("num_train_epochs", "max_steps", "decoding.", "show_translations", "data.cache_dir")
"""Settings that a resumed run may change, besides those of all tasks."""

TRAIN_SAMPLE = 2000
"""Training pairs, evenly spaced over the split, on which the training loss of the deployed model is measured."""


class TranslationRun:
    """One training run: trains, evaluates the deployed model and writes the output folder.

    Creating it loads the data and builds everything that settings can spoil, before the output folder is touched.

    Args:
        config: settings of the run.

    Raises:
        ConfigError: settings that do not fit each other, the data or the number of workers.
        ValueError, OSError, RuntimeError: data, a launch or an output folder that cannot be used.
    """

    def __init__(self, config: TranslationConfig) -> None:
        self.config = config
        check_precision(config.mixed_precision)
        set_seed(config.seed)
        target_language = config.data.target_language or config.data.target
        check_language(target_language)
        # Before there is a process group: one worker may tokenize millions of pairs, and no collective times out.
        self.data = load_translation_data(config.data)
        self.batches = self._plan_batches()
        steps_per_epoch = self.batches.steps_per_epoch
        total_steps = min(config.num_train_epochs * steps_per_epoch, config.max_steps or sys.maxsize)
        check_steps(total_steps)
        self.accelerator = make_accelerator(
            config.algorithm,
            config.gossip,
            total_steps,
            steps_per_epoch,
            mixed_precision=config.mixed_precision,
            gradient_accumulation_steps=config.gradient_accumulation_steps,
            # Batches are dealt out whole, equally many to each worker.
            dataloader_config=DataLoaderConfiguration(split_batches=False, even_batches=False),
            dynamo_plugin=TorchDynamoPlugin(backend="inductor" if config.compile else "no", dynamic=True),
            log_with=list(config.report_to) or None,
            project_dir=str(config.output_dir),
        )
        self._check_launch()
        self.output = OutputDir(config, self.accelerator)
        checkpoint = checkpoint_to_resume(config, self.accelerator, TASK, MAY_CHANGE)
        prepared = Prepared(*self.accelerator.prepare(*self._build()))
        self.model, self.optimizer, self.loader, _ = prepared
        self.step_loss = StepLoss(config, self.accelerator, self.batches)
        self.evaluator = Evaluator(
            self.data.tokenizer, self.accelerator.group, config.decoding, config.label_smoothing, target_language
        )
        self._timed_tokens, self._timed_seconds = 0, 0.0
        self.curvature: CurvatureReport | None = None
        """Curvature at the last evaluation."""
        self.loop = TrainingLoop(TASK, config, self.accelerator, prepared, self.output, steps_per_epoch, total_steps)
        if checkpoint is not None:
            self.accelerator.load_state(checkpoint)
        self.output.begin(step_of_own(checkpoint, config), self.loop.log_bytes)

    def _plan_batches(self) -> TokenBatches:
        config, train = self.config, self.data.train
        processes, local_workers = int(os.environ.get("WORLD_SIZE", "1")), config.gossip.workers_per_process
        return TokenBatches(
            train.source_lengths,
            train.target_lengths,
            config.batch_tokens,
            processes * local_workers,
            config.gradient_accumulation_steps,
            config.seed,
            per_process=local_workers,
            group_by_length=config.group_by_length,
        )

    def _check_launch(self) -> None:
        planned, found = self.batches.workers, self.accelerator.num_workers
        if planned != found:
            raise RuntimeError(
                f"the launcher set WORLD_SIZE for {planned} workers, but {found} joined. Use accelerate launch or "
                f"torchrun."
            )

    def _build(self) -> tuple[Translator, Any, DataLoader, Any]:
        """Model, optimizer, loader and scheduler, to be prepared. Raises ValueError for an impossible model."""
        config, tokenizer, batches = self.config, self.data.tokenizer, self.batches
        longest = int(max(batches.source_lengths.max(), batches.target_lengths.max()))
        self.positions = max(DEFAULT_POSITIONS, longest)
        model = build_model(
            config.model, len(tokenizer), tokenizer.pad_token_id, tokenizer.eos_token_id, self.positions
        )
        self.parameters = trained_parameters(model)
        self.collate = Collate(tokenizer.pad_token_id, decoder_start(model))
        optimizer = torch.optim.Adam(
            [parameter for parameter in model.parameters() if parameter.requires_grad],
            lr=config.learning_rate,
            betas=config.betas,
            eps=config.adam_epsilon,
            weight_decay=config.weight_decay,
            fused=True,
        )
        warmup_peak = (config.warmup_learning_rate or config.learning_rate) / config.learning_rate
        scheduler = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: inverse_square_root(step, config.warmup_steps, warmup_peak)
        )
        loader = DataLoader(
            self.data.train.pairs,
            batch_sampler=batches,
            collate_fn=self.collate,
            num_workers=config.dataloader_num_workers,
        )
        return model, optimizer, loader, scheduler

    def described(self) -> str:
        """Algorithm, data, size, workers and steps in one line."""
        workers, step = self.accelerator.num_workers, self.loop.step
        return (
            f"{self.config.algorithm} on {self.data.origin}: {self.data.train.described()}, {self.parameters:,} "
            f"parameters, {workers} worker{'s' if workers > 1 else ''}, {self.loop.total_steps} steps of "
            f"{'at most' if self.config.group_by_length else 'about'} {self.config.batch_tokens} tokens "
            f"({self.batches.padding:.1%} padding){f', resumed at step {step}' if step else ''}"
        )

    def train(self) -> None:
        """Train all steps, with a validation every `eval_every` epochs; then translate and score the test split."""
        self.loop.run(self)
        self._finish()

    # ---- what the training loop calls

    def begin_epoch(self) -> None:
        """Choose the order of the epoch."""
        self.batches.set_epoch(self.loop.epoch)
        self.step_loss.begin_epoch()
        source_tokens, target_tokens = self.batches.epoch_tokens()
        self._step_tokens = (source_tokens + target_tokens).sum(axis=(1, 2))
        self._own_target_tokens = self.step_loss.local(target_tokens).sum(axis=-1)
        self._micro_step = 0
        self._timed_at = time.perf_counter()

    def backward(self, batch: dict[str, Tensor]) -> tuple[Tensor, float]:
        """Compute the gradients of a micro-batch and clip them. Returns (loss, 1) summed over its real tokens."""
        labels = batch.pop("labels")
        in_epoch = self.loop.step - self._first_step_of_epoch
        loss, total = self.step_loss(self.model, batch, labels, in_epoch, self._micro_step)
        tokens = float(self._own_target_tokens[in_epoch, self._micro_step])
        self.accelerator.backward(loss)
        self._micro_step += 1
        if self.accelerator.sync_gradients and self.config.max_grad_norm is not None:
            self.accelerator.clip_grad_norm_(self.model.parameters(), self.config.max_grad_norm)
        return total, tokens

    def after_step(self) -> None:
        """Count the tokens of the step."""
        self._micro_step = 0
        self._timed_tokens += int(self._step_tokens[self.loop.step - 1 - self._first_step_of_epoch])

    def record_values(self) -> tuple[dict[str, float], dict[str, str]]:
        """Tokens of all workers per second of training since the last record, or since the run was resumed."""
        self._time_training()
        speed = self._timed_tokens / self._timed_seconds
        self._timed_tokens, self._timed_seconds = 0, 0.0
        return {"train/tokens_per_second": speed}, {"tokens/s": f"{speed:.0f}"}

    def end_epoch(self) -> None:
        """Stop the time for the evaluation."""
        self._time_training()

    def _time_training(self) -> None:
        now = time.perf_counter()
        self._timed_seconds += now - self._timed_at
        self._timed_at = now

    @property
    def _first_step_of_epoch(self) -> int:
        return self.loop.epoch * self.loop.steps_per_epoch

    def evaluate(self, done: bool, measure_curvature: bool) -> None:
        """Log loss, perplexity and greedy BLEU of the deployed model on the validation split. Collective."""
        pairs, loop = self.data.validation, self.loop
        with loop.deployed_model() as deployed:
            model = self._bare(deployed)
            losses = self.evaluator.losses(model, pairs.source_ids, pairs.target_ids)
            found = self.evaluator.translations(model, pairs, greedy=True)
            self.curvature = self._measure_curvature(deployed) if measure_curvature else None
        bleu = self.evaluator.scores(found.texts, pairs)["bleu"]
        values = {f"validation/{name}": value for name, value in losses.items()}
        values |= curvature_metrics(self.curvature) if self.curvature else {}
        loop.log({**values, "validation/bleu": bleu})
        self._say(
            f"epoch {loop.epoch + 1}/{self.config.num_train_epochs}  step {loop.step}  "
            f"workers' train loss {loop.loss.last_epoch:.4f}  deployed validation loss {losses['loss']:.4f}  "
            f"perplexity {losses['perplexity']:.2f}  "
            f"BLEU {bleu:.2f} (greedy)  radius {loop.radius():.4g}"
            f"{f'  {curvature_line(self.curvature)}' if self.curvature else ''}"
        )

    def _measure_curvature(self, deployed: nn.Module) -> CurvatureReport:
        """Curvature of the training loss, dropout included, at the average of the workers. Collective."""
        config, pairs = self.config, self.data.train.pairs
        batches = curvature_batches(pairs, config.curvature, config.seed, self.collate)
        return measure_in_training(
            config.curvature,
            self.accelerator,
            self.model,
            deployed,
            translation_loss(config.label_smoothing),
            batches,
            config.seed,
        )

    # ---- the end of the run

    def _finish(self) -> None:
        """Save the final deployed model, translate the test split by beam search, score it, and write the results."""
        pairs, train = self.data.test, self.data.train.pairs
        sample = np.unique(np.linspace(0, len(train) - 1, TRAIN_SAMPLE).round().astype(int)).tolist()
        seen = train.__getitems__(sample)
        with self.loop.deployed_model() as deployed:
            model = self._bare(deployed)
            if self.accelerator.is_main_process:  # before scoring, in which a run may still fail
                self._save_model(model)
            train_losses = self.evaluator.losses(model, seen["source_ids"], seen["target_ids"])
            losses = self.evaluator.losses(model, pairs.source_ids, pairs.target_ids)
            found = self.evaluator.translations(model, pairs)
        scores = self.evaluator.scores(found.texts, pairs)
        values = {f"test/{name}": value for name, value in losses.items()}
        values |= {f"test/{name}": scores[name] for name in ("bleu", "chrf")}
        self.loop.log({**values, "train/deployed_loss": train_losses["loss"]})
        if self.accelerator.is_main_process:
            write_translations(self.output.folder, pairs, found.texts)
            summary = self._summary(losses, train_losses, scores)
            self.output.write_summary({**summary, "translations_at_limit": found.at_limit})
        # If the main worker is lost while it writes, the next one finishes again.
        self.accelerator.group.barrier("writing the results")
        self._report(found, losses, scores)

    def _save_model(self, model: Translator) -> None:
        folder, state = self.output.folder / "deployed", cloned(model.state_dict())
        with writing_model(folder):
            save_translator(model, state, self.data.tokenizer, self.config.decoding, folder, self.positions)

    def _summary(
        self, losses: dict[str, float], train_losses: dict[str, float], scores: dict[str, Any]
    ) -> dict[str, Any]:
        train = self.data.train
        return {
            **self.loop.summary(),
            "model": self.config.model.size,
            "norm": self.config.model.norm,
            "parameters": self.parameters,
            "data": self.data.origin,
            "training_pairs": len(train.pairs),
            "left_out_empty": train.empty,
            "left_out_too_long": train.too_long,
            "vocabulary": len(self.data.tokenizer),
            "padding_share": round(self.batches.padding, 4),
            "train_loss": train_losses["loss"],
            "test_loss": losses["loss"],
            "test_nll": losses["nll"],
            "test_perplexity": losses["perplexity"],
            **scores,
            **({"curvature": self.curvature.as_dict()} if self.curvature else {}),
        }

    def _report(self, found: Translations, losses: dict[str, float], scores: dict[str, Any]) -> None:
        """Print some translations and the scores of the test split."""
        pairs = self.data.test
        for row in range(min(self.config.show_translations, len(pairs))):
            source, reference = one_line(pairs.sources[row]), one_line(pairs.references[row])
            self._say(f"  {source}\n    -> {found.texts[row]}\n    reference: {reference}")
        self._say(
            f"test split {pairs.name!r}: BLEU {scores['bleu']:.2f} ({scores['bleu_signature']})  chrF "
            f"{scores['chrf']:.2f}  tokenized, compound-split BLEU {scores['bleu_tokenized']:.2f}  the paper's BLEU "
            f"{scores['bleu_paper']:.2f}  loss {losses['loss']:.4f}  perplexity {losses['perplexity']:.2f}"
        )
        if found.at_limit:
            self._say(found.warning())

    def _bare(self, deployed: nn.Module) -> Translator:
        """The model without the wrapper of torch.compile, which would compile again for every length in a search."""
        return self.accelerator.unwrap_model(deployed, keep_torch_compile=False)

    def _say(self, text: str) -> None:
        say(self.accelerator, text)
