"""bf16 models whose float32 masters are mixed: checkpoints, averages, and the Trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dsgdac_accel import GossipAccelerator, GossipCallback, GossipConfig
from tests.held import held
from tests.multiprocess.small_model import FAST
from tests.workers import run_workers

pytestmark = pytest.mark.multiprocess

STEPS, SAVED = 10, 5


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).bfloat16()


def optimizer_and_scheduler(parameters: Any) -> tuple:
    optimizer = torch.optim.AdamW(parameters, lr=1e-3)
    return optimizer, torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, STEPS)


def loss_of(model: nn.Module, worker: int, number: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * worker + number)
    return model(torch.randn(4, 5, generator=generator).bfloat16()).float().square().mean()


def values(parameters: Any) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in parameters]


class Run:
    """A model that is trained by gossip, two micro-batches a step, with clipping."""

    def __init__(self, **settings: Any) -> None:
        self.accelerator = GossipAccelerator(gossip=GossipConfig(power=2.0, **FAST, **settings))
        model = make_model()
        prepared = self.accelerator.prepare(model, *optimizer_and_scheduler(model.parameters()))
        self.model, self.optimizer, self.scheduler = prepared

    def train(self, rank: int, first: int, last: int) -> None:
        for step in range(first, last):
            for micro in (2 * step, 2 * step + 1):
                self.accelerator.backward(loss_of(self.model, rank, micro))
            self.accelerator.clip_grad_norm_(self.model.parameters(), 0.2)
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()

    def masters(self) -> list[torch.Tensor]:
        return values(held(self.accelerator, p) for p in self.model.parameters())


def train(rank: int, folder: Path, order: str) -> dict[str, Any]:
    run = Run(order=order)
    run.train(rank, 0, SAVED)
    run.accelerator.save_state(folder)
    saved = run.masters()
    run.train(rank, SAVED, STEPS)
    own, masters = values(run.model.parameters()), run.masters()
    with run.accelerator.deployed_model(run.model) as deployed:
        deployed.float()
    restored = all(map(torch.equal, own, run.model.parameters())) and all(map(torch.equal, masters, run.masters()))
    run.accelerator.load_state(folder)
    run.train(rank, SAVED, STEPS)
    resumed = all(map(torch.equal, own, run.model.parameters())) and all(map(torch.equal, masters, run.masters()))
    return {"restored": restored, "resumed": resumed, "saved": saved}


@pytest.mark.parametrize("order", ["local_first", pytest.param("mix_first", marks=pytest.mark.slow)])
def test_a_bf16_model_resumes_bit_by_bit(tmp_path, order):
    for result in run_workers(train, 3, tmp_path / "c", order):
        assert result["restored"], "also after the model was converted inside `deployed_model`"
        assert result["resumed"]


def resume_with_another_count(rank: int, folder: Path) -> tuple:
    run = Run(on_other_worker_count="deployed")
    run.accelerator.load_state(folder)
    start = run.masters(), values(run.model.parameters())
    run.train(rank, SAVED, STEPS)
    return *start, all(bool(torch.isfinite(p).all()) for p in run.model.parameters())


@pytest.mark.slow
def test_another_number_of_workers_starts_from_the_average_of_the_masters(tmp_path):
    saved = [result["saved"] for result in run_workers(train, 3, tmp_path / "c", "local_first")]
    means = [torch.stack(each).double().mean(0).float() for each in zip(*saved, strict=True)]
    for masters, own, finite in run_workers(resume_with_another_count, 2, tmp_path / "c"):
        assert finite
        for mean, master, rounded in zip(means, masters, own, strict=True):
            torch.testing.assert_close(master, mean, rtol=0, atol=1e-9)
            assert torch.equal(rounded, master.bfloat16())


def edit_in_flight(rank: int) -> list[float]:
    found = []
    for order in ("local_first", "mix_first"):
        accelerator = GossipAccelerator(gossip=GossipConfig(topology="complete", power=0, order=order, **FAST))
        model = nn.Linear(1, 1, bias=False).bfloat16()
        nn.init.zeros_(model.weight)
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
        accelerator.backward(-rank * model.weight.sum())
        optimizer.step()  # now it is 0 on worker 0 and 1 on worker 1, and on its way
        optimizer.zero_grad()
        if rank == 0:
            model.weight.data.fill_(4)
        optimizer.step()
        found.append(model.weight.item())
    return found


def test_an_edit_in_flight_is_added_to_what_was_mixed():
    for worker, found in enumerate(run_workers(edit_in_flight, 2)):
        assert found == [[4.5, 4.5], [0.5, 0.5]][worker], "the mean of 0 and 1, and on worker 0 the edit by 4"


def evaluate_after_a_pass(rank: int) -> dict[str, Any]:
    accelerator = GossipAccelerator(gossip=GossipConfig(power=2.0, **FAST))
    model = make_model()
    rows = torch.randn(12, 5, generator=torch.Generator().manual_seed(0)).bfloat16()
    loaders = [torch.utils.data.DataLoader(rows, batch_size=2) for _ in range(2)]
    model, optimizer, train, test = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2), *loaders)
    found: dict[str, Any] = {}
    for turn in ("first", "second"):
        model.train()
        for batch in train:
            accelerator.backward(model(batch).float().square().mean())
            optimizer.step()
            optimizer.zero_grad()
        masters = values(held(accelerator, p) for p in model.parameters())
        model.eval()
        for _ in test:
            shown = values(model.parameters())
        own = values(held(accelerator, p) for p in model.parameters())
        found[turn] = masters, shown, all(map(torch.equal, own, masters))
    return found


def test_an_evaluation_pass_shows_the_average_of_the_masters():
    results = run_workers(evaluate_after_a_pass, 2)
    for turn in ("first", "second"):
        masters, shown, kept = zip(*(result[turn] for result in results), strict=True)
        assert all(kept)
        for mine, theirs, *both in zip(*masters, *shown, strict=True):
            mean = ((mine + theirs) / 2).bfloat16()
            assert all(torch.equal(each, mean) for each in both)
        assert not torch.equal(masters[0][0], masters[1][0])


# ---- in a Trainer


class Tokens(torch.utils.data.Dataset):
    def __init__(self, length: int) -> None:
        self.rows = torch.randint(0, 64, (length, 8), generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[row], "labels": self.rows[row]}


def language_model() -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads)).bfloat16()


def trainer_of(folder: Path, model: nn.Module, **settings: Any) -> Any:
    from transformers import Trainer, TrainingArguments

    quiet = {"use_cpu": True, "report_to": [], "disable_tqdm": True, "dataloader_pin_memory": False}
    sizes = {"max_steps": 6, "save_steps": 3, "gradient_accumulation_steps": 2, "per_device_train_batch_size": 2}
    arguments = TrainingArguments(str(folder), **quiet, **sizes, learning_rate=1e-3, **settings)
    callback = GossipCallback(GossipConfig(power=1.0, **FAST))
    return Trainer(model, arguments, train_dataset=Tokens(64), callbacks=[callback])


def train_language_model(rank: int, folder: Path, lora: bool) -> dict[str, Any]:
    model = language_model()
    if lora:
        from peft import LoraConfig, get_peft_model

        adapters = LoraConfig(target_modules=["q_proj", "v_proj"], r=4)
        model = get_peft_model(model, adapters, autocast_adapter_dtype=False)
    found = {}
    for checkpoint in (None, str(folder / "checkpoint-3")):
        trainer = trainer_of(folder, model, bf16=True, gradient_checkpointing=True)
        trainer.train(resume_from_checkpoint=checkpoint)
        found[checkpoint is None] = values(trainer.model.parameters())
    trainer.save_model(str(folder / "final"))
    kept = {parameter.dtype for parameter in trainer.model.parameters()}
    return {"whole": found[True], "resumed": found[False], "dtypes": kept}


@pytest.mark.slow
@pytest.mark.parametrize("lora", [False, True])
def test_a_trainer_trains_a_bf16_language_model_and_resumes_bit_by_bit(tmp_path, lora):
    if lora:
        pytest.importorskip("peft")
    first, second = run_workers(train_language_model, 2, tmp_path, lora)
    for result in (first, second):
        assert result["dtypes"] == {torch.bfloat16}
        assert all(map(torch.equal, result["whole"], first["whole"]))
        assert all(map(torch.equal, result["resumed"], first["whole"]))


def test_what_has_no_master_is_refused_when_the_trainer_is_built(tmp_path):
    model = language_model()
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().to(torch.float8_e4m3fn))
    with pytest.raises(ValueError, match=r"lm_head\.weight is torch.float8.*dtype=torch\.float32.*bf16=True"):
        trainer_of(tmp_path, model)
