"""Checks of this machine (software, devices, disk, network, clock), each with its fix."""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from modelwright.errors import first_line
from modelwright.launch.config import CUDA_VISIBLE_DEVICES, count_visible_gpus
from modelwright.plan.hardware import find_gpu, probe_device
from modelwright.runs.caches import cache_dir, hf_hub_cache, is_offline

CheckStatus = Literal["ok", "warn", "fail", "skip"]
MIN_PYTHON, MIN_TORCH = (3, 11), (2, 9)
PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "datasets", "peft", "numpy", "pydantic")
EXTRAS = {"torchao": "fp8", "bitsandbytes": "quantization", "tensorboard": "track", "nvidia-ml-py": "gpu"}
PORTS = (29500, 23456)
"""Default master ports of torchrun and of the documents' jobs."""
HUB = "https://huggingface.co"
MIN_SHM_BYTES = 1 << 30
MIN_DISK_BYTES = 5 << 30
CONNECT_TIMEOUT = 3.0


@dataclass(frozen=True)
class CheckResult:
    """Result of one check."""

    name: str
    """What."""
    status: CheckStatus
    """ok; warn: works, with a loss; fail: the recipe cannot run; skip: not checked."""
    detail: str
    """What was found."""
    fix: str = ""
    """What would fix it."""
    data: dict[str, Any] = field(default_factory=dict)
    """Numbers, for machines."""

    def as_json(self) -> dict[str, Any]:
        """For --json."""
        return asdict(self)


def run_checks(checks: Sequence[Callable[[], CheckResult | list[CheckResult]]]) -> list[CheckResult]:
    """Run checks in order; one that raises becomes a failed result, and the others still run."""
    results: list[CheckResult] = []
    for check in checks:
        try:
            result = check()
        except Exception as error:  # whatever a broken installation raises is a result to report
            name = check.__name__.removeprefix("check_").replace("_", " ")
            fix = "fix the installation: pip install --force-reinstall modelwright"
            result = CheckResult(name, "fail", f"{type(error).__name__}: {first_line(error)}"[:300], fix)
        results += result if isinstance(result, list) else [result]
    return results


def check_python() -> CheckResult:
    """The interpreter."""
    detail = f"{platform.python_version()} on {platform.machine()}, {sys.executable}"
    if sys.version_info[:2] < MIN_PYTHON:
        return CheckResult("python", "fail", detail, "modelwright wants Python 3.11 or newer")
    return CheckResult("python", "ok", detail, data={"version": platform.python_version()})


def check_packages() -> list[CheckResult]:
    """Required packages and optional extras."""
    versions = {name: installed_version(name) for name in (*PACKAGES, "accelerate")}
    missing = [name for name in PACKAGES if versions[name] is None]
    detail = ", ".join(f"{name} {installed}" for name, installed in versions.items() if installed)
    packages = CheckResult("packages", "ok", detail, data=versions)
    if missing:
        fix = f"pip install {' '.join(missing)}"
        packages = CheckResult("packages", "fail", f"missing: {', '.join(missing)}", fix, versions)
    extras = {name: installed_version(name) for name in EXTRAS}
    missing_extras = [f"modelwright[{EXTRAS[name]}]" for name, installed in extras.items() if installed is None]
    detail = ", ".join(f"{name} {installed or 'absent'}" for name, installed in extras.items())
    fix = f"only if wanted: pip install {' '.join(f'{extra!r}' for extra in missing_extras)}" if missing_extras else ""
    return [packages, CheckResult("extras", "ok", detail, fix, extras)]


def check_disk(folder: Path, needed: float = 0.0) -> CheckResult:
    """Free disk space at the run folder."""
    existing = _existing_parent(folder)
    free = shutil.disk_usage(existing).free
    detail = f"{free / 2**30:.1f} GiB free at {existing}"
    detail += f", this recipe may take {needed / 2**30:.1f}" if needed else ""
    data = {"free_bytes": free, "needed_bytes": round(needed)}
    if needed > free:
        fix = "another output_dir with more space, or a smaller save_total_limit"
        return CheckResult("disk", "fail", detail, fix, data)
    if not os.access(existing, os.W_OK):
        return CheckResult("disk", "fail", f"{existing} cannot be written", "another output_dir", data)
    if free < MIN_DISK_BYTES:
        return CheckResult("disk", "warn", detail, "free some space: a full disk ends a run", data)
    return CheckResult("disk", "ok", detail, data=data)


