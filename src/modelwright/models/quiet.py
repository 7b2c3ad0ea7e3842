"""Keep the libraries' chatter off the terminal: what a person should know is said by us, in a line."""

from __future__ import annotations


def be_quiet() -> None:
    """Turn off progress bars and advice of transformers; its errors still come through."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
