"""Mixed precision (autocast, loss scaling, bf16 parameters with fp32 masters, TF32, FP8), deterministic kernels."""

from __future__ import annotations

import re
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
"""The compute dtype of each precision; with fp8, everything but the FP8 matmuls is bf16."""
Value = TypeVar("Value")


class MixedPrecision:
    """Autocast for fp32 parameters, loss scaling for fp16, the TF32 switch."""

    def __init__(
        self, name: str, device: torch.device, param_dtype: str = "fp32", tf32: bool = False, fp8_scaling: str = ""
    ) -> None:
        self.name, self.param_dtype, self._fp8_scaling = name, param_dtype, fp8_scaling
        self.tf32 = tf32 and name == "fp32"
        self.compute_dtype = DTYPES[name]
        self._device = device
        # mkldnn warns at length on CPUs without bf16; the plan chose the precision
        warnings.filterwarnings("ignore", message="mkldnn_matmul failed")
        warnings.filterwarnings("ignore", message="TensorFloat32 tensor cores")  # advice; the plan chose
        self.scaler = torch.amp.GradScaler(device.type, init_scale=2.0**14, enabled=name == "fp16")

    def autocast(self) -> AbstractContextManager[Any]:
        """Context of a forward pass: autocast to the compute dtype, or the TF32 setting in fp32."""
        if self.compute_dtype is None:
            return self._tf32_context()
        if self.param_dtype == "bf16":
            return nullcontext()
        return torch.autocast(self._device.type, dtype=self.compute_dtype)

    def backward(self, loss: Tensor) -> None:
        """Scale the loss if fp16, and run backward."""
        with self._tf32_context():
            self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]

    def _tf32_context(self) -> AbstractContextManager[Any]:
        """On a GPU in fp32: TF32 on or off for the whole process, so in backward threads and CUDA graph capture too."""
        computes_in_fp32 = self.compute_dtype is None and self._device.type == "cuda"
        return allow_tf32(self.tf32, convolutions=True) if computes_in_fp32 else nullcontext()

    @property
    def matmul_precision(self) -> str:
        """Matmul precision as a tag in cache fingerprints: values cached with another one are not reused."""
        return "tf32" if self.tf32 else f"fp8 {self._fp8_scaling}" if self.name == "fp8" else self.name

    @property
    def can_lower_loss_scale(self) -> bool:
        """Whether a non-finite gradient may just mean that the loss scale is too large."""
        return self.scaler.is_enabled() and self.scaler.get_scale() > 1.0


PARAM_REMAINDER = "param_remainder"
"""State key of the 16 bits that rounding an fp32 master weight to bf16 drops."""


def split_fp32_master(master: Tensor) -> tuple[Tensor, Tensor]:
    """An fp32 tensor as the nearest bf16 and a signed 16-bit remainder: bf16, int16.

    Ties round away from zero: a tie rounded down to even would leave 32768, one more than int16 holds.
    """
    bits = master.float().contiguous().view(torch.int32)
    high = (bits + 0x8000).bitwise_right_shift_(16)
    rounded = high.to(torch.int16).view(torch.bfloat16)
    # in place: the embeddings of a model are a gigabyte
    return rounded, high.bitwise_left_shift_(16).neg_().add_(bits).to(torch.int16)


def join_fp32_master(high: Tensor, remainder: Tensor) -> Tensor:
    """The fp32 tensor that `split_fp32_master` split."""
    bits = (high.contiguous().view(torch.int16).to(torch.int32) << 16) + remainder.to(torch.int32)
    return bits.view(torch.float32)


def to_bf16_with_remainders(module: nn.Module) -> dict[str, Tensor]:
    """Convert a module's fp32 parameters to bf16; returns the remainders of the trainable ones, by name."""
    remainders: dict[str, Tensor] = {}
    for name, weight in module.named_parameters():
        if weight.dtype is torch.float32 and weight.requires_grad:
            weight.data, remainders[name] = split_fp32_master(weight.data.contiguous())
        elif weight.dtype is torch.float32:
            weight.data = weight.data.to(torch.bfloat16)
    return remainders


@contextmanager
def deterministic_algorithms(enabled: bool) -> Iterator[None]:
    """Inside, torch uses deterministic kernels and raises where an operation has none.

    Without, the backward of attention (FlashAttention, cuDNN), `index_select` and `gather` differs from run to run on a
    GPU, that of `x[index]` on a CPU; and torch.compile chooses reductions by timing them. SDPA skips cuDNN inside.
    Filling uninitialized memory is off: it adds a kernel to each allocation. 15 µs on the host.
    """
    if not enabled:
        yield
        return
    fill: Any = torch.utils.deterministic
    before = torch.get_deterministic_debug_mode(), fill.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)  # strict: with warn_only FlashAttention stays as it was
    fill.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0] > 0, warn_only=before[0] == 1)
        fill.fill_uninitialized_memory = before[1]


def nondeterministic_operation(error: Exception) -> str | None:
    """The operation of an error that `deterministic_algorithms` raised; None for any other error."""
    match = re.search(r"(\S+) does not have a deterministic implementation|it uses (CuBLAS)", str(error))
    return (match[1] or "cuBLAS with this CUBLAS_WORKSPACE_CONFIG") if match else None


