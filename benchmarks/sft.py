"""Our SFT loop beside TRL's SFTTrainer: the same small Llama, the same batches in the same order, in one run."""

from __future__ import annotations

import tempfile
import time
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import common
from benchmarks.common import installed
from benchmarks.peer_trainers import StepTimes, conversation_dataset, in_our_order, train_ours, train_peer
from benchmarks.workloads import SEED, SMALL_LENGTH, save_small_model

WARM_UP, TIMED, BATCH, ROUNDS = 3, 12, 8, 2
STEPS = WARM_UP + TIMED
LENGTH = SMALL_LENGTH
LEARNING_RATE = 1e-4


def measure() -> dict[str, Any]:
    """Train both in turn, each round in the other order, and take the median step."""
    from modelwright.data import chat
    from modelwright.recipe.schema import DataConfig
    from modelwright.recipe.sections import CountOrFraction

    wish = DataConfig(
        dataset_name="field-guide", columns={"question": "prompt", "answer": "completion"},
        max_rows=STEPS * BATCH + 1, test_size=CountOrFraction(1),
    )  # fmt: skip
    data = chat.load_conversations(wish, SEED, Path())
    has_peer = installed("trl") is not None
    ours: list[StepTimes] = []
    theirs: list[StepTimes] = []
    with tempfile.TemporaryDirectory() as place:
        save_small_model(Path(place), [message["content"] for item in data.train for message in item.messages])
        for turn in range(ROUNDS):
            for is_ours in (True, False) if turn % 2 == 0 else (False, True):
                if is_ours:
                    ours.append(train_modelwright(Path(place), data))
                elif has_peer:
                    theirs.append(train_trl(Path(place), data))
    return _figures(ours, theirs)


def train_modelwright(folder: Path, data: Any) -> StepTimes:
    """Our engine on one device in fp32."""
    from modelwright.engine.distributed import World
    from modelwright.engine.trainer import Engine
    from modelwright.models import pretrained
    from modelwright.plan.hardware import probe_device
    from modelwright.plan.stage import plan_stage
    from modelwright.recipe.schema import SftConfig
    from modelwright.tasks.sft import SftTask

    model = pretrained.load_model(folder)
    settings = SftConfig(
        max_steps=STEPS, per_device_train_batch_size=BATCH, max_length=LENGTH, precision="fp32",
        learning_rate=LEARNING_RATE, lr_scheduler_type="constant",
    )  # fmt: skip
    task = SftTask(model, pretrained.load_tokenizer(folder), data, settings, pretrained.eos_token_ids(model))
    engine = Engine(task, settings, plan_stage(settings, task.rows, 1, probe_device()), World(), SEED)
    return train_ours(engine, STEPS, time.perf_counter())


def train_trl(folder: Path, data: Any) -> StepTimes:
    """TRL's trainer on the same rows in the order our engine takes them."""
    from trl import SFTConfig, SFTTrainer

    from modelwright.models import pretrained

    settings = {
        "max_steps": STEPS, "per_device_train_batch_size": BATCH, "max_length": LENGTH, "learning_rate": LEARNING_RATE,
        "use_cpu": True, "bf16": False, "gradient_checkpointing": False,
    }  # fmt: skip
    rows = conversation_dataset(in_our_order(data.train, BATCH, STEPS))
    times, trainer = train_peer(
        SFTTrainer, SFTConfig, settings, time.perf_counter(), model=pretrained.load_model(folder), train_dataset=rows,
        processing_class=pretrained.load_tokenizer(folder),
    )  # fmt: skip
    lengths = [len(row["input_ids"]) for row in trainer.train_dataset]
    return replace(times, tokens=tuple(sum(lengths[step * BATCH : (step + 1) * BATCH]) for step in range(STEPS)))


def lines(figures: dict[str, Any]) -> list[str]:
    """The figures as sentences."""
    ours = figures["modelwright"]
    told = [f"modelwright {ours['tokens_per_second']:,.0f} tokens/s, mean loss {ours['mean_loss']:.4f}"]
    if "trl" not in figures:
        return [*told, "trl is not installed, so there is nothing to hold it against"]
    peer = figures["trl"]
    told.append(f"trl         {peer['tokens_per_second']:,.0f} tokens/s, mean loss {peer['mean_loss']:.4f}")
    return [*told, f"ratio {figures['ratio']:.2f} (above 1: ours is faster), {figures['setting']}"]


def _figures(ours: list[StepTimes], theirs: list[StepTimes]) -> dict[str, Any]:
    found: dict[str, Any] = {
        "setting": f"8-layer Llama of width 256, batch {BATCH}, fp32, CPU, median of {TIMED} steps x {ROUNDS} rounds",
        "modelwright": _side(ours),
    }
    if theirs:
        assert ours[0].tokens == theirs[0].tokens, "the two sides did not see the same tokens"
        found["trl"] = _side(theirs)
        found["ratio"] = round(found["modelwright"]["tokens_per_second"] / found["trl"]["tokens_per_second"], 3)
    return found


def _side(paces: list[StepTimes]) -> dict[str, Any]:
    return {
        "tokens_per_second": round(median(rate for pace in paces for rate in _rates(pace)), 1),
        "rounds": [round(median(_rates(pace)), 1) for pace in paces],
        "tokens": sum(paces[0].tokens[WARM_UP:]),
        "mean_loss": round(paces[0].mean_loss, 5),
    }


def _rates(times: StepTimes) -> list[float]:
    """Tokens per second in each timed step."""
    return [tokens / seconds for tokens, seconds in zip(times.tokens, times.seconds, strict=True)][WARM_UP:]


def main(save: common.Save = False, as_json: common.Json = False) -> None:
    """Tokens per second of our SFT loop, beside TRL's SFTTrainer."""
    common.report("sft", measure, lines, save, as_json)


if __name__ == "__main__":
    common.run(main)
