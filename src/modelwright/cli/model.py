"""Commands on a run and its model: ask, compare, gate, eval, chat, serve, report, dashboard, export."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from modelwright.cli.options import JsonOption, RunArgument, StringList, TrustFileOption, add_commands, print_json
from modelwright.errors import GateClosed, UsageError
from modelwright.report.formatting import strip_control_chars

if TYPE_CHECKING:
    from modelwright.recipe.sections import EvaluateConfig
    from modelwright.report.dashboard import AskFn
    from modelwright.runs.folder import RunFolder
    from modelwright.stages.compare import RunModels


def register(app: typer.Typer) -> None:
    """Add these commands to the application."""
    add_commands(app, {"ask": ask, "compare": compare, "gate": gate, "eval": evaluate, "chat": chat, "serve": serve,
                       "report": report, "dashboard": dashboard, "export": export})  # fmt: skip
    add_commands(app, {"board": dashboard}, hidden=True)  # its name in version 0.1


def ask(
    run: RunArgument,
    question: Annotated[str, typer.Argument(help="The question.")],
    base: Annotated[bool, typer.Option("--base", help="Ask the model as it was before training.")] = False,
    both: Annotated[bool, typer.Option("--both", help="Ask before and after, one below the other.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Ask the model of a run a question. It gets the prompt of its training; the answer is streamed."""
    if not question.strip():
        raise UsageError("the question is empty; put it in quotes after the run")
    models = _open_models(run)
    names = ["before", "after"] if both else ["before"] if base else ["after"]
    answers: dict[str, str] = dict.fromkeys(names, "")
    for name in names:
        reply = models.generator(name).stream(models.messages(question))
        if both and not as_json:
            print(f"{name}: ", end="")
        for piece in reply:
            answers[name] += piece
            if not as_json:
                print(strip_control_chars(piece), end="", flush=True)
        if not as_json:
            print("\n" if both else "")
    if as_json:
        print_json({"question": question, **answers})


def _open_models(run: str) -> RunModels:
    """The models of a run before and after training, each loaded when first asked."""
    from modelwright.runs.caches import prepare_environment
    from modelwright.runs.folder import open_run

    folder = open_run(run)
    prepare_environment()
    from modelwright.stages.compare import RunModels

    return RunModels(folder)


