"""The Transformer, its loss and its schedule against closed forms and against torch and Transformers themselves."""

import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F
from datasets import Dataset
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, T5Config, T5ForConditionalGeneration

from dsgdac_accel import AdaptiveConsensus
from tasks.common.lr_schedules import inverse_square_root
from tasks.translation.batches import IGNORED, Collate, TokenizedPairs
from tasks.translation.config import DecodingConfig, ModelConfig
from tasks.translation.loss import losses_and_tokens, smoothed_loss
from tasks.translation.model import allow_positions, build_model, load_translator, save_translator, trained_parameters
from tasks.translation.tokenizer import load_tokenizer, train_tokenizer


def tiny(vocab_size=60, **changes):
    torch.manual_seed(0)
    return build_model(ModelConfig(size="tiny", **{"dropout": 0.0} | changes), vocab_size, pad=0, end=1, positions=32)


@pytest.fixture(params=["post", "pre"])
def norm(request):
    return request.param


@pytest.fixture
def tokenizer(tmp_path):
    train_tokenizer(["a small text of some words"], 300).save(str(tmp_path / "tokenizer.json"))
    return load_tokenizer(tmp_path / "tokenizer.json")


# ---- sizes


def expected_parameters(vocab_size, width, ffn, layers, last_norms):
    norm, attention = 2 * width, 4 * (width * width + width)
    feed_forward = 2 * width * ffn + ffn + width
    return vocab_size * width + layers * (3 * attention + 2 * feed_forward + 5 * norm) + last_norms * norm


@pytest.mark.parametrize(("size", "width", "ffn"), [("base", 512, 2048), ("big", 1024, 4096)])
def test_the_sizes_are_those_of_the_literature(size, width, ffn, norm):
    with torch.device("meta"):
        model = build_model(ModelConfig(size=size, norm=norm), 37_000, pad=0, end=1)
    last_norms = 2 if norm == "pre" else 0
    assert trained_parameters(model) == expected_parameters(37_000, width, ffn, 6, last_norms)
    if size == "big":
        assert round(trained_parameters(model) / 1e6) in (213, 214)  # "about 213M"


def test_a_key_that_is_set_wins_over_the_size():
    model = build_model(ModelConfig(size="tiny", d_model=64, encoder_layers=3), 60, pad=0, end=1)
    assert (model.config.d_model, model.config.encoder_layers, model.config.decoder_layers) == (64, 3, 1)
    assert model.config.encoder_ffn_dim == 64


def test_widths_that_do_not_divide_by_the_heads_are_refused():
    with pytest.raises(ValueError, match=r"multiple of 2 x heads.*d_model 30 and 4 heads"):
        build_model(ModelConfig(size="tiny", d_model=30, heads=4), 60, pad=0, end=1)


def test_pre_norm_leaves_the_residual_path_alone_and_post_norm_normalizes_it(norm):
    model = tiny(norm=norm).eval()
    x = torch.randn(2, 5, 32)
    for part in (model.model.encoder, model.model.decoder):
        layer = part.layers[0]
        for name, weights in layer.named_parameters():
            if name.startswith(("self_attn.out_proj", "encoder_attn.out_proj", "fc2")):
                torch.nn.init.zeros_(weights)
        options = {"encoder_hidden_states": x} if part is model.model.decoder else {}
        found = layer(x, attention_mask=None, **options)
        expected = x if norm == "pre" else F.layer_norm(x, (32,))
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
        assert isinstance(getattr(part, "layer_norm", None), torch.nn.LayerNorm) == (norm == "pre")


def test_dropout_acts_where_it_is_set():
    model = tiny(norm="pre", dropout=0.3, attention_dropout=0.2, activation_dropout=0.1)
    layer = model.model.decoder.layers[0]
    assert (layer.dropout, layer.activation_dropout) == (0.3, 0.1)
    assert (layer.self_attn.dropout, layer.encoder_attn.dropout) == (0.2, 0.2)


