"""Mixed precision: autocast, loss scaling, TF32 and FP8 linear layers."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import cache
from types import MethodType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from modelwright.engine.parallel import repeated_layers
from modelwright.errors import UsageError
from modelwright.models.trainable import LORA_PREFIX

DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp8": torch.bfloat16, "fp16": torch.float16}
"""What is not multiplied in fp8 is computed in bf16."""
Value = TypeVar("Value")


class MixedPrecision:
    """Casts the forward pass where the weights are fp32, scales the backward pass, and moves the weights."""

    def __init__(
        self, name: str, device: torch.device, param_dtype: str = "fp32", tf32: bool = False, fp8_scaling: str = ""
    ) -> None:
        self.name, self.param_dtype, self._fp8_scaling = name, param_dtype, fp8_scaling
        self.tf32 = tf32 and name == "fp32"
        self.compute_dtype = DTYPES[name]
        self._device = device
        # on a processor without bf16 torch tells at length, once, that it takes the slow way; the plan chose otherwise
        warnings.filterwarnings("ignore", message="mkldnn_matmul failed")
        warnings.filterwarnings("ignore", message="TensorFloat32 tensor cores")  # the compiler's advice; the plan chose
        self._scaler = torch.amp.GradScaler(device.type, init_scale=2.0**14) if name == "fp16" else None

    def autocast(self) -> AbstractContextManager[Any]:
        """Do matrix products in the compute type, fp32 ones as wished."""
        if self.compute_dtype is None:
            return self._tf32_context()
        if self.param_dtype == "bf16":
            return nullcontext()
        return torch.autocast(self._device.type, dtype=self.compute_dtype)

    def backward(self, loss: Tensor) -> None:
        """Add to the gradients."""
        with self._tf32_context():
            (self._scaler.scale(loss) if self._scaler else loss).backward()  # type: ignore[no-untyped-call]

    def _tf32_context(self) -> AbstractContextManager[Any]:
        """On a GPU that computes in fp32: on the tensor cores or exactly; any other arithmetic is left as torch has it.

        The switch is the process's own, so that threads of the backward pass and of a recording have it too.
        """
        computes_in_fp32 = self.compute_dtype is None and self._device.type == "cuda"
        return allow_tf32(self.tf32, convolutions=True) if computes_in_fp32 else nullcontext()

    @property
    def matmul_precision(self) -> str:
        """What numbers are rounded to before they are multiplied; what was kept of other products is not taken."""
        return "tf32" if self.tf32 else f"fp8 {self._fp8_scaling}" if self.name == "fp8" else self.name

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Bring the gradients back to their own size, ready to be measured and clipped."""
        if self._scaler:
            self._scaler.unscale_(optimizer)

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Move the weights."""
        if self._scaler:
            self._scaler.step(optimizer)
        else:
            optimizer.step()

    def update(self) -> None:
        """Let the scaler learn from the step, whether the weights moved or overflowed."""
        if self._scaler:
            self._scaler.update()

    @property
    def can_lower_loss_scale(self) -> bool:
        """Whether a non-finite gradient may only mean that the loss scale is too large."""
        return self._scaler is not None and self._scaler.get_scale() > 1.0

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return self._scaler.state_dict() if self._scaler else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with a checkpoint's scale."""
        if self._scaler and state:
            self._scaler.load_state_dict(state)


@contextmanager
def allow_tf32(tf32: bool, convolutions: bool = False) -> Iterator[None]:
    """Inside, a GPU multiplies fp32 numbers on its tensor cores, or exactly; afterwards as it did before."""
    switches, matmul_before, conv_before = (
        _tf32_switches(),
        _read_legacy(torch.get_float32_matmul_precision),
        _read_legacy(_conv_tf32),
    )
    values_before = [switch.fp32_precision for switch in switches]
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    if convolutions:
        torch.backends.cudnn.allow_tf32 = tf32
        for switch in switches[2:]:  # where nothing is said, what holds for all of torch would
            switch.fp32_precision = "tf32" if tf32 else "ieee"
    try:
        yield
    finally:
        if matmul_before is not None:
            torch.set_float32_matmul_precision(matmul_before)
        if conv_before is not None:
            torch.backends.cudnn.allow_tf32 = conv_before
        for switch, value in zip(
            switches, values_before, strict=True
        ):  # unset is not exact: compiled layers are kept by this word
            switch.fp32_precision = value


