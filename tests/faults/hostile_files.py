"""A corpus of files that would run code, read by a program that trusts them; each is made here, none is kept.

Every payload does one thing: it writes a file, the canary. Whoever finds it afterwards knows that code has run.
"""

from __future__ import annotations

import io
import json
import shutil
import struct
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

Kind = Literal["model", "data", "images", "recipe", "checkpoint"]


@dataclass(frozen=True)
class Place:
    """Where a hostile file is made."""

    folder: Path
    """A folder of its own."""
    canary: Path
    """The file that its code would write."""
    model: Path
    """A good model, to be copied and spoilt."""

    @property
    def pickle(self) -> bytes:
        """A pickle that runs a command when it is read, written by hand: nothing here imports pickle."""
        return f"cos\nsystem\n(S'touch {self.canary}'\ntR.".encode()

    @property
    def module(self) -> str:
        """Python that writes the canary as it is imported."""
        return (
            f"open({str(self.canary)!r}, 'w').close()\nclass Model: pass\nclass Config: pass\nclass Tokenizer: pass\n"
        )

    def copied_model(self, **changes: Any) -> Path:
        """The good model with a changed config.json."""
        folder = self.folder / "model"
        shutil.copytree(self.model, folder)
        change_json(folder / "config.json", changes)
        return folder


@dataclass(frozen=True)
class Hostile:
    """One hostile file."""

    name: str
    """What it is."""
    kind: Kind
    """By which doors it may come in."""
    make: Callable[[Place], Path]
    """Makes it, and says what to name in a recipe or a command."""


def change_json(path: Path, changes: dict[str, Any]) -> None:
    """Set some keys of a JSON file."""
    path.write_text(json.dumps({**json.loads(path.read_text("utf-8")), **changes}), encoding="utf-8")


def torch_archive(pickle: bytes) -> bytes:
    """A pickle in the zip that torch.save writes."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("archive/data.pkl", pickle)
        archive.writestr("archive/byteorder", "little")
        archive.writestr("archive/version", "3\n")
    return file.getvalue()


def array_of_objects(pickle: bytes) -> bytes:
    """An .npy file whose numbers are a pickle."""
    head = b"{'descr': '|O', 'fortran_order': False, 'shape': (1,), }"
    head += b" " * (-(len(head) + 11) % 64) + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(head)) + head + pickle


def zipped(name: str, content: bytes) -> bytes:
    """One file in a zip."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(name, content)
    return file.getvalue()


def _pickled_weights(name: str, archive: bool) -> Callable[[Place], Path]:
    def make(place: Place) -> Path:
        folder = place.copied_model()
        (folder / "model.safetensors").unlink()
        (folder / name).write_bytes(torch_archive(place.pickle) if archive else place.pickle)
        return folder

    return make


def _settings(name: str, changes: Callable[[Place], dict[str, Any]]) -> Callable[[Place], Path]:
    """A model with changed settings, and code beside them under every name that a library may look for."""

    def make(place: Place) -> Path:
        folder = place.copied_model()
        change_json(folder / name, changes(place))
        for module in ("code.py", "modeling.py", "planted.py", "custom_generate/generate.py", "__init__.py"):
            (folder / module).parent.mkdir(exist_ok=True)
            (folder / module).write_text(place.module, encoding="utf-8")
        return folder

    return make


def _nothing(place: Place) -> dict[str, Any]:
    return {}


def _own_code(place: Place) -> dict[str, Any]:
    classes = {
        "AutoConfig": "code.Config",
        "AutoModelForCausalLM": "code.Model",
        "AutoTokenizer": ["code.Tokenizer", None],
    }
    return {"auto_map": classes}


def _weights(content: bytes) -> Callable[[Place], Path]:
    def make(place: Place) -> Path:
        folder = place.copied_model()
        (folder / "model.safetensors").write_bytes(content)
        return folder

    return make


def _template(text: str) -> Callable[[Place], Path]:
    def make(place: Place) -> Path:
        folder = place.copied_model()
        (folder / "chat_template.jinja").write_text(text.replace("CANARY", str(place.canary)), encoding="utf-8")
        return folder

    return make


def _adapter(pickled: bool = False, **changes: Any) -> Callable[[Place], Path]:
    """An adapter on the good model."""

    def make(place: Place) -> Path:
        folder = place.folder / "adapter"
        folder.mkdir()
        for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            if (place.model / name).exists():
                shutil.copy(place.model / name, folder)
        said = {"peft_type": "LORA", "base_model_name_or_path": str(place.model), "r": 4, "target_modules": ["q_proj"]}
        (folder / "adapter_config.json").write_text(json.dumps({**said, **changes}), encoding="utf-8")
        (folder / "planted.py").write_text(place.module, encoding="utf-8")
        if pickled:
            (folder / "adapter_model.bin").write_bytes(torch_archive(place.pickle))
        else:
            (folder / "adapter_model.safetensors").write_bytes(struct.pack("<Q", 2) + b"{}")
        return folder

    return make


