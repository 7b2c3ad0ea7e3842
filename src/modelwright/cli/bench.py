"""The verb that measures: bench, against a peer on the same machine."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Annotated

import typer

Save = Annotated[bool, typer.Option("--save", help="Keep the figures in bench/results.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")]


def register(app: typer.Typer) -> None:
    """Add the verb to the command."""
    bench = typer.Typer(help="Measure against a peer, in one run on this machine.", no_args_is_help=True)
    for more in (start, faults, reliability, scale, pictures, vision):
        bench.command(more.__name__)(more)
    bench.command("sft")(sft)
    bench.command("plan")(plan)
    bench.command("survival")(survival)
    bench.command("speed")(speed)
    bench.command("data")(data)
    bench.command("data-trials")(data_trials)
    bench.command("stages")(stages)
    app.add_typer(bench, name="bench")


def faults(
    only: Annotated[list[str] | None, typer.Option("--only", help="One fault, such as rank_killed.")] = None,
    save: Save = False,
    as_json: Json = False,
) -> None:
    """What is done to two nodes, and how long until they train again, beside torchrun; needs root."""
    from modelwright.bench import faults as benchmark
    from modelwright.runs.caches import prepare_environment

    prepare_environment()
    _measure(benchmark, "faults", save, as_json, only=only or ())


def reliability(
    only: Annotated[
        list[str] | None, typer.Option("--only", metavar="ID", help="Only these, as R3 or R1-R11; may be given often.")
    ] = None,
    skip: Annotated[
        list[str] | None, typer.Option("--skip", metavar="ID", help="Not these; may be given often.")
    ] = None,
    seed: Annotated[int | None, typer.Option("--seed", help="What is drawn at random, again.")] = None,
    smoke: Annotated[bool, typer.Option("--smoke", help="Few trials of each, without peers.")] = False,
    peers: Annotated[bool, typer.Option("--peers/--no-peers", help="Do the same to the HF Trainer.")] = True,
    listed: Annotated[
        bool, typer.Option("--list", help="Only list the faults, and about how long each takes.")
    ] = False,
    save: Save = False,
    as_json: Json = False,
) -> None:
    """What a run survives: every fault that this machine can inject, beside the HF Trainer and torchrun."""
    import json
    import sys
    from contextlib import redirect_stdout

    from modelwright.bench import results
    from modelwright.bench.reliability import scorecard
    from modelwright.runs.caches import prepare_environment

    prepare_environment()
    chosen = scorecard.choose(only or (), skip or ())
    if listed:
        print("\n".join(scorecard.listing()))
        return
    with redirect_stdout(sys.stderr):
        figures = scorecard.measure(chosen, scorecard.SEED if seed is None else seed, smoke, peers)
    measured = results.result("reliability", figures)
    print(json.dumps(measured, ensure_ascii=False) if as_json else "\n".join(scorecard.lines(figures)))
    if save:
        print(f"kept in {scorecard.keep(measured)}", file=sys.stderr)


def scale(
    ranks: Annotated[
        list[int] | None, typer.Option("--ranks", min=1, help="CPU ranks to try; may be given often.")
    ] = None,
    cards: Annotated[list[str] | None, typer.Option("--card", help="A card on paper; may be given often.")] = None,
    only_paper: Annotated[bool, typer.Option("--paper", help="Only the arithmetic; nothing is trained.")] = False,
    save: Save = False,
    as_json: Json = False,
) -> None:
    """How much faster several devices are: measured with CPU ranks, on paper for GPUs and their links."""
    from modelwright.bench import scale as benchmark
    from modelwright.runs.caches import prepare_environment

    prepare_environment()
    chosen = [benchmark.card(name) for name in cards or benchmark.CARDS]
    _measure(benchmark, "scale", save, as_json, ranks=() if only_paper else ranks or benchmark.RANKS, cards=chosen)


def pictures(
    run: Annotated[str, typer.Argument(metavar="RUN", help="The run that is photographed.")] = "runs/quickstart",
    as_json: Json = False,
) -> None:
    """Make the pictures of docs/pictures anew: a run's report and the terminal."""
    import json

    from modelwright.bench import pictures as camera
    from modelwright.runs.folder import open_run

    told = camera.take(open_run(run))
    print(json.dumps(told) if as_json else "\n".join(f"{size:>9,}  {name}" for name, size in told["bytes"].items()))


