"""LoRA on a base that the processes of a worker shard, in a Trainer and in TRL's SFTTrainer, on gloo."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import ParallelismConfig
from accelerate.state import PartialState
from accelerate.utils import DistributedType
from torch import nn
from torch.distributed.fsdp import fully_shard
from transformers import LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

from dsgdac_accel import AdaptiveConsensus, GossipCallback, GossipConfig, build_topology
from dsgdac_accel.distributed.shards import gathering_modules, reshard, whole_of
from dsgdac_accel.simulation import Simulation
from tests.llm.fine_tuning import lora, rows
from tests.llm.tiny import arguments, build_model, build_tokenizer
from tests.multiprocess.scenarios import fresh
from tests.multiprocess.test_sharded import mesh_of
from tests.multiprocess.test_trainer_sharded import TokenIds
from tests.workers import run_workers

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]

peft = pytest.importorskip("peft")

SAVED_AT, LAST = 3, 6
EPSILON = 1e-3  # Llama computes norms and its loss in float32: Adam is not to enlarge that


def adapted() -> Any:
    torch.manual_seed(0)
    return peft.get_peft_model(build_model(LlamaForCausalLM), lora("CAUSAL_LM", lora_dropout=0.0)).double()


def adapter_of(model: nn.Module) -> dict[str, torch.Tensor]:
    reshard(gathering_modules([model]))
    return {name: whole_of(p).detach().clone() for name, p in model.named_parameters() if p.requires_grad}


class Adapters(TrainerCallback):
    """Records the adapter after every step."""

    def __init__(self) -> None:
        self.recorded: dict[int, dict[str, torch.Tensor]] = {}

    def on_step_end(self, args, state, control, **kwargs):
        self.recorded[state.global_step] = adapter_of(kwargs["model"])


def build_trainer(folder: str, kind: str, by: str, **changes: Any) -> Any:
    """Return a "trainer" or "sft" trainer of 2 workers of 2 processes, sharded by a "mesh" or by "arguments"."""
    fresh()
    if by == "arguments":
        changes |= {
            "parallelism_config": ParallelismConfig(dp_replicate_size=2, dp_shard_size=2),
            "fsdp": True,
            "fsdp_config": {"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]},
        }
    model = adapted()
    settings = arguments(
        folder,
        per_device_train_batch_size=2,
        per_device_eval_batch_size=2,
        adam_epsilon=EPSILON,
        max_steps=LAST,
        logging_steps=1,
        **changes,
    )
    if kind == "sft":
        trl = pytest.importorskip("trl")
        data, build, args = rows("sft"), trl.SFTTrainer, trl.SFTConfig(**settings)
        evaluation = data.select(range(8))
    else:
        data, build, args = TokenIds(), Trainer, TrainingArguments(**settings)
        evaluation = torch.utils.data.Subset(data, range(8))
    mesh = None
    if by == "mesh":
        mesh = mesh_of(2, 2)
        for layer in model.get_base_model().model.layers:
            fully_shard(layer, mesh=mesh["dp_shard"])
        fully_shard(model, mesh=mesh["dp_shard"])
    else:
        assert args.world_size == 4
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU  # on gloo in place of GPUs
    adapters = Adapters()
    more = {"processing_class": build_tokenizer()} if kind == "sft" else {}
    trainer = build(
        model, args, train_dataset=data, eval_dataset=evaluation, **more,
        callbacks=[adapters, GossipCallback(GossipConfig(power=2.0, timeout=60), device_mesh=mesh)],
    )  # fmt: skip
    trainer.adapters = adapters
    return trainer


def train(rank: int, folder: str, kind: str, by: str, resume: Any = None) -> dict[str, Any]:
    """Train, evaluate and save after three and six steps, or resume. The first checkpoint counts as the best."""
    best = {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss", "greater_is_better": True}
    every = {"eval_strategy": "steps", "eval_steps": SAVED_AT, "save_strategy": "steps", "save_steps": SAVED_AT}
    trainer = build_trainer(folder, kind, by, **every, **({} if resume else best))
    seen: list[tuple[bool, dict[str, Any]]] = []
    trainer.model.get_base_model().register_forward_pre_hook(
        lambda module, args, kwargs: seen.append((module.training, kwargs)), with_kwargs=True
    )
    if rank >= 2:  # worker 0's values count
        with torch.no_grad():
            for parameter in trainer.model.parameters():
                parameter.add_(0.5)
    trainer.train(resume_from_checkpoint=resume)
    trainer.save_model(f"{folder}/deployed")
    return {
        "adapters": trainer.adapters.recorded,
        "deployed": adapter_of(trainer.model),
        "trained": [kwargs for training, kwargs in seen if training],
        "evaluated": [kwargs for training, kwargs in seen if not training],
        "losses": [row["eval_loss"] for row in trainer.state.log_history if "eval_loss" in row],
    }


def loss_of(model: nn.Module, batches: list[dict[str, Any]]) -> torch.Tensor:
    """Return the loss per token of the batches together."""
    total, tokens = torch.zeros((), dtype=torch.float64), 0
    for inputs in batches:
        logits = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits[:, :-1]
        labels = inputs["labels"][:, 1:]
        total = total + nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        tokens += int((labels != -100).sum())
    return total / tokens


def simulate(results: list[dict[str, Any]]) -> dict[int, list[dict[str, torch.Tensor]]]:
    """Train one dense model per worker on the tokens of both its processes; return both adapters after each step."""
    models = [adapted() for _ in range(2)]
    trained = [[p for p in model.parameters() if p.requires_grad] for model in models]
    optimizers = [torch.optim.AdamW(parameters, lr=0.01, eps=EPSILON, weight_decay=0.0) for parameters in trained]
    simulation = Simulation(models, optimizers, build_topology("one_peer_ring", 2), AdaptiveConsensus(power=2.0))
    adapters = {}
    for step in range(LAST):
        for worker, model in enumerate(models):
            optimizers[worker].param_groups[0]["lr"] = 0.01 * (LAST - step) / LAST
            optimizers[worker].zero_grad()
            loss_of(model, [result["trained"][step] for result in results[2 * worker : 2 * worker + 2]]).backward()
            nn.utils.clip_grad_norm_(trained[worker], 1.0)
        simulation.step()
        adapters[step + 1] = list(map(adapter_of, models))
    assert simulation.radius() > 1e-3, "the workers have to differ in this test"
    assert simulation.gammas[-1] < 0.2, "gamma has to change in this test"
    return adapters


def mean_of(adapters: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {name: (value + adapters[1][name]) / 2 for name, value in adapters[0].items()}


def close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], atol: float = 1e-12) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=atol)


def loaded(folder: Path) -> Any:
    """Return an ordinary model with the adapter in a folder."""
    assert not [*folder.glob("model*")], "only the adapter is to be saved"
    base = build_model(LlamaForCausalLM).double()
    return peft.PeftModel.from_pretrained(base, str(folder), is_trainable=True, autocast_adapter_dtype=False)


@pytest.mark.parametrize(("kind", "by"), [("trainer", "mesh"), ("sft", "arguments")])
def test_adapters_of_a_sharded_base_follow_algorithm_1_and_resume_exactly(tmp_path, kind, by):
    results = run_workers(train, 4, str(tmp_path / "run"), kind, by, timeout=200)
    simulated = simulate(results)
    adapters = {step: [results[rank]["adapters"][step] for rank in (0, 2)] for step in simulated}
    checkpoints = {step: tmp_path / "run" / f"checkpoint-{step}" for step in (SAVED_AT, LAST)}
    for number, (step, folder) in enumerate(checkpoints.items()):
        mean = loaded(folder)
        close(adapter_of(mean), mean_of(adapters[step]))
        with torch.no_grad():
            losses = [float(loss_of(mean, [result["evaluated"][number]])) for result in results]
        assert results[0]["losses"][number] == pytest.approx(sum(losses) / 4, abs=1e-6)  # gathered in float32
        base = sum(p.nbytes for p in mean.get_base_model().parameters() if not p.requires_grad)
        assert base < sum(file.stat().st_size for file in folder.rglob("*.safetensors")) < 2 * base  # once, not twice
    best = adapter_of(loaded(checkpoints[SAVED_AT]))
    close(adapter_of(loaded(tmp_path / "run" / "deployed")), best)
    resumed = run_workers(train, 4, str(tmp_path / "resumed"), kind, by, str(checkpoints[SAVED_AT]), timeout=200)
    for rank, (result, rest) in enumerate(zip(results, resumed, strict=True)):
        for step, expected in simulated.items():
            close(result["adapters"][step], expected[rank // 2], 1e-7)
        assert sorted(rest["adapters"]) == [*range(SAVED_AT + 1, LAST + 1)]
        for step, adapter in rest["adapters"].items():
            torch.testing.assert_close(adapter, result["adapters"][step], rtol=0, atol=0)
        torch.testing.assert_close(result["deployed"], best, rtol=0, atol=0)
        close(rest["deployed"], mean_of(adapters[LAST]))
