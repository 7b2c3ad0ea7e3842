"""Load a recipe: defaults, bases, the file, environment variables and --set, in this order."""

from __future__ import annotations

import io
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from modelwright.errors import Problem, RecipeError, contains_secret, is_secret_name
from modelwright.recipe.diagnostics import closest_match, explain_unknown_key, validate_tree
from modelwright.recipe.fields import (
    all_sections,
    apply_aliases,
    canonical_key,
    child_fields,
    get_field,
    qualify_key,
)
from modelwright.recipe.schema import Recipe, metric_range
from modelwright.recipe.source import (
    DEFAULT,
    EMPTY_MAPPING,
    ConfigNode,
    KeyPath,
    Origin,
    RecipeProblem,
    deep_merge,
    drop_nulls,
    make_problem,
    read_file,
    read_text,
    read_value,
)
from modelwright.recipe.stage_specs import OPTIMIZERS, TrainableConfig

RESOLVED_HEADER = """\
# Resolved by Modelwright: bases, environment variables and --set are already in it, so it runs as it ran.
# The env_overrides map is left out, so that no variable changes it."""
SET_SYNTAX = "it wants KEY=VALUE, such as sft.learning_rate=2e-4"


@dataclass(frozen=True)
class LoadedRecipe:
    """A recipe, with the origin of every setting."""

    recipe: Recipe
    """The recipe, checked."""
    origins: dict[str, Origin]
    """Where each key was set: ``origins["gates.sft.eval_loss.at_most"].line``."""
    notes: tuple[str, ...]
    """Aliases that were replaced and values that were ignored, one line each."""
    path: Path
    """The file."""


def load(
    reference: str | Path, overrides: Sequence[str] = (), environ: Mapping[str, str] | None = None
) -> LoadedRecipe:
    """Load a recipe by path or by the name of a shipped one; all problems are raised at once."""
    path, reader = find_recipe(reference), _LayerReader()
    return _resolve_layers(reader, reader.read_file(path), path, overrides, os.environ if environ is None else environ)


def load_dict(config: Mapping[str, Any], path: Path, overrides: Sequence[str] = ()) -> LoadedRecipe:
    """Load a recipe from a mapping; problems name the path."""
    tree, _ = read_text(json.dumps(config), Origin("recipe", display_path(path)))
    reader = _LayerReader()
    return _resolve_layers(reader, reader.apply_aliases(tree), path, overrides, {})


def _resolve_layers(
    reader: _LayerReader, tree: ConfigNode, path: Path, overrides: Sequence[str], environ: Mapping[str, str]
) -> LoadedRecipe:
    """Merge environment variables and --set over the file, and validate the result."""
    reader.stop_if_unreadable()
    override_layers = [layer for text in overrides if (layer := reader.read_override(text, tree)) is not None]
    for layer in reader.read_env(tree, override_layers, environ):
        tree = deep_merge(tree, layer)
    for layer in override_layers:
        tree = deep_merge(tree, layer)
    tree = reader.read_chat_template(reader.read_gates_file(path, tree))
    reader.stop_if_unreadable()
    if secrets := find_secrets(tree):
        raise RecipeError(_sorted_problems(secrets))
    recipe, problems = validate_tree(tree)
    reported = {(each.key, each.where) for each in reader.problems}
    reader.problems += [each for each in problems if (each.key, each.where) not in reported]
    if recipe is None or reader.problems:
        raise RecipeError(_sorted_problems(reader.problems))
    origins = _origins(recipe, tree)
    checks = (_check_gate_metrics, _check_gate_limits, _check_best_metrics)
    if problems := [problem for check in checks for problem in check(recipe, origins)]:
        raise RecipeError(_sorted_problems(problems))
    reader.note_name(tree)
    reader.notes += _advice(recipe, origins)
    return LoadedRecipe(recipe, origins, tuple(dict.fromkeys(reader.notes)), path)


