"""Images: a ResNet from scratch, a set that lives on the device, and the mistakes it is surest of."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from modelwright.data.images import read_images
from modelwright.errors import ModelError
from modelwright.models.trainable import share
from modelwright.models.vision import load_vision, resnet18, save_vision
from modelwright.recipe.schema import Classify
from modelwright.runs.folder import read_json, write_json
from modelwright.stages.context import Context
from modelwright.stages.kinds import Built, Ingredients, Metrics
from modelwright.stages.lineage import Parent
from modelwright.tasks.classify import ClassifyLoss, ClassifyTask, Pixels, confusion, worst_mistakes

RESNET = "resnet18"
FLOPS_PER_IMAGE = 3 * 2 * 555.4e6
"""Forward and backward of the full ResNet-18 on 32 × 32: 555 million multiplications forward, twice that backward."""


class VisionKind:
    """Recipes that train an image classifier."""

    shown: frozenset[str] = frozenset()

    def gather(self, context: Context, stage: str, parent: Parent | None) -> Ingredients:
        """Read the images; the main rank first, so that nothing is fetched or decoded twice."""
        recipe, data = context.recipe, context.recipe.data_of(stage)
        if recipe.model.model_name_or_path != RESNET:
            raise ModelError(f"model: {recipe.model.name!r} classifies no images; it wants {RESNET}")
        name = data.dataset_name or data.train_file or ""
        context.world.first(lambda: len(read_images(name, context.beside).train))
        images = read_images(name, context.beside)
        if data.max_rows:
            images = replace(images, train=images.train.take(data.max_rows))
        return Ingredients(
            model=None,
            model_name=f"{RESNET}, width {recipe.model.width}, from scratch",
            revision=None,
            data=images,
            model_fingerprint=f"{RESNET} width {recipe.model.width} seed {recipe.seed}",
            data_fingerprint=images.fingerprint(),
        )

    def build(self, context: Context, found: Ingredients, stage: str) -> Built:
        """A fresh model by the recipe's seed, and the set on the device."""
        settings, images = context.recipe.stages[stage], found.data
        assert isinstance(settings, Classify)
        torch.manual_seed(context.recipe.seed)
        width = context.recipe.model.width
        model = resnet18(len(images.train.classes), width, images.train.images.shape[3])
        task = ClassifyTask(model, images, settings, context.recipe.seed)
        config = {"mean": task.pixels.mean, "std": task.pixels.std, "class_names": images.train.classes,
                  "source": images.train.source}  # fmt: skip
        facts = {
            "source": images.train.source,
            "train_rows": len(images.train),
            "held_out_rows": len(images.test),
            "classes": list(images.train.classes),
            "fingerprint": found.data_fingerprint,
        }
        return Built(
            task=task,
            model=model,
            share=share(model),
            flops_per_token=FLOPS_PER_IMAGE * (width / 64) ** 2,
            data_facts=facts,
            save=lambda weights, folder: save_vision(model, folder, config, weights),
        )

    def show(self, context: Context, found: Ingredients, stage: str) -> Metrics:
        """The confusion matrix and the surest mistakes on the test images, as JSON."""
        files = read_json(context.folder.result(stage))["files"]
        path = context.folder.demo_outputs / "mistakes.json"
        if not path.exists() or read_json(path).get("model") != files:
            wrong = self._mistakes(context, found, stage)
            _keep_pictures(path.with_suffix(""), found.data.test.images, wrong["surest_mistakes"])
            write_json(path, {"model": files, **wrong})
        kept = read_json(path)
        context.journal.add("mistakes", stage=stage, accuracy=kept["accuracy"], source=kept["source"])
        return {}

    def _mistakes(self, context: Context, found: Ingredients, stage: str) -> dict[str, Any]:
        model, config = load_vision(context.folder.model(stage))
        settings, images = context.recipe.stages[stage], found.data
        assert isinstance(settings, Classify)
        pixels = Pixels(tuple(config["mean"]), tuple(config["std"]))
        judge = ClassifyLoss(model, images, pixels, settings).to(context.world.device)
        probabilities, labels = judge.probabilities(), torch.from_numpy(images.test.labels)
        table = confusion(probabilities, labels)
        names = images.test.classes
        return {
            "source": images.test.source,
            "accuracy": float(table.diagonal().sum() / table.sum()),
            "classes": list(names),
            "confusion": table.tolist(),
            "surest_mistakes": [
                {"row": m.row, "truth": names[m.truth], "answer": names[m.answer], "confidence": round(m.confidence, 4)}
                for m in worst_mistakes(probabilities, labels)
            ],
        }


def _keep_pictures(folder: Path, images: Any, mistakes: list[dict[str, Any]]) -> None:
    """The images of the surest mistakes, for the report; those of another model go."""
    from PIL import Image

    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for mistake in mistakes:
        pixels = images[mistake["row"]]
        Image.fromarray(pixels[..., 0] if pixels.shape[-1] == 1 else pixels).save(folder / f"{mistake['row']}.png")