def _data(name: str, content: Callable[[Place], bytes]) -> Callable[[Place], Path]:
    def make(place: Place) -> Path:
        path = place.folder / name
        path.write_bytes(content(place))
        return path

    return make


def _extension(name: bytes, form: str) -> Callable[[Place], Path]:
    """A column of an extension type whose description is a pickle, as Arrow once read it (CVE-2023-47248)."""

    def make(place: Place) -> Path:
        import pyarrow
        import pyarrow.parquet

        told = {b"ARROW:extension:name": name, b"ARROW:extension:metadata": place.pickle}
        column = pyarrow.field("text", pyarrow.string(), metadata=told)
        table = pyarrow.table({"text": pyarrow.array(["a", "b"])}, schema=pyarrow.schema([column]))
        if form == "parquet":
            path = place.folder / "rows.parquet"
            pyarrow.parquet.write_table(table, path)
            return path
        folder = place.folder / "stored"
        folder.mkdir()
        with (
            pyarrow.OSFile(str(folder / "data-00000-of-00001.arrow"), "wb") as file,
            pyarrow.ipc.new_stream(file, table.schema) as writer,
        ):
            writer.write_table(table)
        state: dict[str, Any] = {
            "_data_files": [{"filename": "data-00000-of-00001.arrow"}],
            "_fingerprint": "x",
            "_split": "train",
        }
        state |= {"_format_type": None, "_format_columns": None, "_format_kwargs": {}, "_output_all_columns": False}
        (folder / "state.json").write_text(json.dumps(state), encoding="utf-8")
        info = {"features": {"text": {"dtype": "string", "_type": "Value"}}}
        (folder / "dataset_info.json").write_text(json.dumps(info), encoding="utf-8")
        return folder

    return make


def _loading_script(place: Place) -> Path:
    """A folder with a script of its name, which old data set loaders ran."""
    folder = place.folder / "stored"
    folder.mkdir()
    (folder / "stored.py").write_text(place.module, encoding="utf-8")
    (folder / "dataset_dict.json").write_text('{"splits": ["train"]}', encoding="utf-8")
    return folder


def _recipe(text: str) -> Callable[[Place], Path]:
    return _data("recipe.yaml", lambda place: text.replace("CANARY", str(place.canary)).encode())


def _cifar(place: Place) -> Path:
    folder = place.folder / "cifar-10-batches-py"
    folder.mkdir()
    for name in ("data_batch_1", "test_batch", "batches.meta"):
        (folder / name).write_bytes(place.pickle)
    return folder


ESCAPES = {
    "class walk": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "globals of cycler": "{{ cycler.__init__.__globals__.os.system('touch CANARY') }}",
    "globals of lipsum": "{{ lipsum.__globals__['os'].popen('touch CANARY').read() }}",
    "attr filter": "{{ (messages|attr('__class__'))|attr('__init__')|attr('__globals__') }}",
    "format string": "{{ '{0.__class__.__init__.__globals__[os]}'.format(messages) }}",
    "import": "{% import 'os' as os %}{{ os.system('touch CANARY') }}",
    "include": "{% include '/etc/passwd' %}",
    "change of the messages": "{{ messages.clear() }}{{ messages.append(messages) }}",
}
BOMBS = {
    "loop in loop": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "doubling": "{% set n = namespace(x='x') %}{% for a in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}{{ n.x }}",
    "huge product": "{{ 'x' * 10 ** 12 }}",
    "huge power": "{{ 10 ** 10 ** 9 }}",
    "macro without end": "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
}
"""Templates that take all time or all memory."""
TAGS = {
    "python/object/apply": "!!python/object/apply:os.system ['touch CANARY']",
    "python/object/new": "!!python/object/new:os.system ['touch CANARY']",
    "python/module": "!!python/module:os",
    "python/name": "!!python/name:os.system",
}
SOUND = "model: {model_name_or_path: x}\ndata: {train_file: x.jsonl}\nsft: {}\n"

