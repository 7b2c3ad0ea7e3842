"""Show a run in the terminal: one line per event, a live panel, and the summary at the end."""

from __future__ import annotations

import json
import os
import shlex
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, TextIO

from modelwright.errors import replace_surrogates
from modelwright.recipe.stage_specs import throughput_unit
from modelwright.report import formatting
from modelwright.report.formatting import format_duration, format_float, format_table, pluralize, single_line
from modelwright.report.history import read_history
from modelwright.report.view import judged_answers
from modelwright.runs.folder import RunFolder
from modelwright.runs.journal import Event, EventListener, read

BARS = "▁▂▃▄▅▆▇█"
SHOWN_ANSWERS = 3
"""Answers that are printed of an evaluation, wrong ones first."""
LogFormat = Literal["auto", "plain", "json"]


@contextmanager
def console_watcher(log_format: LogFormat, out: TextIO | None = None) -> Iterator[EventListener]:
    """A listener of the journal that prints events: a live panel on a terminal, else lines, or JSON."""
    stream = out or sys.stdout
    if log_format == "json":
        yield lambda event: _print(json.dumps(event, ensure_ascii=False), stream)
    elif log_format == "auto" and stream.isatty():
        with _LivePanel(stream) as panel:
            yield panel.on_event
    else:
        yield lambda event: _print(format_event(event), stream)


def sparkline(values: list[float]) -> str:
    """Values as bars of eight heights."""
    low, high = min(values), max(values)
    span = (high - low) or 1.0
    return "".join(BARS[min(7, int((value - low) / span * 8))] for value in values)


def _print(line: str | None, stream: TextIO) -> None:
    if line is None:
        return
    try:
        print(replace_surrogates(line), file=stream, flush=True)
    except BrokenPipeError:  # as with `| head`: the run continues without output
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


ACTIVITIES: dict[str, Callable[[Event], str]] = {
    "loading": lambda e: "loading model and data",
    "plan": lambda e: "preparing the first step",
    "resumed": lambda e: "preparing the first step",
    "evaluating": lambda e: f"measuring the held-out rows, {e['fraction']:.0%} done",
    "evaluation": lambda e: "" if e["step"] else "preparing the first step",
    "sampling": lambda e: f"answering {pluralize(e['questions'], 'prompt')} before and after training",
    "evaluate_started": lambda e: f"evaluating the {e['model']} model",
    "step": lambda e: "measuring and saving" if e["step"] == e["steps"] else "",
}
"""What a run does after an event, where it is not the next step."""
SHOWN_WAIT_SECONDS = 2  # without an event, after which the panel counts them


