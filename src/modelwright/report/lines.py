"""Say a journal event in one line, for logs, pipes and files."""

from __future__ import annotations

from collections.abc import Callable

from modelwright.runs.journal import Event


def line_of(event: Event) -> str | None:
    """The event as a line, or None where a line would only repeat another."""
    writer = LINES.get(event["event"])
    return writer(event) if writer else None


def unit_of(event: Event) -> str:
    """What a step's speed counts."""
    return "images" if event["stage"] == "classify" else "tok"


def step_line(event: Event) -> str:
    """Everything about a step that a person scans a log for."""
    speed, left, memory = event.get("tokens_per_second"), event.get("eta_seconds"), event.get("memory_bytes")
    parts = [
        f"{event['stage']} step {event['step']}/{event['steps']}",
        f"loss {number(event['loss'])}",
        f"grad {number(event['grad_norm'])}",
        f"lr {event['learning_rate']:.2e}",
        f"{speed:,.0f} {unit_of(event)}/s" if speed else "",
        f"mfu {event['mfu']:.1%}" if event.get("mfu") else "",
        f"mem {memory / 1e9:.1f} GB" if memory else "",
        f"eta {duration(left)}" if left is not None else "",
        "" if event["health"] == "ok" else f"[{event['health']}]",
    ]
    return "  ".join(part for part in parts if part)


def number(value: float | None) -> str:
    """A metric with four digits; what was no number is said so."""
    return "not finite" if value is None else f"{value:.4g}"


def duration(seconds: float) -> str:
    """Seconds as a person says them: 45 s, 3 min 20 s, 2 h 05 min."""
    whole = round(seconds)
    if 0 < seconds < 1:
        return f"{seconds:.1f} s"
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def counted(count: float, noun: str) -> str:
    """A number with its noun: 1 step, 2 steps."""
    return f"{count:,.0f} {noun}{'' if count == 1 else 's'}"


def _data(event: Event) -> str:
    if "classes" in event:
        rows = f"{event['train_rows']:,} images to train on, {event['held_out_rows']:,} held out"
        return f"data: {event['source']}: {rows}, {len(event['classes'])} classes"
    if "packed" in event:
        packed, held_out = event["packed"], event["held_out"]
        return (
            f"data: {event['source']}: {packed['rows']:,} rows of {packed['length']:,} tokens to train on "
            f"({packed['documents']:,} documents, {packed['lost_tokens']:,} tokens left over), "
            f"{held_out['rows']:,} held out, {event['bytes_per_token']:g} bytes a token"
        )
    train, held_out = event["train"], event["held_out"]
    cut = f", {train['lost_tokens']} tokens cut from {train['truncated_rows']} rows" if train["truncated_rows"] else ""
    packed = f" packed into {event['packed_rows']}" if event.get("packed_rows") else ""
    repeated = event.get("repeated_rows") or 0
    repeats = f"; {repeated:,} rows to train on repeat another" if repeated else ""
    return (
        f"data: {event['source']}: {train['rows']} rows{packed} to train on ({train['trained_tokens']:,} of "
        f"{train['tokens']:,} tokens trained{cut}), {held_out['rows']} held out, "
        f"{event['groups_on_both_sides']} questions on both sides{repeats}"
    )


MARKS = {"done": "✔", "running": "▶", "closed": "✘", "accepted": "✔ (accepted)", "to come": "·"}
"""How a stage stands, in the line of all stages."""


def _flow(event: Event) -> str | None:
    if len(event["stages"]) < 2:
        return None
    return "pipeline: " + " → ".join(f"{each['stage']} {MARKS[each['state']]}" for each in event["stages"])


def _verdict(event: Event) -> str | None:
    if event["open"]:
        return str(event["letter"])
    return f"{event['letter']}; accepted: {plain(event['accepted'])}" if event.get("accepted") else None


