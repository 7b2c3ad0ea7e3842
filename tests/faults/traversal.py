"""Names, archives and links that lead out of the run folder: nothing may be written beyond it."""

from __future__ import annotations

import io
import json
import shutil
import tarfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.faults.hostile_doors import CODES, UNFORESEEN, Runner, write_recipe

NAMES = ("../x", "../../x", "/x", "a/b", "..", ".", "a/../../x", "~", "~/x", "a\\..\\x", "%2e%2e/x", "x\n", "-x",
         "A B", "", "x" * 300, "con:", "$(touch x)", "x;y", "\u202ex", "x\u0000")  # fmt: skip
"""Names for runs, stages and jobs."""
LINKS = {
    ".lock": "file", "journal.jsonl": "file", ".recipe.yaml.partial": "file", "recipe.yaml": "file",
    "report.html": "file", "training_summary.json": "file", "best_model": "folder", "stages": "folder",
    "stages/sft": "folder", "stages/sft/checkpoints": "folder", "stages/sft/model": "folder", "data": "folder",
    "gates": "folder", "tensorboard": "folder", "demo_outputs": "folder", "exports": "folder",
}  # fmt: skip
"""What may be a link in a run folder that came from elsewhere."""


@dataclass
class Outside:
    """What happened beyond the run folder."""

    tried: int = 0
    """Commands and archives tried."""
    refused: int = 0
    """Those that were refused."""
    writes: list[str] = field(default_factory=list)
    """What was made, changed or taken away beyond it."""
    unforeseen: list[str] = field(default_factory=list)
    """Commands that ended without a letter of ours."""


@dataclass(frozen=True)
class Scene:
    """A folder that is watched, with a desk in it where commands run."""

    root: Path
    """Everything in it is listed before and after, but for the desk's run folders."""
    run: Runner
    """Runs commands."""
    found: Outside
    """What is gathered."""

    @property
    def desk(self) -> Path:
        return self.root / "desk"

    @property
    def victim(self) -> Path:
        """A folder that nobody named, with a file in it."""
        return self.root / "victim"

    def watched(self, name: str, act: Callable[[], tuple[int, str]], inside: Sequence[Path]) -> None:
        """Do something, and list what changed beyond the places where it may write."""
        before = self._listing(inside)
        code, printed = act()
        self.found.tried += 1
        self.found.refused += code != 0
        after = self._listing(inside)
        changed = sorted({path for path in before.keys() | after.keys() if before.get(path) != after.get(path)})
        self.found.writes += [f"{name}: {path}" for path in changed]
        if code not in CODES or any(word in printed for word in UNFORESEEN):
            self.found.unforeseen.append(f"{name}: exit {code}: {printed.strip()[-300:]}")

    def _listing(self, inside: Sequence[Path]) -> dict[str, str]:
        paths = (path for path in self.root.rglob("*") if not any(path.is_relative_to(place) for place in inside))
        return {str(path.relative_to(self.root)): _state(path) for path in paths if not path.name.startswith("trial-")}


def _state(path: Path) -> str:
    if path.is_symlink():
        return f"link to {path.readlink()}"
    return path.read_bytes().hex()[:2000] if path.is_file() else "folder"


def lead_out(root: Path, model: Path, run: Runner, short: bool = False) -> Outside:
    """Try everything that would lead out."""
    scene = Scene(root, run, Outside())
    for folder in (scene.desk, scene.victim):
        folder.mkdir(parents=True)
    (scene.victim / "kept.txt").write_text("kept\n", encoding="utf-8")
    recipe = write_recipe(scene.desk / "recipe.yaml", model, {"train_file": "rows.jsonl"})
    said = json.loads(recipe.read_text("utf-8"))
    plain = scene.desk / "plain.yaml"
    plain.write_text(json.dumps({key: value for key, value in said.items() if key != "output_dir"}), encoding="utf-8")
    for words in _by_name(plain, short):
        scene.watched(" ".join(words)[-60:], lambda words=words: run(words, scene.desk), [scene.desk / "runs"])  # type: ignore[misc]
    for name, kind in list(LINKS.items())[:: 4 if short else 1]:
        _by_link(scene, recipe, name, kind)
    for name, archive in archives(scene.victim).items():
        _by_archive(scene, name, archive)
    return scene.found