class _LivePanel:
    """A panel that shows the last step and what is done now, drawn four times a second; other events are printed."""

    def __init__(self, stream: TextIO) -> None:
        from rich.console import Console
        from rich.live import Live

        self._console = Console(file=stream, highlight=False)
        self._journal: Path | None = None
        self._live = Live(console=self._console, refresh_per_second=4, transient=True)
        self._start_stage()

    def __enter__(self) -> _LivePanel:
        if os.environ.get("RANK", "0") == "0":
            self._activity = "loading libraries"
            self._live.update(self)
        self._live.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._live.__exit__(*error)

    def _start_stage(self) -> None:
        self._losses: deque[float] = deque(maxlen=32)  # fits on a line with both losses
        self._eval_losses: list[float] = []
        self._step: Event | None = None
        self._stage, self._activity = "", ""
        self._since = self._step_at = time.monotonic()

    def on_event(self, event: Event) -> None:
        """Show a step or what is done now, or print another event."""
        kind = event["event"]
        if kind == "run":
            self._journal = RunFolder(Path(event["folder"])).journal
        if kind == "loading":
            self._start_stage()
        if kind == "resumed":
            self._eval_losses = self._earlier_eval_losses(event)
        if kind == "evaluation" and event["eval_loss"] is not None:
            self._eval_losses.append(event["eval_loss"])
        if kind == "step":
            self._step, self._step_at = event, time.monotonic()
            if event["loss"] is not None:
                self._losses.append(event["loss"])
        if kind in ACTIVITIES:
            activity = ACTIVITIES[kind](event)
            if kind != "evaluating" or not self._activity.startswith(activity.partition(",")[0]):
                self._since = time.monotonic()
            self._stage, self._activity = event.get("stage", self._stage), activity
        self._live.update(self)
        if kind not in ("step", "evaluating") and (line := format_event(event)):
            self._console.print(line, markup=False)

    def _earlier_eval_losses(self, resumed: Event) -> list[float]:
        """The held-out losses of the resumed run up to its checkpoint, so that the best one is the best of all."""
        if self._journal is None:
            return []
        events = [event for event in read(self._journal) if event["event"] == "evaluation"]
        of_stage = [
            event for event in events if event["stage"] == resumed["stage"] and event["step"] <= resumed["step"]
        ]
        return [event["eval_loss"] for event in of_stage if event["eval_loss"] is not None]

    def __rich__(self) -> Any:
        from rich.console import Group
        from rich.panel import Panel
        from rich.text import Text

        if not (self._step or self._activity):
            return Text("")
        now = time.monotonic()
        waited = now - (self._since if self._activity or not self._step else self._step_at)
        count = format_duration(waited) if waited >= SHOWN_WAIT_SECONDS else ""
        since = f"{count} since step {self._step['step']}" if self._step and count else ""
        activity = f"{self._activity}  {count}" if self._activity else since
        lines = self._step_lines(self._step, now - self._since) if self._step else []
        lines += [Text(activity)] if activity else []
        subtitle = "Ctrl-C saves and stops" if self._stage else None
        return Panel(Group(*lines), title=self._stage or None, title_align="left", width=80, subtitle=subtitle)

    def _step_lines(self, event: Event, waited: float) -> list[Any]:
        from rich.align import Align
        from rich.progress_bar import ProgressBar
        from rich.text import Text

        losses, left = self._eval_losses, (event.get("eta_seconds") or 0.0) - (0.0 if self._activity else waited)
        head = f"step {event['step']}/{event['steps']}  epoch {event['epoch']:.2f}"
        head += f"  {format_duration(left)} left" if left >= 1 and event["step"] < event["steps"] else ""
        held_out = f"  held-out {format_float(losses[-1])} (best {format_float(min(losses))})" if losses else ""
        curve = sparkline(list(self._losses)) if self._losses else ""
        stats = f"lr {event['learning_rate']:.2e}  grad_norm {format_float(event['grad_norm'])}"
        stats = "  ".join([stats, *_throughput(event, "memory")])
        bar = ProgressBar(total=event["steps"], completed=event["step"], width=60)
        return [
            Text(head),
            Align.left(bar),  # a progress bar has no line break
            Text(f"loss {format_float(event['loss'])} {curve}{held_out}"),
            Text(stats, style="dim"),
        ]


def format_event(event: Event) -> str | None:
    """The event as a line; None for events that are not printed."""
    formatter = EVENT_FORMATTERS.get(event["event"])
    return formatter(event) if formatter else None


def format_step(event: Event) -> str:
    """One line of a step: loss, gradient norm, LR, throughput, memory, ETA, health."""
    eta_seconds = event.get("eta_seconds")
    parts = [
        f"{event['stage']} step {event['step']}/{event['steps']}",
        f"loss {format_float(event['loss'])}",
        f"grad_norm {format_float(event['grad_norm'])}",
        f"lr {event['learning_rate']:.2e}",
        *_throughput(event, "mem"),
        *([f"eta {format_duration(eta_seconds)}"] if eta_seconds else []),
        *([f"[{event['health']}]"] if event["health"] != "ok" else []),
    ]
    return "  ".join(parts)


