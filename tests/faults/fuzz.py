"""Fuzz every reader: it must return a result or raise a ModelwrightError, nothing else.

Inputs come from two sources, both decided by a seed: real files that are damaged at random (flipped, cut, spliced,
doubled, tokens of the format inserted), and values that hypothesis generates in the shape that a reader expects.
"""

from __future__ import annotations

import io
import json
import math
import random
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
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
from modelwright.data.shards import rows_to_documents
from modelwright.errors import DataError, ModelwrightError
from modelwright.recipe.convert import convert_config
from modelwright.recipe.load import builtin_recipes, dump_yaml, load
from modelwright.recipe.sections import DataConfig


@dataclass(frozen=True)
class Target:
    """One reader."""

    name: str
    """What it is called."""
    weight: float
    """Its share of all inputs."""
    seeds: tuple[bytes, ...]
    """Real inputs, to be damaged."""
    tokens: tuple[bytes, ...]
    """Tokens of its format, to be inserted anywhere."""
    read: Callable[[bytes, Path], None]
    """Reads an input, with a folder to put it into."""
    values: Callable[[], Any] | None = None
    """A strategy of hypothesis for values of the right shape."""
    write: Callable[[Any], bytes] = lambda value: json.dumps(value).encode()
    """A generated value as an input."""
    repair: Callable[[bytes], bytes] | None = None
    """Repairs what would otherwise hide the damage, such as a checksum."""


