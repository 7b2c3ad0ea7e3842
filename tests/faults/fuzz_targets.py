"""The readers that are fuzzed: what a person, a peer or a stranger may hand us, and how each is read."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import xxhash

from modelwright.cluster import documents, lint
from modelwright.data.audit import AuditConfig, audit
from modelwright.data.chat import rows_to_conversations
from modelwright.data.preferences import rows_to_pairs
from modelwright.data.readers import Row, read_file, write_quarantine
from modelwright.data.shards import iter_documents
from modelwright.errors import DataError
from modelwright.recipe.convert import convert_config
from modelwright.recipe.load import builtin_recipes, dump_yaml, load
from modelwright.recipe.schema import DataConfig


@dataclass(frozen=True)
class Target:
    """One reader."""

    name: str
    """What it is called."""
    weight: float
    """Its share of all inputs."""
    seeds: tuple[bytes, ...]
    """Real inputs, to be damaged."""
    words: tuple[bytes, ...]
    """Words of its format, to be put anywhere."""
    read: Callable[[bytes, Path], None]
    """Reads an input, with a folder to put it into."""
    values: Callable[[], Any] | None = None
    """A strategy of hypothesis for values of the right shape."""
    write: Callable[[Any], bytes] = lambda value: json.dumps(value).encode()
    """A made-up value as an input."""
    mend: Callable[[bytes], bytes] | None = None
    """Puts right what would otherwise hide the damage, such as a seal over the whole."""


ROWS: tuple[dict[str, Any], ...] = (
    {"prompt": "Why?", "completion": "So.", "text": "A rope holds.", "topic": 7},
    {"messages": [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}], "text": ""},
    {"prompt": "Why?", "chosen": "So.", "rejected": "No.", "system": "Be brief.", "text": None},
)
JSONL = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
CSV = b'prompt,completion,text\r\n"Why, then?","So ""it"" is.",A rope holds.\r\nWhen?,Now.,"two\nlines"\r\n'
TXT = "First paragraph.\n\nSecond, with é and 🔥.\n".encode()
JSON_WORDS = (b"{", b"}", b"[", b"]", b'"', b"\\u", b"\\ud83d", b":", b",", b'"messages"', b"[" * 3000, b"{}", b"\n")
YAML_WORDS = (
    *(b"!!python/object/apply:os.system ['true']", b"&a ", b"*a", b"<<: *a", b"---\n", b"? ", b"|\n", b">-\n", b"- "),
    *(b"%YAML 1.1\n", b"!!binary ", b": ", b"{", b"}", b"[", b"]", b"'", b'"', b"#", b"\t", b"null", b"~", b".nan"),
    *(
        b"base: ",
        b"gates:",
        b"sft:",
        b"data: ",
        b"gates_file: x",
        b"env_overrides: {A: sft.seed}",
        b"[" * 200,
        b"- " * 90,
    ),
)


def _recipe(given: bytes, folder: Path) -> None:
    path = folder / "recipe.yaml"
    path.write_bytes(given)
    dump_yaml(load(path, environ={}).recipe)


def _setting(given: bytes, folder: Path) -> None:
    dump_yaml(load("quickstart", [given.decode("utf-8", "surrogateescape")], {}).recipe)


def _gates(given: bytes, folder: Path) -> None:
    (folder / "gates.yaml").write_bytes(given)
    path = folder / "recipe.yaml"
    path.write_text(
        "name: x\nmodel: {model_name_or_path: x}\ndata: {train_file: x.jsonl}\nsft: {}\ngates_file: gates.yaml\n",
        encoding="utf-8",
    )
    dump_yaml(load(path, environ={}).recipe)


def _configuration(given: bytes, folder: Path) -> None:
    path = folder / "trl.yaml"
    path.write_bytes(given)
    convert_config(path, None, None)


def _texts(rows: list[Row], data: DataConfig) -> list[str]:
    return list(iter_documents(rows, data.text_column))


def _rows(suffix: str) -> Callable[[bytes, Path], None]:
    """Read a data file and put its rows to every use; now and then look at it whole, as `data audit` does."""

    def read(given: bytes, folder: Path) -> None:
        path = folder / f"rows{suffix}"
        path.write_bytes(given)
        data = DataConfig(train_file=str(path))
        rows = [item for item in read_file(path) if isinstance(item, Row)]
        for use in (rows_to_conversations, rows_to_pairs, _texts):
            for row in rows[:20]:
                try:
                    use([row], data)
                except DataError as error:
                    str(error).encode()
        if len(given) % 16 == 0:
            for kind in ("conversations", "pairs", "text"):
                found = audit(data, AuditConfig(kind, 64, 4, 0), folder)
                json.dumps(found.as_json(), ensure_ascii=False).encode()
                write_quarantine(folder / "quarantine.jsonl", found.invalid_rows)

    return read


def _parquet() -> tuple[bytes, ...]:
    import pyarrow
    import pyarrow.parquet

    made = []
    for codec in ("none", "zstd"):
        for rows in ({"prompt": ["Why?"] * 3, "completion": ["So.", None, ""]}, {"text": ["a", "b"], "n": [1, 2]}):
            file = io.BytesIO()
            pyarrow.parquet.write_table(pyarrow.table(rows), file, compression=codec)
            made.append(file.getvalue())
    return tuple(made)


def _checkpoint(given: bytes, folder: Path) -> None:
    """A manifest beside the files it may speak of."""
    from modelwright.engine.checkpoint import CheckpointManager

    step = folder / "step-00000005"
    step.mkdir(exist_ok=True)
    (step / "state.json").write_bytes(b"{}")
    (step / "manifest.json").write_bytes(given)
    shutil.rmtree(folder / "taken", ignore_errors=True)
    (folder / "taken").mkdir()
    CheckpointManager(folder / "taken", 2, lambda line: None).import_from(step)


def _sealed(given: bytes) -> bytes:
    """The same manifest with a seal that fits, so that the damage is not found by the seal alone."""
    from modelwright.engine.checkpoint import with_checksum

    try:
        body = json.loads(given)
        return with_checksum({key: value for key, value in body.items() if key != "checksum"})
    except (ValueError, AttributeError, RecursionError, TypeError):
        return given


def _manifest() -> bytes:
    facts = {"size": 2, "xxh3": xxhash.xxh3_128_hexdigest(b"{}")}
    return _sealed(json.dumps({"step": 5, "modelwright": "0", "files": {"state.json": facts}}).encode())


def _job(given: bytes, folder: Path) -> None:
    lint.lint(documents.parse_manifests(given.decode("utf-8", "replace"), "job.yaml"))


def _jobs() -> tuple[bytes, ...]:
    from modelwright.cluster.manifests import build_job, render

    loaded = load("quickstart", ["cluster.nodes=2", "cluster.local_queue=default"], {})
    jobs = (build_job(loaded.recipe, Path.cwd(), "trainjob"), build_job(loaded.recipe, Path.cwd(), "pytorchjob"))
    return tuple(render(job).encode() for job in jobs)


def _model_settings(given: bytes, folder: Path) -> None:
    from modelwright.models import trust

    for name in ("config.json", "tokenizer_config.json", trust.ADAPTER_CONFIG):
        (folder / name).write_bytes(given)
    (folder / "model.safetensors").write_bytes(b"")
    (folder / "adapter_model.safetensors").write_bytes(b"")
    trust.check_model(folder)
    trust.check_tokenizer(folder)
    trust.adapter_base(folder)


def _request(given: bytes, folder: Path) -> None:
    from modelwright.serve.generate import SamplingParams
    from modelwright.serve.openai_server import parse_request

    served: Any = SimpleNamespace(
        name="tiny", system_prompt="Be brief.", generator=SimpleNamespace(sampling_params=SamplingParams())
    )
    parse_request(given, served)


def _any_json() -> Any:
    from hypothesis import strategies as some

    leaves = some.none() | some.booleans() | some.integers() | some.floats() | some.text(max_size=8)
    names = some.text(max_size=6)
    grow = lambda inner: some.lists(inner, max_size=3) | some.dictionaries(names, inner, max_size=3)  # noqa: E731
    return some.recursive(leaves, grow, max_leaves=8)


def _some_rows() -> Any:
    from hypothesis import strategies as some

    names = some.sampled_from(["prompt", "completion", "messages", "chosen", "rejected", "system", "text", "role"])
    turn = some.fixed_dictionaries({"role": some.sampled_from(["user", "assistant", "system", "x"]),
                                    "content": some.text(max_size=6) | _any_json()})  # fmt: skip
    value = some.text(max_size=8) | some.lists(turn, max_size=3) | _any_json()
    return some.lists(some.dictionaries(names | some.text(max_size=4), value, max_size=4), max_size=3)


def _some_recipe() -> Any:
    from hypothesis import strategies as some

    from modelwright.recipe.fields import all_sections

    keys = [name for name in all_sections() if name and "." not in name]
    inner = some.dictionaries(some.sampled_from(["learning_rate", "max_steps", "data", "train_file", "trainable", "x",
                                                 "eval_loss", "at_most", "dataset_name", "mix", "columns"]),
                              _any_json(), max_size=4)  # fmt: skip
    whole = {"name": some.just("x") | _any_json(), "model": some.just({"model_name_or_path": "x"}) | _any_json()}
    return some.builds(lambda fixed, more: {**fixed, **more}, some.fixed_dictionaries(whole),
                       some.dictionaries(some.sampled_from(keys), inner | _any_json(), max_size=3))  # fmt: skip


def _as_csv(rows: list[dict[str, Any]]) -> bytes:
    import csv

    text = io.StringIO()
    writer = csv.writer(text)
    for row in rows:
        writer.writerow([*row, *row.values()])
    return text.getvalue().encode("utf-8", "surrogatepass")


def _as_lines(rows: list[dict[str, Any]]) -> bytes:
    return "\n".join(json.dumps(row) for row in rows).encode()


@cache
def targets() -> tuple[Target, ...]:
    """Every reader, with real inputs made now."""
    recipes = tuple(path.read_bytes() for name, path in builtin_recipes().items() if name.endswith("tiny"))
    gates = (
        b"gates:\n  sft:\n    eval_loss: {at_most: 2.2}\n    style_score: {at_least: 0.5, times: base_style_score}\n"
    )
    sets = (b"sft.learning_rate=2e-4", b"data.columns={a: prompt}", b"sft.trainable={last_layers: 2}", b"name=x")
    settings = json.dumps({"model_type": "llama", "auto_map": {"AutoModel": "code.Model"}, "peft_type": "LORA",
                           "_attn_implementation": "sdpa", "base_model_name_or_path": "x", "size": 64})  # fmt: skip
    wish = json.dumps({"model": "tiny", "messages": [{"role": "user", "content": "Why?"}], "max_tokens": 4,
                       "temperature": 0.5, "top_p": 0.9, "stop": ["x"], "stream": True, "seed": 1})  # fmt: skip
    trl = b"model_name_or_path: a/b\ndataset_name: a/c\nlearning_rate: 2.0e-5\nuse_peft: true\nlora_r: 8\nbeta: 0.1\n"
    axolotl = (
        b"base_model: a/b\ndatasets:\n  - path: a/c\n    type: alpaca\nadapter: qlora\nlora_target_modules: [q_proj]\n"
    )
    return (
        Target("recipe", 4, recipes, YAML_WORDS, _recipe, _some_recipe),
        Target("setting", 4, sets, (*YAML_WORDS, b"=", b"."), _setting),
        Target("gates file", 4, (gates,), YAML_WORDS, _gates, _any_json),
        Target("configuration", 3, (trl, axolotl), YAML_WORDS, _configuration, _some_recipe),
        Target("jsonl", 24, (JSONL,), JSON_WORDS, _rows(".jsonl"), _some_rows, _as_lines),
        Target("json", 14, (json.dumps(ROWS).encode(),), JSON_WORDS, _rows(".json"), _some_rows),
        Target("csv", 14, (CSV,), (b'"', b",", b"\r", b"\n", b";", b"\x00", b'""'), _rows(".csv"), _some_rows, _as_csv),
        Target("txt", 8, (TXT,), (b"\n\n", b"\r\n", b"\xff", b"\xef\xbb\xbf"), _rows(".txt")),
        Target("parquet", 6, _parquet(), (b"PAR1", b"\x00", b"\xff\xff\xff\x7f"), _rows(".parquet")),
        Target("checkpoint", 10, (_manifest(),), JSON_WORDS, _checkpoint, _any_json, mend=_sealed),
        Target("manifest", 2, _jobs(), YAML_WORDS, _job, _any_json),
        Target("model settings", 5, (settings.encode(),), JSON_WORDS, _model_settings, _any_json),
        Target("server request", 5, (wish.encode(),), JSON_WORDS, _request, _any_json),
    )