def start(save: Save = False, as_json: Json = False) -> None:
    """CPU-seconds of help and of a typing mistake, beside the command of TRL."""
    from modelwright.bench import start as benchmark

    _measure(benchmark, "start", save, as_json)


def sft(save: Save = False, as_json: Json = False) -> None:
    """Tokens per second of our SFT loop, beside TRL's SFTTrainer."""
    from modelwright.bench import sft as benchmark
    from modelwright.runs.caches import prepare_environment

    prepare_environment()
    _measure(benchmark, "sft", save, as_json)


def data(
    only: Annotated[
        list[str] | None, typer.Option("--only", help="near_duplicates, quality, tokens or gpu; may be given often.")
    ] = None,
    datatrove: Annotated[
        str | None, typer.Option("--datatrove", metavar="PYTHON", help="A Python that has datatrove.")
    ] = None,
    save: Save = False,
    as_json: Json = False,
) -> None:
    """Near-duplicates, tokenizing, packing and reading, beside the peers."""
    from modelwright.bench import data as benchmark

    _measure(benchmark, "data", save, as_json, only=only or (), datatrove=datatrove)


def data_trials(
    gigabytes: Annotated[
        list[float] | None, typer.Option("--gigabytes", help="Measure memory on so much; may be given often.")
    ] = None,
    megabytes: Annotated[float, typer.Option("--megabytes", help="Text for the kills; 0 leaves them out.")] = 100.0,
    save: Save = False,
    as_json: Json = False,
) -> None:
    """Kill a preparation at twenty random moments, vary its workers, and measure its memory."""
    from modelwright.bench import data_trials as benchmark

    name = "data-trials" if megabytes else "data-memory"
    _measure(benchmark, name, save, as_json, gigabytes=gigabytes or (), megabytes=megabytes)


def plan(
    only: Annotated[list[str] | None, typer.Option("--only", metavar="WORD", help="Settings with this word.")] = None,
    into: Annotated[Path | None, typer.Option("--into", help="Write runs.json here after each setting.")] = None,
    again: Annotated[
        list[Path] | None, typer.Option("--from", help="Judge a runs.json again, or several, and measure nothing.")
    ] = None,
    save: Save = False,
    as_json: Json = False,
) -> None:
    """Memory and tokens per second as planned, beside what this machine measures."""
    import json
    import sys

    from modelwright.bench import plan as benchmark
    from modelwright.bench import results
    from modelwright.runs.caches import prepare_environment

    prepare_environment()
    if into:
        into.mkdir(parents=True, exist_ok=True)
    figures = benchmark.judged(benchmark.read_runs(again)) if again else benchmark.measure(only or (), into)
    measured = results.result("plan", figures)
    if into:
        (into / "plan.json").write_text(json.dumps(measured, indent=1), encoding="utf-8")
    print(json.dumps(measured, ensure_ascii=False) if as_json else "\n".join(benchmark.lines(figures)))
    if save:
        kept = benchmark.keep(figures)
        print(f"kept in {results.save(measured)}; the coefficients in {kept}", file=sys.stderr)


def survival(
    scene: Annotated[str, typer.Option("--scene", help="twin, smollm3 (wants a large GPU) or tiny.")] = "twin",
    data: Annotated[Path | None, typer.Option("--data", help="Rows with full-question and answer.")] = None,
    save: Save = False,
    as_json: Json = False,
) -> None:
    """Rows per second of the survival fine-tune, frozen layers kept, beside TRL's SFTTrainer."""
    from modelwright.bench import survival as benchmark
    from modelwright.errors import UsageError
    from modelwright.runs.caches import prepare_environment

    prepare_environment()
    if scene not in benchmark.SCENES:
        raise UsageError(f"--scene is {scene!r}; it wants one of {', '.join(benchmark.SCENES)}")
    _measure(benchmark, "survival", save, as_json, scene=scene, data=data)


