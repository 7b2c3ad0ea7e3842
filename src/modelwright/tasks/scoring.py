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

from modelwright.data.chat_tokens import TokenizedRow
from modelwright.data.multiple_choice import MultipleChoiceQuestion
from modelwright.data.shards import PackedDataset
from modelwright.data.tokenizer import DocumentTokenizer
from modelwright.errors import ModelError, first_line
from modelwright.models.attention import check_forward, compute_logits, hidden_states
from modelwright.recipe.sections import TASK_FILE_SUFFIXES
from modelwright.tasks.batching import as_tensors, collate_examples, has_next_token
from modelwright.tasks.losses import selective_log_softmax

SCORING_BATCH = 8
"""Rows per forward pass."""
Metrics = dict[str, float | None]


def score_texts(model: Any, encoder: DocumentTokenizer, texts: Sequence[str], max_length: int) -> Metrics:
    """Loss, perplexity and bits per byte of documents; long ones are split."""
    chunks: list[TokenizedRow] = []
    text_bytes = sum(len(text.encode()) for text in texts)
    for text in texts:
        tokens = encoder.encode_batch([text]).tokens.astype(np.int32)
        offsets = encoder.tokenizer.encode(text, add_special_tokens=False).offsets
        for start in range(0, len(tokens), max_length):
            chunk = tokens[start : start + max_length]
            chunks += [TokenizedRow(chunk, np.ones(len(chunk), dtype=np.bool_))] if len(chunk) > 1 else []
            # the first token of a chunk has no loss, so its bytes do not count; EOS has none
            text_bytes -= sum(len(text[begin:end].encode()) for begin, end in offsets[start : start + 1])
    chunks.sort(key=len)
    nll_sum, token_count = 0.0, 0
    for start in range(0, len(chunks), SCORING_BATCH):
        micro_batch = collate_examples([[chunk] for chunk in chunks[start : start + SCORING_BATCH]])
        nll_sum -= float(_next_token_logps(model, micro_batch.inputs).sum())
        token_count += micro_batch.trained_tokens
    return _as_metrics(nll_sum, token_count, text_bytes)


def score_shards(model: Any, shards: PackedDataset, max_length: int, max_rows: int) -> Metrics:
    """The same over packed rows, at most the first max_rows."""
    check_forward(model, packed=True)
    length = math.gcd(shards.sequence_length, max_length)
    rows = min(shards.rows(length), max_rows * (max_length // length))
    nll_sum, token_count = 0.0, 0
    for start in range(0, rows, SCORING_BATCH):
        tokens, positions = shards.get_rows(range(start, min(start + SCORING_BATCH, rows)), length)
        loss_positions = np.flatnonzero(has_next_token(positions))
        inputs = {"tokens": tokens, "positions": positions, "loss_positions": loss_positions}
        logps = _next_token_logps(model, as_tensors(inputs))
        nll_sum, token_count = nll_sum - float(logps.sum()), token_count + len(logps)
    return _as_metrics(nll_sum, token_count, shards.text_bytes * token_count / max(1, shards.tokens))


def score_choices(model: Any, tokenizer: Any, questions: Sequence[MultipleChoiceQuestion], max_length: int) -> Metrics:
    """Accuracy of multiple choice by log-prob of the whole option, and per byte of it."""
    pairs = [(item.prompt, option) for item in questions for option in item.choices]
    rows = [_tokenize_option(tokenizer, prompt, option, max_length) for prompt, option in pairs]
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
    """Log-prob of the token after each loss position: [count], on the CPU."""
    device = next(model.parameters()).device
    tokens, positions, loss_positions = (inputs[name].to(device) for name in ("tokens", "positions", "loss_positions"))
    hidden = hidden_states(model, tokens, positions)
    logits = compute_logits(model, hidden.flatten(0, 1)[loss_positions])
    return selective_log_softmax(logits, tokens.flatten()[loss_positions + 1]).cpu()


def _tokenize_option(tokenizer: Any, prompt: str, option: str, max_length: int) -> TokenizedRow:
    """The prompt and one option; only the option is scored, and a long prompt is cut on the left."""
    before = tokenizer(prompt, add_special_tokens=False)["input_ids"] or [tokenizer.eos_token_id]
    after = tokenizer(option if prompt[-1:].isspace() else f" {option}", add_special_tokens=False)["input_ids"][
        : max_length - 1
    ]
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
"""Requests per forward pass."""
LM_EVAL_MISSING = "evaluate.tasks are measured by lm-eval, which is not installed: pip install 'modelwright[eval]'"


def require_lm_eval() -> None:
    """Raise an error with the install command if lm-eval is missing."""
    if find_spec("lm_eval") is None:
        raise ModelError(LM_EVAL_MISSING)


def run_lm_eval(
    model: Any, tokenizer: Any, tasks: Sequence[str], limit: int, recipe_dir: Path
) -> dict[str, float | None]:
    """Metrics as TASK_METRIC; a task is a name lm-eval knows or a YAML file, here or in the recipe's folder."""
    require_lm_eval()
    import lm_eval
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    files = {task: task_file(task, recipe_dir) for task in tasks if task.endswith(TASK_FILE_SUFFIXES)}
    names = [files[task].stem if task in files else task for task in tasks]
    try:
        with redirect_stdout(sys.stderr):  # lm-eval prints to stdout, which a program may read
            task_manager = TaskManager(
                include_path=[str(path.parent) for path in files.values()] or None,
                include_defaults=len(files) < len(tasks),  # indexing lm-eval's own tasks takes as long as a small task
            )
            lm = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=LM_EVAL_BATCH)
            results = lm_eval.simple_evaluate(
                model=lm, tasks=names, limit=limit, bootstrap_iters=0, task_manager=task_manager, log_samples=False
            )
    except Exception as error:  # lm-eval raises many kinds of errors
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
    """Path of a task file; only its task: line is read, since it may hold YAML tags of lm-eval."""
    path = next((candidate for candidate in (Path(task), recipe_dir / task) if candidate.is_file()), None)
    if path is None:
        raise ModelError(f"evaluate.tasks: {task} is not there; it wants a task file of lm-eval, or a name it knows")
    match = re.search(r"^task:\s*[\"']?([^\s\"'#]+)", path.read_text(encoding="utf-8"), re.MULTILINE)
    if match is None or match[1] != path.stem:
        raise ModelError(f"evaluate.tasks: {task} wants a line `task: {path.stem}`, as the file is called")
    return path.resolve()
