"""A Trainer whose workers are several processes that shard a model, on gloo, against the simulation of Algorithm 1."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator, ParallelismConfig
from accelerate.state import PartialState
from accelerate.utils import DistributedType
from safetensors.torch import load_file
from torch import nn
from torch.distributed.fsdp import fully_shard
from transformers import (
    LlamaForCausalLM,
    MarianConfig,
    MarianMTModel,
    MixtralConfig,
    MixtralForCausalLM,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    StoppingCriteria,
    Trainer,
    TrainerCallback,
    get_linear_schedule_with_warmup,
)

from dsgdac_accel import (
    AdaptiveConsensus,
    GossipCallback,
    GossipConfig,
    build_topology,
)
from dsgdac_accel.distributed.shards import gathering_modules, reshard, whole_of
from dsgdac_accel.simulation import Simulation
from tests.llm.tiny import build_model
from tests.multiprocess.scenarios import fresh
from tests.multiprocess.test_sharded import flat, launch_variables, mesh_of, whole
from tests.multiprocess.trainer_model import arguments
from tests.workers import run_workers, try_workers

pytestmark = pytest.mark.multiprocess

LR, BATCH, MAX_NORM = 0.05, 2, 0.3


class Sentences(torch.utils.data.Dataset):
    """Rows of 5 tokens of which 1 to 5 count, so that the numbers of tokens differ a lot between processes."""

    def __init__(self, length: int, seed: int = 3, noise: bool = False) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.tokens = torch.randint(0, 7, (length, 5), generator=generator)
        self.labels = self.tokens.roll(1, 1).clone()
        self.noise = noise
        for row in range(length):
            self.labels[row, 1 + row % 5 :] = -100

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, row: int) -> dict[str, Any]:
        drawn = torch.rand((), dtype=torch.float64) if self.noise else torch.zeros((), dtype=torch.float64)
        return {"tokens": self.tokens[row], "labels": self.labels[row], "row": row, "noise": drawn}


class Tokens(nn.Module):
    """Divides its loss by `num_items_in_batch`, as the models of Transformers do. Records what it was trained on."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.embedding = nn.Embedding(7, 5)
            self.up = nn.Linear(5, 6)
            self.down = nn.Linear(6, 5)
            self.norm = nn.LayerNorm(5)
            self.drop = nn.Dropout(dropout)
            self.out = nn.Linear(5, 7)
        self.double()
        self.rows: list[list[int]] = []
        self.noises: list[list[float]] = []

    def forward(self, tokens, labels=None, row=None, noise=None, num_items_in_batch=None, **kwargs) -> dict[str, Any]:
        if self.training and row is not None:
            self.rows.append(row.tolist())
            self.noises.append(noise.tolist())
        x = self.embedding(tokens)
        logits = self.out(self.drop(self.norm(x + self.down(self.up(x).tanh()))))
        total = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")
        items = (labels != -100).sum() if num_items_in_batch is None else num_items_in_batch
        return {"loss": total / items, "logits": logits}


class Watched(TrainerCallback):
    """Records this worker's whole model after every optimizer step."""

    def __init__(self) -> None:
        self.weights: list[torch.Tensor] = []
        self.gammas: list[float] = []

    def on_optimizer_step(self, args, state, control, **kwargs):
        self.weights.append(whole(kwargs["model"]))
        self.gammas.append(self.trainer.accelerator.gossip_steps[0].gamma)


def sharded(model: nn.Module, mesh: Any) -> nn.Module:
    fully_shard(model.up, mesh=mesh["dp_shard"])
    return fully_shard(model, mesh=mesh["dp_shard"])