ROWS: tuple[dict[str, Any], ...] = (
    {"prompt": "Why?", "completion": "So.", "text": "A rope holds.", "topic": 7},
    {"messages": [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}], "text": ""},
    {"prompt": "Why?", "chosen": "So.", "rejected": "No.", "system": "Be brief.", "text": None},
)
JSONL = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
CSV = b'prompt,completion,text\r\n"Why, then?","So ""it"" is.",A rope holds.\r\nWhen?,Now.,"two\nlines"\r\n'
TXT = "First paragraph.\n\nSecond, with é and 🔥.\n".encode()
JSON_TOKENS = (b"{", b"}", b"[", b"]", b'"', b"\\u", b"\\ud83d", b":", b",", b'"messages"', b"[" * 3000, b"{}", b"\n")
YAML_TOKENS = (
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


def _recipe(data: bytes, folder: Path) -> None:
    path = folder / "recipe.yaml"
    path.write_bytes(data)
    dump_yaml(load(path, environ={}).recipe)


def _setting(data: bytes, folder: Path) -> None:
    dump_yaml(load("quickstart", [data.decode("utf-8", "surrogateescape")], {}).recipe)


def _gates(data: bytes, folder: Path) -> None:
    (folder / "gates.yaml").write_bytes(data)
    path = folder / "recipe.yaml"
    path.write_text(
        "name: x\nmodel: {model_name_or_path: x}\ndata: {train_file: x.jsonl}\nsft: {}\ngates_file: gates.yaml\n",
        encoding="utf-8",
    )
    dump_yaml(load(path, environ={}).recipe)


def _configuration(data: bytes, folder: Path) -> None:
    path = folder / "trl.yaml"
    path.write_bytes(data)
    convert_config(path, None, None)


def _texts(rows: list[Row], data: DataConfig) -> list[str]:
    return [document.text for document in rows_to_documents(rows, data)]


def _rows(suffix: str) -> Callable[[bytes, Path], None]:
    """Read a data file and convert its rows to every format; now and then audit it, as `data audit` does."""

    def read(data: bytes, folder: Path) -> None:
        path = folder / f"rows{suffix}"
        path.write_bytes(data)
        config = DataConfig(train_file=str(path))
        rows = [item for item in read_file(path) if isinstance(item, Row)]
        for use in (rows_to_conversations, rows_to_pairs, _texts):
            for row in rows[:20]:
                try:
                    use([row], config)
                except DataError as error:
                    str(error).encode()
        if len(data) % 16 == 0:
            for kind in ("conversations", "pairs", "text"):
                report = audit(config, AuditConfig(kind, 64, 4, 0), folder)
                json.dumps(report.as_json(), ensure_ascii=False).encode()
                write_quarantine(folder / "quarantine.jsonl", report.invalid_rows)

    return read


def _parquet() -> tuple[bytes, ...]:
    import pyarrow
    import pyarrow.parquet

    files = []
    for codec in ("none", "zstd"):
        for rows in ({"prompt": ["Why?"] * 3, "completion": ["So.", None, ""]}, {"text": ["a", "b"], "n": [1, 2]}):
            file = io.BytesIO()
            pyarrow.parquet.write_table(pyarrow.table(rows), file, compression=codec)
            files.append(file.getvalue())
    return tuple(files)


def _checkpoint(data: bytes, folder: Path) -> None:
    """A manifest next to the files it may name."""
    from modelwright.engine.checkpoint import CheckpointManager

    step = folder / "step-00000005"
    step.mkdir(exist_ok=True)
    (step / "state.json").write_bytes(b"{}")
    (step / "manifest.json").write_bytes(data)
    shutil.rmtree(folder / "taken", ignore_errors=True)
    (folder / "taken").mkdir()
    CheckpointManager(folder / "taken", 2, lambda line: None).import_from(step)


def _with_valid_checksum(data: bytes) -> bytes:
    """The same manifest with a valid checksum, so that the damage is not found by the checksum alone."""
    from modelwright.engine.checkpoint import with_checksum

    try:
        body = json.loads(data)
        return with_checksum({key: value for key, value in body.items() if key != "checksum"})
    except (ValueError, AttributeError, RecursionError, TypeError):
        return data


def _manifest() -> bytes:
    facts = {"size": 2, "xxh3": xxhash.xxh3_128_hexdigest(b"{}")}
    return _with_valid_checksum(json.dumps({"step": 5, "modelwright": "0", "files": {"state.json": facts}}).encode())


def _job(data: bytes, folder: Path) -> None:
    lint.lint(documents.parse_manifests(data.decode("utf-8", "replace"), "job.yaml"))


def _jobs() -> tuple[bytes, ...]:
    from modelwright.cluster.manifests import build_job, render

    loaded = load("quickstart", ["cluster.nodes=2", "cluster.local_queue=default"], {})
    jobs = (build_job(loaded.recipe, Path.cwd(), "trainjob"), build_job(loaded.recipe, Path.cwd(), "pytorchjob"))
    return tuple(render(job).encode() for job in jobs)


def _model_settings(data: bytes, folder: Path) -> None:
    from modelwright.models import trust

    for name in ("config.json", "tokenizer_config.json", trust.ADAPTER_CONFIG):
        (folder / name).write_bytes(data)
    (folder / "model.safetensors").write_bytes(b"")
    (folder / "adapter_model.safetensors").write_bytes(b"")
    trust.check_model(folder)
    trust.check_tokenizer(folder)
    trust.adapter_base(folder)


def _request(data: bytes, folder: Path) -> None:
    from modelwright.serve.openai_server import parse_request
    from modelwright.serve.sampling import SamplingParams

    served: Any = SimpleNamespace(
        name="tiny", system_prompt="Be brief.", generator=SimpleNamespace(sampling_params=SamplingParams())
    )
    parse_request(data, served)


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
    required = {"name": some.just("x") | _any_json(), "model": some.just({"model_name_or_path": "x"}) | _any_json()}
    return some.builds(lambda fixed, more: {**fixed, **more}, some.fixed_dictionaries(required),
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
    """Every reader, with real inputs."""
    recipes = tuple(path.read_bytes() for name, path in builtin_recipes().items() if name.endswith("tiny"))
    gates = (
        b"gates:\n  sft:\n    eval_loss: {at_most: 2.2}\n    style_score: {at_least: 0.5, times: base_style_score}\n"
    )
    sets = (b"sft.learning_rate=2e-4", b"data.columns={a: prompt}", b"sft.trainable={last_layers: 2}", b"name=x")
    settings = json.dumps({"model_type": "llama", "auto_map": {"AutoModel": "code.Model"}, "peft_type": "LORA",
                           "_attn_implementation": "sdpa", "base_model_name_or_path": "x", "size": 64})  # fmt: skip
    request = json.dumps({"model": "tiny", "messages": [{"role": "user", "content": "Why?"}], "max_tokens": 4,
                       "temperature": 0.5, "top_p": 0.9, "stop": ["x"], "stream": True, "seed": 1})  # fmt: skip
    trl = b"model_name_or_path: a/b\ndataset_name: a/c\nlearning_rate: 2.0e-5\nuse_peft: true\nlora_r: 8\nbeta: 0.1\n"
    axolotl = (
        b"base_model: a/b\ndatasets:\n  - path: a/c\n    type: alpaca\nadapter: qlora\nlora_target_modules: [q_proj]\n"
    )
    return (
        Target("recipe", 4, recipes, YAML_TOKENS, _recipe, _some_recipe),
        Target("setting", 4, sets, (*YAML_TOKENS, b"=", b"."), _setting),
        Target("gates file", 4, (gates,), YAML_TOKENS, _gates, _any_json),
        Target("configuration", 3, (trl, axolotl), YAML_TOKENS, _configuration, _some_recipe),
        Target("jsonl", 24, (JSONL,), JSON_TOKENS, _rows(".jsonl"), _some_rows, _as_lines),
        Target("json", 14, (json.dumps(ROWS).encode(),), JSON_TOKENS, _rows(".json"), _some_rows),
        Target("csv", 14, (CSV,), (b'"', b",", b"\r", b"\n", b";", b"\x00", b'""'), _rows(".csv"), _some_rows, _as_csv),
        Target("txt", 8, (TXT,), (b"\n\n", b"\r\n", b"\xff", b"\xef\xbb\xbf"), _rows(".txt")),
        Target("parquet", 6, _parquet(), (b"PAR1", b"\x00", b"\xff\xff\xff\x7f"), _rows(".parquet")),
        Target("checkpoint", 10, (_manifest(),), JSON_TOKENS, _checkpoint, _any_json, repair=_with_valid_checksum),
        Target("manifest", 2, _jobs(), YAML_TOKENS, _job, _any_json),
        Target("model settings", 5, (settings.encode(),), JSON_TOKENS, _model_settings, _any_json),
        Target("server request", 5, (request.encode(),), JSON_TOKENS, _request, _any_json),
    )


GENERATED_SHARE = 5
"""One input in so many is generated by hypothesis, if installed; the others are damaged files."""
NUMBERS = (b"0", b"-1", b"1e999", b"-1e-999", b"NaN", b"9" * 20, b"9" * 5000, b"0x7f", b"1_0", b"1.5", b"true", b"null")
CHARACTERS = ("\x00", "\ufeff", "\u202e", "\u2028", "\U0001f525", "é", "\r", "\t", "\x1b[2J", "\\ud800", "\x7f", "\x85")


@dataclass
class FuzzCounts:
    """Results of the inputs to one reader."""

    inputs: int = 0
    """How many there were."""
    results: int = 0
    """Those that were read."""
    refused: int = 0
    """Those that were refused with an error of ours."""
    escaped: list[str] = field(default_factory=list)
    """What was neither: the error, and the input that caused it."""
    slowest: float = 0.0
    """CPU-seconds of the slowest one."""


def fuzz(target: Target, inputs: int, seed: int, folder: Path) -> FuzzCounts:
    """Give a reader so many inputs; the same seed gives the same ones."""
    counts = FuzzCounts()
    folder.mkdir(parents=True, exist_ok=True)
    generated = inputs // GENERATED_SHARE if target.values is not None and has_hypothesis() else 0
    if generated:
        _generate(target, generated, seed, lambda data: _try(target, data, folder, counts))
    for data in damaged_inputs(target, inputs - counts.inputs, seed):
        _try(target, data, folder, counts)
    return counts


def measure(folder: str, inputs: int, seed: int) -> None:
    """Give every reader its share of the inputs; results go to fuzz.json."""
    weights = sum(target.weight for target in targets())
    readers = {}
    for target in targets():
        counts = fuzz(target, math.ceil(inputs * target.weight / weights), seed, Path(folder) / target.name)
        readers[target.name] = {**asdict(counts), "slowest": round(counts.slowest, 3)}
        print(f"{target.name}: {counts.inputs} inputs, {len(counts.escaped)} escapes", flush=True)
    totals = {
        "inputs": sum(each["inputs"] for each in readers.values()),
        "hypothesis": has_hypothesis(),
        "readers": readers,
    }
    (Path(folder) / "fuzz.json").write_text(json.dumps(totals), encoding="utf-8")


def has_hypothesis() -> bool:
    """Whether the library that makes up values is installed."""
    from importlib.util import find_spec

    return find_spec("hypothesis") is not None


def target_by_name(name: str) -> Target:
    """A reader by its name."""
    return next(target for target in targets() if target.name == name)


def damaged_inputs(target: Target, count: int, seed: int) -> Iterator[bytes]:
    """Real inputs, each damaged one to five times."""
    rng = random.Random(f"{seed}:{target.name}")
    for _ in range(count):
        data = bytearray(rng.choice(target.seeds))
        for _ in range(rng.choice((1, 1, 1, 2, 3, 5))):
            _damage(data, target, rng)
        yield bytes(data) if target.repair is None else target.repair(bytes(data))


def _damage(data: bytearray, target: Target, rng: random.Random) -> None:
    """One change."""
    position = rng.randrange(len(data) + 1)
    length = rng.choice((1, 2, 8, 64, 512))
    kind = rng.randrange(9)
    if kind == 0 and data:
        data[position % len(data)] ^= 1 << rng.randrange(8)
    elif kind == 1 and data:
        data[position % len(data)] = rng.randrange(256)
    elif kind == 2:
        data[position:position] = rng.choice(target.tokens)
    elif kind == 3:
        data[position:position] = rng.choice(NUMBERS) if rng.random() < 0.5 else rng.choice(CHARACTERS).encode()
    elif kind == 4:
        del data[position : position + length]
    elif kind == 5:
        data[position:position] = data[position : position + length] * rng.choice((1, 2, 50))
    elif kind == 6:
        del data[position:]
    elif kind == 7:
        other = rng.choice(target.seeds)
        start = rng.randrange(len(other) + 1)
        data[position : position + length] = other[start : start + length]
    else:
        lines = bytes(data).split(b"\n")
        rng.shuffle(lines)
        data[:] = b"\n".join(lines)


def _generate(target: Target, count: int, seed: int, feed: Callable[[bytes], None]) -> None:
    """Values by hypothesis; escapes are collected, so nothing is shrunk or stored."""
    import hypothesis

    assert target.values is not None

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=[hypothesis.Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(target.values())
    def one(value: Any) -> None:
        feed(target.write(value))

    one()


def _try(target: Target, data: bytes, folder: Path, counts: FuzzCounts) -> None:
    began = time.process_time()
    try:
        target.read(data, folder)
        counts.results += 1
    except ModelwrightError as error:
        counts.refused += 1
        str(error).encode()  # a message that cannot be printed would be none
    except Exception as error:
        if len(counts.escaped) < 20:
            counts.escaped.append(f"{target.name}: {type(error).__name__}: {str(error)[:120]} from {_excerpt(data)}")
    counts.inputs += 1
    counts.slowest = max(counts.slowest, time.process_time() - began)


def _excerpt(data: bytes) -> str:
    return json.dumps(data[:300].decode("latin-1")) + (f" and {len(data) - 300} more bytes" if data[300:] else "")
