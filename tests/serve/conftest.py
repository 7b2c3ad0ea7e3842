"""Fixtures of the generation tests."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from modelwright.models.pretrained import load_model, load_tokenizer


@pytest.fixture(scope="session")
def loud_model(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with weights so large that its answers differ from question to question."""
    folder = tmp_path_factory.mktemp("loud")
    model = load_model(model_folder)
    torch.manual_seed(3)
    for weight in model.parameters():
        if weight.ndim > 1:
            torch.nn.init.normal_(weight, std=0.3)
    model.save_pretrained(folder)
    load_tokenizer(model_folder).save_pretrained(folder)
    return folder
