"""Files and texts that would run code: a corpus, made here, and the commands that read each of them.

Every payload does one thing: it writes a file, the canary. Where it exists afterwards, code has run.
"""

from __future__ import annotations

import io
import json
import shutil
import struct
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Literal

Kind = Literal["model", "data", "images", "recipe", "checkpoint"]


@dataclass(frozen=True)
class HostileFolder:
    """Where a hostile file is written."""

    folder: Path
    """A folder of its own."""
    canary: Path
    """The file that its code would write."""
    model: Path
    """A good model, to be copied and changed."""

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
class HostileFile:
    """One hostile file."""

    name: str
    """What it is."""
    kind: Kind
    """Decides the commands that read it."""
    make: Callable[[HostileFolder], Path]
    """Makes it; returns the path to name in a recipe or a command."""


def change_json(path: Path, changes: dict[str, Any]) -> None:
    """Set some keys of a JSON file."""
    path.write_text(json.dumps({**json.loads(path.read_text("utf-8")), **changes}), encoding="utf-8")


def torch_archive(pickle: bytes) -> bytes:
    """A pickle in the zip format of torch.save."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("archive/data.pkl", pickle)
        archive.writestr("archive/byteorder", "little")
        archive.writestr("archive/version", "3\n")
    return file.getvalue()


def array_of_objects(pickle: bytes) -> bytes:
    """An .npy object array, whose data is a pickle."""
    head = b"{'descr': '|O', 'fortran_order': False, 'shape': (1,), }"
    head += b" " * (-(len(head) + 11) % 64) + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(head)) + head + pickle


def zip_of(name: str, content: bytes) -> bytes:
    """One file in a zip."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(name, content)
    return file.getvalue()


def _pickled_weights(name: str, archive: bool) -> Callable[[HostileFolder], Path]:
    def make(target: HostileFolder) -> Path:
        folder = target.copied_model()
        (folder / "model.safetensors").unlink()
        (folder / name).write_bytes(torch_archive(target.pickle) if archive else target.pickle)
        return folder

    return make


def _changed_config(name: str, changes: Callable[[HostileFolder], dict[str, Any]]) -> Callable[[HostileFolder], Path]:
    """A model with a changed config, and code under every module name that a library may import."""

    def make(target: HostileFolder) -> Path:
        folder = target.copied_model()
        change_json(folder / name, changes(target))
        for module in ("code.py", "modeling.py", "planted.py", "custom_generate/generate.py", "__init__.py"):
            (folder / module).parent.mkdir(exist_ok=True)
            (folder / module).write_text(target.module, encoding="utf-8")
        return folder

    return make


def _no_change(target: HostileFolder) -> dict[str, Any]:
    return {}


def _auto_map(target: HostileFolder) -> dict[str, Any]:
    classes = {
        "AutoConfig": "code.Config",
        "AutoModelForCausalLM": "code.Model",
        "AutoTokenizer": ["code.Tokenizer", None],
    }
    return {"auto_map": classes}


def _weights(content: bytes) -> Callable[[HostileFolder], Path]:
    def make(target: HostileFolder) -> Path:
        folder = target.copied_model()
        (folder / "model.safetensors").write_bytes(content)
        return folder

    return make


def _template(text: str) -> Callable[[HostileFolder], Path]:
    def make(target: HostileFolder) -> Path:
        folder = target.copied_model()
        (folder / "chat_template.jinja").write_text(text.replace("CANARY", str(target.canary)), encoding="utf-8")
        return folder

    return make


def _adapter(pickled: bool = False, **changes: Any) -> Callable[[HostileFolder], Path]:
    """An adapter on the good model."""

    def make(target: HostileFolder) -> Path:
        folder = target.folder / "adapter"
        folder.mkdir()
        for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            if (target.model / name).exists():
                shutil.copy(target.model / name, folder)
        config = {
            "peft_type": "LORA",
            "base_model_name_or_path": str(target.model),
            "r": 4,
            "target_modules": ["q_proj"],
        }
        (folder / "adapter_config.json").write_text(json.dumps({**config, **changes}), encoding="utf-8")
        (folder / "planted.py").write_text(target.module, encoding="utf-8")
        if pickled:
            (folder / "adapter_model.bin").write_bytes(torch_archive(target.pickle))
        else:
            (folder / "adapter_model.safetensors").write_bytes(struct.pack("<Q", 2) + b"{}")
        return folder

    return make


def _data(name: str, content: Callable[[HostileFolder], bytes]) -> Callable[[HostileFolder], Path]:
    def make(target: HostileFolder) -> Path:
        path = target.folder / name
        path.write_bytes(content(target))
        return path

    return make


