"""Wide ResNets against the paper's parameter counts, a hand derivation and a written-out forward pass."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tasks.images.models import build_image_model
from tasks.images.wide_resnet import WideResNet


def count(model):
    return sum(parameter.numel() for parameter in model.parameters())


def count_by_hand(depth, width, num_classes, in_channels=3):
    """Sum over layers in the order of the paper's Table 1."""
    total = 9 * in_channels * 16
    before = 16
    for channels in (16 * width, 32 * width, 64 * width):
        for block in range((depth - 4) // 6):
            entering = before if block == 0 else channels
            total += 2 * entering + 9 * entering * channels + 2 * channels + 9 * channels * channels
            total += entering * channels if entering != channels else 0
        before = channels
    return total + 2 * before + before * num_classes + num_classes


def test_wrn_28_10_has_the_published_number_of_parameters():
    with torch.device("meta"):
        assert count(WideResNet(28, 10, num_classes=100)) == 36_536_884


@pytest.mark.parametrize(
    ("depth", "width", "num_classes", "in_channels"), [(16, 8, 10, 3), (16, 8, 100, 3), (16, 1, 10, 1), (40, 2, 10, 3)]
)
def test_parameters_as_derived_by_hand(depth, width, num_classes, in_channels):
    with torch.device("meta"):
        model = WideResNet(depth, width, num_classes, in_channels)
    assert count(model) == count_by_hand(depth, width, num_classes, in_channels)


@pytest.mark.parametrize(
    ("depth", "nearest"), [(33, "28 or 34"), (18, "16 or 22"), (9, "Use 10"), (4, "Use 10"), (0, "Use 10")]
)
def test_other_depths_are_refused_with_the_nearest_valid_ones(depth, nearest):
    with pytest.raises(ValueError, match=rf"6 m \+ 4.*{nearest}"):
        WideResNet(depth, 1, num_classes=10)


def test_depth_counts_all_convolutions():
    """The stem, 6 m in the blocks and the three projections."""
    for depth in (10, 16, 28, 34):
        model = WideResNet(depth, 2, num_classes=10)
        assert sum(isinstance(module, nn.Conv2d) for module in model.modules()) == depth


def test_forward_as_written_in_the_paper():
    """One block per group, evaluated from its tensors: pre-activation, strides 1, 2, 2, projected shortcuts."""
    torch.manual_seed(0)
    model = WideResNet(10, 2, num_classes=5).double().train()
    images = torch.randn(4, 3, 16, 16, dtype=torch.float64)

    def bn_relu(x, norm):
        return F.relu(F.batch_norm(x, None, None, norm.weight, norm.bias, training=True, eps=norm.eps))

    x = F.conv2d(images, model.stem.weight, padding=1)
    for group, stride in ((model.group1, 1), (model.group2, 2), (model.group3, 2)):
        (block,) = group
        activated = bn_relu(x, block.bn1)
        hidden = F.conv2d(activated, block.conv1.weight, stride=stride, padding=1)
        residual = F.conv2d(bn_relu(hidden, block.bn2), block.conv2.weight, padding=1)
        x = F.conv2d(activated, block.shortcut.weight, stride=stride) + residual
    logits = bn_relu(x, model.bn).mean((2, 3)) @ model.classifier.weight.T + model.classifier.bias
    torch.testing.assert_close(model(images), logits)


def test_shortcut_is_the_identity_where_the_shape_stays():
    model = WideResNet(16, 1, num_classes=10)
    projected = [
        [block.shortcut is not None for block in group] for group in (model.group1, model.group2, model.group3)
    ]
    assert projected == [[False, False], [True, False], [True, False]]


def test_initialization():
    model = WideResNet(16, 4, num_classes=10)
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            fan_out = module.weight.shape[0] * module.kernel_size[0] ** 2
            assert module.bias is None
            assert module.weight.std().item() == pytest.approx((2 / fan_out) ** 0.5, rel=0.1)
        elif isinstance(module, nn.BatchNorm2d):
            assert (module.weight == 1).all()
            assert (module.bias == 0).all()
    assert (model.classifier.bias == 0).all()


def test_dropout_only_in_training():
    model = WideResNet(10, 1, num_classes=10, dropout=0.5)
    images = torch.randn(4, 3, 8, 8)
    assert not torch.equal(model(images), model(images))
    model.eval()
    assert torch.equal(model(images), model(images))


@pytest.mark.parametrize("name", ["wrn-10-1", "WRN10-1", "wrn_10_1", "mlp", "MLP", "cnn"])
@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 32, 32)])
def test_models_by_name_learn_from_small_images(name, shape):
    torch.manual_seed(0)
    model = build_image_model(name, 10, shape[0], image_size=shape[1:])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    images, labels = torch.randn(20, *shape), torch.arange(20) % 10
    losses = []
    for _ in range(8):
        loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


def test_mlp_on_digits_is_64_64_64_10():
    model = build_image_model("mlp", 10, in_channels=1, image_size=(8, 8))
    assert [tuple(m.weight.shape) for m in model if isinstance(m, nn.Linear)] == [(64, 64), (64, 64), (10, 64)]
    assert sum(isinstance(m, nn.BatchNorm1d) for m in model) == 2


def test_mlp_says_which_images_it_reads():
    with pytest.raises(ValueError, match="reads 64 values per image; got 192"):
        build_image_model("mlp", 10, 1, (8, 8))(torch.zeros(2, 3, 8, 8))
