"""The tables of training stages agree with each other and with the settings classes."""

from __future__ import annotations

from typing import get_args

import pytest

from modelwright.data.row_formats import ROW_FORMATS
from modelwright.recipe.schema import Recipe
from modelwright.recipe.stage_specs import STAGES, RowFormatName, StageSpec
from modelwright.stages.specs import BUILDERS

EVERY_STAGE = pytest.mark.parametrize(("stage", "spec"), STAGES.items(), ids=STAGES)


@EVERY_STAGE
def test_a_stage_is_a_section_of_the_recipe_with_its_settings(stage: str, spec: StageSpec) -> None:
    assert set(get_args(Recipe.model_fields[stage].annotation)) == {spec.config, type(None)}
    assert spec.config().spec is spec


@EVERY_STAGE
def test_the_best_weights_are_selected_by_a_metric_that_the_stage_measures(stage: str, spec: StageSpec) -> None:
    annotation = spec.config.model_fields["metric_for_best_model"].annotation
    choices = [word for each in (get_args(annotation), *map(get_args, get_args(annotation))) for word in each]
    assert {word for word in choices if word in spec.metrics} == set(spec.best_metrics)


def test_the_tables_of_stages_have_the_same_keys() -> None:
    assert list(BUILDERS) == list(STAGES)
    assert {spec.row_format for spec in STAGES.values()} == set(ROW_FORMATS) == set(get_args(RowFormatName))