def trainer_of(
    folder: str,
    world: tuple[int, int],
    by: str = "mesh",
    model: nn.Module | None = None,
    data: Any = None,
    gossip: dict[str, Any] | None = None,
    watched: Any = None,
    callback: dict[str, Any] | None = None,
    attached: bool = True,
    **settings: Any,
) -> Trainer:
    """Return a Trainer. `by`: who shards, the test by a "mesh", or Accelerate by "arguments" or the "environment"."""
    fresh()
    workers, shards = world
    model = Tokens() if model is None else model
    sizes = {"dp_replicate_size": workers, "dp_shard_size": shards}
    options: dict[str, Any] = {}
    if by == "fsdp":
        options = {"fsdp": True, "fsdp_config": {"version": 2}}
    elif by == "arguments":
        options = {"parallelism_config": ParallelismConfig(**sizes), "fsdp": True, "fsdp_config": {"version": 2}}
    elif by == "environment":
        os.environ.update(launch_variables(sizes) | {"FSDP_CPU_RAM_EFFICIENT_LOADING": "true"})
    args = arguments(
        folder,
        **{
            "per_device_train_batch_size": BATCH,
            "gradient_accumulation_steps": 2,
            "max_steps": 7,
            "learning_rate": LR,
            "max_grad_norm": MAX_NORM,
            "optim": "adamw_torch",
            "logging_strategy": "steps",
            "logging_steps": 1,
            "remove_unused_columns": False,
            **options,
            **settings,
        },
    )
    assert args.world_size == workers * shards
    mesh = None
    if by == "mesh":
        mesh = mesh_of(*world)
        sharded(model, mesh) if isinstance(model, Tokens) else fully_shard(model, mesh=mesh["dp_shard"])
    else:
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU  # on gloo in place of GPUs
    config = GossipConfig(**{"power": 2.0, "timeout": 60, **(gossip or {})})
    watched = Watched() if watched is None else watched
    trainer = Trainer(
        model,
        args,
        train_dataset=Sentences(23) if data is None else data,
        eval_dataset=Sentences(16, seed=4),
        callbacks=[watched],
    )
    watched.trainer = trainer
    trainer.watched = watched
    trainer.gossip = GossipCallback(config, device_mesh=mesh, **(callback or {}))
    if attached:
        trainer.gossip.attach(trainer)
    return trainer


def train(rank: int, folder: str, world: tuple[int, int], **case: Any) -> dict[str, Any]:
    trainer = trainer_of(folder, world, **case)
    model: Any = trainer.model
    if rank >= world[1]:  # worker 0's values count
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.5)
    trainer.train()
    seen = trainer.watched
    predicted = trainer.predict(Sentences(13, seed=5))
    trainer.save_model(folder)
    return {
        "rows": model.rows,
        "weights": seen.weights,
        "gammas": seen.gammas,
        "deployed": whole(trainer.model),
        "logs": [row for row in trainer.state.log_history if "loss" in row],
        "evaluations": [row["eval_loss"] for row in trainer.state.log_history if "eval_loss" in row],
        "predictions": predicted.predictions,
        "labels": predicted.label_ids,
        "steps": trainer.state.global_step,
        "max_steps": trainer.state.max_steps,
        "samples": trainer.get_total_train_batch_size(trainer.args),
        "tokens": trainer.state.num_input_tokens_seen,
        "workers": trainer.accelerator.num_workers,
    }


