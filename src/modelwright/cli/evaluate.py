"""The verb that measures a model: eval, of a run's stages or of any model folder."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from modelwright.recipe.evaluation import Evaluate

Options = list[str] | None


def register(app: typer.Typer) -> None:
    """Add the verb to the command."""
    app.command("eval")(evaluate)


def evaluate(
    target: Annotated[str, typer.Argument(metavar="RUN|MODEL", help="A run folder or name, or any model.")],
    text: Annotated[str | None, typer.Option("--text", help="Raw text: loss, perplexity, bits per byte.")] = None,
    multiple_choice: Annotated[
        str | None, typer.Option("--multiple-choice", help="Questions with options: accuracy by log-likelihood.")
    ] = None,
    prompts: Annotated[Options, typer.Option("--prompt", help="A beginning to go on with; may be given often.")] = None,
    tasks: Annotated[Options, typer.Option("--task", help="A task of lm-eval; may be given often.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")] = False,
) -> None:
    """Measure every model of a run in the same way, or one model alone."""
    import json

    from modelwright.recipe.evaluation import Evaluate
    from modelwright.report.lines import line_of
    from modelwright.runs.caches import prepare_environment

    prepare_environment()
    wish = Evaluate(text=text, multiple_choice=multiple_choice, prompts=prompts or [], tasks=tasks or [])
    found = _measure(target, wish)
    if as_json:
        print(json.dumps(found, ensure_ascii=False))
        return
    for name, measured in found.items():
        print(line_of({"event": "evaluated", "model": name, **measured}))
    if len(found) > 1:
        models = {name: measured["metrics"] for name, measured in found.items()}
        print("\n" + (line_of({"event": "comparison", "models": models}) or ""))


def _measure(target: str, wish: Evaluate) -> dict[str, Any]:
    """The measurements by model: every stage of a run, or the one model that is named."""
    from modelwright.errors import UsageError
    from modelwright.runs.folder import open_run

    try:
        run = open_run(target)
    except UsageError:
        run = None
    from modelwright.stages import evaluate as stage

    if run is None:
        return {target: stage.evaluate_folder(target, wish)}
    return stage.evaluate_run(run, wish)
