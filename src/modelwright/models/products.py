"""Large products of matrices by the kernel that is fastest while the card is at its limit of power.

cuBLAS knows several kernels for a product and takes the one that is fastest on a cool card. In training a card draws
all the power it may, and a kernel that draws less runs at a higher clock: on an H200 others of the first eight are 2 to
6 % faster alone, which makes 1 % of a step. Which, is measured once for each shape, for a second, where a training is
long enough to pay for it, and kept on the machine. Only kernels that give the very bits of the usual one take part:
what is learnt does not depend on what was found.
"""

from __future__ import annotations

import ctypes
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor

from modelwright.errors import StorageError
from modelwright.runs.caches import cache_dir
from modelwright.runs.folder import read_json, write_json

LARGE = 2e11
"""Operations from which a product is worth a trial: 0.3 ms on an H200."""
KEPT = "products.json"
"""What this machine found before, in its cache folder."""
KERNELS = 8
"""Kernels that cuBLAS is asked for, the likeliest first."""
WARM_SECONDS, ROUND_SECONDS, ROUNDS = 1.5, 0.06, 3
"""How long the card is heated before the first trial, and how long each kernel runs in each round of a trial."""
A_SECOND, LONG_SECONDS = 4e14, 3600.0
"""Operations that a large GPU does in a second, and a training that is long."""
MOST_SECONDS = 60.0
"""Time for trials in one process: rows of ever new lengths would ask for ever more."""
SEEN = 64
"""Products of a shape before it is tried: about two passes through a model."""
COOLS_SECONDS = 4.0
"""How long after a trial it is still hot."""
SLOWER = 1.06
"""Kernels that are so many times slower than the best in a first short look take no part in the rounds."""
GAIN = 1.01
"""How many times faster than the usual one a kernel must be to take its place."""
ALIGNED = 16
"""Bytes that a kernel reads at once."""
BF16, FP32, FP32_SUMS = 14, 0, 68
TRANSPOSE_FIRST, TRANSPOSE_SECOND = 3, 4
"""Numbers of cuBLAS for types of data and of computing, and for attributes of a product."""

USUAL = -1
"""Stands for the kernel that torch takes."""


class Shape(NamedTuple):
    """What a kernel is chosen by: sizes, how the rows of each matrix lie in memory, and whether a sum is added to."""

    rows: int
    columns: int
    inner: int
    first: tuple[bool, int]
    """Whether the first matrix is turned, and how far its lines are apart."""
    second: tuple[bool, int]
    adds: bool

    def __str__(self) -> str:
        turned = "".join("T" if turned else "N" for turned, _ in (self.first, self.second))
        lines = (self.first[1], self.second[1])
        return f"{self.rows}x{self.columns}x{self.inner} {turned} {lines}{' added' * self.adds}"


@dataclass
class _Trials:
    known: bool = True
    """Whether what was found is used; where nothing is and may be, products are left to torch."""
    allowed: bool = False
    seconds: float = 0.0
    """Spent so far."""
    ended: float = float("-inf")
    """When the last one did."""


_trials = _Trials()
_found: dict[Shape, int] = {}
_seen: Counter[Shape] = Counter()