def _existing_parent(path: Path) -> Path:
    """The path itself or its nearest parent that exists."""
    return next(parent for parent in (path, *path.parents) if parent.exists())


def check_shared_memory() -> CheckResult:
    """Size of /dev/shm, through which the ranks of one machine exchange data."""
    shm = Path("/dev/shm")
    if not shm.is_dir():
        fix = "mount one: emptyDir with medium Memory in a pod"
        return CheckResult("shared memory", "warn", "there is no /dev/shm", fix)
    total = shutil.disk_usage(shm).total
    detail = f"{total / 2**30:.2f} GiB at /dev/shm"
    if total < MIN_SHM_BYTES:
        mount = "mount an emptyDir with medium Memory at /dev/shm, or docker run --shm-size 8g"
        fix = f"several GPUs of one machine want 1 GiB and more: {mount}"
        return CheckResult("shared memory", "warn", detail, fix, {"bytes": total})
    return CheckResult("shared memory", "ok", detail, data={"bytes": total})


def check_caches() -> CheckResult:
    """Cache folders of converted models and of the hub."""
    cache_dirs = {"modelwright": cache_dir(), "hub": hf_hub_cache()}
    detail = ", ".join(f"{name} {path}" for name, path in cache_dirs.items())
    for path in cache_dirs.values():
        if not os.access(_existing_parent(path), os.W_OK | os.X_OK):
            fix = "export MODELWRIGHT_CACHE and HF_HOME to folders that can be written"
            return CheckResult("caches", "warn", f"{path} cannot be written", fix)
    return CheckResult("caches", "ok", detail)


def check_hub(needed: str | None = None, model: str | None = None) -> list[CheckResult]:
    """The token, whether the hub can be reached, and whether it lets `model` be read; `needed` is only there."""
    token = bool(os.environ.get("HF_TOKEN")) or (hf_hub_cache().parent / "token").is_file()
    detail = "a token is set" if token else "no token: gated models, such as Gemma, are refused"
    fix = "" if token else "export HF_TOKEN, or: hf auth login"
    token_check = CheckResult("hub token", "ok" if token or not needed else "warn", detail, fix)
    if is_offline():
        bad = f"; {needed} is not on this machine" if needed else ""
        network_fix = "unset HF_HUB_OFFLINE, or put the files into a folder and name that" if needed else ""
        result = CheckResult("hub", "fail" if needed else "skip", f"HF_HUB_OFFLINE is set{bad}", network_fix)
        return [token_check, result]
    hub = urlsplit(os.environ.get("HF_ENDPOINT") or HUB)
    host, port = hub.hostname or "", hub.port or (80 if hub.scheme == "http" else 443)
    try:
        with socket.create_connection((host, port), timeout=CONNECT_TIMEOUT):
            answers = CheckResult("hub", "ok", f"{host} answers")
            return [token_check, answers, *([check_model_access(model, token)] if model else [])]
    except OSError as error:
        reason = f"{host} cannot be reached ({error.strerror or error})"
        if needed:
            network_fix = f"{needed} is only there: open the network or a proxy, or put it into a folder and name that"
            return [token_check, CheckResult("hub", "fail", reason, network_fix)]
        return [token_check, CheckResult("hub", "ok", f"{reason}; nothing here needs it")]


def check_model_access(name: str, has_token: bool) -> CheckResult:
    """Whether the hub lets a model be read with the token at hand; nothing is downloaded."""
    from huggingface_hub import auth_check
    from huggingface_hub.constants import ENDPOINT
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    token = "with the token at hand" if has_token else "without a token"
    try:
        auth_check(name)
    except GatedRepoError:
        fix = f"ask for access at {ENDPOINT.rstrip('/')}/{name}, then export HF_TOKEN, or: hf auth login"
        return CheckResult("model access", "fail", f"{name} is gated, and may not be read {token}", fix)
    except RepositoryNotFoundError:
        fix = "check the name; of a private model, export an HF_TOKEN that may read it"
        return CheckResult("model access", "fail", f"the hub shows no model {name} {token}", fix)
    except Exception as error:  # the hub client raises many types
        return CheckResult("model access", "warn", f"{name}: the hub did not say ({first_line(error)[:160]})")
    return CheckResult("model access", "ok", f"{name} may be read {token}")