def _evaluated(event: Event) -> str:
    measured = "  ".join(f"{name} {number(value)}" for name, value in event["metrics"].items())
    lines = [f"evaluated {event['model']}: {measured or 'nothing was measured'}"]
    return "\n".join([*lines, *(f"  {plain(s['prompt'])} … {plain(s['text'])}" for s in event["samples"])])


def _comparison(event: Event) -> str:
    """Models as rows, metrics as columns."""
    names = list(dict.fromkeys(name for metrics in event["models"].values() for name in metrics))
    rows = [["model", *names]]
    rows += [[model, *(number(found.get(name)) for name in names)] for model, found in event["models"].items()]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def _plan(event: Event) -> str:
    reasons = "".join(f"\nplan: {reason}" for reason in event["reasons"])
    steps = counted(event["steps"], "step")
    return f"plan: {steps}, {event['arithmetic']}, {event['precision']}, on {event['device']}{reasons}"


def _initialised(event: Event) -> str:
    size = f"{event['layers']} layers of width {event['hidden_size']}, {event['bytes'] / 1e9:,.2f} GB in fp32"
    lines = [f"model: {event['parameters'] / 1e6:,.2f} M parameters from scratch, {size}"]
    return "\n".join([*lines, *(f"foreseen: {line}" for line in event["plan"])])


def _evaluation(event: Event) -> str:
    when = "before the first step" if event["step"] == 0 else f"after step {event['step']}"
    bits = f", {event['eval_bits_per_byte']:.3f} bits per byte" if event.get("eval_bits_per_byte") is not None else ""
    accuracy = f", accuracy {event['eval_accuracy']:.2%}" if event.get("eval_accuracy") is not None else ""
    return f"{event['stage']} held-out loss {number(event['eval_loss'])}{accuracy}{bits} {when}"


def _answers(event: Event) -> str:
    if event.get("again"):
        questions = counted(len(event["answers"]), "question")
        return f"the answers to {questions} stand as they were: modelwright compare shows them"
    lines = []
    for pair in event["answers"]:
        lines += [
            "",
            f"question: {plain(pair['question'])}",
            f"  before: {plain(pair['before'])}",
            f"  after:  {plain(pair['after'])}",
        ]
    return "\n".join([*lines, "", plain(event["notice"])])


def plain(text: str) -> str:
    """Model text as one line that no terminal acts upon: control characters are taken out."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


def quiet(piece: str) -> str:
    """A piece of model text as it comes, its lines kept, without anything that a terminal acts upon."""
    return "".join(c if c.isprintable() or c == "\n" else " " for c in piece)


CONVERTING = " (converted on first use, about 40 s)"
LINES: dict[str, Callable[[Event], str | None]] = {
    "run": lambda e: f"run {e['folder']}: {e['recipe']}, {' → '.join(e['stages'])}",
    "gathering": lambda e: f"model: {e['model']}{CONVERTING if e.get('converts') else ''}",
    "model": lambda e: f"model: {e['share']}",
    "data": _data,
    "plan": _plan,
    "stage": lambda e: f"stage {e['stage']}",
    "initialised": _initialised,
    "resumed": lambda e: f"{e['stage']} goes on from step {e['step']} of {e['steps']}",
    "step": step_line,
    "evaluation": _evaluation,
    "saved": lambda e: f"{e['stage']} checkpoint of step {e['step']} saved and verified in {e['seconds']:.1f} s",
    "skipped": lambda e: e["message"],
    "note": lambda e: f"note: {e['message']}",
    "answering": lambda e: f"asking both models {counted(e['questions'], 'question')}",
    "answers": _answers,
    "mistakes": lambda e: f"accuracy {e['accuracy']:.2%} on {e['source']} (its mistakes: demo_outputs/mistakes.json)",
    "flow": _flow,
    "evaluating": lambda e: None,
    "evaluated": _evaluated,
    "comparison": _comparison,
    "verdict": _verdict,
    "stopped": lambda e: None,
}  # fmt: skip
"""How each event reads; the letter of a stop or a closed gate is written once, by the command itself."""
