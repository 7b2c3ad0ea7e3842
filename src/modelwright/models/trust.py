"""Refuse model folders that would run code, before any library reads them: configs, pickles, chat templates."""

from __future__ import annotations

import json
import re
import resource
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

from safetensors import SafetensorError, safe_open

from modelwright.errors import ModelError, first_line
from modelwright.recipe.schema import WIDTH_KEYS, check_sizes
from modelwright.recipe.sections import EMBEDDED_MODEL, MAX_WIDTH
from modelwright.runs.caches import cache_dir, hf_hub_cache
from modelwright.runs.folder import read_regular

MAX_JSON_BYTES = 4_000_000
"""Largest size of a config file; tokenizer.json is not checked."""
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl", "*.pickle")
ADAPTER_CONFIG = "adapter_config.json"
KERNEL_KEY = re.compile(r"(attn|experts)_implementation")
CODE_KEYS = ("megatron_config", "auto_mapping", "corda_config", "lora_ga_config")
"""Keys of an adapter config that name code to import or a pickle to load."""
MEANINGFUL_KEY = re.compile(
    r"^(?!_).*(rope|rotary|norm|scal|multiplier|soft_?cap|window|bias|alibi|residual|activation|expert|router|mup|atten"
    r"|attn|layer|embed|emb$|logit|position|qk|parallel_block|moe)"
)
"""Names in a config.json that say how a model computes, also where transformers has no such key for its family."""
HARMLESS_KEYS = re.compile(
    r"init|fusion$|softmax_in_fp32$|^(offset_alibi|skip_bias_add(_qkv)?|n_embed|scale_attn_weights|rotary|norm_type"
    r"|max_window_layers|attn_implementation|quantization_config|num_nextn_predict_layers|use_parallel_(block|embedding)"
    r"|rope_pct|use_gated_activation|use_embedding_sharing|position_embedding(_type)?|attention_type)$"
)
"""Those of them that public configurations carry though they change nothing."""
RENDER_SECONDS, RENDER_BYTES = 2.0, 1 << 30
"""CPU-seconds and memory limits of a chat template for two turns; usual ones take a millisecond."""
PROBE_CHAT = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}]


def check_regular_files(path: Path) -> None:
    """Refuse a model folder that holds a FIFO, a device or a link to nothing, which may never end when it is read."""
    if odd := next((file for file in path.iterdir() if not (file.is_file() or file.is_dir())), None):
        raise ModelError(f"model: {odd} is not a regular file; put a copy of the file there, or remove it")


def check_model(path: Path) -> None:
    """Refuse a model folder with custom code, or with pickles only."""
    _refuse_code(path, "config.json")
    check_sizes(read_small_json(path / "config.json"), str(path / "config.json"))
    check_regular_files(path)
    if not any(path.glob("*.safetensors")) and (pickles := _pickles(path)):
        raise ModelError(
            f"model: the weights of {path} are pickles ({pickles[0]}), which may run any code when they are read; "
            "it wants safetensors"
        )
    _check_index(path)


def check_config_keys(path: Path) -> None:
    """Refuse a config.json with a key that says how the model computes and that transformers does not read."""
    from transformers import CONFIG_MAPPING

    values = read_small_json(path / "config.json")
    family = values.get("model_type")
    if not isinstance(family, str) or family not in CONFIG_MAPPING:
        return  # transformers says so
    config_class = CONFIG_MAPPING[family]
    try:
        loaded_values, known = config_class.from_dict(values).to_dict(), config_class().to_dict()
    except Exception:  # of many classes; loading the model names the field
        return
    file = Path(sys.modules[config_class.__module__].__file__ or "")
    sources = [file, file.with_name(file.name.replace("configuration_", "modeling_"))]
    text = "".join(source.read_text(encoding="utf-8") for source in sources if source.is_file())
    read = {key: loaded_values[key] for key in known if key in loaded_values}
    for key, value in loaded_values.items():
        # False, 1.0 and a size that the family has under a like name change nothing
        is_alias = any(value == other and {*key.split("_")} & {*name.split("_")} for name, other in read.items())
        is_neutral = value in (None, False, "", [], {}) or (value is not True and (value == 1 or is_alias))
        unread = key in values and key not in known and not re.search(rf"\b{re.escape(key)}\b", text)
        if unread and not is_neutral and MEANINGFUL_KEY.search(key) and not HARMLESS_KEYS.search(key):
            raise ModelError(
                f"model: {path / 'config.json'} has {key} {str(value)[:40]}, which transformers does not read for "
                f"{family}; where it changes nothing, remove it from config.json"
            )


