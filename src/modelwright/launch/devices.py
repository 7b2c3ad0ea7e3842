"""What the doctor asks of torch: build and driver, devices, how fast each type multiplies, attention, compiling."""

from __future__ import annotations

import shutil
import subprocess
import time
from typing import Any

from modelwright.errors import first_line
from modelwright.launch.doctor import OLDEST_TORCH, Check
from modelwright.plan.facts import probe
from modelwright.plan.gpus import named

SECONDS = 0.3
"""Of each probe: enough for a figure within a tenth or so."""
COMPILE_SECONDS = 120
COMPILES = "import torch; print(float(torch.compile(lambda x: (x * 2 + 1).relu())(torch.ones(8)).sum()))"


def torch_build() -> Check:
    """Torch, and whether it was built for the GPU that the driver shows."""
    import torch

    number = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    driver = _driver()
    told = f"torch {torch.__version__}, built for {f'CUDA {torch.version.cuda}' if torch.version.cuda else 'CPU'}"
    facts = {"torch": torch.__version__, "cuda": torch.version.cuda, "driver": driver}
    if number < OLDEST_TORCH:
        return Check("torch", "fail", told, "pip install 'torch>=2.9'", facts)
    if driver and not torch.cuda.is_available():
        if torch.version.cuda is None:
            fix = "this torch has no CUDA: pip install torch from the index that pytorch.org names for your driver"
        else:
            fix = f"driver {driver} does not suit CUDA {torch.version.cuda}: update it, or install an older torch build"
        return Check("torch", "fail", f"{told}, but the driver shows a GPU that torch cannot use", fix, facts)
    return Check("torch", "ok", told + (f", driver {driver}" if driver else ""), facts=facts)


def devices() -> list[Check]:
    """Every device with its memory."""
    import torch

    if not torch.cuda.is_available():
        threads = torch.get_num_threads()
        return [Check("devices", "ok", f"no GPU; {threads} CPU thread{'s' * (threads != 1)}", facts={"gpus": []})]
    found, cards = [], []
    for number in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(number)
        name = torch.cuda.get_device_name(number)
        cards.append({"name": name, "bytes": total, "free_bytes": free})
        known = named(name)
        told = f"{name}, {total / 2**30:.1f} GiB, {free / 2**30:.1f} free" + ("" if known else "; not in our table")
        busy = free < 0.8 * total
        fix = "another process holds its memory: nvidia-smi names it" if busy else ""
        found.append(Check(f"device {number}", "warn" if busy else "ok", told, fix))
    return [Check("devices", "ok", f"{len(cards)} GPU", facts={"gpus": cards}), *found]


def bf16() -> Check:
    """Whether products in bf16 come out right on every device, and are worth it."""
    import torch

    cards = [torch.device("cuda", number) for number in range(torch.cuda.device_count())]
    for device in cards or [torch.device("cpu")]:
        try:
            ones = torch.ones(64, 64, dtype=torch.bfloat16, device=device)
            right = bool(((ones @ ones) == 64).all())
        except RuntimeError as error:
            right, told = False, first_line(error)[:200]
        else:
            told = "products come out wrong"
        if not right:
            return Check("bf16", "warn", f"{device}: {told}", "precision: fp32, or fp16 on a GPU")
    fast = probe().fast_bf16
    told = "works, and pays" if fast else "works, and is slow here: precision auto takes another"
    return Check("bf16", "ok", told, facts={"fast": fast})


