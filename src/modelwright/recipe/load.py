"""Load a recipe: defaults, bases, the file, the environment and the command line, in this order."""

from __future__ import annotations

import io
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from modelwright.errors import Problem, RecipeError
from modelwright.recipe.aliases import canonicalise, our_key, whole_key
from modelwright.recipe.letters import validate
from modelwright.recipe.schema import Recipe
from modelwright.recipe.secrets import refuse_secrets
from modelwright.recipe.settings import Setting, children, find, sections
from modelwright.recipe.source import read_file, read_text, read_value
from modelwright.recipe.training import Parts
from modelwright.recipe.tree import DEFAULT, NOTHING, Located, Origin, RecipeProblem, merge, problem, without_nulls
from modelwright.recipe.unknown import answer, nearest

RESOLVED = """\
# Resolved by Modelwright: bases, environment variables and --set are already in it, so it runs as it ran.
# The environment map is left out, so that no variable changes it."""
SET_FORM = "it wants KEY=VALUE, such as sft.learning_rate=2e-4"


@dataclass(frozen=True)
class LoadedRecipe:
    """A recipe and how it came about."""

    recipe: Recipe
    """The whole wish, checked."""
    origins: dict[str, Origin]
    """Who set each key: ``origins["gates.sft.eval_loss.at_most"].line``."""
    notes: tuple[str, ...]
    """What was read in another way than it was written, one line each."""
    path: Path
    """The file that was asked for."""
    files: tuple[Path, ...]
    """That file and its bases, nearest first."""


def load(reference: str | Path, sets: Sequence[str] = (), environ: Mapping[str, str] | None = None) -> LoadedRecipe:
    """Read a recipe by path or by the name of a shipped one; everything wrong with it is raised at once."""
    path, layers = resolve(reference), _Layers()
    return _settled(layers, layers.file(path), path, sets, os.environ if environ is None else environ)


def made(wish: Mapping[str, Any], path: Path, sets: Sequence[str] = ()) -> LoadedRecipe:
    """A recipe that stands in no file, but means what a path names; its letters name the path."""
    tree, _ = read_text(json.dumps(wish), Origin("recipe", shown_name(path)))
    return _settled(_Layers(), tree, path, sets, {})


def _settled(
    layers: _Layers, tree: Located, path: Path, sets: Sequence[str], environ: Mapping[str, str]
) -> LoadedRecipe:
    """Lay variables and arguments over what was read, and check the whole."""
    layers.stop_if_unreadable()
    arguments = [layer for text in sets if (layer := layers.argument(text, tree)) is not None]
    for layer in layers.variables(tree, arguments, environ):
        tree = merge(tree, layer)
    for layer in arguments:
        tree = merge(tree, layer)
    tree = layers.gates(path, tree)
    layers.stop_if_unreadable()
    if secrets := refuse_secrets(tree):
        raise RecipeError(_in_order(secrets))
    recipe, problems = validate(tree)
    told = {(each.key, each.where) for each in layers.problems}
    layers.problems += [each for each in problems if (each.key, each.where) not in told]
    if recipe is None or layers.problems:
        raise RecipeError(_in_order(layers.problems))
    origins = _origins(recipe, tree)
    if unmeasured := _unmeasured(recipe, origins):
        raise RecipeError(_in_order(unmeasured))
    layers.note_name(tree)
    return LoadedRecipe(recipe, origins, tuple(dict.fromkeys(layers.notes)), path, tuple(layers.files))


def _unmeasured(recipe: Recipe, origins: Mapping[str, Origin]) -> list[RecipeProblem]:
    """Metrics that a gate asks for and no stage measures: better told now than after the training."""
    problems = []
    for stage, asked in recipe.gates.items():
        known = recipe.measured_in(stage)
        for metric, threshold in asked.items():
            key = f"gates.{stage}.{metric}"
            origin = next(origin for name, origin in origins.items() if name.startswith(f"{key}."))
            for name, word in ((key, metric), (f"{key}.times", threshold.times), (f"{key}.plus", threshold.plus)):
                if word is not None and word not in known:
                    close = nearest(word, known)
                    wish = f"did you mean {close}?" if close else "it wants one such as eval_loss"
                    found = name if name == key else f"{name} is {word!r}, which"
                    problems.append(problem(origins.get(name, origin), name, f"{found} is measured by nothing; {wish}"))
    return problems