class _Kernel(ctypes.Structure):
    _fields_ = (
        ("kernel", ctypes.c_uint64 * 8),
        ("workspace", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )


def allow(wish: str, operations: float) -> None:
    """Take kernels that are known from now on, and try others where a training of so many operations pays for that.

    wish: the recipe's tune_products.
    """
    _trials.allowed = wish == "always" or (wish == "auto" and operations / A_SECOND > LONG_SECONDS)
    _trials.known = wish != "never" and (_trials.allowed or any(name.startswith(f"{_here()}: ") for name in _read()))


def mm(first: Tensor, second: Tensor, to: Tensor | None = None) -> Tensor:
    """The product of two matrices, [rows, inner] × [inner, columns], where it is wished or in a place of its own."""
    if not is_large(first, second):
        return torch.mm(first, second, out=to)
    made = first.new_empty(first.shape[0], second.shape[1]) if to is None else to
    return made if _by_choice(first, second, made, adds=False) else torch.mm(first, second, out=made)


def add_mm(into: Tensor, first: Tensor, second: Tensor) -> None:
    """Add the product of two matrices to a third."""
    if not is_large(first, second) or not _by_choice(first, second, into, adds=True):
        into.addmm_(first, second)


def is_large(first: Tensor, second: Tensor) -> bool:
    """Whether the kernel of a product is chosen here: [rows, inner] × [inner, columns]."""
    large = _trials.known and 2.0 * first.numel() * second.shape[1] >= LARGE
    return large and first.is_cuda and first.dtype is torch.bfloat16 and second.dtype is torch.bfloat16


def _by_choice(first: Tensor, second: Tensor, to: Tensor, adds: bool) -> bool:
    """Multiply by the kernel that was found for this shape; False where the usual one is to do it."""
    shape = _shape_of(first, second, to, adds) if _trials.known and _library() is not None else None
    if shape is None:
        return False
    if shape not in _found:
        _seen[shape] += 1
        if _seen[shape] == 1 and (kept := _read().get(_name(shape))) is not None:
            _found[shape] = kept
        elif _seen[shape] <= SEEN or not _trials.allowed or torch.cuda.is_current_stream_capturing():
            return False
        else:
            _found[shape] = _tried(shape, to.device)
    if _found[shape] == USUAL:
        return False
    try:
        return _product(shape, to.device).run(_found[shape], first, second, to)
    except (RuntimeError, AttributeError):  # another library than we know
        _found[shape] = USUAL
        return False


def _shape_of(first: Tensor, second: Tensor, to: Tensor, adds: bool) -> Shape | None:
    """The shape of a product, or None where the numbers of a line are apart, or the lines of the result."""
    lines = []
    for matrix in (first, second):
        turned = matrix.stride(1) != 1
        if turned and matrix.stride(0) != 1:
            return None
        lines.append((turned, matrix.stride(1 if turned else 0)))
    together = to.dtype is torch.bfloat16 and to.is_contiguous()
    if not together or any(each.data_ptr() % ALIGNED for each in (first, second, to)):
        return None
    return Shape(first.shape[0], second.shape[1], first.shape[1], lines[0], lines[1], adds)


@cache
def _library() -> Any:
    """The cuBLAS that torch has loaded, or None."""
    if torch.version.cuda is None:
        return None
    try:
        return ctypes.CDLL(f"libcublasLt.so.{torch.version.cuda.partition('.')[0]}")
    except OSError:
        return None


@cache
def _handle(device: torch.device) -> ctypes.c_void_p:
    handle = ctypes.c_void_p()
    _done(_library().cublasLtCreate(ctypes.byref(handle)))
    return handle


def _done(status: int) -> None:
    if status:
        raise RuntimeError(f"cuBLAS answers {status}")


class _Product:
    """One shape in the words of cuBLAS, whose matrices are those of torch turned: it makes second × first."""

    def __init__(self, shape: Shape, device: torch.device) -> None:
        self._lt, self._handle = _library(), _handle(device)
        self._what = self._made("MatmulDescCreate", FP32_SUMS, FP32)
        for attribute, (turned, _) in ((TRANSPOSE_FIRST, shape.second), (TRANSPOSE_SECOND, shape.first)):
            value = ctypes.c_int32(turned)
            _done(
                self._lt.cublasLtMatmulDescSetAttribute(self._what, attribute, ctypes.byref(value), ctypes.c_size_t(4))
            )
        self._second = self._layout(shape.columns, shape.inner, shape.second)
        self._first = self._layout(shape.inner, shape.rows, shape.first)
        self._to = self._layout(shape.columns, shape.rows, (False, shape.columns))
        self._one, self._kept = ctypes.c_float(1.0), ctypes.c_float(float(shape.adds))
        self.kernels = self._asked_for()

    def run(self, number: int, first: Tensor, second: Tensor, to: Tensor) -> bool:
        """Multiply by one of the kernels; returns whether it was taken."""
        if number >= len(self.kernels):
            return False
        pointer = ctypes.c_void_p
        status = self._lt.cublasLtMatmul(
            self._handle, self._what, ctypes.byref(self._one),
            pointer(second.data_ptr()), self._second, pointer(first.data_ptr()), self._first,
            ctypes.byref(self._kept), pointer(to.data_ptr()), self._to, pointer(to.data_ptr()), self._to,
            ctypes.byref(self.kernels[number].kernel), pointer(), ctypes.c_size_t(0),
            pointer(torch.cuda.current_stream(to.device).cuda_stream),
        )  # fmt: skip
        return bool(status == 0)

    def _made(self, what: str, *given: Any) -> ctypes.c_void_p:
        found = ctypes.c_void_p()
        _done(getattr(self._lt, f"cublasLt{what}")(ctypes.byref(found), *given))
        return found

    def _layout(self, rows: int, columns: int, lines: tuple[bool, int]) -> ctypes.c_void_p:
        turned, apart = lines
        sizes = (columns, rows) if turned else (rows, columns)
        return self._made("MatrixLayoutCreate", BF16, *map(ctypes.c_uint64, sizes), ctypes.c_int64(apart))

    def _asked_for(self) -> list[_Kernel]:
        """The kernels that need no memory of their own."""
        wish, count, found = self._made("MatmulPreferenceCreate"), ctypes.c_int(), (_Kernel * KERNELS)()
        _done(self._lt.cublasLtMatmulAlgoGetHeuristic(
            self._handle, self._what, self._second, self._first, self._to, self._to, wish,
            KERNELS, found, ctypes.byref(count),
        ))  # fmt: skip
        return [kernel for kernel in found[: count.value] if kernel.state == 0 and kernel.workspace == 0]


@cache
def _product(shape: Shape, device: torch.device) -> _Product:
    return _Product(shape, device)


def _tried(shape: Shape, device: torch.device) -> int:
    """What a trial finds, which is kept; the usual kernel where there is no time or memory for one."""
    if _trials.seconds > MOST_SECONDS:
        return USUAL
    began = time.perf_counter()
    try:
        found = _try(shape, device)
    except (RuntimeError, AttributeError):  # no memory left to try it, or another library than we know
        return USUAL
    _trials.ended = time.perf_counter()
    _trials.seconds += _trials.ended - began
    with suppress(OSError, StorageError):  # a full disk, or another rank that writes now
        write_json(cache_dir() / KEPT, {**_read(), _name(shape): found})
    return found


def _read() -> dict[str, int]:
    try:
        return {str(name): int(number) for name, number in read_json(cache_dir() / KEPT).items()}
    except (OSError, StorageError, AttributeError, TypeError, ValueError):
        return {}  # none yet, or not ours


def _name(shape: Shape) -> str:
    return f"{_here()}: {shape}"


def _here() -> str:
    """The card, and what else decides which kernels there are."""
    if (library := _library()) is None or not torch.cuda.is_available():  # what another machine found may be in sight
        return "nowhere"
    versions = f"torch {torch.__version__}, cuBLAS {library.cublasLtGetVersion()}"
    exact = "" if torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction else ", sums in fp32"
    return f"{torch.cuda.get_device_name()}, {versions}{exact}"


def _try(shape: Shape, device: torch.device) -> int:
    """The number of the fastest kernel among those that give the bits of the usual one, of random numbers."""
    product = _product(shape, device)
    first = _matrix((shape.rows, shape.inner), shape.first, device)
    second = _matrix((shape.inner, shape.columns), shape.second, device)
    before = _matrix((shape.rows, shape.columns), (False, shape.columns), device)
    expected = torch.addmm(before, first, second) if shape.adds else torch.mm(first, second)
    spare = before.clone()

    def usual() -> Any:
        return spare.addmm_(first, second) if shape.adds else torch.mm(first, second, out=spare)

    runs: dict[int, Callable[[], Any]] = {USUAL: usual}
    for number in range(len(product.kernels)):
        spare.copy_(before)
        if product.run(number, first, second, spare) and torch.equal(spare, expected):
            runs[number] = partial(product.run, number, first, second, spare)
    _warm(usual)
    looks = {number: _seconds(run, ROUND_SECONDS / 4) for number, run in runs.items()}
    best = min(looks.values())
    rounds: dict[int, list[float]] = {n: [] for n, look in looks.items() if n == USUAL or look < best * SLOWER}
    for _ in range(ROUNDS):
        for number, seconds in rounds.items():
            seconds.append(_seconds(runs[number], ROUND_SECONDS))
    spent = {number: median(seconds) for number, seconds in rounds.items()}
    fastest = min(spent, key=lambda number: spent[number])
    return fastest if spent[fastest] * GAIN < spent[USUAL] else USUAL


def _matrix(sizes: tuple[int, int], lines: tuple[bool, int], device: torch.device) -> Tensor:
    """Random numbers that lie in memory as those of a product do."""
    turned, apart = lines
    strides = (1, apart) if turned else (apart, 1)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        return torch.empty_strided(sizes, strides, dtype=torch.bfloat16, device=device).normal_()


def _seconds(run: Callable[[], Any], long: float) -> float:
    """Of one product, in a row of them that takes about so long."""
    count = 4
    while True:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        start.record()
        for _ in range(count):
            run()
        end.record()
        end.synchronize()
        spent = float(start.elapsed_time(end)) / 1000
        if spent >= 0.7 * long:
            return spent / count
        count = max(count + 1, int(count * long / max(spent, 1e-6)) + 1)


def _warm(run: Callable[[], Any]) -> None:
    """Let the card come to its limit, unless it was at work just now."""
    began = time.perf_counter()
    while began - _trials.ended > COOLS_SECONDS and time.perf_counter() < began + WARM_SECONDS:
        _seconds(run, ROUND_SECONDS)
