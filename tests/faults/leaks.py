"""Secrets that leak into files and output, and names, links and pulled files that lead out of the run folder."""

from __future__ import annotations

import base64
import hashlib
import json
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from urllib.parse import quote

from tests.cluster_jobs import cluster_job
from tests.faults.hostile import CRASHES, EXIT_CODES, Runner, write_recipe

EnvRunner = Callable[[Sequence[str], Path, Mapping[str, str]], tuple[int, str]]
"""Runs `modelwright ARGUMENTS` in a folder with these variables: exit code and output."""
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
MISUSED_VARIABLES = {"EPOCHS": TOKEN}
"""A secret in an environment variable that the recipe maps to a setting."""


@dataclass
class LeakSearch:
    """What was searched, and the leaks."""

    files: int = 0
    """Files searched."""
    streams: int = 0
    """Outputs of commands searched."""
    size: int = 0
    """Bytes of all of them."""
    leaks: list[str] = field(default_factory=list)
    """Files and outputs that contain a canary."""
    endings: dict[str, int] = field(default_factory=dict)
    """How each command ended."""


def search_leaks(folder: Path, model: Path, run: EnvRunner, short: bool = False) -> LeakSearch:
    """A run from its data to its export, and many mistakes that contain secrets; then search all files and outputs."""
    search, planted = LeakSearch(), folder / "planted"
    planted.mkdir(parents=True)
    recipe = write_recipe(folder / "recipe.yaml", model, {"train_file": "rows.jsonl"}, max_steps=2, save_steps=1)
    (folder / ".env").write_text(f"HF_TOKEN={TOKEN}\n", encoding="utf-8")
    (planted / "token").write_text(TOKEN, encoding="utf-8")
    before = {path for path in folder.rglob("*") if path.is_file()}
    secrets = {**VARIABLES, "HF_TOKEN_PATH": str(planted / "token")}
    for arguments in [*_good_commands(recipe, folder, short), *_bad_commands(recipe, planted)]:
        variables = {**secrets, **(MISUSED_VARIABLES if "mixed" in arguments[1] else {})}
        before |= {path for path in planted.rglob("*") if path.is_file()}
        code, printed = run(arguments, folder, variables)
        name = " ".join(str(argument).replace(str(folder), ".") for argument in arguments)
        search.endings[name[:80]] = code
        search.streams += 1
        _search(printed.encode(), f"printed by {name[:80]}", search)
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path not in before:
            search.files += 1
            _search(path.name.encode() + path.read_bytes(), str(path.relative_to(folder)), search)
    return search


def _good_commands(recipe: Path, folder: Path, short: bool) -> Iterator[Sequence[str]]:
    """Commands that work, from the run to the manifests."""
    run, on_cluster = str(folder / "run"), ("launch", str(recipe), "--on", "openshift", "--render")
    yield "run", str(recipe), "--log-format", "json"
    yield "report", run
    yield "export", run, "--output", str(folder / "exported")
    sets = (
        "cluster.hf_token_secret=hub-token",
        "model.model_name_or_path=somebody/model",
        "output_dir=/shared/models/x",
    )
    yield *on_cluster, *(argument for each in sets for argument in ("--set", each))
    yield "explain", str(recipe), "--json"
    yield "run", str(recipe), "--set", "report_to=[wandb, mlflow]"
    if not short:
        yield "doctor", str(recipe), "--json"
        yield "launch", str(recipe), "--nnodes", "2", "--master-addr", "node0"
        yield "data", "audit", str(recipe), "--json"
        yield "launch", str(recipe), "--nproc-per-node", "1", "--set", f"output_dir={folder / 'launched'}"


