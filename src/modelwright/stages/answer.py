"""Answer one question with the model of a run, before or after training, as it was trained to be asked."""

from __future__ import annotations

from pathlib import Path

from modelwright.data.conversations import ask
from modelwright.errors import UsageError
from modelwright.models import text
from modelwright.recipe.load import load
from modelwright.runs.folder import open_run
from modelwright.serve.ask import Answerer


def answers(run: str, question: str, base: bool, tuned: bool) -> dict[str, str]:
    """The answers by name: before, after, or both."""
    if not question.strip():
        raise UsageError("the question is empty; put it in quotes after the run")
    folder = open_run(run)
    recipe = load(folder.recipe, environ={}).recipe
    folders: dict[str, Path] = {}
    if base:
        scratch = folder.model("init") if recipe.model.architecture else None
        folders["before"] = scratch or text.find(recipe.model, folder.path).path
    if tuned:
        folders["after"] = _tuned(folder.best_model, [folder.model(stage) for stage in recipe.stages], run)
    wish = recipe.compare
    messages = [ask(question, recipe.data_of(list(recipe.stages)[-1]).system_prompt)]
    return {
        name: Answerer(path, wish.max_new_tokens, wish.temperature, recipe.seed).answer(messages)[0]
        for name, path in folders.items()
    }


def _tuned(best: Path, models: list[Path], run: str) -> Path:
    """The promoted model; where no gate has opened yet, the last one trained."""
    for folder in (best, *reversed(models)):
        if (folder / "config.json").exists() or (folder / "adapter_config.json").exists():
            return folder
    raise UsageError(f"{run} has no trained model yet; finish it with: modelwright run")
