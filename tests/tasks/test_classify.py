"""What an image looks like depends on seed, step and row alone, and the loss is a sum over rows that adds up."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from modelwright.data.images import ImageDataset, ImageSplits
from modelwright.engine.task import MicroBatch
from modelwright.models.vision import resnet18
from modelwright.recipe.stage_specs import AugmentationConfig
from modelwright.tasks.classify import (
    ClassifyLoss,
    ClassifyTask,
    Mistake,
    PixelStats,
    augment,
    confusion_matrix,
    cutout,
    draw_crops_and_flips,
    draw_cutout,
    worst_mistakes,
)

CLASSES = ("a", "b", "c")


def image_set(count: int, seed: int = 0, size: int = 16) -> ImageDataset:
    rng = np.random.default_rng(seed)
    images = rng.integers(0, 256, (count, size, size, 3), dtype=np.uint8)
    return ImageDataset(images, np.arange(count) % 3, CLASSES, "noise")


def task(seed: int = 5, **settings: Any) -> ClassifyTask:
    torch.manual_seed(1)
    split = ImageSplits(image_set(40), image_set(12, seed=1))
    return ClassifyTask(resnet18(classes=3, width=4), split, AugmentationConfig(**settings), seed)


def run(task: ClassifyTask, batch: MicroBatch) -> Tensor:
    sums: Tensor = task.module(**batch.inputs_on(torch.device("cpu")))
    return sums


def statistics(module: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in module.state_dict().items() if "running" in name or "num_" in name}


def slow_augment(images: Any, shifts: Any, flips: Any, padding: int) -> Any:
    """One image after another, as a person would write it."""
    built = np.zeros_like(images)
    height, width = images.shape[1:3]
    for row, image in enumerate(images):
        framed = np.zeros((height + 2 * padding, width + 2 * padding, image.shape[2]), image.dtype)
        framed[padding : padding + height, padding : padding + width] = image
        down, across = shifts[row]
        crop = framed[down : down + height, across : across + width]
        built[row] = crop[:, ::-1] if flips[row] else crop
    return built


@pytest.mark.parametrize("padding", [0, 2, 4])
def test_crop_and_flip_are_those_of_a_slow_loop(padding: int) -> None:
    rng = np.random.default_rng(3)
    images = rng.integers(0, 256, (50, 12, 10, 3), dtype=np.uint8)
    shifts, flips = rng.integers(0, 2 * padding + 1, (50, 2)), rng.random(50) < 0.5
    built = augment(*(torch.from_numpy(value) for value in (images, shifts, flips)), padding)
    assert np.array_equal(built.numpy(), slow_augment(images, shifts, flips, padding))


@pytest.mark.parametrize("side", [1, 5, 8])
def test_a_cut_out_square_is_that_of_a_slow_loop(side: int) -> None:
    rng = np.random.default_rng(4)
    images = rng.standard_normal((30, 3, 12, 10)).astype(np.float32)
    holes = np.stack([rng.integers(0, 12, 30), rng.integers(0, 10, 30)], axis=1)
    wanted = images.copy()
    for row, (down, across) in enumerate(holes):
        top, left = down - side // 2, across - side // 2
        wanted[row, :, max(0, top) : top + side, max(0, left) : left + side] = 0.0
    assert np.array_equal(cutout(torch.from_numpy(images), torch.from_numpy(holes), side).numpy(), wanted)


def test_a_shift_of_the_padding_is_the_image_itself() -> None:
    images = torch.from_numpy(image_set(5).images)
    assert torch.equal(augment(images, torch.full((5, 2), 4), torch.zeros(5, dtype=torch.bool)), images)


def test_draws_depend_on_seed_step_and_row_and_on_nothing_else() -> None:
    settings, rows = AugmentationConfig(), list(range(200))
    shifts, flips = draw_crops_and_flips(1, 7, rows, settings)
    for part in (rows[::-1], rows[50:60], [3], []):
        some_shifts, some_flips = draw_crops_and_flips(1, 7, part, settings)
        assert np.array_equal(some_shifts, shifts[part])
        assert np.array_equal(some_flips, flips[part])
    for other in (draw_crops_and_flips(2, 7, rows, settings), draw_crops_and_flips(1, 8, rows, settings)):
        assert not np.array_equal(other[0], shifts)
        assert not np.array_equal(other[1], flips)


def test_draws_are_spread_evenly_and_apart_from_each_other() -> None:
    shifts, flips = (
        np.concatenate(part)
        for part in zip(
            *(draw_crops_and_flips(9, step, range(5000), AugmentationConfig()) for step in range(10)), strict=True
        )
    )
    for axis in (0, 1):
        shares = np.bincount(shifts[:, axis], minlength=9) / len(shifts)
        assert len(shares) == 9
        assert np.abs(shares - 1 / 9).max() < 0.006  # four deviations of 50,000 draws
    assert abs(flips.mean() - 0.5) < 0.009
    together = np.corrcoef(np.stack([shifts[:, 0], shifts[:, 1], flips, np.roll(shifts[:, 0], 1), np.roll(flips, 1)]))
    assert np.abs(together - np.eye(5)).max() < 0.02


def test_holes_are_drawn_everywhere_and_apart_from_the_crops() -> None:
    rows = range(50_000)
    holes, (shifts, flips) = draw_cutout(9, 3, rows, (32, 16)), draw_crops_and_flips(9, 3, rows, AugmentationConfig())
    for axis, size in enumerate((32, 16)):
        shares = np.bincount(holes[:, axis], minlength=size) / len(holes)
        assert len(shares) == size
        assert np.abs(shares * size - 1).max() < 0.12  # four deviations of 50,000 draws over 32 places
    together = np.corrcoef(np.stack([holes[:, 0], holes[:, 1], shifts[:, 0], shifts[:, 1], flips]))
    assert np.abs(together - np.eye(5)).max() < 0.02
    assert np.array_equal(draw_cutout(9, 3, [7, 4], (32, 16)), holes[[7, 4]])
    assert not np.array_equal(draw_cutout(9, 4, rows, (32, 16)), holes)


def test_draws_stay_within_the_settings_and_take_no_time() -> None:
    shifts, flips = draw_crops_and_flips(
        -3, 0, range(1000), AugmentationConfig(random_crop_padding=0, horizontal_flip=False)
    )
    assert not shifts.any()
    assert not flips.any()
    full_task, together, alone = task(), float("inf"), float("inf")
    rows = list(range(1024))
    for step in range(20):
        began = time.thread_time()
        full_task.batch(rows, step)
        middle = time.thread_time()
        for row in rows[:32]:
            full_task.batch([row], step)
        together = min(together, middle - began)
        alone = min(alone, time.thread_time() - middle)
    assert together < alone, "1,024 rows at once take less than 32 one by one"


def test_a_batch_is_the_same_whoever_asks_and_whenever() -> None:
    rows = [3, 17, 8, 30]
    first, again = task().batch(rows, step=2), task().batch(rows, step=2)
    assert all(torch.equal(first.inputs[name], again.inputs[name]) for name in ("rows", "shifts", "flips"))
    halves = [task().batch(part, step=2) for part in (rows[:2], rows[2:])]
    for name, expected in first.inputs.items():
        assert torch.equal(torch.cat([half.inputs[name] for half in halves]), expected)
    assert (first.trained_tokens, first.tokens) == (4, 4)
    assert not torch.equal(task().batch(rows, step=3).inputs["shifts"], first.inputs["shifts"])


def test_the_loss_is_the_summed_cross_entropy_of_the_images_it_should_show() -> None:
    built = task(label_smoothing_factor=0.1)
    built.module.eval()  # the batch norms do not mix the rows
    rows = list(range(10))
    batch = built.batch(rows, step=4)
    shown = slow_augment(
        built.images.train.images[rows], batch.inputs["shifts"].numpy(), batch.inputs["flips"].numpy(), 4
    )
    pixels = (shown / 255.0 - np.array(built.pixel_stats.mean)) / np.array(built.pixel_stats.std)
    with torch.no_grad():
        logits = built.classifier.model(torch.from_numpy(pixels).float().permute(0, 3, 1, 2))
        loss, correct = run(built, batch)
    labels = torch.from_numpy(built.images.train.labels[rows])
    assert float(loss) == pytest.approx(float(F.cross_entropy(logits, labels, label_smoothing=0.1) * 10), rel=1e-5)
    assert int(correct) == int((logits.argmax(1) == labels).sum())
    assert built.metric_names == ("loss", "accuracy")


@torch.no_grad()
def test_a_cutout_blanks_training_images_and_no_held_out_ones() -> None:
    plain, cut = task(), task(cutout_size=6)
    for built in (plain, cut):
        built.module.eval()
    rows = list(range(10))
    batch = cut.batch(rows, step=4)
    holes = batch.inputs["cutout_centers"]
    crops = augment(cut.classifier.train_images[rows], batch.inputs["shifts"], batch.inputs["flips"])
    shown = cutout(cut.classifier.normalise(crops), holes, 6)
    loss = F.cross_entropy(cut.classifier.model(shown), cut.classifier.train_labels[rows], reduction="sum")
    assert float(run(cut, batch)[0]) == pytest.approx(float(loss), rel=1e-5)
    assert float(run(plain, plain.batch(rows, step=4))[0]) != pytest.approx(float(loss), rel=1e-5)
    assert "cutout_centers" not in plain.batch(rows, step=4).inputs
    measured = [run(built, built.held_out_batch(range(12))) for built in (plain, cut)]
    assert torch.equal(*measured)


def test_the_model_sees_channels_last() -> None:
    built = task()
    shown = built.classifier.normalise(built.classifier.train_images[:4])
    assert shown.is_contiguous(memory_format=torch.channels_last)
    assert built.classifier.get_parameter("model.layer1.0.conv1.weight").is_contiguous(
        memory_format=torch.channels_last
    )
    assert shown.dtype == torch.float32


@torch.no_grad()
def test_held_out_rows_are_shown_as_they_are_and_without_smoothing() -> None:
    built = task(label_smoothing_factor=0.2)
    built.module.eval()
    halves = [run(built, built.held_out_batch(rows)) for rows in (range(5), range(5, 12))]
    all_rows = run(built, built.held_out_batch(range(built.held_out_rows)))
    images, labels = built.classifier.test_images, built.classifier.test_labels
    logits = built.classifier.model(built.classifier.normalise(images))
    assert torch.allclose(all_rows, torch.stack(halves).sum(0))
    assert float(all_rows[0]) == pytest.approx(float(F.cross_entropy(logits, labels, reduction="sum")), rel=1e-5)
    assert int(all_rows[1]) == int((logits.argmax(1) == labels).sum())


@torch.no_grad()
def test_a_test_time_flip_judges_by_the_mean_of_both_logits() -> None:
    plain, flipped = task(), task(test_time_flip=True)
    for built in (plain, flipped):
        built.module.eval()
    images = plain.classifier.normalise(plain.classifier.test_images)
    logits = (plain.classifier.model(images) + plain.classifier.model(images.flip(3))) / 2
    loss = F.cross_entropy(logits, plain.classifier.test_labels, reduction="sum")
    assert float(run(flipped, flipped.held_out_batch(range(12)))[0]) == pytest.approx(float(loss), rel=1e-5)
    assert torch.allclose(flipped.classifier.probabilities(5), logits.softmax(1), atol=1e-6)
    assert float(run(plain, plain.held_out_batch(range(12)))[0]) != pytest.approx(float(loss), rel=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("flip", [False, True])
def test_a_test_time_shift_averages_the_logits_of_three_shifts(flip: bool) -> None:
    built = task(test_time_shift=2, test_time_flip=flip)
    built.module.eval()
    images = built.images.test.images
    stay = np.zeros(12, bool)
    views = [torch.from_numpy(slow_augment(images, np.full((12, 2), at), stay, 2)) for at in (0, 2, 4)]
    shown = [built.classifier.normalise(view) for view in views]
    shown += [view.flip(3) for view in shown] if flip else []
    logits = torch.stack([built.classifier.model(view) for view in shown]).mean(0)
    loss = F.cross_entropy(logits, built.classifier.test_labels, reduction="sum")
    assert float(run(built, built.held_out_batch(range(12)))[0]) == pytest.approx(float(loss), rel=1e-5)
    assert torch.allclose(built.classifier.probabilities(5), logits.softmax(1), atol=1e-6)


def test_gradients_reach_every_weight() -> None:
    built = task()
    run(built, built.batch(range(8)))[0].backward()  # type: ignore[no-untyped-call]
    assert all(weight.grad is not None and bool(weight.grad.abs().sum() > 0) for weight in built.module.parameters())


def test_a_blank_batch_adds_exactly_nothing_and_leaves_the_statistics_alone() -> None:
    built = task(label_smoothing_factor=0.1)
    run(built, built.batch(range(8)))
    before = statistics(built.module)
    for batch in (built.batch([], step=3), built.held_out_batch([])):
        assert (batch.trained_tokens, batch.tokens) == (0, 0)
        sums = run(built, batch)
        assert sums.tolist() == [0.0, 0.0]
        sums[0].backward()  # type: ignore[no-untyped-call]
        for name, weight in built.module.named_parameters():
            assert weight.grad is not None, name
            assert not weight.grad.any(), name
        built.module.zero_grad()
    assert built.module.training
    after = statistics(built.module)
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_the_images_go_with_the_module_but_are_no_part_of_its_state() -> None:
    built = task()
    assert not [name for name in built.module.state_dict() if not name.startswith("model.")]
    moved = built.module.to(torch.device("meta"))
    assert moved.get_buffer("train_images").device.type == "meta"


def test_ddp_does_not_send_the_images_around(tmp_path: Path) -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        built = task()
        wrapped: Any = DistributedDataParallel(built.module)
        sent = {buffer.data_ptr() for buffer in wrapped.modules_buffers}
        held = {built.module.get_buffer(name).data_ptr() for name in ("train_images", "test_images", "train_labels")}
        assert sent
        assert not sent & held
        sums = wrapped(**built.batch([]).inputs_on(torch.device("cpu")))
        sums[0].backward()
        assert not any(bool(weight.grad.any()) for weight in built.module.parameters() if weight.grad is not None)
    finally:
        # whatever holds the group last ends it: the reducer would wait for threads with Python's lock, and they for it
        wrapped = sums = None
        dist.destroy_process_group()


def test_a_few_steps_learn_a_colour() -> None:
    labels = np.arange(48) % 3
    images = np.zeros((48, 16, 16, 3), np.uint8)
    images[np.arange(48), :, :, labels] = 200
    side = ImageDataset(images, labels, CLASSES, "colours")
    torch.manual_seed(2)
    built = ClassifyTask(resnet18(classes=3, width=4), ImageSplits(side, side), AugmentationConfig(), seed=1)
    optimizer = torch.optim.SGD(built.module.parameters(), lr=0.05, momentum=0.9, nesterov=True)
    for step in range(12):
        loss = run(built, built.batch(range(48), step))[0] / 48
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    with torch.no_grad():
        for _ in range(40):  # running statistics of the final weights
            run(built, built.batch(range(48), 12))
    built.module.eval()
    assert int(run(built, built.held_out_batch(range(48)))[1]) == 48
    assert torch.equal(
        confusion_matrix(built.classifier.probabilities(), built.classifier.test_labels), 16 * torch.eye(3).long()
    )


def test_the_confusion_matrix_counts_truth_down_and_answers_across() -> None:
    answers = F.one_hot(torch.tensor([0, 1, 1, 2, 0]), 3).float()
    labels = torch.tensor([0, 0, 1, 2, 2])
    assert confusion_matrix(answers, labels).tolist() == [[1, 1, 0], [0, 1, 0], [1, 0, 1]]


def test_the_worst_mistakes_are_the_surest_first() -> None:
    probabilities = torch.tensor([[0.6, 0.4], [0.9, 0.1], [0.2, 0.8], [0.3, 0.7]])
    mistakes = worst_mistakes(probabilities, torch.tensor([1, 1, 1, 0]), count=2)
    assert [(m.row, m.truth, m.answer) for m in mistakes] == [(1, 1, 0), (3, 0, 1)]
    assert mistakes[0] == Mistake(1, 1, 0, pytest.approx(0.9))
    assert worst_mistakes(probabilities, torch.tensor([0, 0, 1, 1])) == []


def test_images_are_normalised_by_the_given_statistics() -> None:
    split = ImageSplits(image_set(9), image_set(3))
    stats, model = PixelStats((0.5,) * 3, (0.25,) * 3), resnet18(classes=3, width=4)
    shown = ClassifyLoss(model, split, stats, AugmentationConfig()).normalise(
        torch.full((1, 2, 2, 3), 255, dtype=torch.uint8)
    )
    assert torch.allclose(shown, torch.full((1, 3, 2, 2), 2.0))
    built = ClassifyTask(model, split, AugmentationConfig(), 0)
    assert isinstance(built.module, ClassifyLoss)
    assert (built.rows, built.held_out_rows, built.row_length(3)) == (9, 3, 1)