def _check_gate_metrics(recipe: Recipe, origins: Mapping[str, Origin]) -> list[RecipeProblem]:
    """Problems for metrics of gates that no stage reports."""
    problems = []
    for stage, thresholds in recipe.gates.items():
        known = recipe.gate_metrics(stage)
        for metric, threshold in thresholds.items():
            key = f"gates.{stage}.{metric}"
            origin = next(origin for name, origin in origins.items() if name.startswith(f"{key}."))
            named = {key: metric, f"{key}.times": threshold.times, f"{key}.plus": threshold.plus}
            for name, metric_name in named.items():
                if metric_name is not None and metric_name not in known:
                    close = closest_match(metric_name, known)
                    hint = f"did you mean {close}?" if close else "it wants one such as eval_loss"
                    if "answers." in metric_name:
                        name_of = metric_name.partition("answers.")[2]
                        hint = f"no verifier {name_of} in evaluate.answers.verifiers measures it"
                    subject = name if name == key else f"{name} is {metric_name!r}, which"
                    message = f"{subject} is not a metric of this stage; {hint}"
                    problems.append(make_problem(origins.get(name, origin), name, message))
                elif metric_name is not None and (reason := recipe.unmeasured_reason(stage, metric_name)):
                    message = f"{key}: {metric_name} is never measured, so the gate never opens: {reason}"
                    problems.append(make_problem(origins.get(name, origin), name, message))
    return problems


def _check_gate_limits(recipe: Recipe, origins: Mapping[str, Origin]) -> list[RecipeProblem]:
    """Problems for limits that no value of the metric can satisfy, such as an accuracy of at least 1.5."""
    problems = []
    for stage, thresholds in recipe.gates.items():
        for metric, threshold in thresholds.items():
            lowest, highest = metric_range(metric)
            reference = threshold.times or threshold.plus
            ends = metric_range(reference) if reference else (0.0, 0.0)
            limits = {"at_most": threshold.at_most, "at_least": threshold.at_least}
            bounds = {name: [limit * end if threshold.times and limit else limit + end for end in ends]
                      for name, limit in limits.items() if limit is not None}  # fmt: skip
            never = {}
            if "at_most" in bounds and max(bounds["at_most"]) < lowest:
                never["at_most"] = f"{limits['at_most']:g}, and {metric} is never below {lowest:g}"
            if "at_least" in bounds and min(bounds["at_least"]) > highest:
                never["at_least"] = f"{limits['at_least']:g}, and {metric} is never above {highest:g}"
            section = f"gates.{stage}.{metric}"
            for name, reason in never.items():
                origin = origins.get(f"{section}.{name}") or origins[section]
                message = f"{section}.{name} is {reason}: the gate never opens"
                problems.append(make_problem(origin, f"{section}.{name}", message))
    return problems


MANY_EPOCHS = {"text": 50, "image": 1000}


def _advice(recipe: Recipe, origins: Mapping[str, Origin]) -> list[str]:
    """What is valid and nearly always a mistake, with the numbers."""
    notes = []
    for stage, settings in recipe.stages.items():
        rate, high = settings.learning_rate, OPTIMIZERS[settings.optim].high_learning_rate
        epochs, default = settings.num_train_epochs, type(settings).model_fields["learning_rate"].default
        if rate > high:
            advice = f"{settings.optim} usually diverges above {high:g}; the default is {default:g}"
            notes.append(f"{origins[f'{stage}.learning_rate'].location}: {stage}.learning_rate is {rate:g}; {advice}")
        if epochs > MANY_EPOCHS[settings.spec.modality] and settings.max_steps is None:
            advice = f"every row is trained {epochs:g} times and may be learnt by heart; 1 to 10 epochs are usual"
            where = origins[f"{stage}.num_train_epochs"].location
            notes.append(f"{where}: {stage}.num_train_epochs is {epochs:g}; {advice}")
    return notes


