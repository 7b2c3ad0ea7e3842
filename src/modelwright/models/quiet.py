"""Keep the libraries' chatter off the terminal, and out of memory what nobody here asks of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


def be_quiet() -> None:
    """Turn off progress bars and advice of transformers; its errors still come through."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


@contextmanager
def without_sklearn() -> Iterator[None]:
    """Inside, transformers does without scikit-learn, scipy and pandas, which some of its versions import for assisted
    decoding alone: 2 of 24 s to the first step of a run.
    """
    from transformers import utils

    asked = getattr(utils, "is_sklearn_available", None)
    if asked is None:
        yield
        return
    utils.is_sklearn_available = lambda: False
    try:
        yield
    finally:
        utils.is_sklearn_available = asked