def speed(
    work: Annotated[
        str, typer.Option("--work", help="135m, 0.5b, fp32, 6b, lora, sft, dpo (for a large GPU), start, or tiny.")
    ] = "",
    ways: Annotated[list[str] | None, typer.Option("--way", metavar="WORD", help="Ways with this word.")] = None,
    steps: Annotated[int, typer.Option("--steps", min=1, help="Steps of each way; for start, between saves.")] = 12,
    rows: Annotated[
        Path | None,
        typer.Option("--rows", "--tokens", help="An .npy of tokens of real text; for sft, questions and answers."),
    ] = None,
    kernels: Annotated[bool, typer.Option("--kernels", help="Tell what the device does in a step.")] = False,
    save: Save = False,
    as_json: Json = False,
) -> None:
    """Tokens, rows or pairs a second on one GPU, beside HF Trainer, TRL and torchtitan; time to the first step."""
    from modelwright.bench import speed as benchmark
    from modelwright.errors import UsageError
    from modelwright.runs.caches import prepare_environment

    prepare_environment()
    if work and work not in benchmark.KNOWN:
        raise UsageError(f"--work is {work!r}; it wants one of {', '.join(benchmark.KNOWN)}")
    if save:
        benchmark.may_be_kept(work)  # before it is measured, for which some works take long
    _measure(benchmark, "speed", save, as_json, work=work, ways=ways or (), steps=steps, rows=rows, kernels=kernels)


def vision(
    recipe: Annotated[str, typer.Argument(help="A recipe that classifies images.")] = "resnet18-cifar10",
    seeds: Annotated[int, typer.Option("--seeds", min=1, help="Runs, each with a seed of its own.")] = 3,
    batches: Annotated[int, typer.Option("--batches", min=0, help="Batches of the plain script; 0: without it.")] = 400,
    sets: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Set one setting.")] = None,
    save: Save = False,
    as_json: Json = False,
) -> None:
    """Accuracy, seconds and seconds an epoch of an image recipe, beside the plain script."""
    from modelwright.bench import vision as benchmark
    from modelwright.runs.caches import prepare_environment

    prepare_environment()
    _measure(benchmark, "vision", save, as_json, recipe=recipe, seeds=seeds, batches=batches, sets=sets or ())


def stages(
    recipe: Annotated[str, typer.Argument(help="A recipe with an architecture.")] = "llama-7b",
    steps: Annotated[int, typer.Option("--steps", min=1, help="Steps of each stage.")] = 20,
    precision: Annotated[list[str] | None, typer.Option("--precision", help="May be given often.")] = None,
    only: Annotated[list[str] | None, typer.Option("--only", help="One stage; may be given often.")] = None,
    sets: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Set one setting.")] = None,
    save: Save = False,
    as_json: Json = False,
) -> None:
    """Tokens per second and memory of every training stage of a recipe, at its real shapes."""
    import json
    import sys

    from modelwright.bench import results
    from modelwright.bench import stages as benchmark
    from modelwright.runs.caches import prepare_environment

    prepare_environment()
    figures = benchmark.measure(recipe, steps, precision or ["auto"], sets or (), only or ())
    measured = results.result("stages", figures)
    print(json.dumps(measured, ensure_ascii=False) if as_json else "\n".join(benchmark.lines(figures)))
    if save:
        print(f"kept in {results.save(measured)}", file=sys.stderr)


def _measure(benchmark: ModuleType, name: str, save: bool, as_json: bool, **wishes: object) -> None:
    """Measure, tell and keep."""
    import json
    import sys
    from contextlib import redirect_stdout

    from modelwright.bench import results

    with redirect_stdout(sys.stderr):  # the peer prints while it trains; ours is the only object on stdout
        figures = benchmark.measure(**wishes)
    measured = results.result(name, figures)
    print(json.dumps(measured, ensure_ascii=False) if as_json else "\n".join(benchmark.lines(figures)))
    if save:
        measured["figures"] = getattr(benchmark, "kept_with", lambda found: found)(figures)
        print(f"kept in {results.save(measured)}", file=sys.stderr)
