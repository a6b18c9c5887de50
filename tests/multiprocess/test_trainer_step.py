"""The step inside a Trainer: gradients stay local for any loss, data and precision."""

from __future__ import annotations

import logging
import os
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments

from dsgdac_accel import GossipCallback, GossipConfig
from tests.multiprocess.trainer_model import Model, Rows, arguments, flat
from tests.workers import run_workers

pytestmark = pytest.mark.multiprocess

NO_MIXING = GossipConfig(constant=0.0, timeout=30)


# ---- losses over tokens


class Sentences(torch.utils.data.Dataset):
    """Rows of 5 tokens of which 1 to 5 count, so that token counts differ a lot between batches."""

    def __init__(self, length: int = 24) -> None:
        generator = torch.Generator().manual_seed(3)
        self.tokens = torch.randint(0, 7, (length, 5), generator=generator)
        self.labels = self.tokens.roll(1, 1).clone()
        for row in range(length):
            self.labels[row, 1 + row % 5 :] = -100

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, row: int) -> dict[str, Any]:
        return {"tokens": self.tokens[row], "labels": self.labels[row], "row": row}


class TokenModel(nn.Module):
    """Takes `num_items_in_batch`, as the models of Transformers do."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.embedding = nn.Embedding(7, 4)
            self.out = nn.Linear(4, 7)
        self.double()
        self.rows: list[list[int]] = []

    def forward(self, tokens, labels=None, row=None, num_items_in_batch=None, **kwargs) -> dict[str, Any]:
        if self.training and row is not None:
            self.rows.append(row.tolist())
        logits = self.out(self.embedding(tokens))
        total = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")
        items = (labels != -100).sum() if num_items_in_batch is None else num_items_in_batch
        return {"loss": total / items, "logits": logits}


def train_on_tokens(rank: int, folder: Path) -> dict:
    model = TokenModel()
    trainer = Trainer(
        model,
        arguments(str(folder), gradient_accumulation_steps=2, max_steps=6, per_device_train_batch_size=2),
        train_dataset=Sentences(),
        optimizers=(torch.optim.SGD(model.parameters(), lr=0.5), None),
        callbacks=[Own(), GossipCallback(NO_MIXING)],
    )
    trainer.train()
    return {"weights": trainer.callback_handler.callbacks[-2].weights, "rows": model.rows}


class Own(TrainerCallback):
    """Records this worker's weights after the last step, before they are averaged."""

    def on_step_end(self, args, state, control, **kwargs):
        self.weights = flat(kwargs["model"])


def test_a_loss_over_tokens_counts_this_workers_tokens_only(tmp_path):
    data = Sentences()
    results = run_workers(train_on_tokens, 2, tmp_path)
    first, second = (set(chain.from_iterable(result["rows"][:6])) for result in results)
    assert not first & second
    for result in results:
        model = TokenModel()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        for step in range(6):
            window = result["rows"][2 * step : 2 * step + 2]
            rows = [*chain.from_iterable(window)]
            optimizer.param_groups[0]["lr"] = 0.5 * (6 - step) / 6
            optimizer.zero_grad()
            model(data.tokens[rows], data.labels[rows])["loss"].backward()
            optimizer.step()
        torch.testing.assert_close(result["weights"], flat(model), rtol=0, atol=1e-12)


# ---- numbers that are not finite, low precision


class Poison(TrainerCallback):
    """Makes a gradient of worker 1 infinite at one step."""

    def __init__(self, rank: int, step: int) -> None:
        self.rank, self.step = rank, step
        self.weights: list[torch.Tensor] = []
        self.lrs: list[float] = []

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        if self.rank == 1 and state.global_step == self.step:
            next(kwargs["model"].parameters()).grad.fill_(float("inf"))

    def on_step_end(self, args, state, control, **kwargs):
        self.weights.append(flat(kwargs["model"]))
        self.lrs.append(self.trainer.accelerator.gossip_steps[0].lr)