def _throughput(event: Event, memory_label: str) -> list[str]:
    """Throughput, model FLOPs utilization, peak memory and the state of the GPUs at a step, where measured."""
    unit = throughput_unit(event["stage"])
    speed, mfu, memory = event.get(f"{unit}_per_second"), event.get("mfu"), event.get("peak_memory_bytes")
    parts = [f"{speed:,.0f} {'tok' if unit == 'tokens' else unit}/s"] if speed else []
    parts += [f"mfu {mfu:.1%}"] if mfu else []
    parts += [f"{memory_label} {memory / 1e9:.1f} GB"] if memory else []
    if event.get("gpu_utilization") is None:
        return parts
    watts, celsius = event["gpu_power_watts"], event["gpu_temperature"]
    return [*parts, f"gpu {event['gpu_utilization']:.0%} {watts:.0f} W {celsius:.0f} °C"]


def _format_data(event: Event) -> str:
    if "classes" in event:
        rows = f"{event['train_rows']:,} training images, {event['held_out_rows']:,} held out"
        return f"data: {event['source']}: {rows}, {len(event['classes'])} classes"
    if "packed" in event:
        packed, held_out = event["packed"], event["held_out"]
        return (
            f"data: {event['source']}: {packed['rows']:,} training rows of {packed['sequence_length']:,} tokens "
            f"({packed['documents']:,} documents, {packed['dropped_tokens']:,} tokens dropped), "
            f"{held_out['rows']:,} held out, {event['bytes_per_token']:g} bytes per token"
        )
    train, held_out = event["train"], event["held_out"]
    cut = (
        f", {train['truncated_tokens']} tokens cut from {train['truncated_rows']} rows"
        if train["truncated_rows"]
        else ""
    )
    packed = f" packed into {event['packed_rows']}" if event.get("packed_rows") else ""
    repeated = event.get("duplicate_rows") or 0
    duplicates = f"; {repeated:,} duplicate training rows" if repeated else ""
    return (
        f"data: {event['source']}: {train['rows']} training rows{packed} ({train['trained_tokens']:,} of "
        f"{train['tokens']:,} tokens trained{cut}), {held_out['rows']} held out, "
        f"{event['prompts_in_both_splits']} prompts in both splits{duplicates}"
    )


STAGE_MARKS = {"done": "✔", "running": "▶", "closed": "✘", "accepted": "✔ (accepted)", "pending": "·"}
"""State of a stage in the line of all stages."""


def _format_pipeline(event: Event) -> str | None:
    if len(event["stages"]) < 2:
        return None
    return "pipeline: " + " → ".join(f"{stage['stage']} {STAGE_MARKS[stage['state']]}" for stage in event["stages"])


def _format_verdict(event: Event) -> str | None:
    if event["open"]:
        return str(event["message"])
    return f"{event['message']}; accepted: {single_line(event['accepted'])}" if event.get("accepted") else None


def judged_metrics(metrics: Mapping[str, Any]) -> list[str]:
    """The metrics of judged answers; answers.score only where there are several verifiers."""
    names = [name for name in metrics if name.startswith("answers.")]
    return names if len(names) > 2 else names[:1]


def _format_evaluated(event: Event) -> str:
    metrics, judged, count = event["metrics"], judged_metrics(event["metrics"]), len(event.get("answers", ()))
    parts = [f"{name} {format_float(value)}" for name, value in metrics.items() if not name.startswith("answers.")]
    for name in judged:
        low, high = event["intervals"][name]
        answers = pluralize(event.get("judged", count), "answer")
        parts.append(f"{name} {metrics[name]:.1%} of {answers} (95 % interval {low:.1%} to {high:.1%})")
    lines = [f"evaluated {event['model']}: {'  '.join(parts) or 'nothing was measured'}"]
    for row in event.get("answers", ())[:SHOWN_ANSWERS]:
        right = row["scores"]["score"] == 1
        lines += [f"  {'✔ right' if right else '✘ wrong'}: {single_line(row['prompt'])}",
                  f"    answer:   {single_line(row['answer'])}",
                  *([] if right else [f"    expected: {single_line(row['reference'])}"])]  # fmt: skip
    return "\n".join([*lines, *(f"  {single_line(s['prompt'])} … {single_line(s['text'])}" for s in event["samples"])])


