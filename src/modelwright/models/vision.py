"""ResNet-18 for 32 x 32 images, with a fused batch norm for GPUs.

The fused batch norm trains 1.23 times as fast: 68,740 instead of 56,078 images/s, 512 a step (H200, 2026-11-17,
`python -m benchmarks.ablation --only batch-norm-kernels`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from modelwright.errors import ModelError
from modelwright.models.save import atomic_model_folder

MODEL_TYPE = "modelwright-resnet18"
CONFIG_FILE, WEIGHTS_FILE = "config.json", "model.safetensors"


class BasicBlock(nn.Module):
    """Two 3 × 3 convolutions with a residual connection."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = _conv3x3(inputs, outputs, stride)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = _conv3x3(outputs, outputs)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.downsample: nn.Sequential | None = None
        if stride != 1 or inputs != outputs:
            self.downsample = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        """x: [rows, inputs, height, width]."""
        inner = batch_norm_relu(self.bn1, self.conv1(x))
        residual = x
        if self.downsample is not None:
            shrink, norm = self.downsample
            assert isinstance(norm, nn.BatchNorm2d)
            residual = batch_norm_relu(norm, shrink(x), relu=False)
        return batch_norm_relu(self.bn2, self.conv2(inner), residual)


class ResNet18(nn.Module):
    """Four stages of two blocks; each stage doubles the channels and halves the image size."""

    def __init__(self, classes: int, width: int, channels: int) -> None:
        super().__init__()
        self.classes, self.width, self.channels = classes, width, channels
        self.conv1 = _conv3x3(channels, width)
        self.bn1 = nn.BatchNorm2d(width)
        self.layer1 = nn.Sequential(BasicBlock(width, width, 1), BasicBlock(width, width, 1))
        self.layer2 = nn.Sequential(BasicBlock(width, 2 * width, 2), BasicBlock(2 * width, 2 * width, 1))
        self.layer3 = nn.Sequential(BasicBlock(2 * width, 4 * width, 2), BasicBlock(4 * width, 4 * width, 1))
        self.layer4 = nn.Sequential(BasicBlock(4 * width, 8 * width, 2), BasicBlock(8 * width, 8 * width, 1))
        self.fc = nn.Linear(8 * width, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images: Tensor) -> Tensor:
        """images: [rows, channels, height, width], normalised; returns logits [rows, classes]."""
        x = batch_norm_relu(self.bn1, self.conv1(images))
        for layer in (self.layer1, self.layer2, self.layer3, self.layer4):
            x = layer(x)
        logits: Tensor = self.fc(x.mean((2, 3)))
        return logits


def _conv3x3(inputs: int, outputs: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)


def resnet18(classes: int = 10, width: int = 64, channels: int = 3) -> ResNet18:
    """A new model: 11,173,962 parameters at width 64 for 10 classes, and a quarter of that at half the width."""
    return ResNet18(classes, width, channels)


def save_vision(
    model: ResNet18, folder: Path, config: Mapping[str, Any], weights: Mapping[str, Tensor] | None = None
) -> None:
    """Write a model folder atomically; `config` has mean, std and class names.

    `weights` replace the model's own: those of the EMA, or full tensors of a sharded model.
    """
    shape = {"classes": model.classes, "width": model.width, "channels": model.channels}
    text = json.dumps({**config, "model_type": MODEL_TYPE, **shape}, indent=2, ensure_ascii=False, allow_nan=False)
    stored = {name: value.detach().to("cpu").contiguous() for name, value in (weights or model.state_dict()).items()}
    with atomic_model_folder(folder) as partial:
        save_file(stored, partial / WEIGHTS_FILE, metadata={"format": "pt"})
        (partial / CONFIG_FILE).write_text(text + "\n", encoding="utf-8")


