"""Hostile trees, requests and signals by a seed: every reader, both servers and every phase end in a foreseen way.

The rule: an end within the limit, under 1 GB more memory, with a result or a foreseen exit code or status, and nothing
else is harmed. A small budget by default; NIGHTLY=1 takes a large one, and SEED=n another seed:

    NIGHTLY=1 python -m pytest -s --timeout 3600 tests/faults/test_hostile_trees.py
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import resource
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from modelwright.cli.main import main
from modelwright.report import http_guard
from modelwright.runs.folder import RUN_FORMAT
from modelwright.runs.heartbeat import has_exited
from modelwright.stages.context import STOP_SIGNALS
from tests.faults import fuzz
from tests.faults.fork_server import ForkServer, events_of, run_fingerprint
from tests.faults.http_requests import BODY, RUN, DashboardServer, LiveServer, ModelServer
from tiny import tiny_recipe

NIGHTLY = bool(os.environ.get("NIGHTLY"))
SEED = int(os.environ.get("SEED", "20261117"))
INPUTS, TREES, REQUESTS, SIGNALS = (50_000, 5_000, 5_000, 200) if NIGHTLY else (0, 250, 150, 2)
LIMIT_SECONDS, LIMIT_BYTES = (10 if NIGHTLY else 60), 1 << 30
"""Of one case; a test on a loaded machine gets more time."""
KNOWN_EXIT_CODES = {0, 2, 3, 75, 76, 77, 78}
pytestmark = pytest.mark.timeout(3600 if NIGHTLY else 600)

EVENTS: tuple[dict[str, Any], ...] = (
    {"time": 1.0, "event": "run", "run_format": RUN_FORMAT, "recipe": "x", "folder": "x", "stages": ["sft"]},
    {"time": 2.0, "event": "stage_status", "stage": "sft", "state": "running", "stages": []},
    {"time": 3.0, "event": "step", "stage": "sft", "step": 1, "steps": 9, "loss": 2.0, "grad_norm": 1.0, "epoch": 0.1,
     "learning_rate": 1e-3, "health": "ok", "step_seconds": 0.1, "tokens_per_second": 9.0, "trained_tokens": 3},
    {"time": 4.0, "event": "evaluation", "stage": "sft", "step": 1, "eval_loss": 2.0},
    {"time": 5.0, "event": "checkpoint_saved", "stage": "sft", "step": 1, "seconds": 0.1, "bytes": 7},
    {"time": 6.0, "event": "done", "seconds": 5.0},
)  # fmt: skip
JOURNAL = "".join(json.dumps(event) + "\n" for event in EVENTS).encode()
RECIPE = (
    b"name: x\nmodel: {model_name_or_path: MODEL}\ndata: {train_file: rows.jsonl, test_size: 1}\nsft: {max_steps: 2}\n"
)
CONFIG = json.dumps(
    {
        "model_type": "llama",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 128,
        "vocab_size": 400,
        "head_dim": 16,
    }
).encode()
ADAPTER = json.dumps(
    {"peft_type": "LORA", "r": 8, "base_model_name_or_path": ".", "target_modules": ["q_proj"]}
).encode()
INDEX = json.dumps({"weight_map": {"model.norm.weight": "model.safetensors"}}).encode()
WEIGHTS = b"\x40\0\0\0\0\0\0\0" + b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'.ljust(64) + bytes(8)
TREE: dict[str, tuple[bytes, tuple[bytes, ...]]] = {
    "run/journal.jsonl": (JOURNAL, fuzz.JSON_TOKENS),
    "run/recipe.yaml": (RECIPE, fuzz.YAML_TOKENS),
    "run/plan.json": (b'{"sft": {"steps": 9}}', fuzz.JSON_TOKENS),
    "run/lineage.json": (b'{"stages": {}}', fuzz.JSON_TOKENS),
    "run/stages/sft/result.json": (b'{"metrics": {"eval_loss": 2.0}, "files": {}}', fuzz.JSON_TOKENS),
    "model/config.json": (CONFIG, fuzz.JSON_TOKENS),
    "model/adapter_config.json": (ADAPTER, fuzz.JSON_TOKENS),
    "model/model.safetensors.index.json": (INDEX, (*fuzz.JSON_TOKENS, b"../../etc/passwd", b"/dev/zero")),
    "model/model.safetensors": (WEIGHTS, (b"\xff" * 8, b"\0", b"{", b"[9999999999999]")),
    "model/tokenizer.json": (b'{"model": {"type": "BPE", "vocab": {}, "merges": []}}', fuzz.JSON_TOKENS),
    "rows.jsonl": (fuzz.JSONL * 3, fuzz.JSON_TOKENS),
    "recipe.yaml": (RECIPE.replace(b"MODEL", b"model"), fuzz.YAML_TOKENS),
}
COMMANDS: tuple[tuple[str, ...], ...] = (
    ("report", "run"), ("check", "recipe.yaml"), ("plan", "recipe.yaml"), ("data", "audit", "rows.jsonl"),
    ("data", "audit", "recipe.yaml"), ("explain", "recipe.yaml"), ("check", "run/recipe.yaml"), ("gate", "run"),
)  # fmt: skip
NAMES = (b"\xff\xfe", "é\u202e".encode(), b"x" * 255, b"-rf", b" ", b"\n", b"%s", b"..x", b"con.yaml", b"~")


def write_tree(folder: Path, rng: random.Random) -> str:
    """A sound tree with one to three things wrong; returns what they are."""
    for name, (content, _) in TREE.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    wrong = []
    for _ in range(rng.choice((1, 1, 2, 3))):
        name, kind = rng.choice(list(TREE)), rng.choice((*["damage"] * 12, *KINDS))
        path = folder / name
        if kind == "damage":
            content, tokens = TREE[name]
            data = bytearray(content)
            target = fuzz.Target(name, 1, (content,), tokens, lambda data, folder: None)
            for _ in range(rng.choice((1, 2, 5))):
                fuzz._damage(data, target, rng)
            if path.is_file():
                path.write_bytes(data)
        else:
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)
            KINDS[kind](path, rng)
        wrong.append(f"{name}: {kind}")
    return ", ".join(wrong)


def _sparse(path: Path, rng: random.Random) -> None:
    with path.open("wb") as file:
        file.truncate(64 << 20)


def _odd_neighbour(path: Path, rng: random.Random) -> None:
    Path(os.fsdecode(os.fsencode(path.parent) + b"/" + rng.choice(NAMES))).mkdir(exist_ok=True)


KINDS: dict[str, Callable[[Path, random.Random], None]] = {
    "missing": lambda path, rng: None,
    "empty": lambda path, rng: path.touch(),
    "FIFO": lambda path, rng: os.mkfifo(path),
    "folder": lambda path, rng: path.mkdir(),
    "endless": lambda path, rng: path.symlink_to("/dev/zero"),
    "terminal": lambda path, rng: path.symlink_to("/dev/tty"),
    "dangling": lambda path, rng: path.symlink_to("nowhere"),
    "loop": lambda path, rng: path.symlink_to(path.name),
    "itself": lambda path, rng: path.symlink_to("."),
    "sparse": _sparse,
    "kernel": lambda path, rng: path.symlink_to("/proc/self/environ"),
    "odd name": _odd_neighbour,
}


class Hang(BaseException):
    """A case that does not end; no handler of ours takes it for an error."""


@contextlib.contextmanager
def bounded() -> Iterator[None]:
    """End what takes too long, and refuse more memory than the limit."""

    def stop(number: int, frame: Any) -> None:
        raise Hang

    pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[0])
    limits, handler = resource.getrlimit(resource.RLIMIT_AS), signal.signal(signal.SIGALRM, stop)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + LIMIT_BYTES, limits[1]))
    signal.alarm(LIMIT_SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, handler)
        resource.setrlimit(resource.RLIMIT_AS, limits)


def command_ends(arguments: tuple[str, ...]) -> str:
    """Run a command in this process; returns what was not foreseen."""
    output = io.StringIO()
    try:
        with bounded(), contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            main(list(arguments))
    except SystemExit as stop:
        code = stop.code or 0
        return "" if code in KNOWN_EXIT_CODES else f"exit {code}: {output.getvalue().strip()[-300:]}"
    except Hang:
        return "it does not end"
    return ""


def test_every_command_ends_with_a_known_exit_code_on_a_hostile_tree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    print(f"seed {SEED}: {TREES:,} commands on trees")
    rng, unforeseen = random.Random(SEED), []
    for number in range(TREES // len(COMMANDS) + 1):
        folder = tmp_path / "tree"
        folder.mkdir()
        wrong = write_tree(folder, rng)
        monkeypatch.chdir(folder)
        for arguments in COMMANDS:
            if problem := command_ends(arguments):
                unforeseen.append(f"tree {number} ({wrong}): {' '.join(arguments)}: {problem}")
        monkeypatch.chdir(tmp_path)
        shutil.rmtree(folder)
        if number % 500 == 499:
            print(f"{number + 1} trees, {len(unforeseen)} unforeseen", flush=True)
    assert not unforeseen, "\n".join(unforeseen[:30])


@pytest.mark.skipif(not NIGHTLY, reason="tests/faults/test_security.py takes a few inputs; NIGHTLY=1 takes 50,000")
def test_every_reader_returns_or_raises_our_error_on_a_hostile_file(tmp_path: Path) -> None:
    print(f"seed {SEED}: {INPUTS:,} files")
    fuzz.measure(str(tmp_path), INPUTS, SEED)
    result = json.loads((tmp_path / "fuzz.json").read_text(encoding="utf-8"))
    assert [line for reader in result["readers"].values() for line in reader["escaped"]] == []
    assert result["inputs"] >= INPUTS
    assert max(reader["slowest"] for reader in result["readers"].values()) < LIMIT_SECONDS


def odd_request(
    rng: random.Random, sound: tuple[str, str, dict[str, str], bytes]
) -> tuple[str, str, dict[str, str], bytes]:
    """A sound request with one to three things wrong."""
    method, path, headers, body = sound
    for _ in range(rng.choice((1, 1, 2, 3))):
        match rng.randrange(6):
            case 0:
                method = rng.choice(("GET", "POST", "PUT", "HEAD", "OPTIONS", "TRACE", "CONNECT", "X", "get", "\xe9"))
            case 1:
                piece = rng.choice(("..", "%2e%2e", "%00", "//", "?", "#", "%ff", "a" * 2000, "\xff", " ", "%", "*"))
                position = rng.randrange(len(path) + 1)
                path = path[:position] + piece + path[position:]
            case 2:
                name = rng.choice(("Host", "Origin", "Content-Type", "Authorization", "Cookie", "Range", "Upgrade",
                                   "Expect", "Content-Encoding", "X-Forwarded-For", "Accept-Encoding"))  # fmt: skip
                headers = {
                    **headers,
                    name: rng.choice(("", "x", "\xff", "null", "100-continue", "9" * 5000, "gzip, br")),
                }
            case 3:
                headers = {**headers, "Content-Length": rng.choice(("0", "-1", "9" * 30, "1e3", "5, 5", "+7", "1"))}
            case 4:
                headers = {**headers, "Transfer-Encoding": rng.choice(("chunked", "gzip", "chunked, chunked", "x"))}
            case _:
                data = bytearray(body or b"{}")
                target = fuzz.Target("body", 1, (body or b"{}",), fuzz.JSON_TOKENS, lambda data, folder: None)
                fuzz._damage(data, target, rng)
                body = bytes(data)
    return method, path, headers, body


def attack(
    server: LiveServer, sound: list[tuple[str, str, dict[str, str], bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Send odd requests; every 50th is a sound one, which must be answered."""
    print(f"seed {SEED}: {REQUESTS:,} requests")
    rng, unforeseen = random.Random(SEED), []
    for number in range(REQUESTS):
        monkeypatch.setattr(http_guard, "REQUEST_SECONDS", 0.5)
        method, path, headers, body = odd_request(rng, rng.choice(sound))
        fields = {"Host": f"127.0.0.1:{server.port}", "Connection": "close", "Content-Type": "application/json",
                  "Content-Length": str(len(body)), **headers}  # fmt: skip
        head = f"{method} {path} HTTP/1.1\r\n" + "".join(
            f"{name}: {value}\r\n" for name, value in fields.items() if value
        )
        status, answer = server.raw(head.encode("latin-1") + b"\r\n" + body)
        if status >= 500 or b"Traceback" in answer or b"root:" in answer:
            unforeseen.append(f"request {number}: {status} for {method} {path[:80]!r} {headers} {body[:200]!r}")
        if number % 50 == 49:
            monkeypatch.setattr(http_guard, "REQUEST_SECONDS", 120.0)
            method, path, headers, body = sound[0]
            assert server.send(method, path, headers, body)[0] == 200, f"after request {number}"
    assert not unforeseen, "\n".join(unforeseen[:30])