def _format_comparison(event: Event) -> str:
    """Models as rows, metrics as columns."""
    models = event["models"].items()
    names = list(dict.fromkeys(name for _, metrics in models for name in metrics))
    rows = [[model, *(format_float(metrics.get(name)) for name in names)] for model, metrics in models]
    return "\n".join(format_table([["model", *names], *rows]))


def _format_plan(event: Event) -> str:
    reasons = "".join(f"\nplan: {reason}" for reason in event["reasons"])
    steps = pluralize(event["steps"], "step")
    return f"plan: {steps}, {event['batch_arithmetic']}, {event['precision']}, on {event['device']}{reasons}"


def _format_initialized(event: Event) -> str:
    shape = f"{event['layers']} layers of width {event['hidden_size']}"
    size = f"{shape}, {formatting.format_bytes(event['bytes'])} in fp32"
    lines = [f"model: {event['parameters'] / 1e6:,.2f} M parameters from scratch, {size}"]
    return "\n".join([*lines, *(f"predicted: {line}" for line in event["plan"])])


def _format_evaluation(event: Event) -> str:
    when = "before the first step" if event["step"] == 0 else f"after step {event['step']}"
    bits = f", {event['eval_bits_per_byte']:.3f} bits per byte" if event.get("eval_bits_per_byte") is not None else ""
    accuracy = f", accuracy {event['eval_accuracy']:.2%}" if event.get("eval_accuracy") is not None else ""
    sources = [(name.partition(".")[2], event[name]) for name in event if name.startswith("eval_loss.")]
    by_source = f" ({', '.join(f'{name} {format_float(loss)}' for name, loss in sources)})" if sources else ""
    return f"{event['stage']} held-out loss {format_float(event['eval_loss'])}{by_source}{accuracy}{bits} {when}"


def _format_answers(event: Event) -> str:
    if event.get("cached"):
        questions = pluralize(len(event["answers"]), "prompt")
        return f"before/after samples unchanged ({questions}); see modelwright compare"
    lines = []
    for pair in event["answers"]:
        lines += ["", f"question: {single_line(pair['question'])}", f"  before: {single_line(pair['before'])}",
                  f"  after:  {single_line(pair['after'])}"]  # fmt: skip
    return "\n".join([*lines, "", single_line(event["notice"])])


CONVERTING_NOTE = " (converted on first use, about 40 s)"
EVENT_FORMATTERS: dict[str, Callable[[Event], str | None]] = {
    "run": lambda e: f"run {e['folder']}: {e['recipe']}, {' → '.join(e['stages'])}",
    "loading": lambda e: f"model: {e['model']}{CONVERTING_NOTE if e.get('converting') else ''}",
    "model": lambda e: f"model: {e['trainable_summary']}",
    "data": _format_data,
    "plan": _format_plan,
    "plan_revised": lambda e: _format_plan({**e, "reasons": [e["reason"]]}),
    "stage_started": lambda e: f"stage {e['stage']}",
    "model_initialized": _format_initialized,
    "resumed": lambda e: f"{e['stage']} resumed from step {e['step']} of {e['steps']}",
    "step": format_step,
    "evaluation": _format_evaluation,
    "evaluating": lambda e: f"{e['stage']} evaluating: {e['fraction']:.0%} of the held-out rows",
    "checkpoint_saved": lambda e: (
        f"{e['stage']} checkpoint of step {e['step']} saved and verified in {e['seconds']:.1f} s"
    ),
    "step_skipped": lambda e: e["message"],
    "note": lambda e: f"note: {e['message']}",
    "sampling": lambda e: f"sampling before/after answers to {pluralize(e['questions'], 'prompt')}",
    "answers": _format_answers,
    "misclassified": lambda e: f"misclassified images of {e['source']}: demo_outputs/mistakes.json",
    "stage_status": _format_pipeline,
    "evaluate_result": _format_evaluated,
    "evaluate_table": _format_comparison,
    "verdict": _format_verdict,
}  # fmt: skip
"""Lines by event; the message of a stop or a closed gate is printed by the command itself."""
SHELL_UNSAFE = str.maketrans('"`', "''", "$\\!")
"""Removes what a shell would interpret between double quotes."""
SUMMARY_METRICS = {"held-out loss": "eval_loss", "accuracy": "eval_accuracy", "style score": "style_score",
                   "words per answer": "answer_words", "answer_f1": "answer_f1"}  # fmt: skip


