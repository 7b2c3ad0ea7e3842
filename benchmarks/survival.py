"""The survival fine-tune beside TRL: last two layers and head, one long system prompt, the same rows in one run.

Counted is everything after the model is loaded: tokenizing, the frozen layers, every step. The kept run is held
against one that keeps and shares nothing, loss by loss.
"""

from __future__ import annotations

import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer

from benchmarks import common
from benchmarks.common import installed, require_finite
from benchmarks.peer_trainers import StepTimes, conversation_dataset, in_our_order, train_ours, train_peer
from benchmarks.workloads import SEED, make_tokenizer
from modelwright.errors import UsageError

LEARNING_RATE = 5e-5
COLUMNS: dict[str, Any] = {"full-question": "prompt", "question": "prompt", "answer": "completion"}
MOVING: Any = {"last_layers": 2, "lm_head": True, "untie_lm_head": True}
SMOLLM3_3B: dict[str, Any] = {
    "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36,
    "num_attention_heads": 16, "num_key_value_heads": 4, "max_position_embeddings": 65536, "rope_theta": 5e6,
}  # fmt: skip
TINY: dict[str, Any] = {
    **SMOLLM3_3B, "vocab_size": 8192, "hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 12,
}  # fmt: skip


@dataclass(frozen=True)
class Scene:
    """What is trained, how long, and how much of it the others do."""

    name: str
    """smollm3, twin or tiny."""
    rows: int | None
    """Training rows; all where it says nothing."""
    batch: int
    """Rows in a step."""
    epochs: int
    """Times the rows are seen."""
    beside: int
    """Steps that the run without savings, and the peer, take."""


SCENES = {
    "smollm3": Scene("smollm3", None, 16, 4, 24),
    "twin": Scene("twin", 32, 8, 4, 3),
    "tiny": Scene("tiny", 32, 8, 2, 3),
}


