"""What the arithmetic is done in: fp32 (or tf32), bf16 or fp8, or fp16 with a loss scaler; what weights are kept in."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp8": torch.bfloat16, "fp16": torch.float16}
"""What is not multiplied in fp8 is computed in bf16."""
Value = TypeVar("Value")


class Precision:
    """Casts the forward pass where the weights are fp32, scales the backward pass, and moves the weights."""

    def __init__(
        self, name: str, device: torch.device, weights: str = "fp32", tf32: bool = False, scaling: str = ""
    ) -> None:
        self.name, self.weights, self._scaling = name, weights, scaling
        self.tf32 = tf32 and name == "fp32"
        self.compute = DTYPES[name]
        self._device = device
        # on a processor without bf16 torch tells at length, once, that it takes the slow way; the plan chose otherwise
        warnings.filterwarnings("ignore", message="mkldnn_matmul failed")
        warnings.filterwarnings("ignore", message="TensorFloat32 tensor cores")  # the compiler's advice; the plan chose
        self._scaler = torch.amp.GradScaler(device.type, init_scale=2.0**14) if name == "fp16" else None

    def autocast(self) -> AbstractContextManager[Any]:
        """Do matrix products in the compute type, fp32 ones as wished."""
        if self.compute is None:
            return self._fp32_products()
        if self.weights == "bf16":
            return nullcontext()
        return torch.autocast(self._device.type, dtype=self.compute)

    def backward(self, loss: Tensor) -> None:
        """Add to the gradients."""
        with self._fp32_products():
            (self._scaler.scale(loss) if self._scaler else loss).backward()  # type: ignore[no-untyped-call]

    def _fp32_products(self) -> AbstractContextManager[Any]:
        """On a GPU that computes in fp32: on the tensor cores or exactly; any other arithmetic is left as torch has it.

        The switch is the process's own, so that threads of the backward pass and of a recording have it too.
        """
        fixed = self.compute is None and self._device.type == "cuda"
        return fp32_products(self.tf32, convolutions=True) if fixed else nullcontext()

    @property
    def products(self) -> str:
        """What numbers are rounded to before they are multiplied; what was kept of other products is not taken."""
        return "tf32" if self.tf32 else f"fp8 {self._scaling}" if self.name == "fp8" else self.name

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
    def overflows_are_normal(self) -> bool:
        """Whether a non-finite gradient may only mean that the loss scale is too large."""
        return self._scaler is not None and self._scaler.get_scale() > 1.0

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return self._scaler.state_dict() if self._scaler else {}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on with a checkpoint's scale."""
        if self._scaler and state:
            self._scaler.load_state_dict(state)


@contextmanager
def fp32_products(tf32: bool, convolutions: bool = False) -> Iterator[None]:
    """Inside, a GPU multiplies fp32 numbers on its tensor cores, or exactly; afterwards as it did before."""
    places, matrices, images = _places(), _told(torch.get_float32_matmul_precision), _told(_allowed_in_convolutions)
    words = [place.fp32_precision for place in places]
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    if convolutions:
        torch.backends.cudnn.allow_tf32 = tf32
        for place in places[2:]:  # where nothing is said, what holds for all of torch would
            place.fp32_precision = "tf32" if tf32 else "ieee"
    try:
        yield
    finally:
        if matrices is not None:
            torch.set_float32_matmul_precision(matrices)
        if images is not None:
            torch.backends.cudnn.allow_tf32 = images
        for place, word in zip(places, words, strict=True):  # unset is not exact: compiled layers are kept by this word
            place.fp32_precision = word


def _places() -> tuple[Any, ...]:
    """Where torch 2.9 and later keep it, of what the older switches set too."""
    backends: Any = torch.backends
    return (backends.cuda.matmul, backends.mkldnn.matmul, backends.cudnn.conv, backends.cudnn.rnn)


def _allowed_in_convolutions() -> bool:
    return bool(torch.backends.cudnn.allow_tf32)


def _told(switch: Callable[[], Value]) -> Value | None:
    """What an older switch says; it refuses where somebody has used the newer one in this process."""
    try:
        return switch()
    except RuntimeError:
        return None


def keep_angles_exact(module: nn.Module) -> None:
    """Let rotary positions be multiplied exactly whatever holds around them.

    Some versions of transformers multiply positions by frequencies as matrices. With 10 bits position 4,001 would be
    4,000, and its first angle off by a radian; that a library computes products so thin exactly is not promised.
    """
    for part in module.modules():
        if turns(part):
            exactly = _Exactly()
            part.register_forward_pre_hook(exactly.begin)
            part.register_forward_hook(exactly.end, prepend=True, always_call=True)  # who began last ends first


def turns(part: nn.Module) -> bool:
    """Whether a part of a model makes the angles by which queries and keys are turned."""
    holds = any("inv_freq" in name for name, _ in part.named_buffers(recurse=False))
    return holds or "rotary" in type(part).__name__.lower()


class _Exactly:
    """Switches to exact products as a module begins, and back as it ends, by whatever way."""

    def __init__(self) -> None:
        self._open: list[AbstractContextManager[None]] = []

    def begin(self, *_: Any) -> None:
        self._open.append(fp32_products(tf32=False))
        self._open[-1].__enter__()

    def end(self, *_: Any) -> None:
        self._open.pop().__exit__(None, None, None)