def load_vision(folder: Path) -> tuple[ResNet18, dict[str, Any]]:
    """The model of a folder in eval mode, and its config."""
    try:
        config: dict[str, Any] = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
        model_type, shape = config.get("model_type"), [config.get(name) for name in ("classes", "width", "channels")]
        if model_type != MODEL_TYPE or not all(type(value) is int and 0 < value < 10**5 for value in shape):
            described = f"{model_type!r} of {str(shape)[:80]}"
            raise ModelError(f"model: {folder / CONFIG_FILE} describes {described}; it wants {MODEL_TYPE!r}")
        with torch.device("meta"):
            model = resnet18(*shape)  # type: ignore[arg-type]
        model.load_state_dict(load_file(folder / WEIGHTS_FILE), assign=True)
    except (OSError, ValueError, AttributeError, RuntimeError, SafetensorError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ModelError(f"model: {folder} holds no complete {MODEL_TYPE} ({reason})") from None
    return model.eval(), config


BLOCK_ROWS, NUM_WARPS, MAX_PROGRAMS = 128, 8, 528
"""Rows per block, warps per program, and programs that compute partial sums: four per SM of an H200."""
SUM_STEP = 64
"""Partial sums that are added at once."""
HAS_TRITON = find_spec("triton") is not None


def batch_norm_relu(norm: nn.BatchNorm2d, x: Tensor, residual: Tensor | None = None, relu: bool = True) -> Tensor:
    """relu(norm(x) + residual), fused on a GPU in training. x, residual: [rows, channels, height, width]."""
    if _is_fast(norm, x):
        assert norm.num_batches_tracked is not None
        norm.num_batches_tracked.add_(1)
        out: Tensor = _FusedBatchNorm.apply(x, residual, norm.weight, norm.bias, norm, relu)  # type: ignore[no-untyped-call]
        return out
    out = norm(x) if residual is None else norm(x) + residual
    return F.relu(out, inplace=True) if relu else out


def _is_fast(norm: nn.BatchNorm2d, x: Tensor) -> bool:
    """Whether the fused kernels apply: training on a GPU, channels_last, not under torch.compile."""
    if not x.is_cuda or not norm.training or norm.momentum is None or torch.compiler.is_compiling():
        return False
    return x.shape[1] % 64 == 0 and x.is_contiguous(memory_format=torch.channels_last) and HAS_TRITON


class _FusedBatchNorm(torch.autograd.Function):
    """Batch norm, residual and ReLU by the Triton kernels, forward and backward."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor, norm: nn.BatchNorm2d, relu: bool
    ) -> Tensor:
        from modelwright.models import kernels

        channels = x.shape[1]
        num_rows, channel_blocks = x.numel() // channels, channels // kernels.BLOCK_CHANNELS
        programs = max(1, min(-(-num_rows // BLOCK_ROWS), MAX_PROGRAMS // channel_blocks))
        rows_per_program = -(-num_rows // (programs * BLOCK_ROWS)) * BLOCK_ROWS
        partial_sums = x.new_empty(programs, 2, channels, dtype=torch.float32)
        stats = x.new_empty(4, channels, dtype=torch.float32)
        out = torch.empty_like(x)
        floor = 0.0 if relu else float("-inf")
        tile_kwargs = {"BLOCK_ROWS": BLOCK_ROWS, "BLOCK_CHANNELS": kernels.BLOCK_CHANNELS, "num_warps": NUM_WARPS}
        sum_kwargs = {"SUM_STEP": SUM_STEP, "BLOCK_CHANNELS": kernels.BLOCK_CHANNELS, "num_warps": NUM_WARPS}
        kernels.bn_partial_sums[(programs, channel_blocks)](
            x, partial_sums, num_rows, channels, rows_per_program, **tile_kwargs
        )
        running = (norm.running_mean, norm.running_var)
        kernels.bn_stats[(channel_blocks,)](
            partial_sums, weight, bias, stats, *running, num_rows, channels, programs, norm.momentum, norm.eps,
            **sum_kwargs,
        )  # fmt: skip
        has_residual, past = residual is not None, x if residual is None else residual
        kernels.bn_apply[(-(-num_rows // BLOCK_ROWS), channel_blocks)](
            x, past, stats, out, num_rows, channels, int(has_residual), floor, **tile_kwargs
        )
        ctx.save_for_backward(x, out, stats)
        ctx.has_residual, ctx.floor, ctx.tile_kwargs, ctx.sum_kwargs = has_residual, floor, tile_kwargs, sum_kwargs
        ctx.programs, ctx.rows_per_program = programs, rows_per_program
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        from modelwright.models import kernels

        x, out, stats = ctx.saved_tensors
        grad_output = grad_output.contiguous(memory_format=torch.channels_last)
        channels = x.shape[1]
        num_rows, channel_blocks = x.numel() // channels, channels // kernels.BLOCK_CHANNELS
        partial_sums, gradients = stats.new_empty(ctx.programs, 2, channels), stats.new_empty(2, channels)
        grad_x = torch.empty_like(x)
        grad_residual = torch.empty_like(x) if ctx.has_residual else None
        inputs = (grad_output, out, x, stats)
        kernels.bn_grad_sums[(ctx.programs, channel_blocks)](
            *inputs, partial_sums, num_rows, channels, ctx.rows_per_program, ctx.floor, **ctx.tile_kwargs
        )
        kernels.bn_grads[(channel_blocks,)](partial_sums, gradients, channels, ctx.programs, **ctx.sum_kwargs)
        kernels.bn_backward[(-(-num_rows // BLOCK_ROWS), channel_blocks)](
            *inputs, gradients, grad_x, grad_x if grad_residual is None else grad_residual, num_rows, channels,
            int(ctx.has_residual), ctx.floor, **ctx.tile_kwargs,
        )  # fmt: skip
        return grad_x, grad_residual, gradients[0], gradients[1], None, None
