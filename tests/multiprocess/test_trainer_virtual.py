"""A Trainer with several workers per process trains the same weights as with one process per worker."""

from __future__ import annotations

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from dsgdac_accel import GossipCallback, GossipConfig
from tests.multiprocess.trainer_model import Model, Rows, arguments, flat
from tests.workers import run_workers

pytestmark = pytest.mark.multiprocess

BATCH, WORKERS = 4, 4


class Sentences(torch.utils.data.Dataset):
    """Token rows with different numbers of labels."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, row: int) -> dict:
        ids = (torch.arange(8) * (row + 1)) % 20
        labels = ids.clone()
        labels[: row % 6] = -100
        return {"input_ids": ids, "labels": labels}


def language_model() -> torch.nn.Module:
    torch.manual_seed(0)
    sizes = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 8, "vocab_size": 20}
    return GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)).double()


class Watched(GossipCallback):
    """Records the weights of all workers of this process at the end, before they are averaged."""

    def on_train_end(self, args, state, control, **kwargs):
        wrapped = self.trainer.model_wrapped
        self.weights = [flat(replica) for replica in getattr(wrapped, "replicas", [wrapped])]
        super().on_train_end(args, state, control, **kwargs)


def train(rank: int, per_process: int, folder: str) -> dict[str, dict]:
    return {kind: train_one(per_process, f"{folder}/{kind}", kind) for kind in ("own", "gpt2")}


def train_one(per_process: int, folder: str, kind: str) -> dict:
    model, data = (Model(batch_norm=True), Rows(80)) if kind == "own" else (language_model(), Sentences())
    callback = Watched(GossipConfig(power=1, timeout=60, workers_per_process=per_process))
    settings = arguments(
        folder, per_device_train_batch_size=BATCH * per_process, per_device_eval_batch_size=8, max_steps=6,
        gradient_accumulation_steps=2, max_grad_norm=0.5, eval_strategy="steps", eval_steps=3, save_strategy="steps",
        save_steps=3, optim="adamw_torch", learning_rate=0.02,
    )  # fmt: skip
    trainer = Trainer(model, settings, train_dataset=data, eval_dataset=data, callbacks=[callback])
    trainer.train()
    if kind == "own" and per_process == 2:
        weights = resumed(per_process, folder, settings, data)
        assert all(map(torch.equal, weights, callback.weights)), "resuming must equal never having stopped"
    losses = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    saved = type(model).from_pretrained(f"{folder}/checkpoint-6") if kind == "gpt2" else None
    kept = None if saved is None else flat(saved.double())
    found = {"weights": callback.weights, "deployed": flat(model), "losses": losses, "saved": kept}
    trainer.train()
    return found | {"again": callback.weights}


def resumed(per_process: int, folder: str, settings: TrainingArguments, data: Rows) -> list[torch.Tensor]:
    """Return the final weights of a run that resumes from the checkpoint of step 3."""
    callback = Watched(GossipConfig(power=1, timeout=60, workers_per_process=per_process))
    other = Model(batch_norm=True, seed=5)
    trainer = Trainer(other, settings, train_dataset=data, eval_dataset=data, callbacks=[callback])
    trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-3")
    return callback.weights


@pytest.mark.slow
def test_any_split_trains_the_same_workers(tmp_path):
    results = {
        processes: run_workers(train, processes, WORKERS // processes, str(tmp_path / str(processes)))
        for processes in (4, 2, 1)
    }
    for kind in ("own", "gpt2"):
        one = results[4][0][kind]
        alone = torch.stack([weights for result in results[4] for weights in result[kind]["weights"]])
        alone_again = torch.stack([weights for result in results[4] for weights in result[kind]["again"]])
        assert (alone - alone.mean(0)).norm() > 1e-3, "the workers have to differ in this test"
        for processes in (2, 1):
            mine = torch.stack([weights for result in results[processes] for weights in result[kind]["weights"]])
            torch.testing.assert_close(mine, alone, rtol=0, atol=1e-9)
            again = torch.stack([weights for result in results[processes] for weights in result[kind]["again"]])
            torch.testing.assert_close(again, alone_again, rtol=0, atol=1e-9, msg=f"{kind}: the second training")
            for result in results[processes]:
                torch.testing.assert_close(result[kind]["deployed"], one["deployed"], rtol=0, atol=1e-9)
                assert result[kind]["losses"] == pytest.approx(one["losses"], abs=1e-6)  # Trainer's are float32
                assert len(result[kind]["losses"]) == 2
                if kind == "gpt2":
                    torch.testing.assert_close(result[kind]["saved"], one["deployed"], rtol=0, atol=1e-6)
