"""Translation by adam, dadam or dadam_ac: `accelerate launch tasks/wmt14.py --config configs/wmt14_demo.yaml`."""

from __future__ import annotations

import math
import os
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from accelerate.utils import DataLoaderConfiguration, TorchDynamoPlugin, set_seed
from torch import Tensor, nn
from torch.utils.data import DataLoader
from tqdm.auto import tqdm
from transformers import MarianMTModel

from dsgdac_accel.curvature import CurvatureReport
from dsgdac_accel.deployed_model import cloned
from tasks.common.algorithms import SYNCHRONOUS, make_accelerator
from tasks.common.checkpoints import Checkpoints, checkpoint_to_resume, step_of_own
from tasks.common.cli_errors import quiet_ends, starting_up
from tasks.common.config import ConfigError
from tasks.common.diagnostics import described, logged, measure_in_training
from tasks.common.output_dir import RunFolder, lost_workers, writing_model
from tasks.common.progress import Clock, WaitingTime, figures, progress_bar, require_finite, rest_of_epoch
from tasks.common.runner import run_task
from tasks.translation.averages import LastModels, averaged_parameters, trained_state
from tasks.translation.batches import Collate, TokenBatches
from tasks.translation.commands import COMMANDS
from tasks.translation.config import TranslationConfig
from tasks.translation.curvature import curvature_batches, translation_loss
from tasks.translation.data import load_translation_data
from tasks.translation.decoding import Translations
from tasks.translation.evaluation import Evaluator, write_translations
from tasks.translation.loss import smoothed_loss
from tasks.translation.model import DEFAULT_POSITIONS, build_model, save_translator, trained_parameters
from tasks.translation.scores import TranslationScores, one_line

TASK = "wmt14"
MAY_CHANGE = ("num_train_epochs", "max_steps", "decoding.", "show_translations", "data.cache_dir")

TRAIN_SAMPLE = 2000
"""Training pairs, evenly spaced over the split, on which the deployed model's training loss is measured."""


def inverse_square_root(step: int, warmup_steps: int) -> float:
    """Factor on the peak rate at 0-based `step`, t = step + 1: t / warm-up, then (warm-up / t)^0.5. Never 0.

    >>> [5e-4 * inverse_square_root(t - 1, warmup_steps=4000) for t in (1, 4000, 16000)]
    [1.25e-07, 0.0005, 0.00025]
    """
    t = step + 1
    return t / warmup_steps if t < warmup_steps else (warmup_steps / t) ** 0.5