CORPUS: tuple[Hostile, ...] = (
    *(Hostile(f"weights {name}, {'archive' if archive else 'plain pickle'}", "model", _pickled_weights(name, archive))
      for name in ("pytorch_model.bin", "model.pt", "consolidated.00.pth") for archive in (True, False)),
    Hostile("config.json auto_map, unknown family", "model",
            _settings("config.json", lambda place: {**_own_code(place), "model_type": "planted"})),
    Hostile("config.json auto_map, known family", "model", _settings("config.json", _own_code)),
    Hostile("config.json auto_map inside a section", "model",
            _settings("config.json", lambda place: {"text_config": {**_own_code(place), "model_type": "planted"},
                                                    "model_type": "planted"})),
    Hostile("config.json with a kernel of somebody", "model",
            _settings("config.json", lambda place: {"_attn_implementation": "somebody/kernel"})),
    Hostile("config.json with a kernel, internal name", "model",
            _settings("config.json", lambda place: {"_attn_implementation_internal": "somebody/kernel@main"})),
    Hostile("config.json with trust_remote_code", "model",
            _settings("config.json", lambda place: {**_own_code(place), "trust_remote_code": True})),
    Hostile("tokenizer_config.json auto_map", "model", _settings(
        "tokenizer_config.json", lambda place: {**_own_code(place), "tokenizer_class": "Planted"})),
    Hostile("modules beside the weights", "model", _settings("config.json", _nothing)),
    Hostile("adapter with megatron_core", "model",
            _adapter(megatron_config={"a": 1}, megatron_core="planted")),
    Hostile("adapter with auto_mapping", "model",
            _adapter(auto_mapping={"base_model_class": "Model", "parent_library": "planted"})),
    Hostile("adapter with pickled matrices", "model", _adapter(pickled=True)),
    Hostile("adapter on itself", "model", _adapter(base_model_name_or_path=".")),
    Hostile("adapter on /etc", "model", _adapter(base_model_name_or_path="/etc")),
    Hostile("adapter on a hub name", "model", _adapter(base_model_name_or_path="somebody/model")),
    Hostile("adapter of a custom type", "model", _adapter(peft_type="PLANTED")),
    Hostile("safetensors with a head of 2**63 bytes", "model", _weights(struct.pack("<Q", 2**63) + b"{}")),
    Hostile("safetensors with negative offsets", "model", _weights(struct.pack("<Q", 74) + json.dumps(
        {"a": {"dtype": "F32", "shape": [-1, 4], "data_offsets": [-16, -8]}}).ljust(74).encode())),
    Hostile("safetensors that is a pickle", "model", _weights(b"cos\nsystem\n(S'true'\ntR.")),
    Hostile("GGUF garbage as weights", "model", _weights(b"GGUF" + b"\xff" * 200)),
    *(Hostile(f"chat template: {name}", "model", _template(text)) for name, text in {**ESCAPES, **BOMBS}.items()),
    *(Hostile(f"pickle called {name}", "data", _data(name, lambda place: place.pickle))
      for name in ("rows.jsonl", "rows.json", "rows.csv", "rows.parquet", "rows.txt", "rows.pkl", "rows.bin")),
    Hostile("array of objects", "data", _data("rows.npy", lambda place: array_of_objects(place.pickle))),
    Hostile("arrow column of a pickled type", "data", _extension(b"arrow.py_extension_type", "parquet")),
    Hostile("stored set with a pickled type", "data", _extension(b"arrow.py_extension_type", "arrow")),
    Hostile("stored set with an unknown type", "data", _extension(b"planted", "arrow")),
    Hostile("data set script", "data", _loading_script),
    Hostile("npz of objects", "images", _data(
        "images.npz", lambda place: zipped("train_scans.npy", array_of_objects(place.pickle)))),
    Hostile("pickled CIFAR-10", "images", _cifar),
    Hostile("pickle called npz", "images", _data("images.npz", lambda place: place.pickle)),
    *(Hostile(f"recipe with !!{name}", "recipe", _recipe(f"name: x\ndescription: {tag}\n{SOUND}"))
      for name, tag in TAGS.items()),
    Hostile("recipe with a template", "recipe", _recipe(f"name: \"{{{{ cycler }}}}\"\n{SOUND}")),
    Hostile("recipe with trust_remote_code", "recipe", _recipe(f"name: x\ntrust_remote_code: true\n{SOUND}")),
    Hostile("recipe that is a pickle", "recipe", _data("recipe.yaml", lambda place: place.pickle)),
    *(Hostile(f"checkpoint with {name}", "checkpoint", _data(name, content)) for name, content in {
        "model.safetensors": lambda place: torch_archive(place.pickle),
        "optimizer.safetensors": lambda place: place.pickle,
        "state.json": lambda place: place.pickle,
        "optimizer.pt": lambda place: torch_archive(place.pickle),
    }.items()),
)  # fmt: skip
"""Every hostile file."""
