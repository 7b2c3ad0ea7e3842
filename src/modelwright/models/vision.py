"""ResNet-18 for 32 × 32 images, with torchvision's names, and a folder that holds one.

Torchvision's model made for 224 × 224 shrinks a small image 4 times before its first layer; here the first convolution
is 3 × 3 with stride 1, and there is no max-pool. A torchvision resnet18 with the same two changes loads these weights.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from modelwright.errors import ModelError
from modelwright.models.convolution import Conv3x3
from modelwright.models.export import model_folder
from modelwright.models.norms import normalised

KIND = "modelwright-resnet18"
CONFIG, WEIGHTS = "config.json", "model.safetensors"


class Block(nn.Module):
    """Two 3 × 3 convolutions and a way past them."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = Conv3x3(inputs, outputs, stride)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = Conv3x3(outputs, outputs)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.downsample: nn.Sequential | None = None
        if stride != 1 or inputs != outputs:
            self.downsample = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, seen: Tensor) -> Tensor:
        """seen: [rows, inputs, height, width]."""
        inner = normalised(self.bn1, self.conv1(seen))
        past = seen
        if self.downsample is not None:
            shrink, norm = self.downsample
            assert isinstance(norm, nn.BatchNorm2d)
            past = normalised(norm, shrink(seen), rectify=False)
        return normalised(self.bn2, self.conv2(inner), past)


class ResNet18(nn.Module):
    """Four stages of two blocks, each stage twice as wide as the last and half as large."""

    def __init__(self, classes: int, width: int, channels: int) -> None:
        super().__init__()
        self.classes, self.width, self.channels = classes, width, channels
        self.conv1 = Conv3x3(channels, width)
        self.bn1 = nn.BatchNorm2d(width)
        self.layer1 = nn.Sequential(Block(width, width, 1), Block(width, width, 1))
        self.layer2 = nn.Sequential(Block(width, 2 * width, 2), Block(2 * width, 2 * width, 1))
        self.layer3 = nn.Sequential(Block(2 * width, 4 * width, 2), Block(4 * width, 4 * width, 1))
        self.layer4 = nn.Sequential(Block(4 * width, 8 * width, 2), Block(8 * width, 8 * width, 1))
        self.fc = nn.Linear(8 * width, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images: Tensor) -> Tensor:
        """images: [rows, channels, height, width], normalised; returns logits [rows, classes]."""
        seen = normalised(self.bn1, self.conv1(images))
        for layer in (self.layer1, self.layer2, self.layer3, self.layer4):
            seen = layer(seen)
        logits: Tensor = self.fc(seen.mean((2, 3)))
        return logits


def resnet18(classes: int = 10, width: int = 64, channels: int = 3) -> ResNet18:
    """A fresh model: 11,173,962 parameters at width 64 for 10 classes, and a quarter as many for half the width."""
    return ResNet18(classes, width, channels)


def save_vision(
    model: ResNet18, folder: Path, config: Mapping[str, Any], weights: Mapping[str, Tensor] | None = None
) -> None:
    """Write a model folder, whole or not at all; `config` says mean, std and class names, and the model its own shape.

    `weights` stand for the model's own where they are given: averaged ones, or whole ones of a sharded model.
    """
    shape = {"classes": model.classes, "width": model.width, "channels": model.channels}
    text = json.dumps({**config, "model_type": KIND, **shape}, indent=2, ensure_ascii=False, allow_nan=False)
    stored = {name: value.detach().to("cpu").contiguous() for name, value in (weights or model.state_dict()).items()}
    with model_folder(folder) as partial:
        save_file(stored, partial / WEIGHTS, metadata={"format": "pt"})
        (partial / CONFIG).write_text(text + "\n", encoding="utf-8")


def load_vision(folder: Path) -> tuple[ResNet18, dict[str, Any]]:
    """The model of a folder, ready to answer, and its config."""
    try:
        config: dict[str, Any] = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        kind, shape = config.get("model_type"), [config.get(name) for name in ("classes", "width", "channels")]
        if kind != KIND or not all(isinstance(value, int) and value > 0 for value in shape):
            raise ModelError(f"model: {folder / CONFIG} describes {kind!r} of {shape}; it wants {KIND!r}")
        with torch.device("meta"):
            model = resnet18(*shape)  # type: ignore[arg-type]
        model.load_state_dict(load_file(folder / WEIGHTS), assign=True)
    except (OSError, ValueError, AttributeError, RuntimeError, SafetensorError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ModelError(f"model: {folder} holds no whole {KIND} ({reason})") from None
    return model.eval(), config
