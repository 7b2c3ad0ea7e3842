"""Bring a data set from the hub: tried again where what arrived was broken; its cache holds whole files or none."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from modelwright.data.fetch import PAUSES
from modelwright.errors import DataError, Problem, UsageError

PASSING = (408, 425, 429)
"""Answers below 500 after which another try may do better."""


def load(name: str, config: str | None, split: str, pauses: tuple[float, ...] = PAUSES) -> Any:
    """The rows of a split, as the datasets library keeps them."""
    from datasets import load_dataset

    reasons: list[str] = []
    for pause in (*pauses, None):
        try:
            return load_dataset(name, config, split=split)
        except Exception as error:  # the hub client raises many kinds; each becomes one letter
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            if not any(map(_may_pass, _causes(error))):
                raise UsageError(
                    f"data: {name!r} is no local file or folder, and the hub gave no data set of that name ({reason}); "
                    "check the name, dataset_config_name and dataset_split, the network, and HF_TOKEN for a gated set"
                ) from None
            reasons.append(reason)
        if pause is not None:
            time.sleep(pause)
    tries = f"{len(reasons)} tries" if len(reasons) > 1 else "one try"
    letter = (
        f"the data set did not arrive in {tries} (last: {reasons[-1]}); the same command goes on where this one ended"
    )
    raise DataError([Problem(name, letter)])


def _causes(error: BaseException) -> Iterator[BaseException]:
    seen: BaseException | None = error
    while seen is not None:
        yield seen
        seen = seen.__cause__ or seen.__context__


def _may_pass(error: BaseException) -> bool:
    """Whether the hub was there, but what it sent was broken or a passing trouble."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status is not None:
        return bool(status >= 500 or status in PASSING)
    return isinstance(error, OSError) and "onsistency check failed" in str(error)