def train_with_poison(rank: int, folder: Path, scaled: bool) -> dict:
    model = Model().float()
    poison = Poison(rank, 2)
    rows = Rows(40)
    rows.x, rows.y = rows.x.float(), rows.y.float()
    trainer = Trainer(
        model,
        arguments(str(folder), max_steps=5),
        train_dataset=rows,
        optimizers=(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), None),
        callbacks=[poison, GossipCallback(GossipConfig(topology="complete", power=1, timeout=30))],
    )
    poison.trainer = trainer
    if scaled:
        trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)  # stands in for a GPU's
    trainer.train()
    scale = trainer.accelerator.scaler.get_scale() if scaled else None
    return {"weights": poison.weights, "lrs": poison.lrs, "scale": scale}


@pytest.mark.parametrize("scaled", [False, True])
def test_a_nonfinite_gradient_skips_a_local_update_and_nothing_else(scaled, tmp_path):
    results = run_workers(train_with_poison, 2, tmp_path, scaled)
    before, after = (torch.stack([result["weights"][step] for result in results]) for step in (1, 2))
    mean, gamma = before.mean(0), 3 / 5
    expected = before + gamma * (mean - before)
    torch.testing.assert_close(after[1], expected[1], rtol=0, atol=1e-6)
    # In fp16 an overflow on any worker skips the update on all, so that loss scales stay equal.
    assert torch.allclose(after[0], expected[0], rtol=0, atol=1e-6) == scaled
    for result in results:
        assert torch.isfinite(result["weights"][-1]).all()
        assert result["lrs"] == pytest.approx([0.1 * (5 - step) / 5 for step in range(5)])
        assert result["scale"] == (2.0**7 if scaled else None)


def train_in_bf16(rank: int, folder: Path) -> dict:
    model = Model(batch_norm=True).float()
    rows = Rows(40)
    rows.x, rows.y = rows.x.float(), rows.y.float()
    own = Own()
    trainer = Trainer(
        model,
        arguments(str(folder), max_steps=6, bf16=True, logging_strategy="steps", logging_steps=2),
        train_dataset=rows,
        eval_dataset=rows,
        callbacks=[own, GossipCallback(GossipConfig(timeout=30))],
    )
    trainer.train()
    first, second = (trainer.evaluate()["eval_loss"] for _ in range(2))
    return {"dtypes": {p.dtype for p in model.parameters()}, "weights": own.weights, "deployed": flat(model),
            "losses": (first, second)}  # fmt: skip


def test_bf16_computes_in_low_precision_and_mixes_in_full(tmp_path):
    results = run_workers(train_in_bf16, 2, tmp_path)
    mean = (results[0]["weights"] + results[1]["weights"]) / 2
    for result in results:
        assert result["dtypes"] == {torch.float32}
        torch.testing.assert_close(result["deployed"], mean, rtol=0, atol=1e-7)
        assert result["losses"][0] == result["losses"][1] == results[0]["losses"][0]


# ---- data of all kinds


class Stream(torch.utils.data.IterableDataset):
    """`Rows` as a stream without a length."""

    def __iter__(self):
        rows = Rows(40)
        return (rows[row] for row in range(40))


def by_length() -> dict[str, Any]:
    fields = TrainingArguments.__dataclass_fields__
    return (
        {"train_sampling_strategy": "group_by_length"}
        if "train_sampling_strategy" in fields
        else {"group_by_length": True}
    )


class Lengths(Rows):
    """`Rows` with "input_ids" of different lengths, which only the sampler reads."""

    def __getitem__(self, row: int) -> dict[str, Any]:
        return {**super().__getitem__(row), "input_ids": [0] * (1 + row % 7)}


