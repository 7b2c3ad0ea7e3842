"""The error family that users see (a message and an exit code, no traceback), and redaction of secrets."""

from __future__ import annotations

import errno
import re
from collections.abc import Sequence
from dataclasses import dataclass

SECRET_NAME_PATTERN = r"(TOKEN|PASSWORD|PASSWD|SECRET|CREDENTIALS?|(API|ACCESS|PRIVATE)_?KEY)$"
"""Names of variables that hold a secret."""
SECRET_PATTERN = (
    r"\b(?:hf_[A-Za-z0-9]{16,}|sk-[A-Za-z0-9_-]{16,}|gh[pousr]_[A-Za-z0-9]{16,}|github_pat_\w{16,}|glpat-[\w-]{16,}"
    r"|A[KS]IA[0-9A-Z]{12,}|xox[abprs]-[\w-]{10,}|AIza[\w-]{30,}|sha256~\S{20,}|eyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]*)"
    r"|(?<=://)[^\s/@]+(?=@)|-----BEGIN [A-Z ]*PRIVATE KEY-----"
    r"|(?<=[?&])(?:[\w-]*token|[\w-]*key|sig|signature|x-amz-\w+|password)=[^\s&'\"]{8,}"
)
"""What looks like a secret: tokens by their form, the user and password of a URL, signed URLs."""


def is_secret_name(name: str) -> bool:
    """Whether a variable of this name holds a secret."""
    return re.search(SECRET_NAME_PATTERN, name, re.IGNORECASE) is not None


def contains_secret(text: str) -> bool:
    """Whether something in a text looks like a secret."""
    return re.search(SECRET_PATTERN, text, re.IGNORECASE) is not None


def replace_surrogates(text: str) -> str:
    """The text with "?" for each lone surrogate, which cannot be encoded; names of files and columns may hold one."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode("utf-8")


def redact_secrets(text: str) -> str:
    """The text with everything that looks like a secret hidden, and lone surrogates replaced.

    Error messages are printed, logged and sent to others.
    """
    return re.sub(SECRET_PATTERN, "(hidden)", replace_surrogates(text), flags=re.IGNORECASE)


def first_line(error: BaseException) -> str:
    """The first line of a foreign error's message, and the next one after a colon; its class name if it has none."""
    lines = [*(str(error).strip() or type(error).__name__).splitlines(), ""]
    name = f"{type(error).__name__}: " if isinstance(error, KeyError) else ""
    return f"{name}{lines[0]} {lines[1].strip()}".strip() if lines[0].endswith(":") else name + lines[0]


class ModelwrightError(Exception):
    """A problem with a message for the user: where, what was found, what would work."""

    exit_code = 2
    already_printed = False
    """Whether another process has already printed the message."""

    def __init__(self, message: str = "") -> None:
        super().__init__(redact_secrets(message))


class UsageError(ModelwrightError):
    """The command asks for something that is not there."""


class NotRegularFile(UsageError, OSError):  # an OSError, for readers that do without the file
    """A FIFO, a device or a folder is where a file is expected."""

    def __init__(self, path: object) -> None:
        super().__init__(f"{path}: it is not a regular file")
        self.strerror = "it is not a regular file"


@dataclass(frozen=True)
class Problem:
    """One thing wrong in a recipe or a data file."""

    where: str
    """File and line, as ``lyrics.yaml:14``."""
    message: str
    """What was found and what would work."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if isinstance(value, str):
                object.__setattr__(self, name, redact_secrets(value))

    def __str__(self) -> str:
        return f"{self.where}: {self.message}"


class ProblemsError(ModelwrightError):
    """Everything that is wrong with a file, reported at once."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))


class RecipeError(ProblemsError):
    """The recipe cannot be run as it is written."""


class DataError(ProblemsError):
    """The data cannot be trained on as it is."""


class ModelError(ModelwrightError):
    """The model cannot be found, read or trained as asked."""


class GateClosed(ModelwrightError):
    """A stage was measured and may not be promoted."""

    exit_code = 3


class Interrupted(ModelwrightError):
    """Stopped early by a signal; rerun the same command to resume."""

    exit_code = 75


class Diverged(ModelwrightError):
    """Loss or gradients became non-finite and rolling back did not help."""

    exit_code = 76


class Refused(ModelwrightError):
    """The run is in use, or what is asked is not what the run was started with."""

    exit_code = 77


class PeerLost(ModelwrightError):
    """Another process of the run is gone, and this one cannot continue without it; the launcher restarts it."""

    exit_code = 1


class RankOutOfMemory(ModelwrightError):
    """One rank of several runs out of device memory; the launcher restarts them with a smaller micro-batch."""

    exit_code = 1


class StorageError(ModelwrightError):
    """The disk is full, read-only or broken."""

    exit_code = 78


NON_RETRYABLE_EXIT_CODES = (2, 3, 76, 77, 78)
"""Exit codes after which a restart would fail again: wrong recipe, closed gate, diverged, refused, storage."""
STORAGE_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.ENODEV, errno.ESTALE,
                            errno.ENAMETOOLONG})  # fmt: skip


def is_storage_failure(error: BaseException) -> bool:
    """Whether an error means a failing or full disk; safetensors has its own error class for it."""
    return (isinstance(error, OSError) and error.errno in STORAGE_ERRNOS) or "os error 28" in str(error)
