"""Our ResNet-18 is torchvision's with two changes: its size, its names, its logits; and its folder is checked."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from modelwright.errors import ModelError
from modelwright.models.vision import ResNet18, load_vision, resnet18, save_vision

CONFIG = {"mean": [0.5, 0.4, 0.3], "std": [0.2, 0.2, 0.2], "class_names": ["a", "b", "c"], "source": "a test"}


def torchvision_names() -> Iterator[str]:
    """The names in the state of torchvision's resnet18, by its rule."""
    norm = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
    yield "conv1.weight"
    yield from (f"bn1.{part}" for part in norm)
    for layer in range(1, 5):
        for block in range(2):
            for number in (1, 2):
                yield f"layer{layer}.{block}.conv{number}.weight"
                yield from (f"layer{layer}.{block}.bn{number}.{part}" for part in norm)
            if layer > 1 and block == 0:
                yield f"layer{layer}.0.downsample.0.weight"
                yield from (f"layer{layer}.0.downsample.1.{part}" for part in norm)
    yield from ("fc.weight", "fc.bias")


def small(seed: int = 1) -> ResNet18:
    """A model of width 4 whose batch norms have seen something."""
    torch.manual_seed(seed)
    model = resnet18(classes=3, width=4)
    model(torch.randn(8, 3, 16, 16))
    return model.eval()


def test_it_has_the_size_of_the_document() -> None:
    model = resnet18()
    assert sum(weight.numel() for weight in model.parameters()) == 11_173_962
    assert sum(weight.numel() for weight in resnet18(width=16).parameters()) == 701_466
    assert model.conv1.kernel_size == (3, 3)
    assert (model.conv1.stride, model.conv1.padding) == ((1, 1), (1, 1))


def test_its_names_and_their_order_are_torchvisions() -> None:
    assert list(resnet18(width=4).state_dict()) == list(torchvision_names())


def test_it_keeps_the_image_large_where_torchvision_would_shrink_it() -> None:
    model, shapes = small(), {}
    for name in ("conv1", "layer1", "layer2", "layer3", "layer4"):
        getattr(model, name).register_forward_hook(lambda _m, _i, out, name=name: shapes.update({name: out.shape[1:]}))
    assert model(torch.randn(2, 3, 32, 32)).shape == (2, 3)
    assert [tuple(shape) for shape in shapes.values()] == [
        (4, 32, 32),
        (4, 32, 32),
        (8, 16, 16),
        (16, 8, 8),
        (32, 4, 4),
    ]


def test_grey_images_and_other_sizes_go_through_it() -> None:
    assert resnet18(classes=7, width=4, channels=1)(torch.randn(2, 1, 28, 28)).shape == (2, 7)


def test_it_begins_as_torchvision_does() -> None:
    torch.manual_seed(0)
    model = resnet18(width=32)
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            fan_out = module.out_channels * module.kernel_size[0] * module.kernel_size[1]
            assert float(module.weight.detach().std()) == pytest.approx((2 / fan_out) ** 0.5, rel=0.1)
        elif isinstance(module, nn.BatchNorm2d):
            assert bool((module.weight == 1).all())
            assert bool((module.bias == 0).all())


def test_its_logits_are_torchvisions() -> None:
    torchvision = pytest.importorskip("torchvision")
    theirs = torchvision.models.resnet18(num_classes=10)
    theirs.conv1, theirs.maxpool = nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.Identity()
    torch.manual_seed(1)
    ours, images = resnet18(), torch.randn(4, 3, 32, 32)
    ours(images)  # the batch norms have seen something
    theirs.load_state_dict(ours.state_dict())
    with torch.no_grad():
        assert torch.allclose(ours.eval()(images), theirs.eval()(images), atol=1e-5)
        assert torch.allclose(ours.train()(images), theirs.train()(images), atol=1e-5)


def test_a_saved_model_answers_as_before(tmp_path: Path) -> None:
    model = small().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    save_vision(model, tmp_path / "model", CONFIG)
    again, config = load_vision(tmp_path / "model")
    images = torch.randn(4, 3, 16, 16)
    assert torch.equal(again(images), small()(images))
    assert not again.training
    assert config == {**CONFIG, "model_type": "modelwright-resnet18", "classes": 3, "width": 4, "channels": 3}
    assert all(weight.requires_grad for weight in again.parameters())
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "model").iterdir()}
    assert modes == {"config.json": 0o644, "model.safetensors": 0o644}


def test_other_weights_may_be_saved_in_place_of_its_own(tmp_path: Path) -> None:
    other = small(seed=2)
    save_vision(small(), tmp_path / "model", CONFIG)
    save_vision(small(), tmp_path / "model", CONFIG, weights=other.state_dict())
    again, _ = load_vision(tmp_path / "model")
    assert all(torch.equal(value, other.state_dict()[name]) for name, value in again.state_dict().items())
    assert [path.name for path in tmp_path.iterdir()] == ["model"], "nothing half-made is left"


@pytest.mark.parametrize(
    "damage", ["no folder", "no weights", "cut", "other kind", "no width", "other width", "no json"]
)
def test_a_folder_with_an_incomplete_model_is_reported(damage: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    save_vision(small(), folder, CONFIG)
    config, weights = folder / "config.json", folder / "model.safetensors"
    values = json.loads(config.read_text(encoding="utf-8"))
    if damage == "no folder":
        folder = tmp_path / "nowhere"
    elif damage == "no weights":
        weights.unlink()
    elif damage == "cut":
        weights.write_bytes(weights.read_bytes()[:-10])
    elif damage == "no json":
        config.write_text("{", encoding="utf-8")
    else:
        change = {"other kind": {"model_type": "llama"}, "no width": {"width": None}, "other width": {"width": 8}}
        config.write_text(json.dumps({**values, **change[damage]}), encoding="utf-8")
    with pytest.raises(ModelError, match=str(folder)):
        load_vision(folder)
