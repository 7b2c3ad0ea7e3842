"""The verbs that use a run: ask, compare, gate."""

from __future__ import annotations

from typing import Annotated

import typer

from modelwright.cli import evaluate

Run = Annotated[str, typer.Argument(metavar="RUN", help="A run folder, or its name under runs/.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")]


def register(app: typer.Typer) -> None:
    """Add the verbs to the command."""
    for verb in (ask, compare, gate):
        app.command(verb.__name__)(verb)
    evaluate.register(app)


def ask(
    run: Run,
    question: Annotated[str, typer.Argument(help="What to ask.")],
    base: Annotated[bool, typer.Option("--base", help="Ask the model as it was before training.")] = False,
    both: Annotated[bool, typer.Option("--both", help="Ask before and after, one below the other.")] = False,
    as_json: Json = False,
) -> None:
    """Put a question to the model of a run. It gets the prompt it was trained with; the answer comes as it is made."""
    import json

    from modelwright.errors import UsageError
    from modelwright.report.lines import quiet
    from modelwright.runs.caches import prepare_environment
    from modelwright.runs.folder import open_run

    if not question.strip():
        raise UsageError("the question is empty; put it in quotes after the run")
    folder = open_run(run)
    prepare_environment()
    from modelwright.stages.answer import Asker

    asker = Asker(folder)
    names = ["before", "after"] if both else ["before"] if base else ["after"]
    given: dict[str, str] = dict.fromkeys(names, "")
    for name in names:
        reply = asker.answerer(name).reply(asker.messages(question))
        if both and not as_json:
            print(f"{name}: ", end="")
        for piece in reply:
            given[name] += piece
            if not as_json:
                print(quiet(piece), end="", flush=True)
        if not as_json:
            print("\n" if both else "")
    if as_json:
        print(json.dumps({"question": question, **given}, ensure_ascii=False))


def compare(
    run: Run,
    other: Annotated[str | None, typer.Argument(metavar="[OTHER]", help="A second run, to hold against it.")] = None,
    as_json: Json = False,
) -> None:
    """Show the same questions answered before and after. With a second run, hold the two against each other."""
    import json

    from modelwright.errors import UsageError
    from modelwright.report.lines import line_of
    from modelwright.runs.folder import open_run, read_json

    if other is not None:
        _two_runs(run, other, as_json)
        return
    path = open_run(run).demo_outputs / "before_after.json"
    if not path.exists():
        raise UsageError(f"{run} has no before and after yet; finish it with: modelwright run")
    kept = read_json(path)
    if as_json:
        print(json.dumps({key: kept[key] for key in ("metrics", "answers", "notice")}, ensure_ascii=False))
        return
    print(line_of({"event": "answers", **kept}))


def _two_runs(run: str, other: str, as_json: bool) -> None:
    import json

    from modelwright.report.beside import beside, lines
    from modelwright.report.story import story_of
    from modelwright.report.view import view_of
    from modelwright.runs.folder import open_run

    folders = open_run(run), open_run(other)
    found = beside(*(view_of(folder, story_of(folder)) for folder in folders))
    print(json.dumps(found.as_json(), ensure_ascii=False) if as_json else "\n".join(lines(found)))


def gate(
    run: Run,
    stage: Annotated[str | None, typer.Argument(help="One stage; without it, every stage that was measured.")] = None,
    as_json: Json = False,
) -> None:
    """Judge a run's stages again, without training. The thresholds are those that its recipe has now."""
    import json

    from modelwright.errors import GateClosed
    from modelwright.stages.gate import judge_again

    verdicts = judge_again(run, stage)
    if as_json:
        print(json.dumps({verdict.stage: verdict.as_json() for verdict in verdicts}, ensure_ascii=False))
    else:
        for verdict in verdicts:
            print(verdict.letter)
    if not all(verdict.open for verdict in verdicts):
        raise typer.Exit(GateClosed.exit_code)
