"""The verbs that keep a model at hand: chat, serve."""

from __future__ import annotations

from typing import Annotated

import typer

Run = Annotated[str, typer.Argument(metavar="RUN", help="A run folder, or its name under runs/.")]


def register(app: typer.Typer) -> None:
    """Add the verbs to the command."""
    for verb in (chat, serve):
        app.command(verb.__name__)(verb)


def chat(
    run: Run,
    base: Annotated[bool, typer.Option("--base", help="Talk to the model as it was before training.")] = False,
) -> None:
    """Talk with the model of a run. An empty line or /quit ends it, /new begins anew."""
    import sys

    from modelwright.errors import UsageError
    from modelwright.report.lines import quiet
    from modelwright.runs.caches import prepare_environment
    from modelwright.runs.folder import open_run

    folder = open_run(run)
    prepare_environment()
    from modelwright.stages.answer import Asker

    asker = Asker(folder)
    answerer = asker.answerer("before" if base else "after")
    messages = asker.messages("")[:-1]
    while True:
        print("> ", end="", flush=True)
        line = sys.stdin.readline().strip()
        if line in ("", "/quit"):
            print()
            return
        if line == "/new":
            messages = asker.messages("")[:-1]
            continue
        asked = [*messages, {"role": "user", "content": line}]
        try:
            reply = answerer.reply(asked)
        except UsageError as error:
            print(f"{error}, or begin anew with /new")
            continue
        answer = ""
        for piece in reply:
            answer += piece
            print(quiet(piece), end="", flush=True)
        print("" if reply.finish == "stop" else " …")
        messages = [*asked, {"role": "assistant", "content": answer}]


def serve(
    run: Run,
    base: Annotated[bool, typer.Option("--base", help="Serve the model as it was before training.")] = False,
    host: Annotated[str, typer.Option("--host", help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", help="Port to listen on; 0 takes a free one.")] = 8000,
    key: Annotated[
        str | None, typer.Option("--key", help="The key clients must send; without it, a random one.")
    ] = None,
) -> None:
    """Serve the model of a run to OpenAI-style clients. For production, give its folder to vLLM."""
    from modelwright.report.guard import listen
    from modelwright.runs.caches import prepare_environment
    from modelwright.runs.folder import open_run

    folder = open_run(run)
    prepare_environment()
    with listen(host, port) as place:  # first: a port that is taken is told before a model is loaded
        from modelwright.serve.server import Served, application
        from modelwright.stages.answer import Asker

        asker = Asker(folder)
        served = Served(asker.recipe.name, asker.answerer("before" if base else "after"), asker.system_prompt, key)
        hello = f"base_url  {place.url}/v1\napi_key   {served.key}\nmodel     {served.name}"
        place.serve(application(served, place.hosts), hello)
