"""Random weights, tokens and pixels in the form that the stages' own tasks have: speed and memory need no sense."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from modelwright.errors import UsageError
from modelwright.plan.fit import PlanCase
from modelwright.plan.shapes import KNOWN

SEED = 42


def task_of(case: PlanCase, settings: Any, device: torch.device) -> Any:
    """The task of a case over random rows, its model made ready as a stage makes it."""
    from modelwright.models import text, trainable

    if case.stage == "classify":
        return random_images(case.rows * 8, case.smaller.get("width", 64), settings)
    model = _random_model(config_of(case), "auto", device)
    text.move(model, device, "auto")
    model = trainable.set_trainable(model, settings)
    if settings.gradient_checkpointing:
        trainable.recompute_activations(model, settings.gradient_checkpointing)
    words = model.config.get_text_config().vocab_size
    rows = case.rows * settings.gradient_accumulation_steps
    return TokenRowsTask(model.to(device), settings, (rows, case.length, words))


def config_of(case: PlanCase) -> Any:
    """The transformers config of a case's shape."""
    from transformers import CONFIG_MAPPING

    told = {**KNOWN[case.model], **case.smaller}
    family = str(told.pop("model_type"))
    if family == "gpt_neox":
        told = {key: value for key, value in told.items() if key not in ("num_key_value_heads", "head_dim")}
    told["max_position_embeddings"] = max(case.length, 512)
    return CONFIG_MAPPING[family](**told, bos_token_id=0, eos_token_id=0, pad_token_id=0)


def random_weights(path: Path, attending: str, quantization: str, device: torch.device) -> Any:
    """A model of a folder's configuration with random weights, made on the device itself: a 7B takes no disk."""
    from transformers import AutoConfig

    if quantization != "none":
        raise UsageError(f"quantization: {quantization} wants weights that are there; train the stages before it first")
    return _random_model(AutoConfig.from_pretrained(path), attending, device)


def _random_model(config: Any, attending: str, device: torch.device) -> Any:
    from transformers import AutoModelForCausalLM

    from modelwright.models.quiet import be_quiet

    be_quiet()
    implementation = "sdpa" if attending == "auto" else attending
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=implementation)


def random_shards(folder: Path, length: int, words: int) -> None:
    """Shards of random tokens in documents of many lengths: speed does not ask for sense."""
    from modelwright.data.shard_writer import Block, Documents, write_part
    from modelwright.data.shards import Layout, seal

    draw = np.random.default_rng(42)
    layout = Layout(length, words)
    lengths = draw.integers(20, 2 * length, 512)
    made = Documents(draw.integers(0, words, int(lengths.sum())).astype(np.uint32), lengths, lengths * 4)
    parts = {"train": write_part(folder, "train", layout, {"random": [Block(len(made.tokens), lambda: made)]}, "r")}
    seal(folder, layout, parts, {"tokenizer": "random"})


class TokenRowsTask:
    """Rows of random tokens in the form that the stage's own task gives them."""

    def __init__(self, model: Any, settings: Any, size: tuple[int, int, int]) -> None:
        from modelwright.recipe.schema import Dpo

        self._rows, self._length, words = size
        self.measures: tuple[str, ...] = ("loss",)
        draw = np.random.default_rng(SEED)
        self._tokens = draw.integers(1, words, (self._rows, self._length), dtype=np.int64)
        self._paired = isinstance(settings, Dpo)
        if self._paired:
            from modelwright.models.branches import takes_paths
            from modelwright.models.spread import spread_of
            from modelwright.tasks.dpo import DpoTask, PairLoss

            self.module: Any = PairLoss(model, settings)
            self._paths = takes_paths(model, spread_of)
            self.measures = DpoTask.measures
        else:
            from modelwright.tasks.sft import AnswerLoss

            self.module = AnswerLoss(model)

    @property
    def rows(self) -> int:
        return self._rows

    @property
    def held_out_rows(self) -> int:
        return 0

    def length(self, row: int) -> int:
        return self._length

    def held_out_batch(self, rows: Sequence[int]) -> Any:
        """Nothing is held out, so that only the blank batch of no rows is ever asked for."""
        return self.batch(rows)

    def batch(self, rows: Sequence[int], step: int = 0) -> Any:
        """Every token trains; a pair is a prompt of half a row and two answers of a quarter."""
        from modelwright.data.chat import Encoded

        chosen = self._tokens[list(rows)]
        if not self._paired:
            from modelwright.tasks.sft import collate

            trained = np.arange(self._length) > 0
            return collate([[Encoded(row.astype(np.int32), trained)] for row in chosen])
        return self._pairs(chosen)

    def _pairs(self, chosen: Any) -> Any:
        from modelwright.data.chat import Encoded
        from modelwright.data.preferences import EncodedPair
        from modelwright.engine.task import Batch
        from modelwright.models.spread import spread_of
        from modelwright.tasks.dpo import collate, told_by

        half, quarter = self._length // 2, self._length // 4
        trained = np.ones(quarter, dtype=bool)
        pairs = [
            EncodedPair(row[:half].astype(np.int32), Encoded(row[half : half + quarter].astype(np.int32), trained),
                        Encoded(row[half + quarter : half + 2 * quarter].astype(np.int32), trained))
            for row in chosen
        ]  # fmt: skip
        batch = told_by(spread_of, collate(pairs)) if self._paths else collate(pairs)
        reference = torch.zeros(batch.inputs["answers"].shape[1])
        return Batch({**batch.inputs, "reference": reference}, batch.trained, batch.tokens)


def random_images(rows: int, width: int, settings: Any) -> Any:
    """The real task of images over random pixels, as many as CIFAR-10 has where there is a GPU to hold them."""
    from modelwright.data.image_set import ImageSet, ImageSplit
    from modelwright.models.vision import resnet18
    from modelwright.tasks.classify import ClassifyTask

    draw, classes = np.random.default_rng(SEED), tuple(f"class {number}" for number in range(10))

    def some(count: int) -> ImageSet:
        images = draw.integers(0, 256, (count, 32, 32, 3), dtype=np.uint8)
        return ImageSet(images, draw.integers(0, 10, count, dtype=np.int64), classes, "random pixels")

    return ClassifyTask(resnet18(10, width, 3), ImageSplit(some(rows), some(64)), settings, SEED)


def free_device() -> None:
    """Free a model and its optimizer state before the next one is made."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