def test_no_request_breaks_the_model_server(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from modelwright.serve.generate import TextGenerator
    from modelwright.serve.openai_server import ServedModel

    server = ModelServer(ServedModel("tiny", TextGenerator(model_folder, max_new_tokens=2), None))
    key = {"Authorization": f"Bearer {server.served.api_key}"}
    chat = ("POST", "/v1/chat/completions", key)
    stream = {**BODY, "stream": True, "temperature": 0.5, "top_p": 0.9, "stop": ["x"], "seed": 1, "n": 1}
    try:
        attack(server, [(*chat, json.dumps(BODY).encode()), (*chat, json.dumps(stream).encode()),
                        ("GET", "/v1/models", key, b"")], monkeypatch)  # fmt: skip
    finally:
        server.close()


def test_no_request_and_no_run_breaks_the_board(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(SEED)
    for number in range(20):
        write_tree(tmp_path / f"tree-{number}", rng)
        (tmp_path / f"tree-{number}" / "run").rename(tmp_path / f"run-{number}")
    (tmp_path / "one").mkdir()
    (tmp_path / "one/journal.jsonl").write_bytes(JOURNAL)
    (tmp_path / "one/recipe.yaml").write_bytes(RECIPE)
    server = DashboardServer(tmp_path)
    home = RUN.replace("TOKEN", server.dashboard.token)
    ask = ("POST", f"{home}ask", {}, b'{"question": "Why?"}')
    others = [("GET", home.replace("one", f"run-{number}"), {}, b"") for number in range(20)]
    try:
        attack(
            server, [("GET", home, {}, b""), ("GET", home.removesuffix("run/one/"), {}, b""), ask, *others], monkeypatch
        )
    finally:
        server.close()


def test_ctrl_c_inside_a_save_leaves_a_run_that_ends_the_same(
    fork_server: ForkServer, model_folder: Path, tmp_path: Path
) -> None:
    """Once: the save is finished; twice: it is left, and the checkpoint before it is the last."""

    def interrupt(moment: int, signals: tuple[int, ...] = ()) -> str:
        patch = "from modelwright.stages import context\ncontext.REPEAT_SECONDS = -1.0\n"
        numbers = tuple(map(int, signals))
        return f"{patch}from tests.faults.injections import kill_in_save\nkill_in_save(9, {moment}, {numbers})\n"

    recipe = tiny_recipe(tmp_path / "whole", model_folder)
    code, output = fork_server.run(["run", str(recipe)], recipe.parent, first=interrupt(0))
    assert code == 0, output
    moments, expected = int(output.split("moments: ")[1].split()[0]), run_fingerprint(tmp_path / "whole/run")
    for moment in range(1, moments + 1, 1 if NIGHTLY else moments // 2):
        for signals in ((signal.SIGINT,), (signal.SIGINT, signal.SIGINT)):
            folder = tmp_path / f"{moment}-{len(signals)}"
            recipe = tiny_recipe(folder, model_folder)
            code, output = fork_server.run(["run", str(recipe)], folder, first=interrupt(moment, signals))
            assert code == 75 and "Traceback" not in output, f"moment {moment}: exit {code}: {output[-400:]}"
            code, output = fork_server.run(["run", str(recipe)], folder)
            assert code == 0 and run_fingerprint(folder / "run") == expected, f"moment {moment}: {output[-400:]}"
    print(f"{moments} moments of a save")


PHASES = ("run", "loading", "plan", "step", "evaluation", "checkpoint_started", "checkpoint_saved", "stage_status")


def test_any_signal_in_any_phase_leaves_a_run_that_ends_the_same(
    fork_server: ForkServer, model_folder: Path, tmp_path: Path
) -> None:
    print(f"seed {SEED}: {SIGNALS} signals")
    code, output = fork_server.run(["run", str(tiny_recipe(tmp_path / "whole", model_folder))], tmp_path / "whole")
    assert code == 0, output
    rng, expected, number, stopped = random.Random(SEED), run_fingerprint(tmp_path / "whole/run"), 0, 0
    while number < SIGNALS:
        folder = tmp_path / str(number)
        recipe = tiny_recipe(folder, model_folder)
        for _ in range(2):
            phase, signals = rng.choice(PHASES), [rng.choice(STOP_SIGNALS) for _ in range(rng.choice((1, 1, 2)))]
            slow = f"from tests.faults.injections import slow_steps\nslow_steps({rng.choice((0.0, 0.05, 0.2))})\n"
            trial = fork_server.start(["run", str(recipe)], folder, first=slow)
            count = len(events_of(folder / "run", phase))
            while not has_exited(trial.pid) and len(events_of(folder / "run", phase)) == count:
                time.sleep(0.01)
            time.sleep(rng.uniform(0.0, 0.2))
            for each in signals:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(trial.pid, each)
            number += 1
            where = f"seed {SEED}, signal {number}: {signals} in {phase}"
            code = trial.wait()
            assert code in (0, 75), f"{where}: exit {code}: {trial.output[-400:]}"
            assert "Traceback" not in trial.output, f"{where}: {trial.output[-400:]}"
            stopped += code == 75
        code, output = fork_server.run(["run", str(recipe)], folder)
        assert code == 0 and run_fingerprint(folder / "run") == expected, f"{where}: {output[-400:]}"
        shutil.rmtree(folder)
    print(f"{stopped} of {number} signals stopped a run")
