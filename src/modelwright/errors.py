"""The one family of errors a person may see: a short letter and an exit code, never a traceback."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from dataclasses import dataclass


class ModelwrightError(Exception):
    """A problem told as a letter: where, what was found, what would do."""

    exit_code = 2
    told_elsewhere = False
    """Whether another process has written the letter already."""


class UsageError(ModelwrightError):
    """The command asks for something that is not there."""


@dataclass(frozen=True)
class Problem:
    """One thing wrong in a recipe or a data file."""

    where: str
    """File and line, as ``lyrics.yaml:14``."""
    message: str
    """What was found and what would do."""

    def __str__(self) -> str:
        return f"{self.where}: {self.message}"


class ProblemsFound(ModelwrightError):
    """Everything that is wrong with a file, told at once."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))


class RecipeError(ProblemsFound):
    """The recipe cannot be run as it is written."""


class DataError(ProblemsFound):
    """The data cannot be trained on as it is."""


class ModelError(ModelwrightError):
    """The model cannot be found, read or trained as asked."""


class GateClosed(ModelwrightError):
    """A stage was measured and may not be promoted."""

    exit_code = 3


class Interrupted(ModelwrightError):
    """Stopped early by a signal; the same command continues."""

    exit_code = 75


class Diverged(ModelwrightError):
    """The numbers are no longer numbers, and going back did not help."""

    exit_code = 76


class Refused(ModelwrightError):
    """The run is in use, or what is asked is not what the run was started with."""

    exit_code = 77


class PeerLost(ModelwrightError):
    """Another process of the run is gone, and this one cannot go on without it; whoever started it starts it again."""

    exit_code = 1


class StorageError(ModelwrightError):
    """The disk is full, read-only or broken."""

    exit_code = 78


STORAGE_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.ENODEV, errno.ESTALE})


def is_storage_failure(error: OSError) -> bool:
    """Tell a failing disk from every other operating-system error."""
    return error.errno in STORAGE_ERRNOS