class TranslationRun:
    """One training run: builds everything, trains, evaluates the deployed model, writes the run folder."""

    def __init__(self, config: TranslationConfig) -> None:
        self.config = config
        set_seed(config.seed)
        self.metric = TranslationScores(target_language=config.data.target_language or config.data.target)
        # Before any process group: while one worker tokenises millions of pairs, no collective of the others runs out.
        self.data = load_translation_data(config.data)
        processes, here = int(os.environ.get("WORLD_SIZE", "1")), config.gossip.workers_per_process
        self.batches = TokenBatches(
            self.data.train.source_lengths,
            self.data.train.target_lengths,
            config.batch_tokens,
            processes * here,
            config.gradient_accumulation_steps,
            config.seed,
            per_process=here,
        )
        self.total_steps = min(config.num_train_epochs * self.batches.steps_per_epoch, config.max_steps or sys.maxsize)
        self.accelerator = make_accelerator(
            config.algorithm,
            config.gossip,
            self.total_steps,
            self.batches.steps_per_epoch,
            mixed_precision=config.mixed_precision,
            gradient_accumulation_steps=config.gradient_accumulation_steps,
            # The batches are dealt out whole, as many to each worker.
            dataloader_config=DataLoaderConfiguration(split_batches=False, even_batches=False),
            dynamo_plugin=TorchDynamoPlugin(backend="inductor" if config.compile else "no", dynamic=True),
            log_with=list(config.report_to) or None,
            project_dir=str(config.output_dir),
        )
        if self.accelerator.num_processes != processes:
            raise RuntimeError(
                f"the launcher announced {processes} workers (WORLD_SIZE) and {self.accelerator.num_processes} met. "
                f"Use accelerate launch or torchrun."
            )
        checkpoint = checkpoint_to_resume(config, self.accelerator, TASK, MAY_CHANGE)
        resumed_at = step_of_own(checkpoint, config)
        if checkpoint is not None and resumed_at is None and config.average_last > 1:
            raise ConfigError(
                f"resume: average_last = {config.average_last} needs the models that the earlier run left in its own "
                f"output_dir. Go on there, with resume_from_checkpoint: auto."
            )
        self.folder = RunFolder(
            config.output_dir, config, self.accelerator, trackers=bool(config.report_to), resumed_at=resumed_at
        )
        self._build(keep_models_to=resumed_at)
        self.epoch = self.step = 0
        self.lr = 0.0  # that the last step used
        self.losses: list[Tensor] = []  # since the last record, by micro-batch
        self.logged = 0  # step of the last record
        self.worker_loss = math.nan  # of the workers, mean over real tokens since the last record
        self.curvature: CurvatureReport | None = None  # at the last evaluation
        self.waiting = WaitingTime()
        self.train_seconds = 0.0
        self.clock = Clock()
        self.checkpoints = Checkpoints(config, self.accelerator, TASK, self.total_steps)
        self.accelerator.register_for_checkpointing(self)
        if checkpoint is not None:
            self.accelerator.load_state(checkpoint)

    def _build(self, keep_models_to: int | None) -> None:
        config, tokenizer, batches = self.config, self.data.tokenizer, self.batches
        longest = int(max(batches.source_lengths.max(), batches.target_lengths.max()))
        self.positions = max(DEFAULT_POSITIONS, longest)
        model = build_model(
            config.model, len(tokenizer), tokenizer.pad_token_id, tokenizer.eos_token_id, self.positions
        )
        self.parameters = trained_parameters(model)
        self.collate = Collate(tokenizer.pad_token_id, model.config.decoder_start_token_id)
        optimizer = torch.optim.Adam(
            [parameter for parameter in model.parameters() if parameter.requires_grad],
            lr=config.learning_rate,
            betas=config.betas,
            eps=config.adam_epsilon,
            weight_decay=config.weight_decay,
            fused=True,
        )
        scheduler = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: inverse_square_root(step, config.warmup_steps)
        )
        loader = DataLoader(
            self.data.train.pairs,
            batch_sampler=batches,
            collate_fn=self.collate,
            num_workers=config.dataloader_num_workers,
        )
        self.model, self.optimizer, self.loader, self.scheduler = self.accelerator.prepare(
            model, optimizer, loader, scheduler
        )
        self.evaluator = Evaluator(
            tokenizer, self.accelerator.group, config.decoding, config.label_smoothing, self.metric
        )
        self.last_models = None
        if config.average_last > 1 and self.accelerator.is_main_process:
            self.last_models = LastModels(config.output_dir / "averages", config.average_last, keep_models_to)

    def described(self) -> str:
        """Algorithm, data, size and steps, in words."""
        workers = self.accelerator.num_workers
        return (
            f"{self.config.algorithm} on {self.data.origin}: {self.data.train.described()}, {self.parameters:,} "
            f"parameters, {workers} worker{'s' if workers > 1 else ''}, {self.total_steps} steps of at most "
            f"{self.config.batch_tokens} tokens ({self.batches.padding:.1%} padding)"
            f"{f', resumed at step {self.step}' if self.step else ''}"
        )

    # ---- what a checkpoint keeps of the run itself

    def state_dict(self) -> dict[str, Any]:
        """How far the run is."""
        return {
            "epoch": self.epoch,
            "step": self.step,
            "lr": self.lr,
            "losses": [loss.clone() for loss in self.losses],
            "logged": self.logged,
            "worker_loss": self.worker_loss,
            "log_bytes": self.folder.logged_bytes(),
            "waited": self.waiting.seconds,
            "train_seconds": self.train_seconds + self.clock.lap(),
            "seconds": self.clock.seconds(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Be there again."""
        if state["step"] > self.total_steps:
            raise ConfigError(
                f"resume_from_checkpoint: the checkpoint is of step {state['step']}, and this run has "
                f"{self.total_steps} steps only. Raise num_train_epochs or max_steps."
            )
        self.epoch, self.step, self.lr = state["epoch"], state["step"], state["lr"]
        self.losses = [loss.to(self.accelerator.device) for loss in state["losses"]]
        self.logged, self.worker_loss = state["logged"], state["worker_loss"]
        self.folder.cut_log_back(state["log_bytes"])
        self.waiting.seconds, self.train_seconds = state["waited"], state["train_seconds"]
        self.clock = Clock(state["seconds"])

    # ---- training

    def train(self) -> None:
        """All steps, with an evaluation on the validation split every `eval_every` epochs, then the test split."""
        bar = progress_bar(self.accelerator, self.step, self.total_steps)
        while True:  # the last epoch of a resumed run may have no step left
            self._train_epoch(self.epoch, bar)
            done = self.step == self.total_steps
            measure = self.config.curvature.due(self.epoch, done)
            if done or measure or (self.epoch + 1) % self.config.eval_every == 0:
                self.accelerator.group.retry_after_loss(lambda: self._validate(self.epoch + 1, measure))  # noqa: B023  # called at once
            if done:
                break
            self.epoch += 1
        bar.close()
        self.checkpoints.finish()
        self.accelerator.group.retry_after_loss(lambda: self._finish(self.epoch + 1))

    def _train_epoch(self, epoch: int, bar: Any) -> None:
        self.model.train()
        self.batches.set_epoch(epoch)
        self.clock.start_lap()
        source_tokens, target_tokens = self.batches.epoch_tokens()
        step_tokens = (source_tokens + target_tokens).sum(axis=(1, 2))
        scales, pairs = self._loss_scales(target_tokens), self._of_this_process(self.batches.epoch_pairs())
        micro_step = 0
        first = epoch * self.batches.steps_per_epoch
        timed_from, timed_at = self.step, time.perf_counter()
        rest = () if self.step == self.total_steps else rest_of_epoch(self.accelerator, self.loader, epoch)
        for batch in self.waiting.batches(rest):
            in_epoch = self.step - first
            labels = batch.pop("labels")
            sizes = pairs[in_epoch, micro_step].tolist()
            with self.accelerator.accumulate(self.model):
                losses = self._losses(batch, labels, sizes)
                self.accelerator.backward(self._mean(losses, sizes, scales[in_epoch]))
                if self.accelerator.sync_gradients and self.config.max_grad_norm is not None:
                    self.accelerator.clip_grad_norm_(self.model.parameters(), self.config.max_grad_norm)
                self.lr = self.optimizer.param_groups[0]["lr"]
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()
            self.losses.append(losses.detach().sum())
            if not self.accelerator.sync_gradients:
                micro_step += 1
                continue
            micro_step = 0
            self.step += 1
            self.accelerator.group.steps_taken = self.step  # which errors name; gossip counts by itself
            bar.update()
            complete = in_epoch + 1 == self.batches.steps_per_epoch
            last = complete or self.step == self.total_steps
            if self.step % self.config.logging_steps == 0 or last:
                self._set_worker_loss(target_tokens[self.logged - first : self.step - first])
                tokens = step_tokens[timed_from - first : self.step - first].sum()
                self._log_training(epoch, tokens / (time.perf_counter() - timed_at), bar)
                self.losses, self.logged = [], self.step
                timed_from, timed_at = self.step, time.perf_counter()
            self._keep_for_average(last)
            self.checkpoints.save_if_due(self.step)
            if last and not complete:  # a complete pass has to end by itself: its loader counts epochs there
                break
        self.train_seconds += self.clock.end_lap()

    def _loss_scales(self, target_tokens: np.ndarray) -> np.ndarray:
        """For each step, what makes of summed losses the mean over real tokens: for gossip over each worker's own
        micro-batches, for the synchronous baseline over those of all workers (whose gradients DDP averages).

        (steps, workers of this process).
        """
        shares = self.config.gradient_accumulation_steps  # Accelerate's backward divides by them
        if self.config.algorithm in SYNCHRONOUS:
            scales = shares * self.accelerator.num_processes / target_tokens.sum(axis=(1, 2))
            return np.repeat(scales[:, None], self.accelerator.workers_per_process, axis=1)
        return shares / self._of_this_process(target_tokens).sum(axis=1)

    def _of_this_process(self, of_workers: np.ndarray) -> np.ndarray:
        """(..., workers) to (..., workers of this process), which were dealt out before any worker was lost."""
        here, group = self.accelerator.workers_per_process, self.accelerator.group
        return of_workers[..., here * group.original_ranks[group.rank] :][..., :here]

    def _losses(self, batch: dict[str, Tensor], labels: Tensor, sizes: list[int]) -> Tensor:
        """Summed loss of each worker of this process (workers,), whose pairs are `sizes` many each."""
        smoothing = self.config.label_smoothing
        if len(sizes) == 1:
            return smoothed_loss(self.model(**batch).logits, labels, smoothing)[None]
        holder = getattr(self.model, "module", self.model)  # DDP's
        with holder.cut_at(sizes):
            logits = self.model(**batch).logits
        parts = zip(logits.split(sizes), labels.split(sizes), strict=True)
        return torch.stack([smoothed_loss(mine, own, smoothing) for mine, own in parts])

    def _mean(self, losses: Tensor, sizes: list[int], scales: np.ndarray) -> Tensor:
        """The loss to descend: of virtual workers a mean over the batch, of which each takes its own part."""
        weights = scales
        if self.config.algorithm not in SYNCHRONOUS:
            weights = scales * np.asarray(sizes) / sum(sizes)
        return (losses * torch.as_tensor(weights, dtype=losses.dtype, device=losses.device)).sum()

    def _set_worker_loss(self, target_tokens: np.ndarray) -> None:
        total = float(torch.stack(self.losses).double().sum())
        mine = total, int(self._of_this_process(target_tokens).sum())
        totals, tokens = zip(*self.accelerator.group.all_gather_object(mine, f"logging step {self.step}"), strict=True)
        self.worker_loss = math.fsum(totals) / sum(tokens)
        require_finite(self.accelerator, self.worker_loss, self.step)

    def _log_training(self, epoch: int, tokens_per_second: float, bar: Any) -> None:
        values = {
            "train/loss": self.worker_loss,
            "train/tokens_per_second": tokens_per_second,
            "epoch": epoch,
            "gossip/lr": self.lr,
        }
        self.accelerator.log(values, step=self.step)
        bar.set_postfix(figures(self.accelerator, self.worker_loss, self.lr) | {"tokens/s": f"{tokens_per_second:.0f}"})

    def _keep_for_average(self, last_of_epoch: bool) -> None:
        """Write the deployed model to a file when it is due, and at the end. Collective."""
        if self.config.average_last == 1:
            return
        every = self.config.average_every
        due = last_of_epoch if every is None else self.step % every == 0
        if due or self.step == self.total_steps:
            self.accelerator.group.retry_after_loss(self._keep_average)

    def _keep_average(self) -> None:
        with self.accelerator.deployed_model(self.model) as deployed:
            models = self._last_models()
            if models is not None:
                models.add(self.step, trained_state(self._bare(deployed)))

    def _last_models(self) -> LastModels | None:
        """On the main worker, which may become another one when that is lost."""
        if self.last_models is None and self.config.average_last > 1 and self.accelerator.is_main_process:
            self.last_models = LastModels(self.config.output_dir / "averages", self.config.average_last, self.step)
        return self.last_models

    # ---- evaluation of the deployed model

    def _validate(self, epoch: int, measure_curvature: bool) -> None:
        pairs = self.data.validation
        with self.accelerator.deployed_model(self.model) as deployed:
            model = self._bare(deployed)
            losses = self.evaluator.losses(model, pairs.source_ids, pairs.target_ids)
            found = self.evaluator.translations(model, pairs, greedy=True)
            self.curvature = self._curvature(deployed) if measure_curvature else None
        bleu = self.evaluator.scores(found.texts, pairs)["bleu"]
        values = {f"validation/{name}": value for name, value in losses.items()}
        values |= logged(self.curvature) if self.curvature else {}
        self.accelerator.log(
            values | {"validation/bleu": bleu, "epoch": epoch - 1, "gossip/lr": self.lr}, step=self.step
        )
        self._say(
            f"epoch {epoch}/{self.config.num_train_epochs}  step {self.step}  "
            f"workers' train loss {self.worker_loss:.4f}  deployed validation loss {losses['loss']:.4f}  "
            f"perplexity {losses['perplexity']:.2f}  "
            f"BLEU {bleu:.2f} (greedy)  radius {self._radius():.4g}"
            f"{f'  {described(self.curvature)}' if self.curvature else ''}"
        )

    def _curvature(self, deployed: nn.Module) -> CurvatureReport:
        """Of the training loss, dropout included, at the average of the workers. Collective."""
        config, pairs = self.config, self.data.train.pairs
        batches = curvature_batches(
            pairs, config.curvature.rows(len(pairs), config.seed), self.collate, self.accelerator.device
        )
        loss_fn = translation_loss(config.label_smoothing)
        return measure_in_training(
            config.curvature, self.accelerator, self.model, deployed, loss_fn, batches, config.seed
        )

    def _finish(self, epoch: int) -> None:
        """Beam search over the test split by the model that is deployed, its scores, and everything on disk."""
        pairs, folder = self.data.test, self.config.output_dir
        sample = np.unique(np.linspace(0, len(self.data.train.pairs) - 1, TRAIN_SAMPLE).round().astype(int)).tolist()
        seen = self.data.train.pairs.__getitems__(sample)
        with self.accelerator.deployed_model(self.model) as deployed:
            model = self._bare(deployed)
            with self._average(model) as averaged:
                train_losses = self.evaluator.losses(model, seen["source_ids"], seen["target_ids"])
                losses = self.evaluator.losses(model, pairs.source_ids, pairs.target_ids)
                found = self.evaluator.translations(model, pairs)
                if self.accelerator.is_main_process:
                    self._save_model(model, folder / "deployed")
        scores = self.evaluator.scores(found.texts, pairs)
        values = {f"test/{name}": value for name, value in losses.items()}
        values |= {
            "test/bleu": scores["bleu"],
            "test/chrf": scores["chrf"],
            "train/deployed_loss": train_losses["loss"],
        }
        self.accelerator.log(values | {"epoch": epoch - 1, "gossip/lr": self.lr}, step=self.step)
        if self.accelerator.is_main_process:
            write_translations(folder, pairs, found.texts)
            summary = self._summary(epoch, losses, train_losses, scores, self.clock.seconds())
            counts = {"averaged_models": averaged, "translations_at_limit": found.at_limit}
            self.folder.write_summary(summary | lost_workers(self.accelerator) | counts)
        self.accelerator.group.barrier("writing the results")  # if the one that writes is lost, another does it all
        if self.config.average_last > 1:
            self._say(f"deployed is the average of {averaged} models (average_last: {self.config.average_last})")
        if self.accelerator.is_main_process:
            self._report(found, losses, scores)

    def _save_model(self, model: MarianMTModel, folder: Path) -> None:
        state, decoding = cloned(model.state_dict()), self.config.decoding
        with writing_model(folder):
            save_translator(model, state, self.data.tokenizer, decoding, folder, self.positions)

    def _average(self, model: MarianMTModel) -> Any:
        """Inside, `model` is the average of the last deployed models, if that was asked for."""
        if self.config.average_last == 1:
            return nullcontext(1)
        models = self._last_models()
        files = [] if models is None else models.files()
        return averaged_parameters(model, files, self.accelerator.group)

    def _report(self, found: Translations, losses: dict[str, float], scores: dict[str, Any]) -> None:
        pairs, hypotheses = self.data.test, found.texts
        for row in range(min(self.config.show_translations, len(pairs))):
            source, reference = one_line(pairs.sources[row]), one_line(pairs.references[row])
            self._say(f"  {source}\n    -> {hypotheses[row]}\n    reference: {reference}")
        self._say(
            f"test split {pairs.name!r}: BLEU {scores['bleu']:.2f} ({scores['bleu_signature']})  chrF "
            f"{scores['chrf']:.2f}  tokenised, compound-split BLEU {scores['bleu_tokenized']:.2f}  loss "
            f"{losses['loss']:.4f}  perplexity {losses['perplexity']:.2f}"
        )
        if found.at_limit:
            self._say(found.warning())

    def _bare(self, deployed: nn.Module) -> MarianMTModel:
        """Without the wrapper of torch.compile, which would compile anew for every length of a search."""
        return self.accelerator.unwrap_model(deployed, keep_torch_compile=False)

    def _radius(self) -> float:
        steps = self.accelerator.gossip_steps
        return steps[0].metrics().get("radius", math.nan) if steps else 0.0  # measured when the average was taken

    def _say(self, text: str) -> None:
        if self.accelerator.is_main_process:
            tqdm.write(text, file=sys.stdout)

    def _summary(
        self,
        epoch: int,
        losses: dict[str, float],
        train_losses: dict[str, float],
        scores: dict[str, Any],
        seconds: float,
    ) -> dict[str, Any]:
        steps = self.accelerator.gossip_steps
        return {
            "algorithm": self.config.algorithm,
            "workers": self.accelerator.num_workers,
            "topology": steps[0].mixer.topology.name if steps else "all-reduce",
            "model": self.config.model.size,
            "parameters": self.parameters,
            "data": self.data.origin,
            "training_pairs": len(self.data.train.pairs),
            "left_out_empty": self.data.train.empty,
            "left_out_too_long": self.data.train.too_long,
            "vocabulary": len(self.data.tokenizer),
            "epochs": epoch,
            "steps": self.step,
            "train_loss": train_losses["loss"],
            "worker_train_loss": self.worker_loss,
            "test_loss": losses["loss"],
            "test_nll": losses["nll"],
            "test_perplexity": losses["perplexity"],
            **scores,
            "radius": self._radius(),
            "gamma": steps[0].gamma if steps else None,
            "padding_share": round(self.batches.padding, 4),
            "seconds": round(seconds, 3),
            "train_seconds": round(self.train_seconds, 3),
            "data_share": round(self.waiting.seconds / self.train_seconds, 4),
            "seed": self.config.seed,
            **({"curvature": self.curvature.as_dict()} if self.curvature else {}),
        }


def main() -> None:
    """Train, or run the subcommand `translate`, `score` or `curvature`."""
    transformers.utils.logging.disable_progress_bar()
    if sys.argv[1:2] and sys.argv[1] in COMMANDS:
        with starting_up(), quiet_ends():
            COMMANDS[sys.argv[1]](sys.argv[2:])
        return
    run_task(TranslationRun, TranslationConfig, "wmt14_demo", ("wmt14*", "multi30k*"), __doc__)


if __name__ == "__main__":
    main()