def check_ports() -> CheckResult:
    """Whether the default master ports are free."""
    in_use = [port for port in PORTS if not _is_free(port)]
    detail = f"{', '.join(map(str, in_use))} taken" if in_use else f"{', '.join(map(str, PORTS))} free"
    fix = "choose another: --master-port, or MASTER_PORT" if in_use else ""
    return CheckResult("ports", "warn" if in_use else "ok", detail, fix, {"in_use": in_use})


def check_clock() -> CheckResult:
    """Rendezvous fails for nodes whose clocks differ by more than a minute."""
    synchronized = is_clock_synchronized()
    if synchronized is None:
        return CheckResult("clock", "skip", "this system does not say whether its clock is set by the network")
    if synchronized:
        return CheckResult("clock", "ok", "set by the network")
    fix = "for several nodes start chrony or ntp: with 90 s between two clocks each node trains alone"
    return CheckResult("clock", "warn", "not known to be set by the network", fix)


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


def installed_version(package: str) -> str | None:
    """Version of an installed package."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


PROBE_SECONDS = 0.3
"""Duration of each speed probe; accurate to about 10 %."""
COMPILE_TIMEOUT = 120
COMPILE_PROBE = "import torch; print(float(torch.compile(lambda x: (x * 2 + 1).relu())(torch.ones(8)).sum()))"


def check_torch() -> CheckResult:
    """The torch version, and whether it was built for the GPU of the driver."""
    import torch

    torch_version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    driver = _driver_version()
    detail = f"torch {torch.__version__}, built for {f'CUDA {torch.version.cuda}' if torch.version.cuda else 'CPU'}"
    data = {"torch": torch.__version__, "cuda": torch.version.cuda, "driver": driver}
    if torch_version < MIN_TORCH:
        return CheckResult("torch", "fail", detail, "pip install 'torch>=2.9'", data)
    if driver and not torch.cuda.is_available():
        if torch.version.cuda is None:
            fix = "this torch has no CUDA: pip install torch from the index that pytorch.org names for your driver"
        else:
            fix = f"driver {driver} does not suit CUDA {torch.version.cuda}: update it, or install an older torch build"
        return CheckResult("torch", "fail", f"{detail}, but the driver shows a GPU that torch cannot use", fix, data)
    return CheckResult("torch", "ok", detail + (f", driver {driver}" if driver else ""), data=data)


def check_devices() -> list[CheckResult]:
    """Every device with its memory."""
    import torch

    chosen, visible = os.environ.get(CUDA_VISIBLE_DEVICES), torch.cuda.device_count()
    wanted = count_visible_gpus(os.environ) if chosen else 0
    fix = f"{CUDA_VISIBLE_DEVICES}={chosen} chooses {wanted} GPUs, {visible} visible: nvidia-smi -L lists all there are"
    devices = CheckResult("devices", "warn", "", fix) if wanted > visible else CheckResult("devices", "ok", "")
    if not torch.cuda.is_available():
        threads = torch.get_num_threads()
        return [replace(devices, detail=f"no GPU; {threads} CPU thread{'s' * (threads != 1)}", data={"gpus": []})]
    results, gpus = [], []
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        name = torch.cuda.get_device_name(index)
        gpus.append({"name": name, "bytes": total, "free_bytes": free})
        datasheet = find_gpu(name)
        detail = f"{name}, {total / 2**30:.1f} GiB, {free / 2**30:.1f} free"
        detail += "" if datasheet else "; unknown GPU model"
        busy = free < 0.8 * total
        fix = "another process holds its memory: nvidia-smi names it" if busy else ""
        results.append(CheckResult(f"device {index}", "warn" if busy else "ok", detail, fix))
    return [replace(devices, detail=f"{len(gpus)} GPU", data={"gpus": gpus}), *results]


def check_bf16() -> CheckResult:
    """Whether bf16 matmul is correct on every device, and fast."""
    import torch

    gpus = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    for device in gpus or [torch.device("cpu")]:
        try:
            ones = torch.ones(64, 64, dtype=torch.bfloat16, device=device)
            correct = bool(((ones @ ones) == 64).all())
        except RuntimeError as error:
            correct, detail = False, first_line(error)[:200]
        else:
            detail = "matmul gives wrong results"
        if not correct:
            return CheckResult("bf16", "warn", f"{device}: {detail}", "precision: fp32, or fp16 on a GPU")
    fast = probe_device().fast_bf16
    detail = "works and is fast here" if fast else "works but is slow here: precision auto selects another"
    return CheckResult("bf16", "ok", detail, data={"fast": fast})


def check_matmul_speed() -> list[CheckResult]:
    """Matmul rate of each dtype, compared with the GPU's data sheet."""
    import torch

    on_gpu = torch.cuda.is_available()
    datasheet = find_gpu(torch.cuda.get_device_name()) if on_gpu else None
    results = []
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)):
        size = 4096 if on_gpu else (512 if dtype is torch.float32 else 128)
        try:
            rate = _matmul_flops(torch, dtype, size, on_gpu)
        except RuntimeError as error:
            results.append(CheckResult(f"{name} matmul", "warn", f"do not work here ({first_line(error)})"[:200]))
            continue
        detail = f"{rate / 1e12:.1f} TFLOP/s" if on_gpu else f"{rate / 1e9:.3g} GFLOP/s"
        fraction = rate / datasheet.peak_flops(name) if datasheet and datasheet.peak_flops(name) else None
        status, fix = "ok", ""
        if fraction is not None:
            detail += f", {fraction:.0%} of the data sheet"
            if fraction < 0.4:
                status, fix = "warn", "slower than it should be: is the GPU shared, throttled or limited in power?"
        results.append(CheckResult(f"{name} matmul", status, detail, fix, {"flops": rate}))  # type: ignore[arg-type]
    if on_gpu:
        return [*results, _check_fp8_matmul(torch, datasheet.fp8 if datasheet else 0.0)]
    flops = {result.name: result.data.get("flops", 0.0) for result in results}
    advice = "bf16 is slower on this processor; precision auto selects fp32"
    if flops["bf16 matmul"] > flops["fp32 matmul"]:
        advice = "bf16 is faster here"
    return [*results, CheckResult("fp8 matmul", "skip", f"needs a GPU; {advice}")]