def _check_best_metrics(recipe: Recipe, origins: Mapping[str, Origin]) -> list[RecipeProblem]:
    """Problems for stages whose best weights are selected by answers that nothing judges, or that never evaluate."""
    answers = recipe.evaluate.answers if recipe.evaluate else None
    known = answers.metric_names if answers else ()
    problems = []
    for stage, section in recipe.stages.items():
        key, metric = f"{stage}.metric_for_best_model", section.metric_for_best_model
        if metric.startswith("answers.") and metric not in known:
            hint = f"it wants one of {', '.join(known)}" if known else "it wants a section evaluate.answers"
            problems.append(make_problem(origins[key], key, f"{key} is {metric!r}, which nothing measures; {hint}"))
        key = f"{stage}.early_stopping_patience"
        if section.early_stopping_patience and section.eval_steps is None:
            problems.append(
                make_problem(origins[key], key, f"{key} needs {stage}.eval_steps, to evaluate while training")
            )
        key = f"{stage}.early_stopping_threshold"
        if section.early_stopping_threshold is not None and not section.early_stopping_patience:
            problems.append(make_problem(origins[key], key, f"{key} needs {stage}.early_stopping_patience"))
    return problems


def dump_yaml(recipe: Recipe) -> str:
    """Write a recipe with every setting as YAML that loads as the same recipe, whatever the defaults are then.

    env_overrides and gates_file are omitted: they are already applied, and must not be applied again.
    """
    writer: Any = YAML(typ="safe", pure=True)
    writer.default_flow_style = False
    writer.sort_base_mapping_type_on_output = False
    writer.allow_unicode = True
    writer.width = 110
    values = recipe.model_dump(exclude_none=True, exclude={"env_overrides", "gates_file"})
    for section in values.values():
        if isinstance(section, dict) and not section.get("trainable", {}).get("lora", True):
            for name in TrainableConfig.LORA_KEYS:  # these are refused without LoRA
                del section[name]
    text = io.StringIO()
    writer.dump({key: values[key] for key in type(recipe).model_fields if key in values}, text)
    return f"{RESOLVED_HEADER}\n{text.getvalue()}"


def builtin_recipes() -> dict[str, Path]:
    """The shipped recipes by name, from the package or the checkout it runs in."""
    package = Path(__file__).resolve().parents[1]
    folders = [package / "recipes"]
    if package.parent.name == "src":
        folders.append(package.parent.parent / "recipes")
    folder = next((each for each in folders if each.is_dir()), None)
    return {file.stem: file for file in sorted(folder.glob("*.yaml"))} if folder else {}


def find_recipe(reference: str | Path) -> Path:
    """The file of a recipe, given by path or by the name of a shipped one."""
    path, name = Path(reference), str(reference)
    try:
        if path.is_file():
            return path
    except OSError as error:
        raise RecipeError([Problem(f"{name[:60]}…", f"no such recipe file ({error.strerror})")]) from None
    if name in builtin_recipes():
        return builtin_recipes()[name]
    if path.is_dir():
        inside = path / "recipe.yaml"
        hint = f"; did you mean {inside}?" if inside.is_file() else ""
        raise RecipeError([Problem(name, f"is a folder; it wants a recipe file{hint}")])
    if path.exists():
        raise RecipeError([Problem(name, "is not a regular file; it wants a recipe file")])
    raise RecipeError([Problem(name, f"no such recipe file; {_suggest_recipe(path)}")])


def _suggest_recipe(path: Path) -> str:
    """A suggestion for a file that does not exist."""
    folder = path.parent
    files = [str(each) for each in folder.glob("*") if each.suffix in (".yaml", ".yml")] if folder.is_dir() else []
    names = [*files, *builtin_recipes()]
    close = closest_match(str(path), names, cutoff=0.6) or closest_match(path.stem, builtin_recipes(), cutoff=0.6)
    return f"did you mean {close}?" if close else f"shipped recipes are {', '.join(builtin_recipes())}"


