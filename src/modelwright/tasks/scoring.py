"""Score a language model: loss of texts and shards, multiple choice, and lm-eval tasks."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from modelwright.data.chat import TokenizedRow
from modelwright.data.multiple_choice import MultipleChoiceQuestion
from modelwright.data.shards import PackedDataset
from modelwright.data.tokenizer import DocumentTokenizer
from modelwright.errors import ModelError, first_line
from modelwright.models.attention import compute_logits, hidden_states
from modelwright.recipe.sections import TASK_FILE_SUFFIXES
from modelwright.tasks.batching import collate_examples

SCORING_BATCH = 8
"""Rows that are measured at once."""
Metrics = dict[str, float | None]


def score_texts(model: Any, encoder: DocumentTokenizer, texts: Sequence[str], max_length: int) -> Metrics:
    """Loss, perplexity and bits per byte of documents; long ones in pieces."""
    chunks: list[TokenizedRow] = []
    for text in texts:
        tokens = encoder.encode_batch([text]).tokens.astype(np.int32)
        token_chunks = [tokens[start : start + max_length] for start in range(0, len(tokens), max_length)]
        chunks += [TokenizedRow(chunk, np.ones(len(chunk), dtype=np.bool_)) for chunk in token_chunks if len(chunk) > 1]
    chunks.sort(key=len)
    nll_sum, token_count = 0.0, 0
    for start in range(0, len(chunks), SCORING_BATCH):
        micro_batch = collate_examples([[chunk] for chunk in chunks[start : start + SCORING_BATCH]])
        nll_sum -= float(_next_token_logps(model, micro_batch.inputs).sum())
        token_count += micro_batch.trained_tokens
    return _as_metrics(nll_sum, token_count, sum(len(text.encode()) for text in texts))


def score_shards(model: Any, shards: PackedDataset, max_length: int, max_rows: int) -> Metrics:
    """The same of packed rows, the first ones where there are many."""
    length = math.gcd(shards.sequence_length, max_length)
    rows = min(shards.rows(length), max_rows * (max_length // length))
    nll_sum, token_count = 0.0, 0
    for start in range(0, rows, SCORING_BATCH):
        tokens, positions = shards.get_rows(range(start, min(start + SCORING_BATCH, rows)), length)
        has_next = np.zeros(tokens.shape, dtype=np.bool_)
        has_next[:, :-1] = positions[:, 1:] != 0  # the first word of a document has nothing before it
        inputs = {"tokens": tokens, "positions": positions, "loss_positions": np.flatnonzero(has_next)}
        logps = _next_token_logps(model, {name: torch.from_numpy(value) for name, value in inputs.items()})
        nll_sum, token_count = nll_sum - float(logps.sum()), token_count + len(logps)
    # the bytes of what was foretold, as a share of all bytes by the share of its tokens
    return _as_metrics(nll_sum, token_count, shards.text_bytes * token_count / max(1, shards.tokens))


def score_choices(model: Any, tokenizer: Any, questions: Sequence[MultipleChoiceQuestion], max_length: int) -> Metrics:
    """How often the right option is the likeliest, by the whole option and by each of its bytes."""
    rows = [
        _tokenize_option(tokenizer, item.prompt, option, max_length) for item in questions for option in item.choices
    ]
    order = sorted(range(len(rows)), key=lambda row: len(rows[row]))
    option_logps = np.zeros(len(rows))
    for start in range(0, len(rows), SCORING_BATCH):
        batch_rows = order[start : start + SCORING_BATCH]
        micro_batch = collate_examples([[rows[row]] for row in batch_rows])
        logps = _next_token_logps(model, micro_batch.inputs)
        owners = micro_batch.inputs["loss_positions"] // micro_batch.inputs["tokens"].shape[1]
        sums = torch.zeros(len(batch_rows), dtype=torch.float64).index_add_(0, owners, logps.double())
        option_logps[batch_rows] = sums.numpy()
    right, right_by_byte, offset = 0, 0, 0
    for item in questions:
        question_logps = option_logps[offset : offset + len(item.choices)]
        sizes = np.array([max(1, len(option.encode())) for option in item.choices])
        right += int(question_logps.argmax()) == item.answer_index
        right_by_byte += int((question_logps / sizes).argmax()) == item.answer_index
        offset += len(item.choices)
    count = max(1, len(questions))
    return {"choice_accuracy": right / count, "choice_accuracy_norm": right_by_byte / count}


@torch.inference_mode()
def _next_token_logps(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    """The log-probability of the token after each learnt place: [count], on the CPU."""
    device = next(model.parameters()).device
    tokens, positions, loss_positions = (inputs[name].to(device) for name in ("tokens", "positions", "loss_positions"))
    hidden = hidden_states(model, tokens, positions)
    logits = compute_logits(model, hidden.flatten(0, 1)[loss_positions]).float()
    targets = tokens.flatten()[loss_positions + 1]
    return (logits.gather(1, targets[:, None])[:, 0] - logits.logsumexp(1)).cpu()


def _tokenize_option(tokenizer: Any, prompt: str, option: str, max_length: int) -> TokenizedRow:
    """The prompt and one option; only the option counts, and a long prompt loses its beginning."""
    before = tokenizer(prompt, add_special_tokens=False)["input_ids"] or [tokenizer.eos_token_id]
    after = tokenizer(f" {option}", add_special_tokens=False)["input_ids"][: max_length - 1]
    before = before[-(max_length - len(after)) :]
    trained = np.zeros(len(before) + len(after), dtype=np.bool_)
    trained[len(before) :] = True
    return TokenizedRow(np.array([*before, *after], dtype=np.int32), trained)


def _as_metrics(nll_sum: float, token_count: int, text_bytes: float) -> Metrics:
    if not token_count:
        return {}
    loss = nll_sum / token_count
    return {
        "text_loss": loss,
        "text_perplexity": math.exp(min(loss, 700.0)),
        "text_bits_per_byte": nll_sum / math.log(2.0) / max(1.0, text_bytes),
    }


LM_EVAL_BATCH = 8
"""Requests computed together."""
LM_EVAL_MISSING = "evaluate.tasks are measured by lm-eval, which is not installed: pip install 'modelwright[eval]'"


def require_lm_eval() -> None:
    """Say what is missing, where lm-eval is not there."""
    if find_spec("lm_eval") is None:
        raise ModelError(LM_EVAL_MISSING)


def run_lm_eval(
    model: Any, tokenizer: Any, tasks: Sequence[str], limit: int, recipe_dir: Path
) -> dict[str, float | None]:
    """The metrics of each task as TASK_METRIC; a task that is unknown or cannot be fetched is one letter.

    A task is a name that lm-eval knows, or a YAML file of its form, found from where we stand or beside the recipe.
    """
    require_lm_eval()
    import lm_eval
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    files = {task: task_file(task, recipe_dir) for task in tasks if task.endswith(TASK_FILE_SUFFIXES)}
    names = [files[task].stem if task in files else task for task in tasks]
    try:
        with redirect_stdout(sys.stderr):  # it prints, and our output may be read by a program
            task_manager = TaskManager(
                include_path=[str(path.parent) for path in files.values()] or None,
                include_defaults=len(files) < len(tasks),  # reading its own list takes as long as a small task
            )
            lm = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=LM_EVAL_BATCH)
            results = lm_eval.simple_evaluate(
                model=lm, tasks=names, limit=limit, bootstrap_iters=0, task_manager=task_manager, log_samples=False
            )
    except Exception as error:  # the harness raises many kinds; each becomes one letter
        raise ModelError(
            f"evaluate.tasks: lm-eval could not measure {', '.join(tasks)} ({first_line(error)})"
        ) from None
    metrics: dict[str, float | None] = {}
    for task, values in results["results"].items():
        for name, value in values.items():
            if isinstance(value, int | float) and "stderr" not in name and math.isfinite(value):
                metrics[f"{task}_{name.partition(',')[0]}"] = float(value)
    return metrics


def task_file(task: str, recipe_dir: Path) -> Path:
    """A task file; it is not parsed, since it may hold tags of lm-eval's own, and is known by its name."""
    path = next((candidate for candidate in (Path(task), recipe_dir / task) if candidate.is_file()), None)
    if path is None:
        raise ModelError(f"evaluate.tasks: {task} is not there; it wants a task file of lm-eval, or a name it knows")
    match = re.search(r"^task:\s*[\"']?([^\s\"'#]+)", path.read_text(encoding="utf-8"), re.MULTILINE)
    if match is None or match[1] != path.stem:
        raise ModelError(f"evaluate.tasks: {task} wants a line `task: {path.stem}`, as the file is called")
    return path.resolve()