def _extension(name: bytes, container: str) -> Callable[[HostileFolder], Path]:
    """A column of an extension type whose description is a pickle, as Arrow once read it (CVE-2023-47248)."""

    def make(target: HostileFolder) -> Path:
        import pyarrow
        import pyarrow.parquet

        metadata = {b"ARROW:extension:name": name, b"ARROW:extension:metadata": target.pickle}
        column = pyarrow.field("text", pyarrow.string(), metadata=metadata)
        table = pyarrow.table({"text": pyarrow.array(["a", "b"])}, schema=pyarrow.schema([column]))
        if container == "parquet":
            path = target.folder / "rows.parquet"
            pyarrow.parquet.write_table(table, path)
            return path
        folder = target.folder / "stored"
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


def _loading_script(target: HostileFolder) -> Path:
    """A folder with a script of its name, which old data set loaders ran."""
    folder = target.folder / "stored"
    folder.mkdir()
    (folder / "stored.py").write_text(target.module, encoding="utf-8")
    (folder / "dataset_dict.json").write_text('{"splits": ["train"]}', encoding="utf-8")
    return folder


def _recipe(text: str) -> Callable[[HostileFolder], Path]:
    return _data("recipe.yaml", lambda target: text.replace("CANARY", str(target.canary)).encode())


def _cifar(target: HostileFolder) -> Path:
    folder = target.folder / "cifar-10-batches-py"
    folder.mkdir()
    for name in ("data_batch_1", "test_batch", "batches.meta"):
        (folder / name).write_bytes(target.pickle)
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

CORPUS: tuple[HostileFile, ...] = (
    *(HostileFile(f"weights {name}, {'archive' if archive else 'plain pickle'}", "model",
                  _pickled_weights(name, archive))
      for name in ("pytorch_model.bin", "model.pt", "consolidated.00.pth") for archive in (True, False)),
    HostileFile("config.json auto_map, unknown family", "model",
            _changed_config("config.json", lambda target: {**_auto_map(target), "model_type": "planted"})),
    HostileFile("config.json auto_map, known family", "model", _changed_config("config.json", _auto_map)),
    HostileFile("config.json auto_map inside a section", "model",
            _changed_config("config.json", lambda target: {
                "text_config": {**_auto_map(target), "model_type": "planted"}, "model_type": "planted"})),
    HostileFile("config.json with a kernel of somebody", "model",
            _changed_config("config.json", lambda target: {"_attn_implementation": "somebody/kernel"})),
    HostileFile("config.json with a kernel, internal name", "model",
            _changed_config("config.json", lambda target: {"_attn_implementation_internal": "somebody/kernel@main"})),
    HostileFile("config.json with trust_remote_code", "model",
            _changed_config("config.json", lambda target: {**_auto_map(target), "trust_remote_code": True})),
    HostileFile("tokenizer_config.json auto_map", "model", _changed_config(
        "tokenizer_config.json", lambda target: {**_auto_map(target), "tokenizer_class": "Planted"})),
    HostileFile("modules next to the weights", "model", _changed_config("config.json", _no_change)),
    HostileFile("adapter with megatron_core", "model",
            _adapter(megatron_config={"a": 1}, megatron_core="planted")),
    HostileFile("adapter with auto_mapping", "model",
            _adapter(auto_mapping={"base_model_class": "Model", "parent_library": "planted"})),
    HostileFile("adapter with pickled matrices", "model", _adapter(pickled=True)),
    HostileFile("adapter on itself", "model", _adapter(base_model_name_or_path=".")),
    HostileFile("adapter on /etc", "model", _adapter(base_model_name_or_path="/etc")),
    HostileFile("adapter on a hub name", "model", _adapter(base_model_name_or_path="somebody/model")),
    HostileFile("adapter of a custom type", "model", _adapter(peft_type="PLANTED")),
    HostileFile("safetensors with a head of 2**63 bytes", "model", _weights(struct.pack("<Q", 2**63) + b"{}")),
    HostileFile("safetensors with negative offsets", "model", _weights(struct.pack("<Q", 74) + json.dumps(
        {"a": {"dtype": "F32", "shape": [-1, 4], "data_offsets": [-16, -8]}}).ljust(74).encode())),
    HostileFile("safetensors that is a pickle", "model", _weights(b"cos\nsystem\n(S'true'\ntR.")),
    HostileFile("GGUF garbage as weights", "model", _weights(b"GGUF" + b"\xff" * 200)),
    *(HostileFile(f"chat template: {name}", "model", _template(text)) for name, text in {**ESCAPES, **BOMBS}.items()),
    *(HostileFile(f"pickle called {name}", "data", _data(name, lambda target: target.pickle))
      for name in ("rows.jsonl", "rows.json", "rows.csv", "rows.parquet", "rows.txt", "rows.pkl", "rows.bin")),
    HostileFile("array of objects", "data", _data("rows.npy", lambda target: array_of_objects(target.pickle))),
    HostileFile("arrow column of a pickled type", "data", _extension(b"arrow.py_extension_type", "parquet")),
    HostileFile("stored set with a pickled type", "data", _extension(b"arrow.py_extension_type", "arrow")),
    HostileFile("stored set with an unknown type", "data", _extension(b"planted", "arrow")),
    HostileFile("data set script", "data", _loading_script),
    HostileFile("npz of objects", "images", _data(
        "images.npz", lambda target: zip_of("train_scans.npy", array_of_objects(target.pickle)))),
    HostileFile("pickled CIFAR-10", "images", _cifar),
    HostileFile("pickle called npz", "images", _data("images.npz", lambda target: target.pickle)),
    *(HostileFile(f"recipe with !!{name}", "recipe", _recipe(f"name: x\ndescription: {tag}\n{SOUND}"))
      for name, tag in TAGS.items()),
    HostileFile("recipe with a template", "recipe", _recipe(f"name: \"{{{{ cycler }}}}\"\n{SOUND}")),
    HostileFile("recipe with trust_remote_code", "recipe", _recipe(f"name: x\ntrust_remote_code: true\n{SOUND}")),
    HostileFile("recipe that is a pickle", "recipe", _data("recipe.yaml", lambda target: target.pickle)),
    *(HostileFile(f"checkpoint with {name}", "checkpoint", _data(name, content)) for name, content in {
        "model.safetensors": lambda target: torch_archive(target.pickle),
        "optimizer.safetensors": lambda target: target.pickle,
        "state.json": lambda target: target.pickle,
        "optimizer.pt": lambda target: torch_archive(target.pickle),
    }.items()),
)  # fmt: skip
"""All of them."""