def _by_name(recipe: Path, short: bool) -> Iterator[Sequence[str]]:
    for name in NAMES[:: 5 if short else 1]:
        yield "run", str(recipe), "--set", f"name={name}"
    for name in NAMES[:2] if short else NAMES:
        yield "run", str(recipe), "--from", name
        yield "gate", "runs/none", name
    for name in () if short else ("../x.jsonl", "$(touch x).jsonl", "rows.jsonl/../../x.jsonl", "x\n.jsonl"):
        yield "run", str(recipe), "--set", f"data.train_file={name}"
        yield "data", "audit", str(recipe), "--set", f"data.train_file={name}"


def _by_link(scene: Scene, recipe: Path, name: str, kind: str) -> None:
    """A run folder in which one name is a link to the victim."""
    folder = scene.desk / "run"
    shutil.rmtree(folder, ignore_errors=True)
    (folder / name).parent.mkdir(parents=True)
    (folder / name).symlink_to(scene.victim / "kept.txt" if kind == "file" else scene.victim)
    scene.watched(f"link {name}", lambda: scene.run(("run", str(recipe)), scene.desk), [folder])


def archives(victim: Path) -> dict[str, bytes]:
    """Archives as a pod could send them."""
    up = "../" * 8 + str(victim).lstrip("/")
    made: dict[str, list[tuple[str, bytes | None, str]]] = {
        "up": [("../escaped.txt", b"x", "")],
        "absolute": [(str(victim / "escaped.txt"), b"x", "")],
        "deep": [(f"a/b/{up}/escaped.txt", b"x", "")],
        "link and through it": [("inner", None, str(victim)), ("inner/escaped.txt", b"x", "")],
        "relative link and through it": [("inner", None, up), ("inner/escaped.txt", b"x", "")],
        "link to a file": [("journal.jsonl", None, str(victim / "kept.txt")), ("journal.jsonl", b"x", "")],
        "link to itself": [("a", None, "a"), ("a/b", b"x", "")],
        "chain of links": [("a", None, "."), ("a/b", None, ".."), ("a/b/escaped.txt", b"x", "")],
        "hard link": [("hard", None, f"={victim / 'kept.txt'}"), ("hard", b"x", "")],
        "good": [("journal.jsonl", b"{}\n", ""), ("stages/sft/model/config.json", b"{}", ""),
                 ("best_model", None, "stages/sft/model")],
    }  # fmt: skip
    return {name: _packed(members) for name, members in made.items()}


def _packed(members: list[tuple[str, bytes | None, str]]) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        for name, content, target in members:
            member = tarfile.TarInfo(name)
            if content is None:
                member.type = tarfile.LNKTYPE if target.startswith("=") else tarfile.SYMTYPE
                member.linkname = target.removeprefix("=")
            member.size = len(content or b"")
            archive.addfile(member, io.BytesIO(content or b""))
    return file.getvalue()


def _by_archive(scene: Scene, name: str, archive: bytes) -> None:
    """What `job pull` does with an archive."""
    from modelwright.cluster.client import extract_tar
    from modelwright.errors import ModelwrightError

    into = scene.desk / "pulled"
    shutil.rmtree(into, ignore_errors=True)

    def act() -> tuple[int, str]:
        try:
            extract_tar(io.BytesIO(archive), into)
            return 0, ""
        except ModelwrightError as error:
            return error.exit_code if error.exit_code != 1 else 2, str(error)

    scene.watched(f"archive: {name}", act, [into])