def compare(
    run: RunArgument,
    other: Annotated[str | None, typer.Argument(metavar="[OTHER]", help="A second run to compare with.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Show answers before and after training, or compare two runs."""
    from modelwright.report.console import format_event
    from modelwright.runs.folder import open_run, read_json

    if other is not None:
        _compare_runs(run, other, as_json)
        return
    path = open_run(run).demo_outputs / "before_after.json"
    if not path.exists():
        raise UsageError(f"{run} has no before and after yet; finish it with: modelwright run")
    before_after = read_json(path)
    if as_json:
        print_json({key: before_after[key] for key in ("metrics", "answers", "notice")})
        return
    print(format_event({"event": "answers", **before_after}))


def _compare_runs(run: str, other: str, as_json: bool) -> None:
    from modelwright.report.history import read_history
    from modelwright.report.view import compare_runs, comparison_lines, load_run_view
    from modelwright.runs.folder import open_run

    folders = open_run(run), open_run(other)
    comparison = compare_runs(*(load_run_view(folder, read_history(folder)) for folder in folders))
    print_json(comparison.as_json()) if as_json else print("\n".join(comparison_lines(comparison)))


def gate(
    run: RunArgument,
    stage: Annotated[str | None, typer.Argument(help="One stage; default: every stage that was evaluated.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Judge the saved metrics again by the limits in RUN/recipe.yaml. Nothing is trained."""
    from modelwright.stages.gate import rejudge_run

    verdicts = rejudge_run(run, stage)
    if as_json:
        print_json({verdict.stage: verdict.as_json() for verdict in verdicts})
    else:
        for verdict in verdicts:
            print(verdict.message)
    if not all(verdict.open for verdict in verdicts):
        raise typer.Exit(GateClosed.exit_code)


def chat(
    run: RunArgument,
    base: Annotated[bool, typer.Option("--base", help="Chat with the model as it was before training.")] = False,
) -> None:
    """Chat with the model of a run. /help lists the commands; Ctrl-C stops an answer, Ctrl-D or /quit ends the chat."""
    models = _open_models(run)
    generator = models.generator("before" if base else "after")
    start = models.messages("")[:-1]
    messages = list(start)
    print(f"{models.recipe.name}, {'before' if base else 'after'} training; /help lists the commands, /quit ends")
    while True:
        line = _read_line()
        if line in (None, "/quit", "/exit"):
            print()
            return
        if not line:
            continue
        if line.startswith("/"):
            start, messages = _chat_command(line, start, messages)
            continue
        conversation = [*messages, {"role": "user", "content": line}]
        try:
            reply = generator.stream(conversation)
        except UsageError as error:
            print(f"{error}, or start a new conversation with /reset")
            continue
        answer = ""
        try:
            for piece in reply:
                answer += piece
                print(strip_control_chars(piece), end="", flush=True)
        except KeyboardInterrupt:
            print(" … stopped")
        else:
            print("" if reply.finish_reason == "stop" else " …")
        messages = [*conversation, {"role": "assistant", "content": answer}]


CHAT_HELP = """/reset         start a new conversation
/system TEXT   set the system prompt, and start a new conversation; without TEXT: show it
/history       show the conversation
/quit          end, as does Ctrl-D
Ctrl-C         stop an answer"""


def _read_line() -> str | None:
    """One line of the user, None at the end; on a terminal with editing, and earlier lines by the arrow keys."""
    if not sys.stdin.isatty():
        print("> ", end="", flush=True)
        line = sys.stdin.readline()
        return line.strip() if line else None
    import readline  # noqa: F401 (gives input() its editing)

    try:
        return input("> ").strip()
    except EOFError:
        return None


Messages = list[dict[str, str]]


def _chat_command(line: str, start: Messages, messages: Messages) -> tuple[Messages, Messages]:
    """Obey a command; returns the messages of a new conversation, and those of the current one."""
    command, _, text = line.partition(" ")
    if command in ("/reset", "/new"):
        print("new conversation")
        return start, list(start)
    if command == "/system" and text.strip():
        print("new conversation with this system prompt")
        start = [{"role": "system", "content": text.strip()}]
        return start, list(start)
    if command in ("/history", "/system"):
        shown = messages if command == "/history" else [each for each in start if each["role"] == "system"]
        lines = [f"{each['role']}: {strip_control_chars(each['content'])}" for each in shown]
        print("\n".join(lines) or "nothing yet")
    else:
        print(CHAT_HELP if command == "/help" else f"there is no command {command}; /help lists them")
    return start, messages


def serve(
    run: RunArgument,
    base: Annotated[bool, typer.Option("--base", help="Serve the model as it was before training.")] = False,
    host: Annotated[str, typer.Option("--host", help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", help="Port to listen on; 0 takes a free one.")] = 8000,
    api_key: Annotated[
        str | None, typer.Option("--api-key", help="The key clients must send; default: a random one.")
    ] = None,
    compiles: Annotated[
        bool, typer.Option("--compile/--no-compile", help="On a GPU, compile the layers first.")
    ] = True,
) -> None:
    """Serve the model of a run to OpenAI-style clients. For production, give its folder to vLLM."""
    from modelwright.report.http_guard import listen
    from modelwright.runs.folder import open_run

    open_run(run)
    with listen(host, port) as listener:  # before the model is loaded: a port in use is reported at once
        models = _open_models(run)
        from modelwright.serve.openai_server import ServedModel, application

        generator = models.generator("before" if base else "after")
        if compiles and generator.decoder.can_compile:
            print("compiling the model's layers, about 20 s; --no-compile leaves it out", file=sys.stderr, flush=True)
            generator.decoder.compile_for(math.inf)
        served = ServedModel(models.recipe.name, generator, models.system_prompt, api_key)
        banner = f"base_url  {listener.url}/v1\napi_key   {served.api_key}\nmodel     {served.name}"
        try:
            listener.serve(application(served, listener.hosts), banner)
        finally:
            generator.decoder.cancel_all()  # its thread ends with the current step


def evaluate(
    target: Annotated[
        str, typer.Argument(metavar="RUN|MODEL", help="A run, one of its models or checkpoints, or any model.")
    ],
    text: Annotated[str | None, typer.Option("--text", help="Raw text: loss, perplexity, bits per byte.")] = None,
    multiple_choice: Annotated[
        str | None, typer.Option("--multiple-choice", help="Questions with options: accuracy by log-likelihood.")
    ] = None,
    prompts: Annotated[StringList, typer.Option("--prompt", help="Prompt to complete; repeatable.")] = None,
    tasks: Annotated[StringList, typer.Option("--task", help="A task of lm-eval; repeatable.")] = None,
    trust_file: TrustFileOption = None,
    as_json: JsonOption = False,
) -> None:
    """Evaluate all models of a run, a checkpoint, or any model."""
    from modelwright.recipe.sections import EvaluateConfig
    from modelwright.report.console import format_event
    from modelwright.runs.caches import prepare_environment

    prepare_environment()
    config = EvaluateConfig(
        perplexity_text=text, multiple_choice=multiple_choice, completion_prompts=prompts or [], tasks=tasks or []
    )
    results = _evaluate(target, config, trust_file or ())
    if as_json:
        print_json(results)
        return
    for name, result in results.items():
        print(format_event({"event": "evaluate_result", "model": name, **result}))
    if len(results) > 1:
        models = {name: result["metrics"] for name, result in results.items()}
        print("\n" + (format_event({"event": "evaluate_table", "models": models}) or ""))


def _evaluate(target: str, config: EvaluateConfig, trusted_files: Sequence[str]) -> dict[str, Any]:
    """Metrics by model: every stage of a run, one of its models or checkpoints, or any model."""
    from modelwright.recipe.sections import EMBEDDED_MODEL
    from modelwright.runs.folder import open_run

    path = Path(target).resolve()  # best_model and last_model are links to the model of a stage
    depth = next((number for number, pattern in enumerate(("stages/*/model", "stages/*/checkpoints/*"), 2)
                  if path.match(pattern) and path.is_dir()), None)  # fmt: skip
    try:
        run = open_run(str(path.parents[depth]) if depth else target)
    except UsageError:
        run = None
    hub_id = r"\w[\w.-]*/(?!(checkpoint|step)-\d+$)[\w.-]+"
    by_name = target == EMBEDDED_MODEL or (re.fullmatch(hub_id, target) and not path.parent.exists())
    if run is None and not (config.is_configured or by_name or (path / "config.json").is_file()):
        wants = "a run, its stages/STAGE/model or stages/STAGE/checkpoints/step-N, a model folder or a hub id"
        raise UsageError(f"{target} is no model; eval wants {wants}")
    from modelwright.stages import evaluate as stage

    if run is None:
        return {target: stage.evaluate_folder(target, config)}
    return stage.evaluate_run(run, config, trusted_files, path if depth else None)


def report(run: RunArgument, as_json: JsonOption = False) -> None:
    """Regenerate a run's report.html, one self-contained page."""
    from modelwright.report import html
    from modelwright.runs.folder import open_run

    folder = open_run(run)
    folder.reject_unsafe_files()
    path = html.write_report(folder)
    print_json({"report": str(path), "bytes": path.stat().st_size}) if as_json else print(path)


def dashboard(
    runs: Annotated[list[str] | None, typer.Argument(metavar="[RUN]...", help="Runs; default: all in runs/.")] = None,
    port: Annotated[int, typer.Option("--port", help="Port on 127.0.0.1; 0 takes a free one.")] = 0,
) -> None:
    """Show runs live in a browser on this machine. Curves as they grow, runs compared, a question box."""
    from modelwright.report.dashboard import Dashboard, RunIndex
    from modelwright.report.http_guard import listen
    from modelwright.runs.caches import prepare_environment
    from modelwright.runs.folder import RunFolder, open_run

    selected = tuple(open_run(run) for run in runs or ())
    for path in () if selected else sorted(Path("runs").glob("*/journal.jsonl")):
        if problem := RunFolder(path.parent).format_problem():
            print(f"not shown: {problem}", file=sys.stderr)
    with listen("127.0.0.1", port) as listener:
        prepare_environment()
        app = Dashboard(RunIndex(selected, Path("runs"), {}), make_ask_handler())
        listener.serve(app.application(listener.hosts), f"{listener.url}/{app.token}/")


def make_ask_handler() -> AskFn:
    """Answer questions with a run's models, loaded at its first question and kept until another run is asked."""
    loaded: dict[str, RunModels] = {}

    def handle_question(folder: RunFolder, question: str) -> Iterator[tuple[str, str]]:
        from modelwright.stages.compare import RunModels

        name = str(folder.path)
        if name not in loaded:
            models = RunModels(folder)
            loaded.clear()
            loaded[name] = models
        return loaded[name].stream_both(question)

    return handle_question


def export(
    run: RunArgument,
    export_format: Annotated[
        str, typer.Option("--format", help="hf, merged (an adapter), gguf, or pth (images).")
    ] = "hf",
    outtype: Annotated[str, typer.Option("--outtype", help="For gguf: f16 or q8_0.")] = "f16",
    dtype: Annotated[
        str | None, typer.Option("--dtype", help="For hf and merged: bf16, fp16 or fp32; default: as trained.")
    ] = None,
    output: Annotated[str | None, typer.Option("--output", "-o", help="Folder; default: RUN/exports/FORMAT.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Export a run's model with its model card and SHA-256 sums."""
    from modelwright.runs.caches import prepare_environment
    from modelwright.stages import export as stage

    request = stage.check_export(run, export_format, outtype, output, dtype)
    if request.warning:
        print(strip_control_chars(request.warning), file=sys.stderr)
    prepare_environment()
    exported = stage.export(request)
    if as_json:
        print_json(stage.as_json(exported))
        return
    for name, digest in exported.files.items():
        print(f"{digest[:16]}  {name}")
    if exported.logit_comparison:
        print(stage.describe_logit_comparison(exported.logit_comparison, outtype))
    print(exported.path)
