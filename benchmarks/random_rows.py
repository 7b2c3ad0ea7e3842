"""Rows of random tokens or pixels in the form that the real tasks give them: speed and memory do not ask for sense."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

SEED = 42


class RandomRows:
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
        import torch

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