def check_attention() -> CheckResult:
    """Speed of causal attention, forward and backward, with the kernel that training uses; and which kernels work."""
    import torch
    import torch.nn.functional as F
    from torch.nn.attention import SDPBackend, sdpa_kernel

    from modelwright.models.attention import SDPA_BACKENDS

    on_gpu = torch.cuda.is_available()
    device, dtype = ("cuda", torch.bfloat16) if on_gpu else ("cpu", torch.float32)
    rows, heads, length, width = (2, 32, 4096, 128) if on_gpu else (1, 2, 128, 64)
    size = (rows, heads, length, width)
    query, key, value = (torch.randn(size, device=device, dtype=dtype, requires_grad=True) for _ in range(3))

    def once() -> None:
        F.scaled_dot_product_attention(query, key, value, is_causal=True).backward(value.detach())  # type: ignore[no-untyped-call]

    with sdpa_kernel(SDPA_BACKENDS, set_priority=True):
        rate = 3.5 * 2.0 * rows * heads * length**2 * width / _seconds_per_call(once, torch, on_gpu)
    works = []
    for name in ("CUDNN_ATTENTION", "FLASH_ATTENTION", "EFFICIENT_ATTENTION", "MATH"):
        try:
            with sdpa_kernel(getattr(SDPBackend, name)):
                once()
            works.append(name.removesuffix("_ATTENTION").lower())
        except RuntimeError:
            continue
    detail = f"{rate / 1e12:.1f} TFLOP/s" if on_gpu else f"{rate / 1e9:.3g} GFLOP/s"
    data = {"flops": rate, "kernels": works}
    slow = on_gpu and not {"cudnn", "flash"} & set(works)
    fix = "neither cuDNN nor FlashAttention works: install a torch build for this GPU" if slow else ""
    return CheckResult("attention", "warn" if slow else "ok", f"{detail}; kernels: {', '.join(works)}", fix, data)