def speeds() -> list[Check]:
    """How fast matrices of each type are multiplied, against what the card's data sheet says."""
    import torch

    on_gpu = torch.cuda.is_available()
    known = named(torch.cuda.get_device_name()) if on_gpu else None
    found = []
    for name, kind in (("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)):
        size = 4096 if on_gpu else (512 if kind is torch.float32 else 128)
        try:
            rate = _products(torch, kind, size, on_gpu)
        except RuntimeError as error:
            found.append(Check(f"{name} products", "warn", f"do not work here ({first_line(error)})"[:200]))
            continue
        told = f"{rate / 1e12:.1f} TFLOP/s" if on_gpu else f"{rate / 1e9:.3g} GFLOP/s"
        share = rate / known.rate(name) if known and known.rate(name) else None
        state, fix = "ok", ""
        if share is not None:
            told += f", {share:.0%} of the data sheet"
            if share < 0.4:
                state, fix = "warn", "slower than it should be: is the card shared, throttled or limited in power?"
        found.append(Check(f"{name} products", state, told, fix, {"flops": rate}))  # type: ignore[arg-type]
    if on_gpu:
        return [*found, _fp8(torch, known.fp8 if known else 0.0)]
    quick, slow = (
        next((c.facts.get("flops", 0.0) for c in found if c.name.startswith(n)), 0.0) for n in ("bf16", "fp32")
    )
    advice = "bf16 pays here" if quick > slow else "bf16 does not pay on this processor; precision auto takes fp32"
    return [*found, Check("fp8 products", "skip", f"need a GPU; {advice}")]


def attention() -> Check:
    """Causal attention forward and backward, by the kernels in the order that training takes them; and which work."""
    import torch
    import torch.nn.functional as F
    from torch.nn.attention import SDPBackend, sdpa_kernel

    from modelwright.models.attention import PREFERRED

    on_gpu = torch.cuda.is_available()
    device, kind = ("cuda", torch.bfloat16) if on_gpu else ("cpu", torch.float32)
    rows, heads, length, width = (2, 32, 4096, 128) if on_gpu else (1, 2, 128, 64)
    size = (rows, heads, length, width)
    query, key, value = (torch.randn(size, device=device, dtype=kind, requires_grad=True) for _ in range(3))

    def once() -> None:
        F.scaled_dot_product_attention(query, key, value, is_causal=True).backward(value.detach())  # type: ignore[no-untyped-call]

    with sdpa_kernel(PREFERRED, set_priority=True):
        rate = 3.5 * 2.0 * rows * heads * length**2 * width / _seconds(once, torch, on_gpu)
    works = []
    for name in ("CUDNN_ATTENTION", "FLASH_ATTENTION", "EFFICIENT_ATTENTION", "MATH"):
        try:
            with sdpa_kernel(getattr(SDPBackend, name)):
                once()
            works.append(name.removesuffix("_ATTENTION").lower())
        except RuntimeError:
            continue
    told = f"{rate / 1e12:.1f} TFLOP/s" if on_gpu else f"{rate / 1e9:.3g} GFLOP/s"
    facts = {"flops": rate, "kernels": works}
    slow = on_gpu and not {"cudnn", "flash"} & set(works)
    fix = "neither cuDNN nor FlashAttention works: install a torch build for this card" if slow else ""
    return Check("attention", "warn" if slow else "ok", f"{told}; kernels: {', '.join(works)}", fix, facts)


def compiles(asked: bool) -> Check:
    """Whether torch.compile works here, tried in a process of its own."""
    import sys

    compiler = shutil.which("g++") or shutil.which("clang++") or shutil.which("c++")
    if not asked:
        told = f"not asked for; a C++ compiler is {'there' if compiler else 'missing'}"
        return Check("compile", "skip", told)
    began = time.perf_counter()
    try:
        done = subprocess.run([sys.executable, "-c", COMPILES], capture_output=True, text=True, timeout=COMPILE_SECONDS)
    except subprocess.TimeoutExpired:
        return Check("compile", "warn", f"took longer than {COMPILE_SECONDS} s", "torch_compile: false")
    if done.returncode == 0:
        return Check("compile", "ok", f"works, {time.perf_counter() - began:.0f} s for the first function")
    said = (done.stderr.strip().splitlines() or ["no word"])[-1]
    fix = "torch_compile: false" + ("" if compiler else ", or install a C++ compiler (g++)")
    return Check("compile", "fail", said[:200], fix)


def _products(torch: Any, kind: Any, size: int, on_gpu: bool) -> float:
    left = torch.randn(size, size, device="cuda" if on_gpu else "cpu").to(kind)
    return float(2.0 * size**3 / _seconds(lambda: left @ left, torch, on_gpu))


def _fp8(torch: Any, told: float) -> Check:
    """Products in 8 bits, where the card has them; told: what its data sheet says, 0 where that is not known."""
    if torch.cuda.get_device_capability() < (8, 9):
        return Check("fp8 products", "skip", "this card has none; bf16 is used")
    one = torch.tensor(1.0, device="cuda")
    left = torch.randn(4096, 4096, device="cuda").to(torch.float8_e4m3fn)
    seconds = _seconds(
        lambda: torch._scaled_mm(left, left.T, scale_a=one, scale_b=one, out_dtype=torch.bfloat16), torch, True
    )
    rate = 2.0 * 4096**3 / seconds
    share = f", {rate / told:.0%} of the data sheet" if told else ""
    return Check("fp8 products", "ok", f"{rate / 1e12:.1f} TFLOP/s{share}", facts={"flops": rate})


def _seconds(action: Any, torch: Any, on_gpu: bool) -> float:
    """Of one call, over as many as fit into the probe's time."""
    wait = torch.cuda.synchronize if on_gpu else (lambda: None)
    action()
    wait()
    began, calls = time.perf_counter(), 0
    while time.perf_counter() - began < SECONDS:
        for _ in range(10 if on_gpu else 1):
            action()
        wait()
        calls += 10 if on_gpu else 1
    return (time.perf_counter() - began) / calls


def _driver() -> str | None:
    """The driver's version, where there is one."""
    try:
        told = subprocess.run(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
                              capture_output=True, text=True, check=True, timeout=10).stdout  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
    return told.splitlines()[0].strip() if told.strip() else None