def run_summary(folder: RunFolder) -> str:
    """The lines printed at the end of a run: metrics before and after, verdict, time, paths, next commands."""
    history = read_history(folder)
    verdict = history.last_events.get("verdict", {})
    metrics, promoted = verdict.get("metrics", {}), verdict.get("open") or verdict.get("accepted")
    rows: list[tuple[str, Any]] = []
    for label, name in SUMMARY_METRICS.items():
        before, after = metrics.get(f"base_{name}"), metrics.get(name)
        if after is not None:
            change = f"  ({after / before - 1:+.1%})" if name == "eval_loss" and before else ""
            rows.append((label, f"{format_float(before)} → {format_float(after)}{change}"))
    for name in reversed(judged_metrics(metrics)):
        label, before = name.partition(".")[2].replace("_", " "), metrics.get(f"base_{name}")
        rows.insert(0, (label, (f"{before:.1%} → " if before is not None else "") + f"{metrics[name]:.1%}"))
    if judged := judged_answers(folder, verdict.get("stage", "")):
        first = judged.rows[0]
        texts = [first["prompt"], f"answer:   {first['answer']}", f"expected: {first['reference']}"]
        wrong = [] if first["right"] else zip(("a wrong answer", "", ""), map(single_line, texts), strict=True)
        rows[:0] = [("answers", judged.summary), *wrong]
    opened = "no gate" if verdict.get("thresholds") == 0 else "open"
    state = opened if verdict.get("open") else "closed" if verdict else "none: nothing was trained yet"
    accepted = f", accepted: {single_line(verdict['accepted'])}" if verdict.get("accepted") else ""
    rows.append(("verdict", f"{state}{accepted}"))
    unit = throughput_unit(verdict.get("stage", ""))
    trained = ", ".join(pluralize(metrics.get(f"{name}s", 0), name) for name in ("step", unit.removesuffix("s")))
    done = history.last_events.get("done")
    since_start = f"; {format_duration(done['seconds'])} for this command" if done else ""
    rows.append(("time", f"{format_duration(metrics.get('seconds', 0))} for {trained}{since_start}"))
    if (goodput := history.time_breakdown.goodput) is not None:
        rows.append(("goodput", f"{goodput:.0%} of the run's time went into steps whose result is kept"))
    if verdict and not promoted:
        rows.append(("model", f"{folder.model(verdict['stage'])} (not promoted)"))
    best_label = "model" if promoted else "best model"
    paths = {best_label: folder.best_model, "before / after": folder.demo_outputs / "before_after.md",
             "report": folder.report}  # fmt: skip
    rows += [(label, path) for label, path in paths.items() if path.exists()]
    run_path = shlex.quote(str(folder.path))
    commands = []
    if history.answers and history.answers["answers"]:
        question = single_line(history.answers["answers"][0]["question"]).translate(SHELL_UNSAFE)
        commands = [f'ask {run_path} "{question}" --both', f"compare {run_path}"]
    lines = ["", f"── {folder.path} " + "─" * max(0, 66 - len(str(folder.path)))]
    lines += [f"  {label:<16} {text}" for label, text in rows]
    return "\n".join(
        [*lines, "", "next:", *(f"  modelwright {command}" for command in [*commands, f"gate {run_path}"])]
    )