def collate(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    return {
        "x": torch.stack([row["x"] for row in rows]),
        "labels": torch.stack([row["labels"] for row in rows]),
        "row": torch.tensor([row["row"] for row in rows]),
    }


def read(rank: int, folder: Path) -> dict:
    seen = {}
    two_epochs = {"num_train_epochs": 2, "max_steps": -1}
    for name, data, settings in (
        (
            "grouped",
            Lengths(48),
            {**by_length(), "num_train_epochs": 2, "max_steps": -1, "remove_unused_columns": False},
        ),
        ("stream", Stream(), {"max_steps": 5}),
        ("dispatched", Stream(), {"max_steps": 5, "accelerator_config": {"dispatch_batches": False}}),
        ("shuffled", Rows(48), {**two_epochs, "dataloader_num_workers": 1}),
    ):
        model = Model()
        trainer = Trainer(
            model, arguments(str(folder), **settings), train_dataset=data, data_collator=collate,
            callbacks=[GossipCallback(GossipConfig(timeout=30))],
        )  # fmt: skip
        trainer.train()
        seen[name] = (trainer.state.global_step, model.rows)
    return seen


def test_the_workers_read_disjoint_parts_of_any_data(tmp_path):
    first, second = run_workers(read, 2, tmp_path)
    assert first.keys() == second.keys() == {"grouped", "stream", "dispatched", "shuffled"}
    for name in first:
        (steps, mine), (other_steps, others) = first[name], second[name]
        assert steps == other_steps
        passes = [slice(0, 8), slice(8, 16)] if name in ("grouped", "shuffled") else [slice(0, 5)]
        for rows in passes:
            a, b = [*chain.from_iterable(mine[rows])], [*chain.from_iterable(others[rows])]
            assert not set(a) & set(b), name
            assert len(a) == len(set(a)) == 3 * (rows.stop - rows.start), name
            if name in ("grouped", "shuffled"):
                assert set(a) | set(b) == set(range(48)), name
    for name in ("grouped", "shuffled"):
        assert first[name][1][:8] != first[name][1][8:], "the order must change with the epoch"
    spread = [max(row % 7 for row in rows) - min(row % 7 for row in rows) for rows in first["grouped"][1]]
    assert sum(spread) / len(spread) < 2, "rows of similar length must be together"


# ---- noticing workers that are equal


class Averager(TrainerCallback):
    """Averages gradients by hand, as DDP does."""

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        for parameter in kwargs["model"].parameters():
            torch.distributed.all_reduce(parameter.grad)


def average_gradients(rank: int, folder: Path) -> list[str]:
    messages: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())

    logging.getLogger("dsgdac_accel").addHandler(Listener())
    for callbacks in ([], [Averager()]):
        model = Model()
        gossip = GossipCallback(GossipConfig(timeout=30))
        settings = arguments(str(folder), max_steps=4, logging_strategy="steps", logging_steps=2)
        trainer = Trainer(model, settings, train_dataset=Rows(40), callbacks=[gossip])
        trainer.callback_handler.callbacks[:0] = callbacks
        trainer.train()
        messages.append("end")
    return messages


def test_workers_that_are_equal_at_a_log_are_warned_of_once(tmp_path):
    first, second = run_workers(average_gradients, 2, tmp_path)
    assert [first[0], first[2], *second] == ["end"] * 4
    assert "equal to the last bit after step 2" in first[1]
    assert len(first) == 3


# ---- alone


def test_a_single_process_equals_the_plain_trainer_to_the_bit(tmp_path):
    for value in run_workers(train_alone, 1, tmp_path):
        assert torch.equal(value[0], value[1])


def train_alone(rank: int, folder: Path) -> list[torch.Tensor]:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name)
    found = []
    for callbacks in ([], [GossipCallback()]):
        model = Model(dropout=0.1, batch_norm=True)
        trainer = Trainer(
            model,
            arguments(str(folder), max_steps=7, gradient_accumulation_steps=2),
            train_dataset=Rows(20),
            callbacks=[*callbacks],
        )
        trainer.train()
        found.append(flat(model))
    return found
