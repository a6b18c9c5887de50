"""A tiny Llama and its tokenizer, built without the hub, and a replay of every worker's optimizer steps."""

from __future__ import annotations

from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from torch import Tensor, nn
from transformers import LlamaConfig, PreTrainedTokenizerFast, Trainer, TrainerCallback

from tasks.translation.grammar import Sampler

_SAMPLER = Sampler(2602)
PAIRS = [_SAMPLER.pair() for _ in range(96)]
"""English sentences and their German translations."""

CHAT = "{% for m in messages %}{{ m['role'] }} : {{ m['content'] }} {{ eos_token }} {% endfor %}"


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of whole words."""
    words = Tokenizer(models.WordLevel(unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    special = ["<unk>", "<pad>", "<eos>"]
    words.train_from_iterator(
        (text for pair in PAIRS for text in pair), trainers.WordLevelTrainer(vocab_size=300, special_tokens=special)
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="<unk>", pad_token="<pad>", eos_token="<eos>", chat_template=CHAT
    )


def build_model(kind: type[nn.Module], dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """Return a Llama with 2 layers of width 64, a language model or a classifier, with random weights from seed 0."""
    config = LlamaConfig(
        vocab_size=300, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, pad_token_id=1, eos_token_id=2, bos_token_id=2, **changes,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return kind(config).to(dtype)


def arguments(folder: Any, **changes: Any) -> dict[str, Any]:
    """Return training arguments that are quiet and run on the CPU."""
    settings = {
        "output_dir": str(folder), "use_cpu": True, "per_device_train_batch_size": 4, "max_steps": 5, "report_to": [],
        "learning_rate": 0.01, "optim": "adamw_torch", "save_strategy": "no", "logging_steps": 2, "disable_tqdm": True,
        "dataloader_pin_memory": False, "bf16": False,
    }  # fmt: skip
    return settings | changes


def trainable(model: nn.Module) -> dict[str, Tensor]:
    """Return copies of the trainable parameters by name."""
    return {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}


class Steps(TrainerCallback):
    """Records, for every optimizer step, the trainable parameters before and after it, the gradients, lr and gamma."""

    def __init__(self) -> None:
        self.trainer: Any = None
        self.recorded: list[dict[str, Any]] = []

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        parameters = kwargs["model"].named_parameters()
        self.gradients = {name: p.grad.clone() for name, p in parameters if p.grad is not None}
        self.before = trainable(kwargs["model"])

    def on_optimizer_step(self, args, state, control, **kwargs):
        self.recorded.append(
            {
                "step": state.global_step + 1,
                "before": self.before,
                "gradients": self.gradients,
                "after": trainable(kwargs["model"]),
                "lr": [float(group["lr"]) for group in self.trainer.optimizer.param_groups],
                "gamma": self.trainer.accelerator.gossip_steps[0].gamma,
            }
        )


def assert_algorithm_1(stock: Trainer, workers: list[dict[str, Any]]) -> list[dict[str, Tensor]]:
    """Replay the run of 2 workers in float32 with the optimizer of a Trainer without gossip and the recorded gradients.

    Args:
        stock: a Trainer of the same model and arguments, without gossip.
        workers: per worker, `steps` as recorded by `Steps`, and `deployed`, the trainable parameters in the end.

    Returns:
        The average of the workers after each step.
    """
    assert stock.model is not None
    parameters = {name: p for name, p in stock.model.named_parameters() if p.requires_grad}
    values = [{name: value.float() for name, value in worker["steps"][0]["before"].items()} for worker in workers]
    optimizers = []
    for _ in workers:
        stock.optimizer = None
        optimizers.append(stock.create_optimizer())
    averages = []
    for steps in zip(*(worker["steps"] for worker in workers), strict=True):
        stepped = [
            _local_step(optimizer, parameters, mine, step)
            for optimizer, mine, step in zip(optimizers, values, steps, strict=True)
        ]
        gamma = steps[0]["gamma"]
        values = [
            {name: after[name] + gamma / 2 * (other[name] - mine[name]) for name in mine}
            for after, mine, other in zip(stepped, values, values[::-1], strict=True)
        ]
        averages.append({name: (values[0][name] + values[1][name]) / 2 for name in values[0]})
        for expected, step in zip(values, steps, strict=True):
            assert_close(step["after"], expected)
    gammas = [step["gamma"] for step in workers[0]["steps"]]
    assert gammas[0] == 1 > gammas[-1], "gamma has to change in this test"
    assert max(float((values[0][name] - values[1][name]).abs().max()) for name in values[0]) > 1e-3
    for worker in workers:
        assert_close(worker["deployed"], averages[-1])
    return averages


def _local_step(
    optimizer: torch.optim.Optimizer, parameters: dict[str, nn.Parameter], values: dict[str, Tensor], step: Any
) -> dict[str, Tensor]:
    """Return the parameters after a step of the optimizer alone, from `values`."""
    for name, parameter in parameters.items():
        parameter.grad = None
        parameter.data = values[name].clone()
        parameter.grad = step["gradients"][name].float() if name in step["gradients"] else None
    for group, lr in zip(optimizer.param_groups, step["lr"], strict=True):
        group["lr"] = torch.full_like(group["lr"], lr) if isinstance(group["lr"], Tensor) else lr
    with torch.compiler.set_stance("force_eager"):  # as the workers: a compiled step rounds 8-bit states otherwise
        optimizer.step()
    return {name: parameter.detach() for name, parameter in parameters.items()}


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Compare with values in float32, as exactly as the dtype allows."""
    for name, value in found.items():
        ulp = 0.0 if value.dtype == torch.float32 else 2.0**-8  # of bfloat16
        torch.testing.assert_close(
            value.float(), expected[name], rtol=ulp, atol=2e-6, msg=lambda m, name=name: f"{name}: {m}"
        )