@contextmanager
def allow_tf32(tf32: bool, convolutions: bool = False) -> Iterator[None]:
    """Turn TF32 on or off inside; restores all switches afterwards."""
    switches = _tf32_switches()
    matmul_before = _read_legacy(torch.get_float32_matmul_precision)
    conv_before = _read_legacy(lambda: bool(torch.backends.cudnn.allow_tf32))
    values_before = [switch.fp32_precision for switch in switches]
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    if convolutions:
        torch.backends.cudnn.allow_tf32 = tf32
        for switch in switches[2:]:  # unset, they would follow the global switch
            switch.fp32_precision = "tf32" if tf32 else "ieee"
    try:
        yield
    finally:
        if matmul_before is not None:
            torch.set_float32_matmul_precision(matmul_before)
        if conv_before is not None:
            torch.backends.cudnn.allow_tf32 = conv_before
        # restores "none" too, which differs from "ieee": torch.compile guards on this value
        for switch, value in zip(switches, values_before, strict=True):
            switch.fp32_precision = value


def _tf32_switches() -> tuple[Any, ...]:
    """The switches of torch 2.9 and later, which the older ones set too."""
    backends: Any = torch.backends
    return (backends.cuda.matmul, backends.mkldnn.matmul, backends.cudnn.conv, backends.cudnn.rnn)


def _read_legacy(read: Callable[[], Value]) -> Value | None:
    """The value of an older switch; torch refuses to read it once a newer one was set in this process."""
    try:
        return read()
    except RuntimeError:
        return None


def disable_tf32_in_rope(module: nn.Module) -> None:
    """Turn TF32 off inside rotary embeddings.

    Some versions of transformers compute positions × frequencies as a matmul. TF32's 10 bits turn position 4,001 into
    4,000, which puts the first angle off by a radian.
    """
    for submodule in module.modules():
        if is_rotary(submodule):
            hook = _NoTf32()
            submodule.register_forward_pre_hook(hook.begin)
            # prepended: hooks that began last end first
            submodule.register_forward_hook(hook.end, prepend=True, always_call=True)


def is_rotary(module: nn.Module) -> bool:
    """Whether a module computes rotary position embeddings."""
    has_inv_freq = any("inv_freq" in name for name, _ in module.named_buffers(recurse=False))
    return has_inv_freq or "rotary" in type(module).__name__.lower()


class _NoTf32:
    """Forward hooks that turn TF32 off in a module."""

    def __init__(self) -> None:
        self._open: list[AbstractContextManager[None]] = []

    def begin(self, *_: Any) -> None:
        self._open.append(allow_tf32(tf32=False))
        self._open[-1].__enter__()

    def end(self, *_: Any) -> None:
        self._open.pop().__exit__(None, None, None)


FP8_ALIGNMENT = 16
"""FP8 matmuls need every dimension to be a multiple of this: rows are padded to it."""


def convert_to_fp8(module: nn.Module) -> list[nn.Linear]:
    """Convert the linear layers inside the decoder layers to FP8 by torchao; returns them.

    LM head and embeddings stay in bf16: the loss is sensitive to them, and they gain least. Scaling is tensorwise until
    `set_fp8_scaling` changes it.
    """
    try:
        from torchao.float8 import convert_to_float8_training
    except ImportError:
        raise UsageError("precision fp8 needs torchao: pip install 'modelwright[fp8]'") from None
    config = _float8_config("tensorwise", emulate=next(module.parameters()).device.type == "cpu")
    names: list[str] = []

    def is_convertible(linear: Any, name: str) -> bool:
        is_linear = isinstance(linear, nn.Linear) and LORA_PREFIX not in name  # LoRA is too small to gain
        fits = is_linear and linear.in_features % FP8_ALIGNMENT == linear.out_features % FP8_ALIGNMENT == 0
        names.extend([name] * fits)
        return fits

    converted: list[Any] = []
    for layer in repeated_layers(module):
        names.clear()
        convert_to_float8_training(layer, config=config, module_filter_fn=is_convertible)
        converted += [layer.get_submodule(name) for name in names]
    return converted


def set_fp8_scaling(linears: Iterable[Any], fp8_scaling: str | None) -> None:
    """Set tensorwise or rowwise scaling of converted layers; None makes them compute as nn.Linear."""
    for linear in linears:
        if fp8_scaling is None:
            linear.__dict__["forward"] = MethodType(nn.Linear.forward, linear)
        else:
            linear.__dict__.pop("forward", None)
            linear.config = _float8_config(fp8_scaling, linear.config.emulate)


@cache
def _float8_config(scaling: str, emulate: bool) -> Any:
    """torchao's recipe, but without rounding scales to powers of two.

    With such scales (tensorwise) 300 steps of a 135 M model ended 0.9 % above bf16, without 0.15 %; rowwise flips
    10.3 % of the signs of a trained model's gradient with them, 9.8 % without.
    """
    from torchao.float8 import Float8LinearConfig

    return replace(Float8LinearConfig.from_recipe_name(scaling), round_scales_to_power_of_2=False, emulate=emulate)