def _tf32_switches() -> tuple[Any, ...]:
    """Where torch 2.9 and later keep it, of what the older switches set too."""
    backends: Any = torch.backends
    return (backends.cuda.matmul, backends.mkldnn.matmul, backends.cudnn.conv, backends.cudnn.rnn)


def _conv_tf32() -> bool:
    return bool(torch.backends.cudnn.allow_tf32)


def _read_legacy(read: Callable[[], Value]) -> Value | None:
    """What an older switch says; it refuses where somebody has used the newer one in this process."""
    try:
        return read()
    except RuntimeError:
        return None


def disable_tf32_in_rope(module: nn.Module) -> None:
    """Let rotary positions be multiplied exactly whatever holds around them.

    Some versions of transformers multiply positions by frequencies as matrices. With 10 bits position 4,001 would be
    4,000, and its first angle off by a radian; that a library computes products so thin exactly is not promised.
    """
    for submodule in module.modules():
        if is_rotary(submodule):
            hook = _NoTf32()
            submodule.register_forward_pre_hook(hook.begin)
            submodule.register_forward_hook(hook.end, prepend=True, always_call=True)  # who began last ends first


def is_rotary(module: nn.Module) -> bool:
    """Whether a part of a model makes the angles by which queries and keys are turned."""
    has_inv_freq = any("inv_freq" in name for name, _ in module.named_buffers(recurse=False))
    return has_inv_freq or "rotary" in type(module).__name__.lower()


class _NoTf32:
    """Switches to exact products as a module begins, and back as it ends, by whatever way."""

    def __init__(self) -> None:
        self._open: list[AbstractContextManager[None]] = []

    def begin(self, *_: Any) -> None:
        self._open.append(allow_tf32(tf32=False))
        self._open[-1].__enter__()

    def end(self, *_: Any) -> None:
        self._open.pop().__exit__(None, None, None)


FP8_ALIGNMENT = 16
"""FP8 products want every side of a matrix to be a multiple of this: rows are padded to such a length."""


def convert_to_fp8(module: nn.Module) -> list[nn.Linear]:
    """Let the linear layers inside the transformer's layers multiply in FP8; returns those that do.

    The head and the embeddings stay as they are: the loss is sensitive to them, and they gain least. At first a matrix
    has one scale; `switch` can give each row its own.
    """
    try:
        from torchao.float8 import convert_to_float8_training
    except ImportError:
        raise UsageError("precision fp8 needs torchao: pip install 'modelwright[fp8]'") from None
    config = _float8_config("tensorwise", emulate=next(module.parameters()).device.type == "cpu")
    names: list[str] = []

    def is_convertible(linear: Any, name: str) -> bool:
        fits = (
            isinstance(linear, nn.Linear)
            and linear.in_features % FP8_ALIGNMENT == linear.out_features % FP8_ALIGNMENT == 0
        )
        fits = fits and LORA_PREFIX not in name  # too small to gain, and what is learnt stays in bf16
        names.extend([name] * fits)
        return fits

    converted: list[Any] = []
    for layer in repeated_layers(module):
        names.clear()
        convert_to_float8_training(layer, config=config, module_filter_fn=is_convertible)
        converted += [layer.get_submodule(name) for name in names]
    return converted


def set_fp8_scaling(linears: Iterable[Any], fp8_scaling: str | None) -> None:
    """Let converted layers multiply in FP8, with a scale for each matrix or each row, or as any linear layer does."""
    for linear in linears:
        if fp8_scaling is None:
            linear.__dict__["forward"] = MethodType(nn.Linear.forward, linear)
        else:
            linear.__dict__.pop("forward", None)
            linear.config = _float8_config(fp8_scaling, linear.config.emulate)


@cache
def _float8_config(scaling: str, emulate: bool) -> Any:
    """What torchao is told: its own recipe, but that no scale is rounded to a power of two, as there those of rows are.

    With such scales of matrices 300 steps of 135 M weights ended 0.9 % above exact ones, without 0.15 %; and rows turn
    10.3 % of the signs of a trained model's gradient with them, 9.8 % without.
    """
    from torchao.float8 import Float8LinearConfig

    return replace(Float8LinearConfig.from_recipe_name(scaling), round_scales_to_power_of_2=False, emulate=emulate)