def measure(scene: str = "twin", data: Path | None = None) -> dict[str, Any]:
    """Ours with everything kept, ours without, and the peer where it is installed."""
    import torch

    wish = SCENES[scene]
    rows = conversations_of(wish, data)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with tempfile.TemporaryDirectory() as place:
        folder = prepared(wish, rows, Path(place))
        steps = -(-len(rows.train) * wish.epochs // wish.batch)
        kept, notes = train_modelwright(wish, rows, folder, device, steps)
        plain, _ = train_modelwright(wish, rows, folder, device, wish.beside, keep_trunk="off", share_prefix=False)
        require_finite([*kept.losses, *plain.losses])
        theirs = train_trl(wish, rows, folder, device) if installed("trl") else None
    found = _figures(wish, len(rows.train), kept, plain, theirs)
    found["modelwright"]["notes"] = list(notes)
    return found


def conversations_of(scene: Scene, data: Path | None) -> Any:
    """The rows of a file, or of the embedded field guide, under the recipe's system prompt."""
    from modelwright.data import chat
    from modelwright.data.sources import read_train_rows
    from modelwright.recipe.load import load
    from modelwright.recipe.schema import DataConfig

    recipe = load("survival-smollm3", environ={}).recipe
    assert recipe.data is not None
    source = str(data) if data else "field-guide"
    wish = DataConfig(dataset_name=source, system_prompt=recipe.data.system_prompt, max_rows=scene.rows)
    columns = read_train_rows(wish, Path())[0].values
    wish = wish.model_copy(update={"columns": {name: COLUMNS[name] for name in COLUMNS if name in columns}})
    items = chat.rows_to_conversations(read_train_rows(wish, Path()), wish)
    return chat.ConversationDataset(items, [], "bench")


def train_modelwright(
    scene: Scene, rows: Any, folder: Path, device: Any, steps: int, **savings: Any
) -> tuple[StepTimes, tuple[str, ...]]:
    """Our engine; the clock starts when the model is there."""
    from modelwright.engine.distributed import World
    from modelwright.engine.trainer import Engine
    from modelwright.models import pretrained
    from modelwright.plan.hardware import probe_device
    from modelwright.plan.stage import plan_stage
    from modelwright.recipe.schema import SftConfig
    from modelwright.tasks.sft import SftTask, find_compute_reuse

    settings = SftConfig(
        trainable=MOVING, per_device_train_batch_size=scene.batch,
        max_steps=steps, learning_rate=LEARNING_RATE, lr_scheduler_type="constant", max_length=1024, **savings,
    )  # fmt: skip
    model, tokenizer = load_model(scene, folder, device, settings), pretrained.load_tokenizer(folder)
    pretrained.prepare_model(model, device, "auto")
    _wait(device)
    began = time.perf_counter()
    task = SftTask(model, tokenizer, rows, settings, pretrained.eos_token_ids(model))
    saver = find_compute_reuse(task, model, settings)
    plan = plan_stage(settings, task.rows, 1, probe_device())
    engine = Engine(task, settings, plan, World(device=device), SEED)
    told = saver.precompute(engine, folder / "trunk", "bench")
    times = train_ours(engine, steps, began)
    return times, (*saver.describe(plan), *([told] if told else []))


def train_trl(scene: Scene, rows: Any, folder: Path, device: Any) -> StepTimes:
    """TRL's trainer: the same model, weights that move, rows, order and precision; padded, as its users run it."""
    from trl import SFTConfig, SFTTrainer

    from modelwright.models import pretrained
    from modelwright.recipe.schema import SftConfig

    settings = {
        "max_steps": scene.beside, "per_device_train_batch_size": scene.batch, "max_length": 1024,
        "learning_rate": LEARNING_RATE, "use_cpu": device.type == "cpu", "bf16": device.type == "cuda",
        "gradient_checkpointing": False,
    }  # fmt: skip
    began = time.perf_counter()
    times, _ = train_peer(
        SFTTrainer, SFTConfig, settings, began, model=load_model(scene, folder, device, SftConfig(trainable=MOVING)),
        train_dataset=conversation_dataset(in_our_order(rows.train, scene.batch, scene.beside)),
        processing_class=pretrained.load_tokenizer(folder),
    )  # fmt: skip
    return times


def load_model(scene: Scene, folder: Path, device: Any, settings: Any) -> Any:
    """The model on its device with what moves decided: the twin's own weights, or random ones of a shape."""
    import torch
    from transformers import AutoModelForCausalLM, SmolLM3Config

    from modelwright.models import pretrained, trainable

    if scene.name == "twin":
        model = pretrained.load_model(pretrained.embedded_model())
    else:
        tokenizer = pretrained.load_tokenizer(folder)
        shape = SMOLLM3_3B if scene.name == "smollm3" else TINY
        ends = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
        torch.manual_seed(SEED)
        with device:
            config = SmolLM3Config(**shape, **ends, tie_word_embeddings=True)
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa")
        model.generation_config.eos_token_id = tokenizer.eos_token_id
    model = trainable.set_trainable(model, settings).to(device)
    _wait(device)
    return model


def lines(figures: dict[str, Any]) -> list[str]:
    """The figures as sentences."""
    ours, plain = figures["modelwright"], figures["without savings"]
    told = [
        f"{figures['setting']}",
        *ours["notes"],
        f"modelwright      {ours['seconds']:.1f} s for {figures['rows']} rows × {figures['epochs']} epochs: "
        f"{ours['seconds_before']:.1f} s before the first step, then {ours['rows_per_second']:.1f} rows/s; "
        f"{ours['overall_rows_per_second']:.1f} rows/s over all",
        f"without savings  {plain['rows_per_second']:.1f} rows/s; its first {len(plain['losses'])} losses differ by "
        f"{figures['largest_loss_difference']:.2e} at most",
    ]
    if "trl" not in figures:
        return [*told, "trl is not installed, so there is nothing to hold it against"]
    peer = figures["trl"]
    return [
        *told,
        f"trl              {peer['rows_per_second']:.1f} rows/s, so about {peer['seconds_extrapolated']:.0f} s for all "
        f"(extrapolated from {len(peer['losses'])} steps)",
        f"ratio {figures['ratio']:.1f} with the frozen layers counted, {figures['ratio_of_steps']:.1f} in the steps "
        "alone (above 1: ours is faster)",
    ]


def _figures(scene: Scene, rows: int, kept: StepTimes, plain: StepTimes, theirs: StepTimes | None) -> dict[str, Any]:
    seen = rows * scene.epochs
    seconds = kept.before + sum(kept.seconds)
    found: dict[str, Any] = {
        "setting": f"{scene.name}: last 2 layers and an untied head, {scene.batch} rows a step",
        "rows": rows,
        "epochs": scene.epochs,
        "modelwright": {
            "seconds": round(seconds, 2),
            "seconds_before": round(kept.before, 2),
            "rows_per_second": round(_rows_per_second(kept, scene), 2),
            "overall_rows_per_second": round(seen / seconds, 2),
            "seconds_of_steps": round(sum(kept.seconds), 2),
            "slowest_steps": sorted((round(each, 3) for each in kept.seconds), reverse=True)[:12],
            "losses": kept.losses,
        },
        "without savings": {"rows_per_second": round(_rows_per_second(plain, scene), 2), "losses": plain.losses},
        "largest_loss_difference": max(abs(a - b) for a, b in zip(kept.losses, plain.losses, strict=False)),
    }
    if theirs is not None:
        pace = _rows_per_second(theirs, scene)
        extrapolated = round(seen / pace, 1)
        found["trl"] = {
            "rows_per_second": round(pace, 2), "seconds_extrapolated": extrapolated, "losses": theirs.losses,
            "overall_rows_per_second": round(scene.batch * len(theirs.seconds) / sum(theirs.seconds), 2),
        }  # fmt: skip
        found["ratio"] = round(extrapolated / seconds, 2)
        found["ratio_of_steps"] = round(_rows_per_second(kept, scene) / pace, 2)
    return found


def _rows_per_second(times: StepTimes, scene: Scene) -> float:
    """In the median step, the first one left out."""
    return scene.batch / median(times.seconds[1:] or times.seconds)


def prepared(scene: Scene, rows: Any, folder: Path) -> Path:
    """A folder with the tokenizer: the twin's own, or one learnt from the rows."""
    from modelwright.models import pretrained

    if scene.name == "twin":
        pretrained.load_tokenizer(pretrained.embedded_model()).save_pretrained(folder)
    else:
        make_tokenizer(folder, [message["content"] for item in rows.train for message in item.messages])
    return folder


def _wait(device: Any) -> None:
    """Until the device has done what it was given."""
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main(
    scene: Annotated[str, typer.Option("--scene", help="twin, smollm3 (wants a large GPU) or tiny.")] = "twin",
    data: Annotated[Path | None, typer.Option("--data", help="Rows with full-question and answer.")] = None,
    save: common.Save = False,
    as_json: common.Json = False,
) -> None:
    """Rows per second of the survival fine-tune with cached frozen layers, beside TRL's SFTTrainer."""
    if scene not in SCENES:
        raise UsageError(f"--scene is {scene!r}; it wants one of {', '.join(SCENES)}")
    common.report("survival", lambda: measure(scene, data), lines, save, as_json)


if __name__ == "__main__":
    common.run(main)
