"""Random weights, tokens and pixels in the form that the stages' own tasks have: speed and memory need no sense."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from modelwright.errors import UsageError
from modelwright.plan.calibrate import PlanCase
from modelwright.plan.model_shape import SHIPPED_CONFIGS

SEED = 42


def task_of(case: PlanCase, settings: Any, device: torch.device) -> Any:
    """The task of a case over random rows, its model made ready as a stage makes it."""
    from modelwright.models import activation_checkpoint, pretrained, trainable

    if case.stage == "classify":
        return random_images(case.rows * 8, case.smaller.get("width", 64), settings)
    model = _random_model(config_of(case), "auto", device)
    pretrained.prepare_model(model, device, "auto")
    model = trainable.set_trainable(model, settings)
    if settings.gradient_checkpointing:
        activation_checkpoint.enable_activation_checkpointing(model, settings.gradient_checkpointing)
    words = model.config.get_text_config().vocab_size
    rows = case.rows * settings.gradient_accumulation_steps
    return TokenRowsTask(model.to(device), settings, (rows, case.length, words))


def config_of(case: PlanCase) -> Any:
    """The transformers config of a case's shape."""
    from transformers import CONFIG_MAPPING

    told = {**SHIPPED_CONFIGS[case.model], **case.smaller}
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

    from modelwright.models.pretrained import silence_transformers

    silence_transformers()
    implementation = "sdpa" if attending == "auto" else attending
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=implementation)


def random_shards(folder: Path, length: int, words: int) -> None:
    """Shards of random tokens in documents of many lengths: speed does not ask for sense."""
    from modelwright.data.shards import DocumentBatch, ShardLayout, write_manifest, write_split
    from modelwright.data.tokenizer import TokenizedDocuments

    draw = np.random.default_rng(42)
    layout = ShardLayout(length, words)
    lengths = draw.integers(20, 2 * length, 512)
    made = TokenizedDocuments(draw.integers(0, words, int(lengths.sum())).astype(np.uint32), lengths, lengths * 4)
    parts = {
        "train": write_split(folder, "train", layout, {"random": [DocumentBatch(len(made.tokens), lambda: made)]}, "r")
    }
    write_manifest(folder, layout, parts, {"tokenizer": "random"})


class TokenRowsTask:
    """Rows of random tokens in the form that the stage's own task gives them."""

    def __init__(self, model: Any, settings: Any, size: tuple[int, int, int]) -> None:
        from modelwright.recipe.schema import DpoConfig

        self._rows, self._length, words = size
        self.measures: tuple[str, ...] = ("loss",)
        draw = np.random.default_rng(SEED)
        self._tokens = draw.integers(1, words, (self._rows, self._length), dtype=np.int64)
        self._paired = isinstance(settings, DpoConfig)
        if self._paired:
            from modelwright.models.attention import unshared_layout
            from modelwright.models.prefix_sharing import supports_layout
            from modelwright.tasks.dpo import DpoLoss, DpoTask

            self.module: Any = DpoLoss(model, settings)
            self._paths = supports_layout(model, unshared_layout)
            self.measures = DpoTask.metric_names
        else:
            from modelwright.tasks.sft import SftLoss

            self.module = SftLoss(model)

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
        from modelwright.data.chat import TokenizedRow

        chosen = self._tokens[list(rows)]
        if not self._paired:
            from modelwright.tasks.batching import collate_examples

            trained = np.arange(self._length) > 0
            return collate_examples([[TokenizedRow(row.astype(np.int32), trained)] for row in chosen])
        return self._pairs(chosen)

    def _pairs(self, chosen: Any) -> Any:
        from modelwright.data.chat import TokenizedRow
        from modelwright.data.preferences import TokenizedPair
        from modelwright.engine.task import MicroBatch
        from modelwright.models.attention import unshared_layout
        from modelwright.tasks.dpo import collate_pairs, with_layout

        half, quarter = self._length // 2, self._length // 4
        trained = np.ones(quarter, dtype=bool)
        pairs = [
            TokenizedPair(row[:half].astype(np.int32), TokenizedRow(row[half : half + quarter].astype(np.int32), trained),
                        TokenizedRow(row[half + quarter : half + 2 * quarter].astype(np.int32), trained))
            for row in chosen
        ]  # fmt: skip
        batch = with_layout(unshared_layout, collate_pairs(pairs)) if self._paths else collate_pairs(pairs)
        reference = torch.zeros(batch.inputs["answers"].shape[1])
        return MicroBatch({**batch.inputs, "reference": reference}, batch.trained_tokens, batch.tokens)


def random_images(rows: int, width: int, settings: Any) -> Any:
    """The real task of images over random pixels, as many as CIFAR-10 has where there is a GPU to hold them."""
    from modelwright.data.images import ImageDataset, ImageSplits
    from modelwright.models.vision import resnet18
    from modelwright.tasks.classify import ClassifyTask

    draw, classes = np.random.default_rng(SEED), tuple(f"class {number}" for number in range(10))

    def some(count: int) -> ImageDataset:
        images = draw.integers(0, 256, (count, 32, 32, 3), dtype=np.uint8)
        return ImageDataset(images, draw.integers(0, 10, count, dtype=np.int64), classes, "random pixels")

    return ClassifyTask(resnet18(10, width, 3), ImageSplits(some(rows), some(64)), settings, SEED)


def free_device() -> None:
    """Free a model and its optimizer state before the next one is made."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