def simulate(results: list[dict[str, Any]], world: tuple[int, int], accumulation: int = 2) -> dict[str, Any]:
    """The same with one dense model per worker, whose loss is the sum over all its tokens divided by their number."""
    workers, shards = world
    data, evaluation = Sentences(23), Sentences(16, seed=4)
    models = [Tokens() for _ in range(workers)]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0) for model in models]
    schedule = AdaptiveConsensus(power=2.0)
    simulation = Simulation(models, optimizers, build_topology("one_peer_ring", workers), schedule)
    per_pass = math.ceil(math.ceil(23 / BATCH) / (workers * shards))
    starts = [first + at for first in range(0, 99, per_pass) for at in range(0, per_pass, accumulation)]
    weights, norms, losses, evaluations = [], [], [], []
    total = results[0]["max_steps"]
    for step in range(total):
        first = starts[step]
        last = min(first + accumulation, (first // per_pass + 1) * per_pass)
        norms.append([])
        losses.append([])
        for worker, model in enumerate(models):
            optimizers[worker].param_groups[0]["lr"] = LR * (total - step) / total
            model.zero_grad()
            mine = results[worker * shards : (worker + 1) * shards]
            rows = [row for result in mine for batch in result["rows"][first:last] for row in batch]
            loss = model(data.tokens[rows], data.labels[rows])["loss"]
            loss.backward()
            losses[-1].append(float(loss.detach()))
            norms[-1].append(float(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM or math.inf)))
        simulation.step()
        weights.append(torch.stack([flat(model) for model in models]))
        mean = model_with(weights[-1].mean(0))
        parts = zip(evaluation.tokens.split(4), evaluation.labels.split(4), strict=True)
        evaluations.append(sum(float(mean(*part)["loss"].detach()) for part in parts) / 4)
    test = Sentences(13, seed=5)
    with torch.no_grad():
        logits = mean(test.tokens, test.labels)["logits"]
    return {
        "weights": weights,
        "norms": norms,
        "losses": losses,
        "evaluations": evaluations,
        "predictions": logits,
        "gammas": simulation.gammas,
        "radius": simulation.radius(),
    }


def model_with(values: torch.Tensor) -> Tokens:
    model = Tokens()
    nn.utils.vector_to_parameters(values, model.parameters())
    return model


def require_equal(results: list[dict[str, Any]], world: tuple[int, int], folder: Path) -> None:
    workers, shards = world
    expected = simulate(results, world)
    assert expected["radius"] > 1e-3, "the workers have to differ in this test"
    assert expected["gammas"][-1] < 0.2, "gamma has to change in this test"
    read = [{*chain.from_iterable(result["rows"][: 3 // shards])} for result in results]
    assert all(not first & second for first in read for second in read if first is not second)
    for rank, result in enumerate(results):
        worker = rank // shards
        assert result["workers"] == workers
        assert result["steps"] == len(expected["weights"]) == len(result["weights"])
        assert result["samples"] == 2 * BATCH * workers * shards
        for step, weights in enumerate(result["weights"]):
            torch.testing.assert_close(weights, expected["weights"][step][worker], rtol=0, atol=1e-9)
        assert result["gammas"] == pytest.approx(expected["gammas"], abs=1e-12)
        mean = expected["weights"][-1].mean(0)
        torch.testing.assert_close(result["deployed"], mean, rtol=0, atol=1e-9)
        for row, losses, norms in zip(result["logs"], expected["losses"], expected["norms"], strict=True):
            assert row["loss"] == pytest.approx(sum(losses) / workers, abs=1e-6)  # summed in float32
            assert row["grad_norm"] == pytest.approx(norms[worker], rel=1e-9)
        assert result["logs"][-1]["gossip/radius"] == pytest.approx(expected["radius"], abs=1e-9)
        assert result["evaluations"] == results[0]["evaluations"]
        for loss, mine in zip(result["evaluations"], expected["evaluations"][2::3], strict=False):
            assert loss == pytest.approx(mine, abs=1e-9)
        assert result["predictions"].shape == (13, 5, 7)
        torch.testing.assert_close(torch.from_numpy(result["predictions"]), expected["predictions"], rtol=0, atol=1e-9)
        assert result["labels"].tolist() == Sentences(13, seed=5).labels.tolist()
    saved = Tokens()
    saved.load_state_dict(load_file(folder / "model.safetensors"))
    assert torch.equal(flat(saved), results[0]["deployed"])


EVALUATING = {"eval_strategy": "steps", "eval_steps": 3, "per_device_eval_batch_size": 4}


def test_two_workers_of_two_shards_follow_algorithm_1_in_a_trainer(tmp_path):
    results = run_workers(train_case, 4, str(tmp_path), (2, 2), EVALUATING)
    require_equal(results, (2, 2), tmp_path)


def train_case(rank: int, folder: str, world: tuple[int, int], case: dict[str, Any]) -> dict[str, Any]:
    return train(rank, folder, world, **case)


@pytest.mark.slow
@pytest.mark.parametrize("by", ["arguments", "environment"])
def test_workers_that_accelerate_shards_follow_algorithm_1(tmp_path, by):
    results = run_workers(train_case, 4, str(tmp_path), (2, 2), {"by": by, **EVALUATING})
    require_equal(results, (2, 2), tmp_path)


# ---- checkpoints


class Steps(Watched):
    """Records what a resumed run must repeat to the bit, and asks for a stop."""

    def __init__(self, stop_at: int | None = None) -> None:
        super().__init__()
        self.stop_at = stop_at
        self.states: dict[int, tuple] = {}
        self.begun: torch.Tensor | None = None

    def on_train_begin(self, args, state, control, **kwargs):
        self.begun = whole(kwargs["model"])

    def on_step_end(self, args, state, control, **kwargs):
        optimizer = self.trainer.optimizer
        moments = [whole_of(value).double().sum() for s in optimizer.state.values() for value in s.values()]
        self.states[state.global_step] = (whole(kwargs["model"]), torch.stack(moments), torch.get_rng_state())
        if state.global_step == self.stop_at:
            self.trainer.gossip.request_stop("the test")


def run(rank: int, folder: str, world: tuple[int, int], by: str, resume: Any, stop: bool = False) -> dict[str, Any]:
    """Train three passes of four steps, with a checkpoint after steps 5 and 10."""
    steps = Steps(stop_at=6 if stop and rank == 3 else None)
    frozen = Tokens(dropout=0.2)
    frozen.norm.weight.requires_grad_(False)
    base = torch.arange(512.0, dtype=torch.float64)  # large enough to leave out of the states of whole workers
    frozen.base = nn.Parameter(base, requires_grad=False)
    trainer = trainer_of(
        folder,
        world,
        by,
        model=frozen,
        watched=steps,
        gradient_accumulation_steps=1,
        max_steps=-1,
        num_train_epochs=3,
        save_strategy="steps",
        save_steps=5,
        callback={"stop_on_request": stop},
        gossip={"on_other_worker_count": "deployed"},
        data=Sentences(31),
    )
    model: Any = trainer.model
    if resume:  # everything comes from the checkpoint
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.5)
    stopped = None
    try:
        trainer.train(resume_from_checkpoint=resume)
    except SystemExit as error:
        stopped = error.code
    return {
        "states": steps.states,
        "begun": steps.begun,
        "gammas": steps.gammas,
        "deployed": whole(model),
        "rows": model.rows,
        "stopped": stopped,
        "folders": sorted(path.name for path in Path(folder).glob("checkpoint-*")),
    }


@pytest.mark.slow
@pytest.mark.parametrize("by", ["mesh", "arguments"])
def test_a_run_stopped_by_one_process_resumes_as_if_unbroken(tmp_path, by):
    unbroken = run_workers(run, 4, str(tmp_path / "unbroken"), (2, 2), by, None)
    stopped = run_workers(run, 4, str(tmp_path / "stopped"), (2, 2), by, None, True)
    resumed = run_workers(run, 4, str(tmp_path / "stopped"), (2, 2), by, "auto")
    for rank, (first, second, expected) in enumerate(zip(stopped, resumed, unbroken, strict=True)):
        assert (first["stopped"], second["stopped"], expected["stopped"]) == (75, None, None)
        assert expected["folders"] == ["checkpoint-10", "checkpoint-12", "checkpoint-5"]
        last, total = max(first["states"]), max(expected["states"])
        assert 6 <= last <= 8 < total
        assert f"checkpoint-{last}" in first["folders"]
        assert sorted(second["states"]) == [*range(last + 1, total + 1)]
        assert torch.equal(second["begun"], first["states"][last][0])
        for step, state in (first["states"] | second["states"]).items():
            assert all(map(torch.equal, state, expected["states"][step])), f"rank {rank}, step {step}"
        assert torch.equal(second["deployed"], expected["deployed"])
        assert first["rows"] + second["rows"] == expected["rows"]
    assert not torch.equal(unbroken[0]["states"][6][0], unbroken[3]["states"][6][0])


@pytest.mark.slow
def test_a_checkpoint_is_read_by_another_number_of_shards_and_of_workers(tmp_path):
    """Also a deployed model alone, and states of workers of one process each."""
    saved = run_workers(run, 4, str(tmp_path), (2, 2), "mesh", None)
    checkpoint = str(tmp_path / "checkpoint-5")
    fewer = run_workers(run, 2, str(tmp_path / "fewer"), (2, 1), "mesh", checkpoint)
    for rank, result in enumerate(fewer):
        assert torch.equal(result["begun"], saved[2 * rank]["states"][5][0])
        assert torch.isfinite(result["deployed"]).all()
    more = run_workers(run, 4, str(tmp_path / "more"), (2, 2), "arguments", str(tmp_path / "fewer/checkpoint-10"))
    for rank, result in enumerate(more):
        assert torch.equal(result["begun"], fewer[rank // 2]["states"][10][0])
    single = run_workers(run, 2, str(tmp_path / "single"), (1, 2), "arguments", checkpoint)
    mean = (saved[0]["states"][5][0] + saved[2]["states"][5][0]) / 2
    for result in single:
        torch.testing.assert_close(result["begun"], mean, rtol=0, atol=1e-12)
    (tmp_path / "only").mkdir()
    for file in ("model.safetensors", "trainer_state.json"):
        (tmp_path / "only" / file).write_bytes((tmp_path / "checkpoint-5" / file).read_bytes())
    (tmp_path / "only" / "optimizer.pt").write_bytes(b"of a Trainer without gossip")
    groups = [{"params": [torch.zeros(1, device="cpu")]} for _ in range(2)]  # with and without weight decay
    optimizer = torch.optim.SGD(groups, lr=LR)
    schedule = get_linear_schedule_with_warmup(optimizer, 0, max(saved[0]["states"]))
    for _ in range(5):
        optimizer.step()
        schedule.step()
    torch.save(schedule.state_dict(), tmp_path / "only" / "scheduler.pt")
    alone = run_workers(run, 4, str(tmp_path / "alone"), (2, 2), "mesh", str(tmp_path / "only"))
    for result in alone:
        torch.testing.assert_close(result["begun"], mean, rtol=0, atol=1e-12)
        assert min(result["states"]) == 6
        assert result["gammas"] == pytest.approx(saved[0]["gammas"][5:], rel=1e-9)  # the lr schedule goes on, too


def choose_best(rank: int, folder: str, by: str) -> dict[str, Any]:
    trainer = trainer_of(
        folder,
        (2, 2),
        by,
        eval_strategy="steps",
        save_strategy="steps",
        eval_steps=2,
        save_steps=2,
        save_total_limit=1,
        load_best_model_at_end=True,
        metric_for_best_model="eval_loss",
        greater_is_better=True,  # the first one
    )
    trainer.compute_metrics = lambda predicted: {"rank": rank}
    trainer.train()
    best, last = whole(trainer.model), trainer.watched.weights[-1]
    evaluated = trainer.evaluate()["eval_loss"]
    history = [row["eval_loss"] for row in trainer.state.log_history if "eval_loss" in row]
    return {
        "best": best,
        "last": last,
        "folder": trainer.state.best_model_checkpoint,
        "eval": (evaluated, history[0]),
        "ranks": [row["eval_rank"] for row in trainer.state.log_history if "eval_rank" in row],
    }


@pytest.mark.slow
@pytest.mark.parametrize("by", ["mesh", "arguments"])
def test_the_best_average_is_loaded_into_all_shards(tmp_path, by):
    results = run_workers(choose_best, 4, str(tmp_path), by)
    saved = Tokens()
    saved.load_state_dict(load_file(tmp_path / "checkpoint-2" / "model.safetensors"))
    assert not [
        path for path in (tmp_path / "checkpoint-2").glob("*") if re.match("optimizer|pytorch_model", path.name)
    ]
    for result in results:
        assert result["ranks"] == [0] * 5  # all agree on the metrics of the first process
        assert result["folder"] == str(tmp_path / "checkpoint-2")
        assert torch.equal(result["best"], flat(saved))
        assert result["eval"][0] == pytest.approx(result["eval"][1], abs=1e-12)
        assert not torch.allclose(result["best"], result["last"], atol=1e-3)


# ---- a language model of Transformers, mixed precision


class TokenIds(torch.utils.data.Dataset):
    def __init__(self) -> None:
        self.ids = torch.randint(3, 300, (40, 12), generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.ids[row], "labels": self.ids[row]}


def train_llama(rank: int, folder: str, by: str, bf16: bool) -> dict[str, Any]:
    model = build_model(LlamaForCausalLM, tie_word_embeddings=True)
    trainer = trainer_of(
        folder,
        (2, 2),
        by,
        model=model,
        data=TokenIds(),
        bf16=bf16,
        max_steps=6,
        eval_strategy="no",
        include_num_input_tokens_seen="all",
        **({} if by == "mesh" else {"fsdp_config": LLAMA_CONFIG}),
    )
    trainer.train()
    trainer.save_model(folder)
    generated = None
    if rank < 4:
        inputs = torch.arange(3, 9)[None] + rank
        generated = trainer.model.generate(inputs, max_new_tokens=4, do_sample=False, synced_gpus=True)
    reshard(gathering_modules([trainer.model]))
    dtypes = {p.dtype for p in trainer.model.parameters()}
    return {
        "deployed": {name: whole_of(p).detach().clone() for name, p in trainer.model.named_parameters()},
        "own": trainer.watched.weights[-1],
        "dtypes": dtypes,
        "tokens": trainer.state.num_input_tokens_seen,
        "generated": generated,
    }


class StopsAt(StoppingCriteria):
    def __init__(self, length: int) -> None:
        self.length = length

    def __call__(self, input_ids, scores, **kwargs):
        return torch.full((len(input_ids),), input_ids.shape[1] >= self.length)


def predict_by_generating(rank: int, folder: str) -> Any:
    """Translate sentences whose translations are longer in some processes of a worker than in others."""
    fresh()
    args = Seq2SeqTrainingArguments(folder, use_cpu=True, max_steps=2, report_to=[], predict_with_generate=True)
    torch.manual_seed(0)
    sizes = {f"{part}_{name}": 2 for part in ("encoder", "decoder") for name in ("layers", "attention_heads")}
    config = MarianConfig(vocab_size=300, d_model=16, pad_token_id=0, eos_token_id=1, decoder_start_token_id=0, **sizes)
    mesh, model = mesh_of(2, 2), MarianMTModel(config)
    for part in (*model.model.encoder.layers, *model.model.decoder.layers, model):
        fully_shard(part, mesh=mesh["dp_shard"])
    gossip = GossipCallback(GossipConfig(timeout=20), device_mesh=mesh)
    data = TokenIds()
    trainer = Seq2SeqTrainer(model, args, train_dataset=data, callbacks=[gossip])
    trainer.train()
    trainer.save_model(folder)
    return trainer.predict(data, max_length=20, num_beams=1, stopping_criteria=[StopsAt(3 + 4 * rank)]).predictions


@pytest.mark.slow
def test_processes_of_a_worker_generate_texts_of_unequal_length(tmp_path):
    results = run_workers(predict_by_generating, 4, str(tmp_path), timeout=150)
    inputs = torch.stack([row["input_ids"] for row in TokenIds()])
    whole_model = MarianMTModel.from_pretrained(tmp_path)
    expected = whole_model.generate(inputs, max_length=3, num_beams=1)
    for predictions in results:
        assert predictions.shape[1] > 3
        assert (predictions[: len(inputs), :2] == expected[:, :2].numpy()).all()


LLAMA_CONFIG = {
    "version": 2,
    "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
    "activation_checkpointing": True,
    "state_dict_type": "SHARDED_STATE_DICT",
}


@pytest.mark.slow
@pytest.mark.parametrize(("by", "bf16"), [("mesh", True), ("arguments", True), ("arguments", False)])
def test_a_llama_of_shared_embeddings_trains_saves_and_generates(tmp_path, by, bf16):
    results = run_workers(train_llama, 4, str(tmp_path), by, bf16, timeout=200)
    loaded = LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    names = {name.replace("_checkpoint_wrapped_module.", ""): value for name, value in results[0]["deployed"].items()}
    for name, value in loaded.named_parameters():
        assert torch.equal(value, names[name]), name
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    mean = (results[0]["own"].double() + results[2]["own"].double()) / 2
    assert not torch.equal(results[0]["own"], results[2]["own"])
    for rank, result in enumerate(results):
        assert result["dtypes"] == {torch.float32}
        assert torch.equal(result["own"], results[rank // 2 * 2]["own"])
        values = torch.cat([value.flatten() for value in result["deployed"].values()])
        torch.testing.assert_close(values.double(), mean, rtol=0, atol=1e-6)
        assert result["tokens"] == 10 * BATCH * 4 * 12  # two passes of five batches, in four processes
        inputs = torch.arange(3, 9)[None] + rank
        expected = loaded.generate(inputs, max_new_tokens=4, do_sample=False)
        assert bf16 or torch.equal(result["generated"], expected)


# ---- data and gradients of processes


def read_noise(rank: int, folder: str, by: str) -> dict[str, Any]:
    """Read random numbers that loader processes draw."""
    data = Sentences(23, noise=True)
    trainer = trainer_of(
        folder, (2, 2), by, data=data, dataloader_num_workers=1, max_steps=3, gradient_accumulation_steps=1
    )
    gathered = trainer.gather_function([rank], use_gather_object=True)
    trainer.train()
    return {"noises": trainer.model.noises, "gathered": gathered}


@pytest.mark.slow
@pytest.mark.parametrize("by", ["mesh", "arguments"])
def test_loader_processes_of_every_process_draw_their_own_numbers(tmp_path, by):
    results = run_workers(read_noise, 4, str(tmp_path), by)
    assert len({str(result["noises"]) for result in results}) == 4
    for result in results:
        assert result["gathered"] == [0, 1, 2, 3]


# ---- a lost process, and a second training


class Dies(Watched):
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 3 and self.trainer.accelerator.group.everyone.rank == 3:
            os._exit(0)


def lose_a_shard(rank: int, folder: str) -> None:
    trainer_of(folder, (2, 2), watched=Dies(), gossip={"timeout": 15}).train()


@pytest.mark.slow
def test_a_killed_shard_ends_the_run_by_name(tmp_path):
    for outcome in try_workers(lose_a_shard, 4, str(tmp_path))[:3]:
        assert outcome.exit_code == 1
        assert re.search("WorkerLostError: .*(worker 1|rank 3) was lost in", outcome.error)


def train_twice(rank: int, folder: str, by: str) -> list[torch.Tensor]:
    trainer = trainer_of(folder, (2, 2), by, gradient_accumulation_steps=1, max_steps=3)
    found = []
    for _ in range(2):
        trainer.train()
        found += [trainer.watched.weights[-1], whole(trainer.model)]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("by", ["mesh", "arguments"])
def test_a_second_training_goes_on_from_the_average(tmp_path, by):
    results = run_workers(train_twice, 4, str(tmp_path), by)
    for last, deployed in ((0, 1), (2, 3)):
        mean = (results[0][last] + results[2][last]) / 2
        assert not torch.equal(results[0][last], results[2][last])
        for result in results:
            torch.testing.assert_close(result[deployed], mean, rtol=0, atol=1e-12)
    assert not torch.allclose(results[0][1], results[0][3], atol=1e-3)


# ---- refusals


def attach(trainer: Trainer, **changes: Any) -> str:
    """Return what `attach` said; nothing may have changed then."""
    accelerator, callbacks = trainer.accelerator, list(trainer.callback_handler.callbacks)
    config = accelerator.parallelism_config
    try:
        trainer.gossip.attach(trainer)
    except ValueError as error:
        assert type(accelerator) is Accelerator
        assert trainer.callback_handler.callbacks == callbacks
        assert accelerator.parallelism_config is config
        assert trainer.gossip._trainer is None
        return str(error)
    return "not refused"


def changed(trainer: Trainer, where: Any, **changes: Any) -> Trainer:
    for name, value in changes.items():
        setattr(where(trainer), name, value)
    return trainer


def tiny_mixtral() -> nn.Module:
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    return MixtralForCausalLM(MixtralConfig(**sizes, num_attention_heads=2, num_key_value_heads=2, num_local_experts=2))


def refuse_all(rank: int, folder: str) -> dict[str, str]:
    def build(by: str = "mesh", world: tuple[int, int] = (1, 2), **case: Any) -> Trainer:
        return trainer_of(folder, world, by, attached=False, **case)

    def args_of(trainer: Any) -> Any:
        return trainer.args

    def with_batch_norm(**case: Any) -> Trainer:
        return build(model=nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), **case)

    trl = type("DPOTrainer", (Trainer,), {"__module__": "trl.trainer"})
    prompts = SimpleNamespace(is_prompt_learning=True)
    said = {
        "deepspeed": attach(changed(build(), args_of, deepspeed="zero.json")),
        "batch size": attach(build(auto_find_batch_size=True)),
        "each node": attach(build(save_on_each_node=True)),
        "uneven": attach(build(accelerator_config={"even_batches": False})),
        "rebalance": attach(changed(build(), args_of, train_sampling_strategy="batch_rebalance")),
        "loaded": attach(changed(build(), lambda trainer: trainer, is_distributed_loading_by_transformers=True)),
        "8 bits": attach(changed(build(), lambda trainer: trainer.model, is_loaded_in_8bit=True)),
        "batch norm": attach(with_batch_norm()),
        "batch norm, pooled": attach(with_batch_norm(callback={"calibrate": False})),
        "adapters": attach(
            changed(
                build(load_best_model_at_end=True, eval_strategy="steps", save_strategy="steps"),
                lambda trainer: trainer.model,
                peft_config={},
            )
        ),
        "prompts": attach(changed(build(), lambda trainer: trainer.model, peft_config={"default": prompts})),
        "wrapped": attach(
            changed(
                build("arguments", fsdp_config={"version": 2, "activation_checkpointing": True}),
                lambda trainer: trainer.model,
                peft_config={},
            )
        ),
        "renamed": attach(
            build(
                model=tiny_mixtral(),
                load_best_model_at_end=True,
                eval_strategy="steps",
                save_strategy="steps",
            )
        ),
        "trl": attach(changed(build(), lambda trainer: trainer, __class__=trl)),
        "virtual": attach(build(gossip={"workers_per_process": 2})),
        "no mesh": attach(changed(build(), lambda trainer: trainer.gossip, device_mesh=None)),
        "both": attach(changed(build("arguments"), lambda trainer: trainer.gossip, device_mesh=mesh_of(1, 2))),
        "fsdp on CPUs": attach(changed(build(), args_of, fsdp=True)),
        "no sizes": attach(build("fsdp")),
        "no fsdp": attach(build("arguments", fsdp=None)),
        "fsdp 1": attach(build("fsdp", fsdp_config={"version": 1, "sync_module_states": False})),
        "offload": attach(build("arguments", fsdp_config={"version": 2, "cpu_offload": True})),
        "context": attach(build("arguments", parallelism_config=ParallelismConfig(cp_size=2))),
        "tensor": attach(build("arguments", parallelism_config=ParallelismConfig(tp_size=2), fsdp=None)),
        "plan": attach(changed(build(), lambda trainer: trainer.model, _tp_size=2)),
        "fp16": attach(changed(build("arguments"), lambda trainer: trainer.accelerator.state, _mixed_precision="fp16")),
    }
    trainer = build("arguments")
    said["before training"] = refusal(trainer.evaluate) if attach(trainer) == "not refused" else ""
    said["search"] = refusal(trainer.create_accelerator_and_postprocess)
    return said


def refusal(act: Any) -> str:
    try:
        act()
    except ValueError as error:
        return str(error)
    return "not refused"


REFUSED = {
    "deepspeed": "DeepSpeed splits the model over all processes.*docs/sharded.md",
    "batch size": "auto_find_batch_size=True does not work.*Set per_device_train_batch_size",
    "each node": "save_on_each_node=True does not work.*all nodes share",
    "uneven": "even_batches=False does not work.*Leave it out",
    "rebalance": "'batch_rebalance' does not work.*'group_by_length'",
    "loaded": "DistributedConfig.*Load it without.*parallelism_config",
    "8 bits": "8-bit layers of bitsandbytes.*Load the model in 4 bits or unquantized",
    "batch norm": r"calibrate= of a model with BatchNorm.*GossipCallback\(calibrate=False\)",
    "batch norm, pooled": "not refused",
    "adapters": "load_best_model_at_end=True with add_adapter .*get_peft_model",
    "prompts": "prompt learning of PEFT .*Use LoRA or another adapter",
    "wrapped": "activation_checkpointing .*PEFT.*Set gradient_checkpointing=True in place",
    "renamed": "load_best_model_at_end=True of models saved under other names.*from_pretrained",
    "trl": "DPOTrainer does not work with sharded workers.*Use SFTTrainer",
    "virtual": "workers_per_process=2 does not work with sharded workers.*Leave one of them out",
    "no mesh": r"the Trainer's model is sharded.*GossipCallback\(device_mesh=mesh\)",
    "both": "device_mesh= says all of it.*leave the arguments out",
    "fsdp on CPUs": r"fsdp= has no effect on CPUs.*GossipCallback\(device_mesh=mesh\)",
    "no sizes": r"FSDP2 needs dp_shard_size > 1.*TrainingArguments\(parallelism_config=..., fsdp=True\)",
    "no fsdp": r"dp_shard_size=2 needs FSDP2 to shard the model.*fsdp=True\)",
    "fsdp 1": r"fsdp_version=1 averages the gradients of all processes.*fsdp=True\)",
    "offload": "cpu_offload of FSDP2 .*Leave cpu_offload",
    "context": "parallelism_config splits a worker over 2 processes by 'cp'.*'dp_shard'",
    "tensor": "parallelism_config splits a worker over 2 processes by 'tp'.*'dp_shard'",
    "plan": "the model splits a worker over 2 processes by 'tp'.*'dp_shard'",
    "fp16": "mixed_precision='fp16' does not work with sharded workers.*Use 'bf16'",
    "before training": r"FSDP2 shards the model in train\(\).*eval_on_start=True",
    "search": "hyperparameter_search does not work with sharded workers",
}


@pytest.mark.slow
def test_what_a_trainer_cannot_shard_is_refused_before_anything_changes(tmp_path):
    for said in run_workers(refuse_all, 2, str(tmp_path)):
        assert {case: text for case, text in said.items() if not re.search(REFUSED[case], text)} == {}


# ---- the page of docs/


@pytest.mark.slow
def test_the_example_of_the_page_runs_and_resumes(tmp_path):
    page = (Path(__file__).resolve().parents[2] / "docs" / "sharded.md").read_text(encoding="utf-8")
    script = next(
        part for part in re.findall(r"```py\n(.*?)```", page, re.DOTALL) if "device_mesh=mesh)\ntrainer" in part
    )
    (tmp_path / "sharded_trainer.py").write_text(script)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "4"]
    variables = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    losses = []
    for epochs in (3, 4):
        (tmp_path / "sharded_trainer.py").write_text(script.replace("num_train_epochs=3", f"num_train_epochs={epochs}"))
        run = subprocess.run(
            [*launch, "sharded_trainer.py"], cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=140
        )
        assert run.returncode == 0, run.stderr
        losses.append([float(loss) for loss in re.findall(r"'eval_loss': '?([0-9.]+)", run.stdout)])
    assert [len(found) for found in losses] == [3, 1]
    assert losses[1][0] < losses[0][0]
    saved = load_file(tmp_path / "deployed_trainer" / "model.safetensors")
    assert {name: tuple(value.shape) for name, value in saved.items()}["layers.0.weight"] == (32, 8)
