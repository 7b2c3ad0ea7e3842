"""What a preparation is going to do, written down once, so that any process on any machine can do a part of it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from modelwright.data.shards import MANIFEST, PARTS, Shards
from modelwright.data.units import Unit, divide
from modelwright.data.work import Work, key_of
from modelwright.errors import DataError
from modelwright.recipe.preparing import Cleaning, Deduplicating, Prepare
from modelwright.recipe.schema import Data
from modelwright.runs.folder import hash_file, read_json, write_json

FORMAT = 2
"""Raised when the same wish would give other bytes."""
PLAN = "plan.json"


@dataclass(frozen=True)
class Wish:
    """What is asked of a preparation."""

    data: Data
    """What is read."""
    settings: Prepare
    """How it is prepared."""
    seed: int
    """Decides what is held out."""
    beside: Path
    """Where relative paths may point."""
    tokenizer: Path | None
    """Folder of the tokenizer; without one, it is trained."""


@dataclass(frozen=True)
class Plan:
    """Sources, settings and the names of the steps."""

    folder: Path
    """Where the shards go; the work folder lies in it."""
    data: Data
    """What is read."""
    settings: Prepare
    """How it is prepared."""
    seed: int
    """Decides what is held out."""
    beside: Path
    """Where relative paths may point."""
    units: list[Unit]
    """The pieces of the sources."""
    fingerprint: str
    """Hash of what stands in the sources."""
    tokenizer: str | None
    """Folder of the tokenizer; without one, it is trained."""

    @classmethod
    def make(cls, wish: Wish, folder: Path) -> Self:
        """Look at the sources and divide them."""
        found = divide(wish.data, wish.beside)
        tokenizer = str(wish.tokenizer.resolve()) if wish.tokenizer else None
        said = (folder, wish.data, wish.settings, wish.seed, wish.beside)
        return cls(*said, found.units, found.fingerprint, tokenizer)

    @classmethod
    def read(cls, folder: Path) -> Self:
        """The plan that another process wrote."""
        said = read_json(folder / "work" / PLAN)
        return cls(
            folder=folder,
            data=Data.model_validate(said["data"]),
            settings=Prepare.model_validate(said["settings"]),
            seed=said["seed"],
            beside=Path(said["beside"]),
            units=[Unit(**unit) for unit in said["units"]],
            fingerprint=said["fingerprint"],
            tokenizer=said["tokenizer"],
        )

    def write(self) -> None:
        """Write it down for the workers."""
        said = {"data": self.data.model_dump(mode="json"), "settings": self.settings.model_dump(mode="json"),
                "seed": self.seed, "beside": str(self.beside.resolve()),
                "units": [unit.as_json() for unit in self.units],
                "fingerprint": self.fingerprint, "tokenizer": self.tokenizer}  # fmt: skip
        write_json(self.work.folder / PLAN, said)

    @property
    def work(self) -> Work:
        """Where pieces lie until all is done."""
        return Work(self.folder / "work")

    @property
    def clean(self) -> str:
        """The step that cleans and signs the documents of a unit."""
        rules = {name: getattr(self.settings, name) for name in Cleaning.model_fields}
        exam = (self.settings.decontaminate, self.settings.decontaminate_ngram)
        read = (self.data.text_column, self.data.split_by, self.data.max_rows, self.seed)
        return f"clean-{key_of(FORMAT, self.fingerprint, rules, exam, read, self.settings.near_dedup)}"

    @property
    def group(self) -> str:
        """The step that finds the near-duplicates of a band."""
        wishes = {name: getattr(self.settings, name) for name in Deduplicating.model_fields}
        return f"group-{key_of(self.clean, wishes)}"

    @property
    def decide(self) -> str:
        """The step that says what becomes of each document."""
        return f"decide-{key_of(self.group, self.seed, self.data.test_size.text, self.data.validation_file)}"

    @property
    def train(self) -> str:
        """The step that trains a tokenizer."""
        return f"train-{key_of(self.decide, self._tokenizer_wish)}"

    @property
    def encode(self) -> str:
        """The step that tokenizes the documents of a unit."""
        return f"encode-{key_of(self.decide, self._tokenizer_wish)}"

    @property
    def _tokenizer_wish(self) -> Any:
        if self.tokenizer is None:
            return {"train": self.settings.vocab_size, "megabytes": self.settings.tokenizer_sample_mb}
        return hash_file(Path(self.tokenizer) / "tokenizer.json")

    @property
    def config(self) -> str:
        """Hash of everything that decides the shards."""
        return key_of(self.encode, self.settings.row_length, self.settings.shard_rows, self.data.mix)


def finished(plan: Plan) -> bool:
    """Whether the very shards of a plan are there, whole as far as their sizes tell."""
    path = plan.folder / MANIFEST
    if not path.exists() or read_json(path).get("config") != plan.config:
        return False
    try:
        for part in PARTS:
            Shards.open(plan.folder, part)
    except DataError:
        return False
    return True
