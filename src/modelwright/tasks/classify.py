"""Image classification: the data set lives on the device, augmentation is a function of (seed, step, row)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from modelwright.data.images import ImageSplits
from modelwright.data.packing import NDArray
from modelwright.engine.task import MicroBatch, Task
from modelwright.recipe.stage_specs import AugmentationConfig

GOLDEN = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True)
class PixelStats:
    """Mean and standard deviation of the pixels, per channel on the scale 0 to 1."""

    mean: tuple[float, ...]
    std: tuple[float, ...]


@dataclass(frozen=True)
class Mistake:
    """A misclassified held-out image."""

    row: int
    """Row in the test set."""
    truth: int
    answer: int
    """The predicted class."""
    confidence: float
    """The predicted probability."""


class ClassifyLoss(nn.Module):
    """A vision model and its images, as buffers on the device; the forward takes row numbers."""

    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor
    scale: Tensor
    offset: Tensor

    def __init__(
        self, model: nn.Module, images: ImageSplits, pixel_stats: PixelStats, settings: AugmentationConfig
    ) -> None:
        super().__init__()
        # on an H200 channels_last trains 2.8 times as fast (benchmarks.ablation --only channels-last)
        self.model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.settings = settings
        std = torch.tensor(pixel_stats.std)
        buffers = {
            "train_images": torch.from_numpy(images.train.images),
            "train_labels": torch.from_numpy(images.train.labels),
            "test_images": torch.from_numpy(images.test.images),
            "test_labels": torch.from_numpy(images.test.labels),
            "scale": 1.0 / (255.0 * std),
            "offset": -torch.tensor(pixel_stats.mean) / std,
        }
        for name, tensor in buffers.items():
            self.register_buffer(name, tensor, persistent=False)
        self._ddp_params_and_buffers_to_ignore = list(buffers)  # DDP reads this list and does not broadcast them

    def forward(
        self,
        rows: Tensor,
        shifts: Tensor | None = None,
        flips: Tensor | None = None,
        cutout_centers: Tensor | None = None,
    ) -> Tensor:
        """rows: [n]; shifts, cutout_centers: [n, 2]; flips: [n]; held-out rows have none. Returns [loss, correct]."""
        if not rows.numel():
            return self._blank()
        if shifts is None or flips is None:
            return _loss_and_correct(self._tta_logits(self.test_images[rows]), self.test_labels[rows])
        inputs = self.normalise(augment(self.train_images[rows], shifts, flips, self.settings.random_crop_padding))
        inputs = inputs if cutout_centers is None else cutout(inputs, cutout_centers, self.settings.cutout_size)
        return _loss_and_correct(self.model(inputs), self.train_labels[rows], self.settings.label_smoothing_factor)

    def normalise(self, images: Tensor) -> Tensor:
        """images: [n, height, width, channels] uint8; returns [n, channels, height, width] float, channels last."""
        return (images * self.scale + self.offset).permute(0, 3, 1, 2)

    @torch.no_grad()
    def probabilities(self, per_batch: int = 500) -> Tensor:
        """Class probabilities of every held-out image: [held-out rows, classes] float32, on the CPU."""
        with _evaluating(self.model):
            batches = torch.split(self.test_images, per_batch)
            return torch.cat([self._tta_logits(images).float().softmax(1).cpu() for images in batches])

    def _tta_logits(self, images: Tensor) -> Tensor:
        """Mean logits over the views of test-time augmentation."""
        views = [self.normalise(view) for view in (images, *_shifted_views(images, self.settings))]
        if self.settings.test_time_flip:
            views += [view.flip(3) for view in views]
        logits: Tensor = torch.stack([self.model(view).float() for view in views]).mean(0)
        return logits

    def _blank(self) -> Tensor:
        """Zeros with gradients for every parameter, as DDP needs; batch-norm statistics stay unchanged."""
        with _evaluating(self.model):
            logits = self.model(self.normalise(self.train_images[:1]))
        return _loss_and_correct(logits[:0], self.train_labels[:0])


class ClassifyTask(Task):
    """Images as rows."""

    metric_names: tuple[str, ...] = ("loss", "accuracy")
    """What the forward sums over the rows, in order."""

    def __init__(self, model: nn.Module, images: ImageSplits, settings: AugmentationConfig, seed: int) -> None:
        """Images are normalised by the mean and standard deviation of the training images."""
        self.pixel_stats = PixelStats(*images.train.mean_and_std())
        self.classifier = ClassifyLoss(model, images, self.pixel_stats, settings)
        self.module: nn.Module = self.classifier
        self.images, self.settings, self.seed = images, settings, seed

    @property
    def rows(self) -> int:
        return len(self.images.train)

    @property
    def held_out_rows(self) -> int:
        return len(self.images.test)

    def row_length(self, row: int) -> int:
        """All images have the same size."""
        return 1

    def batch(self, rows: Sequence[int], step: int = 0) -> MicroBatch:
        shifts, flips = draw_crops_and_flips(self.seed, step, rows, self.settings)
        augmentation = {"shifts": shifts, "flips": flips}
        if self.settings.cutout_size:
            augmentation["cutout_centers"] = draw_cutout(self.seed, step, rows, self.images.train.images.shape[1:3])
        return _batch(rows, **{name: torch.from_numpy(values) for name, values in augmentation.items()})

    def held_out_batch(self, rows: Sequence[int]) -> MicroBatch:
        return _batch(rows)


def draw_crops_and_flips(
    seed: int, step: int, rows: Sequence[int], settings: AugmentationConfig
) -> tuple[NDArray, NDArray]:
    """Crop offsets, [n, 2] in 0 to twice the padding, and flips, [n] bool, by hash: 0.1 ms for 1,024 rows."""
    bits = _hash(seed, step, rows)
    choices = 2 * settings.random_crop_padding + 1
    flips = (bits >> np.uint64(63)).astype(bool) & settings.horizontal_flip
    return _uniform_offsets(bits, (choices, choices)), flips


def draw_cutout(seed: int, step: int, rows: Sequence[int], shape: tuple[int, ...]) -> NDArray:
    """Centers of the blanked squares of rows in a step: [n, 2] int64, y and x."""
    with np.errstate(over="ignore"):
        bits = _splitmix64(_hash(seed, step, rows))  # independent of the crop's
    return _uniform_offsets(bits, shape)


def augment(images: Tensor, shifts: Tensor, flips: Tensor, padding: int = 4) -> Tensor:
    """Pad, crop and flip [n, height, width, channels] images in one gather; shifts: [n, 2], y and x; flips: [n]."""
    count, height, width, _ = images.shape
    down = torch.arange(height, device=images.device) + shifts[:, :1]
    across = torch.arange(width, device=images.device)
    across = torch.where(flips[:, None], width - 1 - across, across) + shifts[:, 1:]
    padded = F.pad(images, (0, 0, padding, padding, padding, padding))
    return padded[torch.arange(count, device=images.device)[:, None, None], down[:, :, None], across[:, None, :]]


def cutout(images: Tensor, centers: Tensor, side: int) -> Tensor:
    """Blank a square of [n, channels, height, width] images, cut off at the edges; centers: [n, 2], y and x."""
    first = centers - side // 2
    down, across = (
        (coordinates >= first[:, axis, None]) & (coordinates < first[:, axis, None] + side)
        for axis, coordinates in enumerate(torch.arange(size, device=images.device) for size in images.shape[2:])
    )
    return images.masked_fill((down[:, :, None] & across[:, None, :])[:, None], 0.0)


def confusion_matrix(probabilities: Tensor, labels: Tensor) -> Tensor:
    """Counts of truth (down) by prediction (across), [classes, classes], of [rows, classes] and [rows]."""
    classes = probabilities.shape[1]
    return torch.bincount(labels * classes + probabilities.argmax(1), minlength=classes**2).view(classes, classes)


def worst_mistakes(probabilities: Tensor, labels: Tensor, count: int = 25) -> list[Mistake]:
    """The wrong predictions of highest confidence first. Shapes as in `confusion_matrix`."""
    confidence, answers = probabilities.max(1)
    wrong = (answers != labels).nonzero().flatten()
    worst = wrong[confidence[wrong].argsort(descending=True, stable=True)[:count]].tolist()
    return [Mistake(row, int(labels[row]), int(answers[row]), float(confidence[row])) for row in worst]


def _batch(rows: Sequence[int], **augmentation: Tensor) -> MicroBatch:
    inputs = {"rows": torch.as_tensor(rows, dtype=torch.int64), **augmentation}
    return MicroBatch(inputs=inputs, trained_tokens=len(rows), tokens=len(rows))


def _shifted_views(images: Tensor, settings: AugmentationConfig) -> list[Tensor]:
    """Images shifted up-left and down-right by test_time_shift, if set. Shapes as in `augment`."""
    if not (pixels := settings.test_time_shift):
        return []
    no_flip = torch.zeros(len(images), dtype=torch.bool, device=images.device)
    shifts = (torch.full((len(images), 2), shift, device=images.device) for shift in (0, 2 * pixels))
    return [augment(images, shift, no_flip, pixels) for shift in shifts]


def _loss_and_correct(logits: Tensor, labels: Tensor, label_smoothing: float = 0.0) -> Tensor:
    loss = F.cross_entropy(logits.float(), labels, reduction="sum", label_smoothing=label_smoothing)
    return torch.stack([loss, (logits.argmax(1) == labels).sum().to(loss.dtype)])


def _hash(seed: int, step: int, rows: Sequence[int]) -> NDArray:
    """64 bits per row in a step."""
    with np.errstate(over="ignore"):  # the hash relies on overflow
        key = _splitmix64(_splitmix64(np.array([seed & (2**64 - 1)], np.uint64)) + np.uint64(step))
        return _splitmix64(key + np.asarray(rows, dtype=np.int64).astype(np.uint64))


def _uniform_offsets(bits: NDArray, choices: tuple[int, ...]) -> NDArray:
    """Two uniform offsets per row, below `choices`: [n, 2] int64, y and x."""
    parts = [
        ((bits >> np.uint64(low)) & np.uint64(0xFFFFFF)) * np.uint64(count) >> np.uint64(24)
        for low, count in zip((0, 24), choices, strict=True)
    ]
    return np.stack(parts, axis=1).astype(np.int64)


def _splitmix64(bits: NDArray) -> NDArray:
    """One step of splitmix64."""
    bits = bits + GOLDEN
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(bits ^ (bits >> np.uint64(31)))


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)