def dump(recipe: Recipe) -> str:
    """Write a recipe as YAML that loads as the same recipe, every setting in it, so that no later default changes it.

    The environment map and the gates_file are left out: they have had their say, and a second run must not hear others.
    """
    writer: Any = YAML(typ="safe", pure=True)
    writer.default_flow_style = False
    writer.sort_base_mapping_type_on_output = False
    writer.allow_unicode = True
    writer.width = 110
    said = recipe.model_dump(exclude_none=True, exclude={"environment", "gates_file"})
    for section in said.values():
        if isinstance(section, dict) and not section.get("trainable", {}).get("lora", True):
            for name in Parts.OF_LORA:  # a refused word where there are no such matrices
                del section[name]
    text = io.StringIO()
    writer.dump({key: said[key] for key in type(recipe).model_fields if key in said}, text)
    return f"{RESOLVED}\n{text.getvalue()}"


def shipped() -> dict[str, Path]:
    """The recipes that come with Modelwright, by name: from the package, or from the checkout it runs in."""
    package = Path(__file__).resolve().parents[1]
    folders = [package / "recipes"]
    if package.parent.name == "src":
        folders.append(package.parent.parent / "recipes")
    folder = next((each for each in folders if each.is_dir()), None)
    return {file.stem: file for file in sorted(folder.glob("*.yaml"))} if folder else {}


def resolve(reference: str | Path) -> Path:
    """Find the file of a recipe: a path first, then a shipped name."""
    path, name = Path(reference), str(reference)
    if path.is_file():
        return path
    if name in shipped():
        return shipped()[name]
    if path.is_dir():
        inside = path / "recipe.yaml"
        hint = f"; did you mean {inside}?" if inside.is_file() else ""
        raise RecipeError([Problem(name, f"is a folder; it wants a recipe file{hint}")])
    raise RecipeError([Problem(name, f"no such recipe file; {_nearby(path)}")])


def _nearby(path: Path) -> str:
    """What a missing file may have been meant to be."""
    folder = path.parent
    files = [str(each) for each in folder.glob("*") if each.suffix in (".yaml", ".yml")] if folder.is_dir() else []
    names = [*files, *shipped()]
    close = nearest(str(path), names, cutoff=0.6) or nearest(path.stem, shipped(), cutoff=0.6)
    return f"did you mean {close}?" if close else f"shipped recipes are {', '.join(shipped())}"


def shown_name(path: Path) -> str:
    """A file as letters name it: shipped ones by name, others as seen from here."""
    resolved = path.resolve()
    if resolved in shipped().values():
        return resolved.name
    here = Path.cwd()
    return str(resolved.relative_to(here)) if resolved.is_relative_to(here) else str(path)