def _check_index(path: Path) -> None:
    """Refuse an index of weights that names anything but files of its folder."""
    if not (index := path / "model.safetensors.index.json").exists():
        return
    names = read_small_json(index).get("weight_map")
    if not names or not isinstance(names, dict):
        raise ModelError(f"model: {index} has no weight_map; it wants the file of each weight")
    for name in sorted({str(name) for name in names.values()}):
        if Path(name).name != name or not (path / name).is_file():
            raise ModelError(f"model: {index} names {name[:80]!r}; it wants safetensors files of its own folder")


def tensor_shapes(path: Path) -> dict[str, list[int]]:
    """Shapes of the tensors in the safetensors files of a folder, from their headers; damaged files are left out."""
    shapes: dict[str, list[int]] = {}
    for file in sorted(path.glob("*.safetensors")):
        with suppress(SafetensorError, OSError), safe_open(file, framework="pt") as tensors:
            shapes |= {name: tensors.get_slice(name).get_shape() for name in tensors.keys()}  # noqa: SIM118
    return shapes


def load_failure(path: Path, error: Exception) -> str:
    """Why transformers could not load a model: the field of config.json, where it can be found, or its own message."""
    config = read_small_json(path / "config.json")
    if isinstance(error, KeyError):  # of a table of activations, rope types, ...
        name = next((key for key, value in _walk(config) if isinstance(value, str) and [value] == [*error.args]), None)
        return f"its config.json has {name} {error}, which transformers does not have" if name else first_line(error)
    return _size_mismatch(path, config) if "mismatched_sizes" in str(error) else first_line(error)


def _size_mismatch(path: Path, config: dict[str, Any]) -> str:
    """Which size of a config.json no tensor of the weights has."""
    dimensions = {size for shape in tensor_shapes(path).values() for size in shape}
    keys = ("vocab_size", *WIDTH_KEYS[:3], "intermediate_size")
    wrong = next((key for key in keys if isinstance(config.get(key), int) and config[key] not in dimensions), None)
    named = f"its config.json has {wrong} {config.get(wrong or '')}, and no tensor of its weights has that size"
    return named if wrong else "the heads or layers in its config.json do not fit its weights"


def check_tokenizer(path: Path) -> None:
    """Refuse a tokenizer with custom code, and a config.json that transformers would read with it and cannot."""
    check_regular_files(path)
    _refuse_code(path, "tokenizer_config.json")
    if (path / "config.json").exists():
        check_sizes(read_small_json(path / "config.json"), str(path / "config.json"))


def adapter_base(path: Path) -> Path:
    """The base model folder of an adapter, which must be plain LoRA."""
    file = path / ADAPTER_CONFIG
    settings = read_small_json(file)
    if (peft_type := settings.get("peft_type")) != "LORA":
        raise ModelError(f"model: {file} is an adapter of type {str(peft_type)[:40]!r}; it wants LORA")
    if name := next((name for name in CODE_KEYS if settings.get(name)), None):
        raise ModelError(f"model: {file} has {name}, which names code or a pickle; that is never run")
    if not (path / "adapter_model.safetensors").is_file():
        pickle_note = f" ({pickles[0]} is a pickle, which may run any code)" if (pickles := _pickles(path)) else ""
        raise ModelError(f"model: {path} has no adapter_model.safetensors{pickle_note}; it wants safetensors")
    largest = max((size for shape in tensor_shapes(path).values() for size in shape), default=MAX_WIDTH)
    if type(rank := settings.get("r")) is not int or not 1 <= rank <= largest:
        raise ModelError(f"model: {file} has r {str(rank)[:40]}; it wants a rank from 1 to {largest}")
    base = settings.get("base_model_name_or_path")
    folders = [each for each in (_base_folders(path, base) if isinstance(base, str) else ()) if _is_model(each)]
    if not folders:
        raise ModelError(f"model: {file} sits on {str(base)[:200]!r}, and there is no such model folder")
    if (folders[0] / ADAPTER_CONFIG).exists():
        raise ModelError(f"model: {file} sits on {base}, itself an adapter; it wants a full model")
    return folders[0]


def _base_folders(path: Path, base: str) -> list[Path]:
    """Where the base of an adapter may be: in its own run folder, which may have moved, as named, or in the caches."""
    named, stage = Path(base), path.resolve().parent
    own = [stage / "base"] if named.parts[-2:] == (stage.name, "base") else []
    embedded = [cache_dir() / named.name] if named.name.startswith(EMBEDDED_MODEL) else []
    hub = [hf_hub_cache().joinpath(*named.parts[-3:])] if named.parent.name == "snapshots" else []
    return [*own, named, *embedded, *hub]