Runner = Callable[[Sequence[str], Path], tuple[int, str]]
"""Runs `modelwright ARGUMENTS` in a folder: exit code and output."""
EXIT_CODES = (0, 2, 3, 75, 76, 77, 78)
"""Exit codes of our commands; 1 is an unexpected error."""
CRASHES = ("Unexpected error", "Traceback (most recent call last)")


@dataclass
class Findings:
    """What happened when commands read hostile files."""

    commands: int = 0
    """Commands that read a hostile file."""
    refused: int = 0
    """Commands that ended with an error of ours."""
    executed: list[str] = field(default_factory=list)
    """File and command where code ran."""
    crashes: list[str] = field(default_factory=list)
    """File and command where it ended without one of our errors."""


def run_entry_points(
    hostile: HostileFile, target: HostileFolder, run: Runner, findings: Findings, max_commands: int = 99
) -> None:
    """Make the file, run every command that reads it, and check the canary after each."""
    target.folder.mkdir(parents=True, exist_ok=True)
    path = hostile.make(target)
    for arguments in islice(ENTRY_POINTS[hostile.kind](path, target), max_commands):
        code, printed = run(arguments, target.folder)
        findings.commands += 1
        findings.refused += code != 0
        where = f"{hostile.name}, by {arguments[0]}"
        if target.canary.exists():
            findings.executed.append(where)
            target.canary.unlink()
        if code not in EXIT_CODES or any(marker in printed for marker in CRASHES):
            findings.crashes.append(f"{where}: exit {code}: {printed.strip()[-300:]}")


