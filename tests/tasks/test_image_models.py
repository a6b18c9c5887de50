"""Small image models against torch's own layers and written-out forward passes."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tasks.images.models import build_image_model


def copy_into_encoder_layer(layer, reference):
    names = {
        "self_attn.in_proj_weight": layer.queries_keys_values.weight,
        "self_attn.in_proj_bias": layer.queries_keys_values.bias,
        "self_attn.out_proj.weight": layer.attention_out.weight,
        "self_attn.out_proj.bias": layer.attention_out.bias,
        "linear1.weight": layer.feed_forward_in.weight,
        "linear1.bias": layer.feed_forward_in.bias,
        "linear2.weight": layer.feed_forward_out.weight,
        "linear2.bias": layer.feed_forward_out.bias,
        "norm1.weight": layer.attention_norm.weight,
        "norm1.bias": layer.attention_norm.bias,
        "norm2.weight": layer.feed_forward_norm.weight,
        "norm2.bias": layer.feed_forward_norm.bias,
    }
    reference.load_state_dict(names)


def test_the_transformer_is_torchs_pre_norm_encoder_over_the_rows():
    torch.manual_seed(0)
    model = build_image_model("transformer-3-16", 5, 2, image_size=(6, 4)).double()
    with torch.no_grad():  # away from ones and zeros, which would hide a norm out of place
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    images = torch.randn(7, 2, 6, 4, dtype=torch.float64)
    rows = torch.stack([images[:, :, row].reshape(7, 8) for row in range(6)], 1)
    hidden = rows @ model.embedding.weight.T + model.embedding.bias + model.positions
    for layer in model.layers:
        reference = nn.TransformerEncoderLayer(16, 4, 32, 0.0, F.gelu, batch_first=True, norm_first=True).double()
        copy_into_encoder_layer(layer, reference)
        hidden = reference(hidden)
    hidden = F.layer_norm(hidden, (16,), model.norm.weight, model.norm.bias).mean(1)
    expected = hidden @ model.classifier.weight.T + model.classifier.bias
    torch.testing.assert_close(model(images), expected)


def test_the_transformer_is_by_default_that_of_the_digits():
    model, named = (build_image_model(name, 10, 1, (8, 8)) for name in ("Transformer", "transformer_2_32"))
    assert [p.shape for p in model.parameters()] == [p.shape for p in named.parameters()]
    d, rows, pixels = 32, 8, 8
    layer = 2 * 2 * d + (d + 1) * 3 * d + (d + 1) * d + (d + 1) * 2 * d + (2 * d + 1) * d
    by_hand = (pixels + 1) * d + rows * d + 2 * layer + 2 * d + (d + 1) * 10
    assert sum(p.numel() for p in model.parameters()) == by_hand


def test_the_transformer_drops_out_in_training_only():
    torch.manual_seed(0)
    model, images = build_image_model("transformer", 10, 1, (8, 8), dropout=0.5), torch.randn(4, 1, 8, 8)
    assert not torch.equal(model(images), model(images))
    model.eval()
    assert torch.equal(model(images), model(images))


def test_memory_format_does_not_change_the_transformers_rows():
    torch.manual_seed(0)
    model, images = build_image_model("transformer", 10, 3, (8, 8)), torch.randn(4, 3, 8, 8)
    torch.testing.assert_close(model(images.contiguous(memory_format=torch.channels_last)), model(images))


def test_the_cnn_with_pooling_as_written_out():
    torch.manual_seed(0)
    model = build_image_model("cnn-4-6-5", 10, 3).double().train()
    images = torch.randn(8, 3, 12, 12, dtype=torch.float64)
    convolutions = [module for module in model if isinstance(module, nn.Conv2d)]
    assert [convolution.out_channels for convolution in convolutions] == [4, 6, 5]
    x = images
    for number, convolution in enumerate(convolutions):
        x = F.max_pool2d(x, 2) if number else x
        x = F.conv2d(x, convolution.weight, padding=1)
        x = F.relu((x - x.mean((0, 2, 3), keepdim=True)) / (x.var((0, 2, 3), False, keepdim=True) + 1e-5).sqrt())
    expected = x.mean((2, 3)) @ model[-1].weight.T + model[-1].bias
    torch.testing.assert_close(model(images), expected)


def test_the_cnn_with_pooling_starts_with_he_normal_layers_and_a_linear_one_of_half_the_variance():
    torch.manual_seed(0)
    model = build_image_model("cnn-64-128", 100, 3)
    first, second = (module for module in model if isinstance(module, nn.Conv2d))
    assert first.weight.std().item() == pytest.approx((2 / 27) ** 0.5, rel=0.1)
    assert second.weight.std().item() == pytest.approx((2 / (9 * 64)) ** 0.5, rel=0.05)
    assert model[-1].weight.std().item() == pytest.approx((1 / 128) ** 0.5, rel=0.05)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "transformer"}, "needs image_size"),
        ({"name": "transformer-0-32", "image_size": (8, 8)}, "depth of model .* got 0"),
        ({"name": "transformer-2-30", "image_size": (8, 8)}, "multiple of its 4 heads; got 30"),
        ({"name": "transformer-2-0", "image_size": (8, 8)}, "width of model .* got 0"),
        ({"name": "transformer-2"}, "one of .*transformer-<layers>-<width>.*; got 'transformer-2'"),
        ({"name": "cnn-16-0"}, "width of model 'cnn-16-0' .*got 0"),
        ({"name": "cnn-4-4-4-4", "image_size": (8, 7)}, "halves its images 3 times, so they need at least 8 .*got 8x7"),
        ({"name": "cnn-16", "dropout": 0.1}, "dropout must be 0"),
        ({"name": "cnn", "dropout": 0.3}, "dropout must be 0"),
        ({"name": "cnn-"}, "must be one of .*'cnn-'"),
        ({"name": "resnet18"}, "must be one of wrn-<depth>"),
        ({"name": "wrn-28"}, "must be one of"),
        ({"name": "wrn-29-1"}, "28 or 34"),
        ({"name": "mlp"}, "needs image_size"),
    ],
)
def test_what_cannot_be_built_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        build_image_model(**arguments, num_classes=10, in_channels=1)


def test_the_transformer_says_which_images_it_reads():
    with pytest.raises(ValueError, match=r"reads images of shape \(1, 8, 8\); got \(1, 8, 9\)"):
        build_image_model("transformer", 10, 1, (8, 8))(torch.zeros(2, 1, 8, 9))
