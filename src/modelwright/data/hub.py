"""Bring a data set from the hub: gone on with where it broke off; its cache holds whole files or none."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from modelwright.data.fetch import PAUSES, Denied, Published, fetch
from modelwright.errors import DataError, Problem, StorageError, UsageError, first_line

PASSING = (408, 425, 429)
"""Answers below 500 after which another try may do better."""
BROKEN = ("ReadError", "ReadTimeout", "RemoteProtocolError")
"""How the hub's client calls a connection that stood and then broke."""
LARGE = 10_000_000
"""Bytes from which a file is worth going on with after a kill; the hub's own client begins anew in every process."""
AT_ONCE = 4
"""Large files brought at a time."""


def load(name: str, config: str | None, split: str, pauses: tuple[float, ...] = PAUSES) -> Any:
    """The rows of a split, as the datasets library keeps them."""
    from datasets import load_dataset_builder

    reasons: list[str] = []
    for pause in (*pauses, None):
        try:
            builder = load_dataset_builder(name, config)
            with suppress(Denied):  # the client has ways of its own, and a letter where they fail
                _bring_large(builder, pauses)
            builder.download_and_prepare()
            return builder.as_dataset(split=split)
        except (DataError, StorageError):
            raise
        except Exception as error:  # the hub client raises many kinds; each becomes one letter
            reason = first_line(error)
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


def _bring_large(builder: Any, pauses: tuple[float, ...]) -> None:
    """Put the large files of a set into the cache, where the client finds them, each by its checksum."""
    if not Path(builder.cache_dir).exists():  # else its rows stand already
        with ThreadPoolExecutor(AT_ONCE) as pool:
            list(pool.map(lambda found: fetch(found[0], found[1], pauses), _large_files(builder)))


def _large_files(builder: Any) -> Iterator[tuple[Published, Path]]:
    """The large files that a set is made of, and the folder of the cache that each belongs to."""
    from huggingface_hub import HfApi, HfFileSystem, get_token, hf_hub_url
    from huggingface_hub.constants import HF_HUB_CACHE
    from huggingface_hub.file_download import repo_folder_name

    wanted: dict[tuple[str, str, str], list[str]] = {}
    for name in (str(name) for names in (builder.config.data_files or {}).values() for name in names):
        if name.startswith("hf://datasets/"):  # there are buckets, too
            place: Any = HfFileSystem().resolve_path(name)
            wanted.setdefault((place.repo_type, place.repo_id, place.revision), []).append(place.path_in_repo)
    for (kind, owner, revision), paths in wanted.items():
        blobs = Path(HF_HUB_CACHE) / repo_folder_name(repo_id=owner, repo_type=kind) / "blobs"
        for file in HfApi().get_paths_info(owner, paths, revision=revision, repo_type=kind):
            about = getattr(file, "lfs", None)
            if about is not None and about.size >= LARGE:
                address = hf_hub_url(owner, file.path, repo_type=kind, revision=revision)
                yield Published(address, about.size, about.sha256, about.sha256, get_token()), blobs


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
    return type(error).__name__ in BROKEN or (isinstance(error, OSError) and "onsistency check failed" in str(error))