def write_recipe(path: Path, model: Path | str, data: dict[str, object], **stage: object) -> Path:
    """A recipe that tunes a model for one step, with its rows in the same folder."""
    rows = [{"prompt": f"What is {number}?", "completion": f"It is {number}."} for number in range(8)]
    (path.parent / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    sft = {"max_steps": 1, "per_device_train_batch_size": 2, "max_length": 64, "precision": "fp32", **stage}
    sections = {"name": "hostile", "output_dir": str(path.parent / "run"),
                "model": {"model_name_or_path": str(model)}, "data": {"test_size": 1, **data}, "sft": sft,
                "compare": {"max_new_tokens": 1}}  # fmt: skip
    path.write_text(json.dumps(sections), encoding="utf-8")
    return path


def _model_commands(path: Path, target: HostileFolder) -> Iterator[Sequence[str]]:
    recipe = write_recipe(target.folder / "recipe.yaml", path, {"train_file": "rows.jsonl"})
    yield "run", str(recipe)
    copied_run = _as_run(target.folder / "kept", path, recipe)
    yield "chat", str(copied_run)
    yield "ask", str(copied_run), "Why?", "--base"
    yield "export", str(copied_run), "--format", "merged" if (path / "adapter_config.json").exists() else "gguf"
    yield "eval", str(path), "--prompt", "Why?"


def _as_run(folder: Path, model: Path, recipe: Path) -> Path:
    """A run folder whose model is the hostile one."""
    stage = folder / "stages" / "sft"
    shutil.copytree(model, stage / "model")
    (stage / "result.json").write_text(json.dumps({"files": {}, "metrics": {}, "resume_config": {}}), encoding="utf-8")
    (folder / "journal.jsonl").write_text("", encoding="utf-8")
    shutil.copy(recipe, folder / "recipe.yaml")
    return folder


def _data_commands(path: Path, target: HostileFolder) -> Iterator[Sequence[str]]:
    recipe = write_recipe(target.folder / "recipe.json", target.model, {"dataset_name": str(path)})
    yield "run", str(recipe)
    yield "data", "audit", str(recipe)
    yield "data", "audit", str(path)
    yield "data", "show", str(recipe)


def _image_commands(path: Path, target: HostileFolder) -> Iterator[Sequence[str]]:
    sections = {"name": "hostile", "output_dir": str(target.folder / "run"), "data": {"dataset_name": str(path)},
            "model": {"model_name_or_path": "resnet18", "resnet_width": 8}, "classify": {"max_steps": 1}}  # fmt: skip
    path = target.folder / "recipe.yaml"
    path.write_text(json.dumps(sections), encoding="utf-8")
    yield "run", str(path)


def _recipe_commands(path: Path, target: HostileFolder) -> Iterator[Sequence[str]]:
    for verb in ("check", "explain", "plan", "run"):
        yield verb, str(path)
    yield "launch", str(path), "--on", "openshift", "--render"


def _checkpoint_commands(path: Path, target: HostileFolder) -> Iterator[Sequence[str]]:
    """The file in the newest checkpoint of a run to resume: as it is, and with a manifest whose hashes match."""
    from modelwright.engine.checkpoint import MANIFEST, with_checksum
    from modelwright.runs.folder import hash_file

    recipe = write_recipe(target.folder / "recipe.yaml", target.model, {"train_file": "rows.jsonl"}, save_steps=1)
    yield "run", str(recipe)
    run = target.folder / "run"
    for valid_hashes in (False, True):
        (run / "stages/sft/result.json").unlink(missing_ok=True)
        shutil.rmtree(run / "stages/sft/checkpoints/corrupt", ignore_errors=True)
        newest = max((run / "stages/sft/checkpoints").glob("step-*"), default=None)
        if newest is None:
            return
        shutil.copy(path, newest / path.name)
        if valid_hashes:
            files = {path.name: {"size": path.stat().st_size, "xxh3": hash_file(path)}
                     for path in newest.iterdir() if path.name != MANIFEST}  # fmt: skip
            (newest / MANIFEST).write_bytes(with_checksum({"step": 1, "modelwright": "0", "files": files}))
        yield "run", str(recipe)


ENTRY_POINTS: dict[str, Callable[[Path, HostileFolder], Iterator[Sequence[str]]]] = {
    "model": _model_commands, "data": _data_commands, "images": _image_commands, "recipe": _recipe_commands,
    "checkpoint": _checkpoint_commands,
}  # fmt: skip
"""By the kind of file, the commands that read it."""


HOSTILE = [
    "<script>window.harm = 1</script>",
    "</script><script>window.harm = 1</script>",
    '"><img src=x onerror="window.harm = 1">',
    "<svg/onload=window.harm=1>",
    "<iframe srcdoc='<script>parent.harm=1</script>'></iframe>",
    '<a href="javascript:window.harm=1" id="bait">touch me</a>',
    "javascript:window.harm=1",
    "<style>*{display:none}</style>",
    "</section></main><h1>not ours</h1>",
    "<!--",
    "]]>",
    "<base href='https://example.invalid/'>",
    "<meta http-equiv=refresh content='0;url=https://example.invalid'>",
    "<link rel=stylesheet href=https://example.invalid/x.css>",
    "{{ 7 * 7 }}{% for x in y %}",
    "${7*7} `window.harm = 1`",
    "\x1b[2J\x1b[31mred\x1b]0;title\x07",
    "=cmd|' /C calc'!A0",
    "@SUM(1+1)*cmd|' /C calc'!A0",
    "\u202etxt.exe\u2066 turned \u200f\u202c",
    "\u2028\u2029\x00\x08\ufeff",
    "a" * 1_000_000,
    "é" * 300 + " " + "no-break" * 5000,
    "&lt;b&gt; &amp; &#60;",
    "🔥" * 50 + " مرحبا नमस्ते 森",
]