@dataclass
class _Layers:
    """Reads the layers of a recipe one by one, gathering notes and problems."""

    problems: list[RecipeProblem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    files: list[Path] = field(default_factory=list)
    unreadable: bool = False

    def file(self, path: Path) -> Located:
        """Read a file over its bases."""
        origin = Origin("base" if self.files else "recipe", shown_name(path))
        self.files.append(path)
        try:
            tree, problems = read_file(path, origin)
        except RecipeError as error:
            self.problems += [each for each in error.problems if isinstance(each, RecipeProblem)]
            self.unreadable = True
            return Located({}, origin)
        self.problems += problems
        tree = self._canonical(tree)
        base = tree.entries.get("base")
        tree = tree.drop(("base",))
        return merge(self._base(path, base), tree) if base is not None else tree

    def _base(self, path: Path, base: Located) -> Located:
        """Read what a file builds on."""
        if not isinstance(base.value, str):
            wants = "it wants one recipe, by path or by the name of a shipped one"
            return self._without(base, f"base is {base.shown}; {wants}")
        beside = path.parent / base.value
        found = beside if beside.is_file() else shipped().get(base.value)
        if found is None:
            return self._without(base, f"base is {base.shown}; no such recipe file; {_nearby(beside)}")
        chain = [file.resolve() for file in self.files]
        if found.resolve() in chain:
            circle = [*self.files[chain.index(found.resolve()) :], found]
            return self._without(base, f"base goes round in a circle: {' → '.join(file.name for file in circle)}")
        return self.file(found)

    def gates(self, path: Path, tree: Located) -> Located:
        """Lay the recipe's own gates over those of its gates_file."""
        wish = tree.at(("gates_file",))
        if wish is None or not isinstance(wish.value, str):
            return tree
        beside = [file.parent / wish.value for file in self.files]  # a base may be what names it
        found = next((each for each in (*beside, Path(wish.value)) if each.is_file()), None)
        if found is None:
            message = f"gates_file is {wish.shown}; there is no such file beside the recipe"
            self.problems.append(problem(wish.origin, "gates_file", message))
            return tree
        try:
            gates, problems = read_file(found, Origin("base", shown_name(found)))
        except RecipeError as error:
            self.problems += [each for each in error.problems if isinstance(each, RecipeProblem)]
            self.unreadable = True
            return tree
        self.problems += problems
        return merge(Located({"gates": gates.entries.get("gates", gates)}, gates.origin), tree)

    def _without(self, base: Located, message: str) -> Located:
        self.problems.append(problem(base.origin, "base", message))
        self.unreadable = True
        return Located({}, base.origin)

    def stop_if_unreadable(self) -> None:
        """Without one of the files the rest would be guesses."""
        if self.unreadable:
            raise RecipeError(_in_order(self.problems))

    def argument(self, text: str, tree: Located) -> Located | None:
        """Read one ``--set key=value``; a name without its section means the one section of the tree that has it."""
        origin = Origin("set")
        key, equals, written = (part.strip() for part in text.partition("="))
        if not equals or not re.fullmatch(r"[^.\s]+(\.[^.\s]+)*", key):
            self.problems.append(problem(origin, key, f"{text!r} is no setting; {SET_FORM}"))
            return None
        return self._layer(whole_key(key, tree.entries), written, origin)

    def variables(self, tree: Located, arguments: Sequence[Located], environ: Mapping[str, str]) -> list[Located]:
        """Read the environment variables that the recipe maps to settings; others mean nothing to a recipe."""
        for argument in arguments:
            tree = merge(tree, argument)
        tree = without_nulls(tree)
        mapped = tree.at(("environment",))
        layers = []
        for name, target in mapped.entries.items() if mapped else ():
            key = self._target(name, target)
            value = environ.get(name, "")
            if key is None or not value.strip():
                continue
            section = key.partition(".")[0]
            if section != key and tree.at((section,)) is None:
                self.notes.append(f"environment {name}: sets {key}, but the recipe has no {section}; it is left out")
                continue
            layer = self._layer(key, value, Origin("environment", name))
            layers += [layer] if layer is not None else []
        return layers

    def _target(self, name: str, target: Located) -> str | None:
        """The setting that a variable may set."""
        if not isinstance(target.value, str):
            return None  # the schema answers what is no text
        key = target.value
        setting = find(tuple(our_key(key).split(".")))
        if setting is not None and not setting.section:
            return key
        if setting is not None:
            message = f"is {target.shown}, a section; it wants one setting, such as {children(setting)[0].key}"
        else:
            told = answer(tuple(key.split(".")))
            hint = f"; did you mean {our_key('.'.join(told.target))}?" if told.target else ""
            message = f"is {target.shown}; it wants a setting that exists{hint}"
        self.problems.append(problem(target.origin, f"environment.{name}", f"environment.{name} {message}"))
        return None

    def _layer(self, key: str, written: str, origin: Origin) -> Located | None:
        """A tree with one value, as the command line or the environment gives it."""
        setting = find(tuple(our_key(key).split(".")))
        try:
            value, problems = _as_text(written, setting, origin) or read_value(written, origin)
        except RecipeError as error:
            reasons = "; ".join(each.message for each in error.problems)
            self.problems.append(problem(origin, key, f"{key}={written} cannot be read: {reasons}"))
            return None
        self.problems += problems
        if value.value == {} and origin.kind == "set":
            value = replace(value, text=NOTHING)
        return self._canonical(Located({}, origin).put(key.split("."), value))

    def _canonical(self, tree: Located) -> Located:
        tree, notes, problems = canonicalise(tree)
        self.notes += notes
        self.problems += problems
        return tree

    def note_name(self, tree: Located) -> None:
        """Say so where a recipe goes by the name, and so into the folder, of its base."""
        name = tree.at(("name",))
        if name is not None and name.origin.kind == "base" and tree.at(("output_dir",)) is None:
            folder = f"so does its folder, runs/{name.value}"
            self.notes.append(f"{name.origin.where}: the name {name.value} comes from the base; {folder}")


def _as_text(written: str, setting: Setting | None, origin: Origin) -> tuple[Located, list[RecipeProblem]] | None:
    """Text settings take what is written as it is, so that a name may be 2024 and a prompt may hold a colon."""
    if setting is None or not setting.is_text or not written or written == "null" or written[0] in "'\"":
        return None
    return Located(written, origin, written), []


def _origins(recipe: Recipe, tree: Located) -> dict[str, Origin]:
    """Who set each key; what nobody set is a default, and one word for a section sets all of it."""
    said = {".".join(path): node.origin for path, node in tree.walk()}
    fixed = (setting.key for section in sections().values() for setting in children(section))
    origins = {}
    for key in fixed:
        whole = tree.at(key.split(".")[:-1])
        if _reached(recipe, key.split(".")[:-1]):
            origins[key] = whole.origin if whole is not None and isinstance(whole.value, str) else DEFAULT
    return {**origins, **said}


def _reached(section: Any, path: Sequence[str]) -> bool:
    """Whether a recipe has all the sections on the way to a setting."""
    for step in path:
        section = getattr(section, step)
        if section is None:
            return False
    return True


def _in_order(problems: Sequence[RecipeProblem]) -> list[RecipeProblem]:
    return sorted(dict.fromkeys(problems), key=lambda each: each.rank)