def _bad_commands(recipe: Path, planted: Path) -> Iterator[Sequence[str]]:
    """Commands that fail: secrets in settings, in files the recipe names, in variables it maps; with --debug."""
    wrong = [f"model.model_name_or_path={URL}", f"data.train_file={URL}", f"sft.learning_rate={TOKEN}",
             f"cluster.env={{HF_TOKEN: {TOKEN}}}", f"cluster.env={{DB_PASSWORD: {MARK}}}",
             f"cluster.code_source=git+https://{MARK}x0x0@example.invalid/a/b", f"sft.{TOKEN}=1",
             f"description={TOKEN}",
             f"data.columns={{{TOKEN}: prompt}}", f"name={TOKEN}", f"compare.prompts=[{TOKEN}]", f"nothing {TOKEN}",
             f"data.train_file=https://example.invalid/rows.jsonl?token={MARK}12345678"]  # fmt: skip
    for setting in wrong:
        yield "run", str(recipe), "--set", setting, "--debug"
    sections = json.loads(recipe.read_text("utf-8"))
    files = {
        "base": {"base": "with-secret.yaml", **sections},
        "gates": {"gates_file": "with-secret.yaml", **sections},
        "mixed-up": {"env_overrides": {"EPOCHS": "sft.num_train_epochs"}, **sections},
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


def _search(content: bytes, where: str, search: LeakSearch) -> None:
    search.size += len(content)
    for encoding in ENCODINGS:
        if encoding in content:
            search.leaks.append(f"{where}: {encoding[:12].decode()}…")
            return


def _encodings() -> tuple[bytes, ...]:
    """The mark in every canary, in the encodings in which it could leak."""
    encoded = [base64.b64encode(b"x" * shift + MARK.encode())[(shift * 4 + 2) // 3 :][:6] for shift in range(3)]
    secrets = [*VARIABLES.values(), TOKEN]
    return (MARK.encode(), MARK.upper().encode(), *(quote(argument, safe="").encode() for argument in secrets),
            *(base64.b64encode(argument.encode())[:16] for argument in secrets), *encoded)  # fmt: skip


ENCODINGS = _encodings()


NAMES = ("../x", "../../x", "/x", "a/b", "..", ".", "a/../../x", "~", "~/x", "a\\..\\x", "%2e%2e/x", "x\n", "-x",
         "A B", "", "x" * 300, "con:", "$(touch x)", "x;y", "\u202ex", "x\u0000")  # fmt: skip
"""Names for runs, stages and jobs."""
LINKS = {
    ".lock": "file", "journal.jsonl": "file", ".recipe.yaml.partial": "file", "recipe.yaml": "file",
    "report.html": "file", "training_summary.json": "file", "best_model": "folder", "stages": "folder",
    "stages/sft": "folder", "stages/sft/checkpoints": "folder", "stages/sft/model": "folder", "data": "folder",
    "gates": "folder", "tensorboard": "folder", "demo_outputs": "folder", "exports": "folder",
}  # fmt: skip
"""What may be a link in a run folder that was copied from elsewhere."""


@dataclass
class TraversalFindings:
    """What happened outside the run folder."""

    tried: int = 0
    """Commands and archives."""
    refused: int = 0
    """Those that were refused."""
    writes: list[str] = field(default_factory=list)
    """Files created, changed or deleted outside it."""
    crashes: list[str] = field(default_factory=list)
    """Commands that ended without one of our errors."""


@dataclass(frozen=True)
class PathTraversalCase:
    """A folder that is listed before and after each command; commands run in its subfolder `desk`."""

    root: Path
    """Everything in it is listed, except for the run folders."""
    run: Runner
    """Runs commands."""
    findings: TraversalFindings
    """The results."""

    @property
    def desk(self) -> Path:
        return self.root / "desk"

    @property
    def victim(self) -> Path:
        """A folder that no command may write to, with a file in it."""
        return self.root / "victim"

    def check_writes(self, name: str, act: Callable[[], tuple[int, str]], inside: Sequence[Path]) -> None:
        """Run something, and list what changed outside the folders where it may write."""
        before = self._listing(inside)
        code, printed = act()
        self.findings.tried += 1
        self.findings.refused += code != 0
        after = self._listing(inside)
        changed = sorted({path for path in before.keys() | after.keys() if before.get(path) != after.get(path)})
        self.findings.writes += [f"{name}: {path}" for path in changed]
        if code not in EXIT_CODES or any(marker in printed for marker in CRASHES):
            self.findings.crashes.append(f"{name}: exit {code}: {printed.strip()[-300:]}")

    def _listing(self, inside: Sequence[Path]) -> dict[str, str]:
        paths = (path for path in self.root.rglob("*") if not any(path.is_relative_to(allowed) for allowed in inside))
        return {str(path.relative_to(self.root)): _state(path) for path in paths if not path.name.startswith("trial-")}


def _state(path: Path) -> str:
    if path.is_symlink():
        return f"link to {path.readlink()}"
    return path.read_bytes().hex()[:2000] if path.is_file() else "folder"


def run_traversal(root: Path, model: Path, run: Runner, short: bool = False) -> TraversalFindings:
    """Run every name, link and pulled file that leads out of the run folder."""
    case = PathTraversalCase(root, run, TraversalFindings())
    for folder in (case.desk, case.victim):
        folder.mkdir(parents=True)
    (case.victim / "kept.txt").write_text("kept\n", encoding="utf-8")
    recipe = write_recipe(case.desk / "recipe.yaml", model, {"train_file": "rows.jsonl"})
    sections = json.loads(recipe.read_text("utf-8"))
    plain = case.desk / "plain.yaml"
    plain.write_text(
        json.dumps({key: value for key, value in sections.items() if key != "output_dir"}), encoding="utf-8"
    )
    for arguments in _name_commands(plain, short):
        command = partial(run, arguments, case.desk)
        case.check_writes(" ".join(arguments)[-60:], command, [case.desk / "runs"])
    for name, kind in list(LINKS.items())[:: 4 if short else 1]:
        _try_link(case, recipe, name, kind)
    for name, members in remote_files(case.victim).items():
        try_pull(case, name, members)
    return case.findings


def _name_commands(recipe: Path, short: bool) -> Iterator[Sequence[str]]:
    for name in NAMES[:: 5 if short else 1]:
        yield "run", str(recipe), "--set", f"name={name}"
    for name in NAMES[:2] if short else NAMES:
        yield "run", str(recipe), "--from-stage", name
        yield "gate", "runs/none", name
    for name in () if short else ("../x.jsonl", "$(touch x).jsonl", "rows.jsonl/../../x.jsonl", "x\n.jsonl"):
        yield "run", str(recipe), "--set", f"data.train_file={name}"
        yield "data", "audit", str(recipe), "--set", f"data.train_file={name}"


def _try_link(case: PathTraversalCase, recipe: Path, name: str, kind: str) -> None:
    """A run folder in which one name is a link to the victim."""
    folder = case.desk / "run"
    shutil.rmtree(folder, ignore_errors=True)
    (folder / name).parent.mkdir(parents=True)
    (folder / name).symlink_to(case.victim / "kept.txt" if kind == "file" else case.victim)
    case.check_writes(f"link {name}", lambda: case.run(("run", str(recipe)), case.desk), [folder])


RemoteFiles = list[tuple[str, bytes | None, str]]
POD = """#!{python}
import json, pathlib, sys
words = sys.argv[1:]
if "get" in words:
    print(json.dumps({"status": {"phase": "Running"}}))
elif "exec" in words and "def list_files" in words[words.index("-c") + 1]:
    print(pathlib.Path(__file__).with_suffix(".list").read_text(), end="")
elif "exec" in words:
    contents = json.loads(pathlib.Path(__file__).with_suffix(".contents").read_text())
    print(end="".join(contents[word.split(":", 2)[2]] for word in words[words.index("-c") + 3 :]))
"""


def remote_files(victim: Path) -> dict[str, RemoteFiles]:
    """Files and links that a pod could list."""
    up = "../" * 8 + str(victim).lstrip("/")
    return {
        "up": [("../escaped.txt", b"x", "")],
        "absolute": [(str(victim / "escaped.txt"), b"x", "")],
        "deep": [(f"a/b/{up}/escaped.txt", b"x", "")],
        "link and through it": [("inner", None, str(victim)), ("inner/escaped.txt", b"x", "")],
        "relative link and through it": [("inner", None, up), ("inner/escaped.txt", b"x", "")],
        "link to a file": [("journal.jsonl", None, str(victim / "kept.txt")), ("journal.jsonl", b"x", "")],
        "link to itself": [("a", None, "a"), ("a/b", b"x", "")],
        "chain of links": [("a", None, "."), ("a/b", None, ".."), ("a/b/escaped.txt", b"x", "")],
        "link in the folder of parts": [(".pull", None, str(victim)), ("a", b"x", "")],
        "good": [("journal.jsonl", b"{}\n", ""), ("stages/sft/model/config.json", b"{}", ""),
                 ("best_model", None, "stages/sft/model")],
    }  # fmt: skip


def try_pull(case: PathTraversalCase, name: str, members: RemoteFiles) -> None:
    """Pull it, with a client whose pod lists these files."""
    from modelwright.cluster.client import KubectlClient
    from modelwright.cluster.pull import pull
    from modelwright.errors import ModelwrightError

    into, program = case.desk / "pulled", case.desk / "kubectl"
    shutil.rmtree(into, ignore_errors=True)
    rows = [[path, len(content or b""), "" if content is None else hashlib.sha256(content).hexdigest(), 0.0,
             target if content is None else None] for path, content, target in members]  # fmt: skip
    program.with_suffix(".list").write_text("".join(f"{json.dumps(row)}\n" for row in rows) + f"{len(rows)}\n")
    program.with_suffix(".contents").write_text(
        json.dumps({path: (content or b"").decode() for path, content, _ in members})
    )
    program.write_text(POD.replace("{python}", sys.executable))
    program.chmod(0o755)

    def act() -> tuple[int, str]:
        try:
            pull(KubectlClient(str(program), "modelwright"), cluster_job("survival", "trainjob"), into)
            return 0, ""
        except ModelwrightError as error:
            return error.exit_code if error.exit_code != 1 else 2, str(error)

    case.check_writes(f"pull: {name}", act, [into])
