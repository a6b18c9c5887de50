"""The Transformer of the translation task: Marian or Pegasus of the transformers library, initialized as in the
literature.

The two differ in nothing but the place of their layer norms: Marian is post-norm, Pegasus pre-norm.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForSeq2SeqLM,
    GenerationConfig,
    MarianConfig,
    MarianMTModel,
    PegasusConfig,
    PegasusForConditionalGeneration,
    PreTrainedTokenizerFast,
)

from tasks.translation.config import SIZES, DecodingConfig, ModelConfig
from tasks.translation.tokenizer import load_tokenizer

Translator: TypeAlias = MarianMTModel | PegasusForConditionalGeneration

DEFAULT_POSITIONS = 1024


def build_model(
    config: ModelConfig, vocab_size: int, pad: int, end: int, positions: int = DEFAULT_POSITIONS
) -> Translator:
    """Build and initialize a translator. Its decoder starts from the padding token, as Marian's does.

    Args:
        config: a size, and the settings that differ from it.
        vocab_size: number of tokens in the joint vocabulary.
        pad, end: ids of the padding token and the sentence end.
        positions: longest sequence, in tokens. Positions are sinusoidal, so this adds no trained parameters.

    Raises ValueError for an attention kernel that cannot be used here.

    >>> model = build_model(ModelConfig(size="tiny"), vocab_size=300, pad=0, end=1)
    >>> sum(p.numel() for p in model.parameters() if p.requires_grad)
    30976
    """
    size = SIZES[config.size] | {
        name: value for name in SIZES[config.size] if (value := getattr(config, name)) is not None
    }
    settings: dict[str, Any] = {
        "vocab_size": vocab_size,
        "d_model": size["d_model"],
        "encoder_layers": size["encoder_layers"],
        "decoder_layers": size["decoder_layers"],
        "encoder_attention_heads": size["heads"],
        "decoder_attention_heads": size["heads"],
        "encoder_ffn_dim": size["ffn"],
        "decoder_ffn_dim": size["ffn"],
        "max_position_embeddings": positions,
        "activation_function": "relu",
        "dropout": config.dropout,
        "attention_dropout": config.attention_dropout,
        "activation_dropout": config.activation_dropout,
        "scale_embedding": True,
        "tie_word_embeddings": True,
        "pad_token_id": pad,
        "eos_token_id": end,
        "decoder_start_token_id": pad,
        "forced_eos_token_id": None,
        "attn_implementation": config.attention,
    }
    try:
        if config.norm == "pre":
            model: Translator = PegasusForConditionalGeneration(PegasusConfig(**settings))
        else:
            model = MarianMTModel(MarianConfig(**settings, share_encoder_decoder_embeddings=True))
    except (ImportError, ValueError) as error:
        raise ValueError(
            f"model.attention: {config.attention} cannot be used here ({str(error)[:200]}). Use sdpa."
        ) from error
    initialize(model)
    model.generation_config = GenerationConfig(**_special_tokens(model))
    return model


@torch.no_grad()
def initialize(model: Translator) -> None:
    """Initialize a model as tensor2tensor and fairseq do: Xavier uniform matrices, zero biases, normal embeddings.

    Embeddings have variance 1 / d_model, so that they have unit size after the factor sqrt(d_model) at the input. The
    standard deviation of 0.02 that Transformers uses suits one width only.
    """
    for module in model.modules():
        if isinstance(module, nn.Linear) and module is not model.lm_head:  # the head is the embedding
            nn.init.xavier_uniform_(module.weight)
            nn.init.zeros_(module.bias)
    nn.init.normal_(model.model.shared.weight, std=model.config.d_model**-0.5)


def trained_parameters(model: nn.Module) -> int:
    """Number of trained parameters; tied ones count once."""
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def decoder_start(model: Translator) -> int:
    """Id of the token from which the decoder starts."""
    start = model.config.decoder_start_token_id
    assert start is not None, "build_model sets it"
    return start


def allow_positions(model: Translator, positions: int) -> None:
    """Let a model read and write sequences of up to `positions` tokens, by longer tables of its sinusoids.

    The tables are not trained, so longer ones change nothing else.
    """
    if positions <= model.config.max_position_embeddings:
        return
    model.config.max_position_embeddings = positions
    for part in (model.model.encoder, model.model.decoder):
        old = part.embed_positions
        new = type(old)(positions, old.embedding_dim)
        new.weight = nn.Parameter(new.create_weight().to(old.weight), requires_grad=False)
        part.embed_positions = new


# ---- deployment


def save_translator(
    model: Translator,
    state: Mapping[str, Tensor],
    tokenizer: PreTrainedTokenizerFast,
    decoding: DecodingConfig,
    folder: Path,
    positions: int = DEFAULT_POSITIONS,
) -> None:
    """Write a folder that `AutoModelForSeq2SeqLM` and `AutoTokenizer` load.

    Args:
        model: the architecture.
        state: its weights.
        tokenizer: the vocabulary.
        decoding: the search to note in the generation config.
        folder: where to write.
        positions: longest sequence to note in the config; the model may have been extended for longer sentences.
    """
    training_search, evaluated = model.generation_config, model.config.max_position_embeddings
    positions = min(positions, evaluated)
    model.config.max_position_embeddings = positions
    model.generation_config = GenerationConfig(
        num_beams=decoding.beams,
        length_penalty=decoding.length_penalty if decoding.beams > 1 else None,  # Transformers refuses it for one
        length_penalty_kind=decoding.length_penalty_kind,  # Transformers keeps but does not read it
        max_new_tokens=positions - 1,
        **_special_tokens(model),
    )
    tables = ("encoder.embed_positions.weight", "decoder.embed_positions.weight")
    saved = {name: tensor[:positions] if name.endswith(tables) else tensor for name, tensor in state.items()}
    try:
        model.save_pretrained(folder, state_dict=saved)
    finally:
        model.generation_config, model.config.max_position_embeddings = training_search, evaluated
    tokenizer.save_pretrained(folder)
    # All versions of Transformers with fast tokenizers know the class by this name.
    settings = folder / "tokenizer_config.json"
    card: dict[str, Any] = json.loads(settings.read_text(encoding="utf-8"))
    card["tokenizer_class"] = "PreTrainedTokenizerFast"
    settings.write_text(json.dumps(card, indent=2) + "\n", encoding="utf-8")


def load_translator(folder: Path) -> tuple[Translator, PreTrainedTokenizerFast, DecodingConfig]:
    """Load what `save_translator` wrote: the model in eval mode, its tokenizer and its search settings.

    Raises FileNotFoundError or ValueError for a folder without such a model.
    """
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        if not (folder / name).is_file():
            raise FileNotFoundError(
                f"model must be the folder of a trained translator, such as `deployed/` of a run; {folder} has no "
                f"{name}."
            )
    rule = f"model must be a Marian or Pegasus model that can be read; {folder}"
    try:
        model = AutoModelForSeq2SeqLM.from_pretrained(folder)
    except Exception as error:  # broken files raise many types of errors of safetensors, json and Transformers
        raise ValueError(f"{rule} is not ({type(error).__name__}: {str(error)[:200]}).") from error
    if not isinstance(model, Translator):
        raise ValueError(f"{rule} has a {type(model).__name__}. Use `deployed/` of a run.")
    saved = model.generation_config
    decoding = DecodingConfig(
        beams=saved.num_beams or 1,
        length_penalty=1.0 if saved.length_penalty is None else saved.length_penalty,
        length_penalty_kind=getattr(saved, "length_penalty_kind", "power"),
    )
    model.generation_config = GenerationConfig(**_special_tokens(model))
    return model.eval(), load_tokenizer(folder), decoding


def _special_tokens(model: Translator) -> dict[str, Any]:
    config = model.config
    return {
        "pad_token_id": config.pad_token_id,
        "eos_token_id": config.eos_token_id,
        "decoder_start_token_id": config.decoder_start_token_id,
        "suppress_tokens": [config.pad_token_id],  # never generate padding
    }