def check_torch_compile(requested: bool) -> CheckResult:
    """Whether torch.compile works here, tried in a subprocess."""
    compiler = shutil.which("g++") or shutil.which("clang++") or shutil.which("c++")
    if not requested:
        detail = f"not asked for; a C++ compiler is {'there' if compiler else 'missing'}"
        return CheckResult("compile", "skip", detail)
    began = time.perf_counter()
    command = [sys.executable, "-c", COMPILE_PROBE]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_TIMEOUT)
    except subprocess.TimeoutExpired:
        return CheckResult("compile", "warn", f"took longer than {COMPILE_TIMEOUT} s", "torch_compile: false")
    if done.returncode == 0:
        return CheckResult("compile", "ok", f"works, {time.perf_counter() - began:.0f} s for the first function")
    last_line = (done.stderr.strip().splitlines() or ["no output"])[-1]
    fix = "torch_compile: false" + ("" if compiler else ", or install a C++ compiler (g++)")
    return CheckResult("compile", "fail", last_line[:200], fix)


def _matmul_flops(torch: Any, dtype: Any, size: int, on_gpu: bool) -> float:
    left = torch.randn(size, size, device="cuda" if on_gpu else "cpu").to(dtype)
    return float(2.0 * size**3 / _seconds_per_call(lambda: left @ left, torch, on_gpu))


def _check_fp8_matmul(torch: Any, datasheet_flops: float) -> CheckResult:
    """FP8 matmul, where the GPU supports it; datasheet_flops is 0 where that is not known."""
    if torch.cuda.get_device_capability() < (8, 9):
        return CheckResult("fp8 matmul", "skip", "this GPU has none; bf16 is used")
    one = torch.tensor(1.0, device="cuda")
    left = torch.randn(4096, 4096, device="cuda").to(torch.float8_e4m3fn)

    def multiply() -> None:
        torch._scaled_mm(left, left.T, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)

    rate = 2.0 * 4096**3 / _seconds_per_call(multiply, torch, True)
    fraction = f", {rate / datasheet_flops:.0%} of the data sheet" if datasheet_flops else ""
    return CheckResult("fp8 matmul", "ok", f"{rate / 1e12:.1f} TFLOP/s{fraction}", data={"flops": rate})


def _seconds_per_call(action: Any, torch: Any, on_gpu: bool) -> float:
    """Mean time of a call, over as many calls as fit into PROBE_SECONDS."""
    wait = torch.cuda.synchronize if on_gpu else (lambda: None)
    action()
    wait()
    began, calls = time.perf_counter(), 0
    while time.perf_counter() - began < PROBE_SECONDS:
        for _ in range(10 if on_gpu else 1):
            action()
        wait()
        calls += 10 if on_gpu else 1
    return (time.perf_counter() - began) / calls


def _driver_version() -> str | None:
    """The driver's version, where there is one."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        output = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    return output.splitlines()[0].strip() if output.strip() else None


STA_UNSYNC = 0x40
"""Status bit of adjtimex: the clock is not synchronized."""


class _Timex(ctypes.Structure):
    """The first fields of the kernel's struct timex; the rest is padding."""

    _fields_ = (
        ("modes", ctypes.c_uint),
        ("offset", ctypes.c_long),
        ("freq", ctypes.c_long),
        ("maxerror", ctypes.c_long),
        ("esterror", ctypes.c_long),
        ("status", ctypes.c_int),
        ("rest", ctypes.c_long * 32),
    )


def is_clock_synchronized() -> bool | None:
    """Whether the clock is set by the network; None where the kernel does not report it."""
    try:
        kernel, timex = ctypes.CDLL(None, use_errno=True), _Timex()
        if kernel.adjtimex(ctypes.byref(timex)) < 0:
            return None
    except (OSError, AttributeError):
        return None
    return not timex.status & STA_UNSYNC
