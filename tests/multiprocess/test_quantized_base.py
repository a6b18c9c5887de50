"""LoRA on plain, bitsandbytes and torchao bases: checkpoints leave the base out, and only the same base resumes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from torch import nn

from dsgdac_accel import GossipAccelerator, GossipCallback, GossipConfig
from dsgdac_accel.checkpoint import CheckpointError
from dsgdac_accel.tensor_bytes import as_bytes, digest
from tests.multiprocess.trainer_model import arguments
from tests.workers import run_workers

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]


class Tokens(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 32

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(0, 64, (12,), generator=torch.Generator().manual_seed(row))
        return {"input_ids": tokens, "labels": tokens}


def quantized(model: nn.Module, kind: str) -> nn.Module:
    """Quantize the linear layers of a decoder in place."""
    if kind == "torchao":
        import torchao

        torchao.quantize_(model.model, torchao.quantization.Int8WeightOnlyConfig())
    if kind == "bitsandbytes":
        import bitsandbytes

        for module in list(model.model.modules()):
            for name, child in list(module.named_children()):
                if isinstance(child, nn.Linear):
                    layer = bitsandbytes.nn.Linear4bit(
                        child.in_features, child.out_features, bias=False, compress_statistics=True, quant_type="nf4"
                    )
                    layer.weight = bitsandbytes.nn.Params4bit(
                        child.weight.data, requires_grad=False, compress_statistics=True, quant_type="nf4"
                    )
                    setattr(module, name, layer.to("cpu"))
    return model


def llama(kind: str, seed: int = 0) -> nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=32,
    )  # fmt: skip
    torch.manual_seed(seed)
    return quantized(transformers.LlamaForCausalLM(config), kind)


def with_adapter(base: nn.Module) -> nn.Module:
    import peft

    torch.manual_seed(1)
    base.requires_grad_(False)
    return peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))


def values_of(model: nn.Module) -> list[str]:
    return [digest(tensor) for tensor in (*model.parameters(), *model.buffers())]


def trained(model: nn.Module, folder: str, resume: str | None = None) -> nn.Module:
    trainer = transformers.Trainer(
        model,
        arguments(folder, max_steps=6, save_strategy="steps", save_steps=3, per_device_train_batch_size=2),
        train_dataset=Tokens(),
        callbacks=[GossipCallback(GossipConfig(timeout=30, power=1.0))],
    )
    trainer.train(resume_from_checkpoint=resume)
    return model


def with_the_trainer(rank: int, folder: Path, kind: str) -> tuple[bool, str]:
    end = values_of(trained(with_adapter(llama(kind)), str(folder)))
    again = values_of(trained(with_adapter(llama(kind)), str(folder), str(folder / "checkpoint-3")))
    with pytest.raises(CheckpointError) as caught:
        trained(with_adapter(llama(kind, seed=7)), str(folder), str(folder / "checkpoint-3"))
    return end == again, str(caught.value)


def by_hand(rank: int, folder: Path, kind: str) -> tuple[bool, str]:
    """`save_state` stores a plain base once and leaves a quantized one out."""

    def run(model: nn.Module, steps: range, load: bool) -> list[str]:
        accelerator = GossipAccelerator(gossip=GossipConfig(timeout=30, power=1.0))
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        model, optimizer = accelerator.prepare(model, optimizer)
        if load:
            accelerator.load_state(folder / "c")
        for step in steps:
            if step == 2:
                accelerator.save_state(folder / "c")
            tokens = torch.stack([Tokens()[2 * step + rank]["input_ids"]])
            accelerator.backward(model(input_ids=tokens, labels=tokens).loss)
            optimizer.step()
            optimizer.zero_grad()
        accelerator.free_memory()
        return values_of(model)

    end = run(with_adapter(llama(kind)), range(4), load=False)
    again = run(with_adapter(llama(kind)), range(2, 4), load=True)
    try:
        other = run(with_adapter(llama(kind, seed=7)), range(2, 4), load=True)
        message = "loaded" if other == end else "wrong"
    except CheckpointError as error:
        message = str(error)
    return end == again, message


def different_on_the_workers(rank: int, kind: str) -> str:
    model = with_adapter(llama(kind, seed=rank))
    accelerator = GossipAccelerator(gossip=GossipConfig(timeout=30))
    with pytest.raises(ValueError, match="is quantized and differs") as caught:
        accelerator.prepare(model, torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1))
    return str(caught.value)


KINDS = {"plain": "peft", "bitsandbytes": "bitsandbytes", "torchao": "torchao"}


@pytest.mark.parametrize("kind", KINDS)
def test_a_trainer_leaves_the_base_out_and_resumes_only_on_the_same_one(tmp_path, kind):
    pytest.importorskip("peft")
    pytest.importorskip(KINDS[kind])
    for equal, message in run_workers(with_the_trainer, 2, tmp_path, kind):
        assert equal
        assert "Build the model from the same base" in message
    base = sum(as_bytes(tensor).numel() for tensor in llama("plain").parameters())
    workers = sum(file.stat().st_size for file in (tmp_path / "checkpoint-3" / "workers").iterdir())
    assert workers < base / 2, "two workers' adapters, moments and random streams"


@pytest.mark.parametrize("kind", KINDS)
def test_save_state_stores_a_plain_base_once_and_a_quantized_one_never(tmp_path, kind):
    pytest.importorskip("peft")
    pytest.importorskip(KINDS[kind])
    for equal, message in run_workers(by_hand, 2, tmp_path, kind):
        assert equal
        assert message == "loaded" if kind == "plain" else "Build the model from the same base" in message


@pytest.mark.parametrize("kind", ["bitsandbytes", "torchao"])
def test_quantized_bases_that_differ_are_refused_on_all_workers(kind):
    pytest.importorskip("peft")
    pytest.importorskip(KINDS[kind])
    assert len(set(run_workers(different_on_the_workers, 2, kind))) == 1