def display_path(path: Path) -> str:
    """A file as messages name it: a shipped recipe by name, others relative to the working directory."""
    resolved = path.resolve()
    if resolved in builtin_recipes().values():
        return resolved.name
    here = Path.cwd()
    return str(resolved.relative_to(here)) if resolved.is_relative_to(here) else str(path)


@dataclass
class _LayerReader:
    """Reads the layers of a recipe and collects notes and problems."""

    problems: list[RecipeProblem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    files: list[Path] = field(default_factory=list)
    unreadable: bool = False

    def read_file(self, path: Path) -> ConfigNode:
        """Read a file, merged over its bases."""
        origin = Origin("base" if self.files else "recipe", display_path(path))
        self.files.append(path)
        tree = self.apply_aliases(self._read_yaml(path, origin))
        base = tree.mapping.get("base")
        tree = tree.without(("base",))
        return deep_merge(self._read_base(path, base), tree) if base is not None else tree

    def _read_base(self, path: Path, base: ConfigNode) -> ConfigNode:
        """Read the base of a file."""
        if not isinstance(base.value, str):
            wants = "it wants one recipe, by path or by the name of a shipped one"
            return self._base_problem(base, f"base is {base.display}; {wants}")
        relative_path = path.parent / base.value
        base_path = relative_path if relative_path.is_file() else builtin_recipes().get(base.value)
        if base_path is None:
            hint = _suggest_recipe(relative_path)
            return self._base_problem(base, f"base is {base.display}; no such recipe file; {hint}")
        chain = [file.resolve() for file in self.files]
        if base_path.resolve() in chain:
            cycle = [*self.files[chain.index(base_path.resolve()) :], base_path]
            return self._base_problem(base, f"circular base: {' → '.join(file.name for file in cycle)}")
        return self.read_file(base_path)

    def read_gates_file(self, path: Path, tree: ConfigNode) -> ConfigNode:
        """Merge the recipe over the gates of its gates_file."""
        setting = tree.get(("gates_file",))
        if setting is None or not isinstance(setting.value, str):
            return tree
        candidates = [file.parent / setting.value for file in self.files]  # a base may set it
        gates_path = next((each for each in (*candidates, Path(setting.value)) if each.is_file()), None)
        if gates_path is None:
            message = f"gates_file is {setting.display}; there is no such file next to the recipe"
            self.problems.append(make_problem(setting.origin, "gates_file", message))
            return tree
        gates = self._read_yaml(gates_path, Origin("base", display_path(gates_path)))
        layer = self.apply_aliases(ConfigNode({"gates": gates.mapping.get("gates", gates)}, gates.origin))
        return deep_merge(layer, tree)

    def read_chat_template(self, tree: ConfigNode) -> ConfigNode:
        """Put the text of a chat template file into the recipe, which then needs the file no more."""
        key = ("model", "chat_template")
        setting = tree.get(key)
        if setting is None or not isinstance(setting.value, str) or re.search(r"[{\n]", setting.value):
            return tree
        candidates = [*(file.parent / setting.value for file in self.files), Path(setting.value)]
        try:
            file = next(each for each in candidates if each.is_file())
            return tree.with_value(key, replace(setting, value=file.read_text(encoding="utf-8")))
        except (StopIteration, OSError, ValueError):
            wants = "it wants Jinja text, or a file of it next to the recipe"
            message = f"model.chat_template is {setting.display}; {wants}"
            self.problems.append(make_problem(setting.origin, ".".join(key), message))
            return tree

    def _read_yaml(self, path: Path, origin: Origin) -> ConfigNode:
        """Read one file; an empty tree if that fails."""
        try:
            tree, problems = read_file(path, origin)
        except RecipeError as error:
            self.problems += [each for each in error.problems if isinstance(each, RecipeProblem)]
            self.unreadable = True
            return ConfigNode({}, origin)
        self.problems += problems
        return tree

    def _base_problem(self, base: ConfigNode, message: str) -> ConfigNode:
        self.problems.append(make_problem(base.origin, "base", message))
        self.unreadable = True
        return ConfigNode({}, base.origin)

    def stop_if_unreadable(self) -> None:
        """Raise the problems if a file could not be read."""
        if self.unreadable:
            raise RecipeError(_sorted_problems(self.problems))

    def read_override(self, text: str, tree: ConfigNode) -> ConfigNode | None:
        """Read one ``--set key=value``; the key may lack its section if only one section has it."""
        origin = Origin("set")
        key, equals, raw_value = (part.strip() for part in text.partition("="))
        if not equals or not re.fullmatch(r"[^.\s]+(\.[^.\s]+)*", key):
            self.problems.append(make_problem(origin, key, f"{text!r} is not a setting; {SET_SYNTAX}"))
            return None
        return self._make_layer(qualify_key(key, tree.mapping), raw_value, origin)

    def read_env(
        self, tree: ConfigNode, override_layers: Sequence[ConfigNode], environ: Mapping[str, str]
    ) -> list[ConfigNode]:
        """Read the environment variables that env_overrides maps to settings."""
        for override in override_layers:
            tree = deep_merge(tree, override)
        tree = drop_nulls(tree)
        mapped = tree.get(("env_overrides",))
        layers = []
        for name, target in mapped.mapping.items() if mapped else ():
            key = self._env_target(name, target)
            value = environ.get(name, "")
            if key is None or not value.strip():
                continue
            section = key.partition(".")[0]
            if section != key and tree.get((section,)) is None:
                self.notes.append(f"environment {name}: sets {key}, but the recipe has no {section}; it is ignored")
                continue
            layer = self._make_layer(key, value, Origin("environment", name))
            layers += [layer] if layer is not None else []
        return layers

    def _env_target(self, name: str, target: ConfigNode) -> str | None:
        """The setting that a variable overrides."""
        if not isinstance(target.value, str):
            return None  # reported by the validation
        key = target.value
        setting = get_field(tuple(canonical_key(key).split(".")))
        if setting is not None and not setting.section:
            return key
        if setting is not None:
            message = f"is {target.display}, a section; it wants one setting, such as {child_fields(setting)[0].key}"
        else:
            unknown = explain_unknown_key(tuple(key.split(".")))
            hint = f"; did you mean {canonical_key('.'.join(unknown.target))}?" if unknown.target else ""
            message = f"is {target.display}; it wants a setting that exists{hint}"
        self.problems.append(make_problem(target.origin, f"env_overrides.{name}", f"env_overrides.{name} {message}"))
        return None

    def _make_layer(self, key: str, raw_value: str, origin: Origin) -> ConfigNode | None:
        """A layer with one value of the command line or the environment."""
        setting = get_field(tuple(canonical_key(key).split(".")))
        # text is taken unparsed, so that a name may be 2024 and a prompt may contain a colon
        is_text = setting is not None and setting.is_str and raw_value not in ("", "null") and raw_value[0] not in "'\""
        text_node = ConfigNode(raw_value, origin, raw_value)
        if any("\ud800" <= char <= "\udfff" for char in raw_value):  # how Python reads bytes that are no text
            self.problems.append(make_problem(origin, key, f"{key} has bytes that are not UTF-8; take them out"))
            return None
        try:
            value, problems = (text_node, []) if is_text else read_value(raw_value, origin)
        except RecipeError as error:
            reasons = "; ".join(each.message for each in error.problems)
            shown = "…" if origin.kind == "environment" else raw_value  # it may be a secret
            self.problems.append(make_problem(origin, key, f"{key}={shown} cannot be read: {reasons}"))
            return None
        self.problems += problems
        if value.value == {} and origin.kind == "set":
            value = replace(value, text=EMPTY_MAPPING)
        return self.apply_aliases(ConfigNode({}, origin).with_value(key.split("."), value))

    def apply_aliases(self, tree: ConfigNode) -> ConfigNode:
        """Replace the aliases of a layer."""
        tree, notes, problems = apply_aliases(tree)
        self.notes += notes
        self.problems += problems
        return tree

    def note_name(self, tree: ConfigNode) -> None:
        """Note that a recipe takes its name, and so its run folder, from its base."""
        name = tree.get(("name",))
        if name is not None and name.origin.kind == "base" and tree.get(("output_dir",)) is None:
            folder = f"so does its folder, runs/{name.value}"
            self.notes.append(f"{name.origin.location}: the name {name.value} comes from the base; {folder}")


def _origins(recipe: Recipe, tree: ConfigNode) -> dict[str, Origin]:
    """The origin of each key; a section that is set by one word sets all of its keys."""
    tree_origins = {".".join(path): node.origin for path, node in tree.walk()}
    fixed = (setting.key for section in all_sections().values() for setting in child_fields(section))
    origins = {}
    for key in fixed:
        parent = tree.get(key.split(".")[:-1])
        if _has_section(recipe, key.split(".")[:-1]):
            origins[key] = parent.origin if parent is not None and isinstance(parent.value, str) else DEFAULT
    return {**origins, **tree_origins}


def _has_section(section: Any, path: Sequence[str]) -> bool:
    """Whether a recipe has the section at a path."""
    for step in path:
        section = getattr(section, step)
        if section is None:
            return False
    return True


def _sorted_problems(problems: Sequence[RecipeProblem]) -> list[RecipeProblem]:
    return sorted(dict.fromkeys(problems), key=lambda each: each.sort_key)


SECRET_REMEDY = (
    "a recipe is copied into the run, its report and its manifests; keep it in the environment, "
    "or, for pods, in a Secret (cluster.hf_token_secret)"
)


def find_secrets(tree: ConfigNode) -> list[RecipeProblem]:
    """Problems for values that look like a token, a key or a password; the messages do not contain the value."""
    problems = []
    for path, node in _str_values(tree):
        key, text = ".".join(path), str(node.value)
        if contains_secret(text):
            problems.append(make_problem(node.origin, key, f"{key} holds what looks like a secret; {SECRET_REMEDY}"))
        elif path[:2] == ("cluster", "env") and is_secret_name(path[-1]) and text:
            problems.append(make_problem(node.origin, key, f"{key} is a secret by its name; {SECRET_REMEDY}"))
        elif contains_secret(key):
            hidden = f"a key of {'.'.join(path[:-1]) or 'the recipe'} looks like a secret"
            problems.append(make_problem(node.origin, "", f"{hidden}; {SECRET_REMEDY}"))
    return problems


def _str_values(node: ConfigNode, path: KeyPath = ()) -> Iterator[tuple[KeyPath, ConfigNode]]:
    """Every text of a tree with its path, in lists too."""
    if isinstance(node.value, dict):
        for key, child in node.value.items():
            yield from _str_values(child, (*path, key))
    elif isinstance(node.value, list):
        for number, child in enumerate(node.value):
            yield from _str_values(child, (*path, str(number)))
    elif isinstance(node.value, str):
        yield path, node


_MISSING_COLUMN_RE = re.compile(r"there is no column '(?P<name>[^']*)'")


def add_recipe_location(problems: Sequence[Problem], loaded: LoadedRecipe, stage: str) -> list[Problem]:
    """The same problems, with the line of the recipe that names a missing column."""
    sections = (f"{stage}.data", "data")
    located = []
    for problem in problems:
        match = _MISSING_COLUMN_RE.search(problem.message)
        names = (f"columns.{match['name']}", "text_column", "split_by") if match else ()
        origins = {
            key: loaded.origins.get(key, DEFAULT) for key in (f"{each}.{name}" for each in sections for name in names)
        }
        key = next((key for key, origin in origins.items() if origin.kind != "default"), None)
        note = f" ({key} is asked for in {origins[key].location})" if key else ""
        located.append(Problem(problem.where, problem.message + note) if note else problem)
    return located