def test_embeddings_enter_at_unit_size_and_one_matrix_serves_both_languages_and_the_output(norm):
    model = build_model(ModelConfig(size="small", norm=norm), 2000, pad=0, end=1)
    shared = model.model.shared.weight
    assert model.lm_head.weight is shared
    assert model.model.encoder.embed_tokens.weight is model.model.decoder.embed_tokens.weight is shared
    assert (shared * math.sqrt(model.config.d_model)).std().item() == pytest.approx(1, rel=0.02)
    linear = model.model.encoder.layers[0].fc1
    assert linear.weight.std().item() == pytest.approx(math.sqrt(2 / sum(linear.weight.shape)), rel=0.03)
    assert not linear.bias.any()


def test_longer_positions_change_nothing_else(norm):
    model = tiny(norm=norm).eval()
    ids = torch.randint(2, 60, (2, 9))
    before = model(input_ids=ids, decoder_input_ids=ids).logits
    parameters = trained_parameters(model)
    allow_positions(model, 70)
    torch.testing.assert_close(model(input_ids=ids, decoder_input_ids=ids).logits, before, rtol=0, atol=0)
    long = torch.randint(2, 60, (1, 70))
    assert model(input_ids=long, decoder_input_ids=long).logits.shape == (1, 70, 60)
    assert trained_parameters(model) == parameters


# ---- loss


def pairs():
    rows = [{"source_ids": [5, 9, 7, 1], "target_ids": [8, 3, 1]}, {"source_ids": [4, 1], "target_ids": [6, 2, 9, 1]}]
    return Collate(pad=0, start=0)(TokenizedPairs(Dataset.from_list(rows)).__getitems__([0, 1]))


def padded(batch, length):
    fill = {"input_ids": 0, "attention_mask": 0, "decoder_input_ids": 0, "labels": IGNORED}
    return {name: F.pad(tensor, (0, length - tensor.shape[1]), value=fill[name]) for name, tensor in batch.items()}


def test_padding_changes_neither_the_loss_nor_the_gradient():
    results = []
    for length in (10, 20):
        model, batch = tiny().double(), padded(pairs(), length)
        labels = batch.pop("labels")
        loss = smoothed_loss(model(**batch).logits, labels, 0.1)
        loss.backward()
        results.append((loss.detach(), [p.grad for p in model.parameters() if p.requires_grad]))
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=1e-9)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_loss_is_torchs_label_smoothed_cross_entropy_over_real_tokens(smoothing):
    torch.manual_seed(1)
    logits, labels = torch.randn(3, 5, 7), torch.randint(7, (3, 5))
    labels[0, 2:] = labels[2, 4:] = IGNORED
    real = labels != IGNORED
    mean = F.cross_entropy(logits[real], labels[real], label_smoothing=smoothing)
    loss, nll, tokens = losses_and_tokens(logits, labels, smoothing)
    assert tokens == int(real.sum()) == 11
    assert loss / tokens == pytest.approx(mean.item(), abs=1e-6)
    assert nll / tokens == pytest.approx(F.cross_entropy(logits[real], labels[real]).item(), abs=1e-6)


def test_half_precision_logits_are_summed_in_single_precision():
    logits = torch.randn(4, 6, 50).bfloat16()
    loss = smoothed_loss(logits, torch.randint(50, (4, 6)), 0.1)
    assert loss.dtype == torch.float32
    assert smoothed_loss(logits.double(), torch.zeros(4, 6, dtype=torch.int64), 0.1).dtype == torch.float64


# ---- schedule


def test_the_rate_is_the_papers_from_its_first_update_and_gamma_follows():
    lrs = [5e-4 * inverse_square_root(t - 1, 4000) for t in range(1, 16_001)]
    assert (lrs[0], lrs[3999], lrs[15_999]) == pytest.approx((1.25e-7, 5e-4, 2.5e-4), rel=1e-12)
    assert max(lrs) == lrs[3999]
    consensus = AdaptiveConsensus(power=2, start_step=3999)
    gammas = [consensus.gamma(step, lr) for step, lr in enumerate(lrs)]
    assert set(gammas[:4000]) == {1.0}
    assert gammas[-1] == pytest.approx(0.25)


