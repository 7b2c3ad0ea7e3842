"""Plant secrets wherever a person keeps them, work for a while, and search everything that was written or printed."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote

from tests.faults.hostile_doors import write_recipe

Runner = Callable[[Sequence[str], Path, Mapping[str, str]], tuple[int, str]]
"""Runs `modelwright WORDS` in a folder with these variables: exit code and everything printed."""
MARK = "c4n4ry"
TOKEN = f"hf_{MARK}AbCdEfGhIjKlMnOpQrStUv"
URL = f"https://somebody:{MARK}pa55word@example.invalid/rows.jsonl"
VARIABLES = {
    "HF_TOKEN": TOKEN,
    "WANDB_API_KEY": f"{MARK}0123456789abcdef0123456789abcdef01",
    "MLFLOW_TRACKING_PASSWORD": f"{MARK}-mlflow-password",
    "AWS_ACCESS_KEY_ID": f"AKIA{MARK.upper()}7654321098",
    "AWS_SECRET_ACCESS_KEY": f"{MARK}/aws+secret/key",
    "OPENAI_API_KEY": f"sk-{MARK}abcdefghijklmnop",
    "MODELWRIGHT_PASSWORD": f"{MARK} with spaces",
}
"""Secrets in the environment."""
MIXED_UP = {"EPOCHS": TOKEN}
"""A secret in a variable that a recipe maps to a setting."""


@dataclass
class Search:
    """What was searched, and what was found."""

    files: int = 0
    """Files looked into."""
    streams: int = 0
    """Outputs of commands looked into."""
    size: int = 0
    """Bytes of all of them."""
    leaks: list[str] = field(default_factory=list)
    """Where a canary was found."""
    endings: dict[str, int] = field(default_factory=dict)
    """How each command ended."""


def work(folder: Path, model: Path, run: Runner, short: bool = False) -> Search:
    """A run from its data to its export, and many mistakes with secrets in them; then the search."""
    found, planted = Search(), folder / "planted"
    planted.mkdir(parents=True)
    recipe = write_recipe(folder / "recipe.yaml", model, {"train_file": "rows.jsonl"}, max_steps=2, save_steps=1)
    (folder / ".env").write_text(f"HF_TOKEN={TOKEN}\n", encoding="utf-8")
    (planted / "token").write_text(TOKEN, encoding="utf-8")
    before = {path for path in folder.rglob("*") if path.is_file()}
    secrets = {**VARIABLES, "HF_TOKEN_PATH": str(planted / "token")}
    for words in [*_sound(recipe, folder, short), *_mistaken(recipe, planted)]:
        variables = {**secrets, **(MIXED_UP if "mixed" in words[1] else {})}
        before |= {path for path in planted.rglob("*") if path.is_file()}
        code, printed = run(words, folder, variables)
        name = " ".join(str(word).replace(str(folder), ".") for word in words)
        found.endings[name[:80]] = code
        found.streams += 1
        _look(printed.encode(), f"printed by {name[:80]}", found)
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path not in before:
            found.files += 1
            _look(path.name.encode() + path.read_bytes(), str(path.relative_to(folder)), found)
    return found


def _sound(recipe: Path, folder: Path, short: bool) -> Iterator[Sequence[str]]:
    """What works: from the check to the manifests."""
    run, on_cluster = str(folder / "run"), ("launch", str(recipe), "--on", "openshift", "--render")
    yield "run", str(recipe), "--log-format", "json"
    yield "report", run
    yield "export", run, "--to", str(folder / "exported")
    sets = (
        "cluster.hf_token_secret=hub-token",
        "model.model_name_or_path=somebody/model",
        "output_dir=/shared/models/x",
    )
    yield *on_cluster, *(word for each in sets for word in ("--set", each))
    yield "explain", str(recipe), "--json"
    yield "run", str(recipe), "--set", "report_to=[wandb, mlflow]"
    if not short:
        yield "doctor", str(recipe), "--json"
        yield "launch", str(recipe), "--nodes", "2", "--main-address", "node0"
        yield "data", "audit", str(recipe), "--json"
        yield "launch", str(recipe), "--per-node", "1", "--set", f"output_dir={folder / 'launched'}"


def _mistaken(recipe: Path, planted: Path) -> Iterator[Sequence[str]]:
    """What fails: secrets in settings, in files that the recipe names, in variables that it maps; each with --debug."""
    wrong = [f"model.model_name_or_path={URL}", f"data.train_file={URL}", f"sft.learning_rate={TOKEN}",
             f"cluster.env={{HF_TOKEN: {TOKEN}}}", f"cluster.env={{DB_PASSWORD: {MARK}}}",
             f"cluster.code_source=git+https://{MARK}x0x0@example.invalid/a/b", f"sft.{TOKEN}=1", f"description={TOKEN}",
             f"data.columns={{{TOKEN}: prompt}}", f"name={TOKEN}", f"compare.prompts=[{TOKEN}]", f"nothing {TOKEN}",
             f"data.train_file=https://example.invalid/rows.jsonl?token={MARK}12345678"]  # fmt: skip
    for setting in wrong:
        yield "run", str(recipe), "--set", setting, "--debug"
    said = json.loads(recipe.read_text("utf-8"))
    files = {
        "base": {"base": "with-secret.yaml", **said},
        "gates": {"gates_file": "with-secret.yaml", **said},
        "mixed-up": {"env_overrides": {"EPOCHS": "sft.num_train_epochs"}, **said},
    }
    (planted / "with-secret.yaml").write_text(json.dumps({"description": TOKEN, TOKEN: TOKEN}), encoding="utf-8")
    for name, changed in files.items():
        path = planted / f"{name}.yaml"
        path.write_text(json.dumps(changed), encoding="utf-8")
        yield "check", str(path), "--json"
        yield "run", str(path), "--debug"
    rows = planted / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": 7, "api": TOKEN}) + f"\n{TOKEN}\n{{{TOKEN}\n", encoding="utf-8")
    yield "data", "audit", str(rows), "--json"
    yield "data", "audit", str(rows), "--quarantine", str(planted.parent / "set-aside.jsonl")
    yield "run", f"{planted}/{TOKEN}.yaml", "--debug"


def _look(content: bytes, where: str, found: Search) -> None:
    found.size += len(content)
    for form in FORMS:
        if form in content:
            found.leaks.append(f"{where}: {form[:12].decode()}…")
            return


def _forms() -> tuple[bytes, ...]:
    """The mark that every canary carries, in the spellings under which it could travel."""
    encoded = [base64.b64encode(b"x" * shift + MARK.encode())[(shift * 4 + 2) // 3 :][:6] for shift in range(3)]
    secrets = [*VARIABLES.values(), TOKEN]
    return (MARK.encode(), MARK.upper().encode(), *(quote(word, safe="").encode() for word in secrets),
            *(base64.b64encode(word.encode())[:16] for word in secrets), *encoded)  # fmt: skip


FORMS = _forms()