def _is_model(folder: Path) -> bool:
    try:
        return (folder / "config.json").is_file()
    except (OSError, ValueError):  # too long, or with a null byte
        return False


def read_small_json(path: Path) -> dict[str, Any]:
    """The object in a small JSON file of a model folder; raises ModelError for anything else."""
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise ModelError(f"model: {path} is over {MAX_JSON_BYTES / 1e6:.0f} MB; no such file is")
        value = json.loads(read_regular(path))
    except (OSError, ValueError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or "it is no JSON"
        raise ModelError(f"model: {path} cannot be read ({reason})") from None
    if not isinstance(value, dict):
        raise ModelError(f"model: {path} is not a JSON object")
    return value


@contextmanager
def render_limits(what: str) -> Iterator[None]:
    """Limit CPU time and memory of a chat template; jinja's sandbox limits neither.

    Memory is limited by rlimit, and CPU time by a signal in the main thread; other threads check the time between
    lines, so that a single endless operation is not interrupted there.
    """
    before = resource.getrlimit(resource.RLIMIT_AS)
    budget = _memory_now() + RENDER_BYTES
    limit = budget if before[0] == resource.RLIM_INFINITY else min(before[0], budget)
    resource.setrlimit(resource.RLIMIT_AS, (limit, before[1]))
    try:
        with _timer() if threading.current_thread() is threading.main_thread() else _trace_timer():
            yield
    except (TimeoutError, MemoryError, OverflowError, RecursionError) as error:
        reason = f"takes more than {RENDER_SECONDS:.0f} s or {RENDER_BYTES / 1e9:.0f} GB ({type(error).__name__})"
        raise ModelError(f"{what} {reason} for two turns; it is not used") from None
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


@contextmanager
def _timer() -> Iterator[None]:
    """Raise TimeoutError after the limit, and repeatedly, since jinja's compiler may swallow the first."""
    running = True

    def ring(number: int, frame: FrameType | None) -> None:
        if running:
            raise TimeoutError

    previous = signal.signal(signal.SIGVTALRM, ring)
    signal.setitimer(signal.ITIMER_VIRTUAL, RENDER_SECONDS, RENDER_SECONDS / 4)
    try:
        yield
    finally:
        running = False
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, previous)


@contextmanager
def _trace_timer() -> Iterator[None]:
    """Raise TimeoutError at the first line that starts after the limit."""
    deadline, previous = time.thread_time() + RENDER_SECONDS, sys.gettrace()

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        if time.thread_time() > deadline:
            raise TimeoutError
        return trace

    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(previous)


def _memory_now() -> int:
    return int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[0]) * resource.getpagesize()


def _pickles(path: Path) -> list[str]:
    return sorted(file.name for pattern in PICKLES for file in path.glob(pattern))


def _refuse_code(path: Path, name: str) -> None:
    """Refuse settings that name code: modules in the folder, or kernels of a hub repository."""
    if not (path / name).is_file():
        return
    settings = read_small_json(path / name)
    for key, value in _walk(settings):
        if key == "auto_map" and value and not _is_known_family(settings, name):
            raise ModelError(
                f"model: {path / name} wants code of its own to run (auto_map); that is never run, and transformers "
                f"does not know {str(settings.get('model_type'))[:60]!r} by itself"
            )
        if KERNEL_KEY.search(key) and ("/" in str(value) or "@" in str(value)):
            problem = f"{key} {str(value)[:60]!r}, which names code from elsewhere"
            raise ModelError(f"model: {path / name} has {problem}; that is never run")


def _is_known_family(settings: dict[str, Any], name: str) -> bool:
    """Whether transformers has its own class for this folder, so that the custom code is not needed."""
    if name != "config.json":
        return True  # transformers reads tokenizer.json with its own classes, or raises
    from transformers import CONFIG_MAPPING

    return settings.get("model_type") in CONFIG_MAPPING


def _walk(node: Any, depth: int = 0) -> Iterator[tuple[str, Any]]:
    if depth > 20:
        return
    if isinstance(node, dict):
        for key, value in node.items():
            yield str(key), value
            yield from _walk(value, depth + 1)
    elif isinstance(node, list):
        for value in node:
            yield from _walk(value, depth + 1)