def test_the_papers_rate_word_for_word_jumps_after_the_warm_up():
    # "Linear warm-up to 5e-4 over the first 4000 iterations, then decay as a0 (4000 / t)^0.5", a0 = 1.3e-3.
    lrs = [1.3e-3 * inverse_square_root(t - 1, 4000, 5e-4 / 1.3e-3) for t in range(1, 16_001)]
    expected = [5e-4 * t / 4000 if t <= 4000 else 1.3e-3 * (4000 / t) ** 0.5 for t in range(1, 16_001)]
    assert lrs == pytest.approx(expected, rel=1e-12)
    consensus = AdaptiveConsensus(power=2, start_step=4000)
    gammas = [consensus.gamma(step, lr) for step, lr in enumerate(lrs)]
    assert set(gammas[:4001]) == {1.0}
    assert gammas[-1] == pytest.approx(4001 / 16_000)


# ---- deployment and averages


def test_what_is_saved_loads_by_itself_with_its_vocabulary_and_its_search(tmp_path, tokenizer, norm):
    model = tiny(len(tokenizer), norm=norm).eval()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    save_translator(model, state, tokenizer, DecodingConfig(beams=3, length_penalty=0.8), tmp_path / "deployed")
    loaded = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "deployed")
    vocabulary = AutoTokenizer.from_pretrained(tmp_path / "deployed")
    text = "Straße </s> \u2028 x"
    ids = torch.tensor([vocabulary(text)["input_ids"]])
    assert vocabulary.decode(ids[0], skip_special_tokens=True) == text
    assert (loaded.generation_config.num_beams, loaded.generation_config.length_penalty) == (3, 0.8)
    with torch.no_grad():
        mine, theirs = (m(input_ids=ids, decoder_input_ids=ids).logits for m in (model, loaded))
    torch.testing.assert_close(mine, theirs, rtol=0, atol=0)
    assert model.generation_config.num_beams in (None, 1), "the search of the run stays its own"


def test_a_saved_model_does_not_depend_on_what_it_was_evaluated_on(tmp_path, tokenizer, norm):
    model = tiny(len(tokenizer), norm=norm).eval()
    allow_positions(model, 3000)
    search = DecodingConfig(beams=3, length_penalty=0.8, length_penalty_kind="gnmt")
    save_translator(model, model.state_dict(), tokenizer, search, tmp_path / "deployed", positions=32)
    assert model.config.max_position_embeddings == 3000
    loaded, _, found = load_translator(tmp_path / "deployed")
    assert (loaded.config.max_position_embeddings, found) == (32, search)
    ids = torch.randint(2, len(tokenizer), (1, 20))
    with torch.no_grad():
        mine, theirs = (m(input_ids=ids, decoder_input_ids=ids).logits for m in (model, loaded))
    torch.testing.assert_close(mine, theirs, rtol=0, atol=0)


def test_another_encoder_decoder_is_refused_by_name(tmp_path, tokenizer):
    config = T5Config(vocab_size=300, d_model=8, d_kv=4, d_ff=8, num_layers=1)
    T5ForConditionalGeneration(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"must be a Marian or Pegasus model .* has a T5ForConditionalGeneration\. "):
        load_translator(tmp_path)


def test_a_greedy_search_is_saved_too(tmp_path, tokenizer):
    model = tiny(len(tokenizer))
    save_translator(model, model.state_dict(), tokenizer, DecodingConfig(beams=1), tmp_path / "deployed")
    assert load_translator(tmp_path / "deployed")[2].beams == 1


def test_a_dataclass_of_sizes_names_every_field_of_a_size():
    fields = {field.name for field in dataclasses.fields(ModelConfig)}
    assert {"d_model", "heads", "ffn", "encoder_layers", "decoder_layers"} <= fields
