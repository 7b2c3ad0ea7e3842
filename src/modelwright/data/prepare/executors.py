"""Executors that run prepare tasks: serial, processes, ranks, Ray; run as a module, a worker process."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from modelwright import errors
from modelwright.data.packing import NDArray
from modelwright.data.prepare import dedup, steps
from modelwright.data.prepare.job import PrepareJob, is_complete

POLL_SECONDS = 0.2
WAIT_TIMEOUT_SECONDS = 1800.0
"""Seconds that a rank waits for the others."""
MAX_ATTEMPTS = 3
"""Worker processes that may die on one task before the job fails."""


class Executor(Protocol):
    """Runs the tasks of a step."""

    def run(self, job: PrepareJob, step: str, numbers: Sequence[int]) -> Iterator[int]:
        """Run the tasks, and yield the number of each finished one."""

    def run_once(self, job: PrepareJob, done: Callable[[], bool], make: Callable[[], None]) -> None:
        """Run `make` in one process, while the others wait until `done` or the job is complete."""

    def close(self) -> None:
        """Release all workers."""


class SerialExecutor:
    """Runs all tasks in this process."""

    def run(self, job: PrepareJob, step: str, numbers: Sequence[int]) -> Iterator[int]:
        for number in numbers:
            steps.run_task(job, step, number)
            yield number

    def run_once(self, job: PrepareJob, done: Callable[[], bool], make: Callable[[], None]) -> None:
        if not done():
            make()

    def close(self) -> None:
        pass


class ProcessExecutor(SerialExecutor):
    """Local worker processes that read JSON lines from a pipe; they exit with this process, however it ends."""

    def __init__(self, count: int) -> None:
        """Up to `count` processes, started when there is more than one task."""
        self._count = count
        self._workers: list[_WorkerProcess] = []

    def run(self, job: PrepareJob, step: str, numbers: Sequence[int]) -> Iterator[int]:
        pending = [number for number in numbers if not job.store.is_done(step, number)]
        if self._count == 1 or len(pending) < 2:
            yield from super().run(job, step, numbers)
            return
        task_queue: queue.SimpleQueue[int] = queue.SimpleQueue()
        replies: queue.SimpleQueue[int | Exception] = queue.SimpleQueue()
        for number in pending:
            task_queue.put(number)
        self._workers += [_WorkerProcess() for _ in range(len(self._workers), min(self._count, len(pending)))]
        for worker in self._workers:
            args = (str(job.folder), step, task_queue, replies)
            threading.Thread(target=worker.run_tasks, args=args, daemon=True).start()
        for _ in pending:
            reply = replies.get()
            if isinstance(reply, Exception):
                self.close()
                raise reply
            yield reply

    def close(self) -> None:
        """Stop the processes."""
        while self._workers:
            self._workers.pop().close()


class _WorkerDied(Exception):
    """The worker process has exited."""


class _WorkerProcess:
    """One worker process and its pipe."""

    def __init__(self) -> None:
        self._closed = False
        self._process = self._start()

    def _start(self) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "modelwright.data.prepare.executors"]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def run_tasks(
        self, folder: str, step: str, task_queue: queue.SimpleQueue[int], replies: queue.SimpleQueue[int | Exception]
    ) -> None:
        """Run tasks from the queue until it is empty or one fails."""
        while True:
            try:
                number = task_queue.get_nowait()
            except queue.Empty:
                return
            try:
                self._run_with_restarts({"folder": folder, "step": step, "number": number})
                replies.put(number)
            except Exception as error:
                replies.put(error)
                return

    def _run_with_restarts(self, task: dict[str, Any]) -> None:
        """Run a task; a worker that dies is restarted, and the task with it."""
        for attempt in range(MAX_ATTEMPTS):
            try:
                return self._request(task)
            except _WorkerDied:
                self._stop()
                if not self._closed and attempt + 1 < MAX_ATTEMPTS:
                    self._process = self._start()
        message = f"a worker of the preparation ended {MAX_ATTEMPTS} times on one task"
        raise errors.Interrupted(f"{message}; the same command resumes where it stopped")

    def _request(self, task: dict[str, Any]) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(task) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except (BrokenPipeError, ValueError):
            line = ""
        if not line:
            raise _WorkerDied
        reply = json.loads(line)
        if not reply["done"]:
            raise error_from_reply(reply)

    def close(self) -> None:
        """Stop the process; it is not restarted."""
        self._closed = True
        self._stop()

    def _stop(self) -> None:
        with suppress(OSError):
            if self._process.stdin:
                self._process.stdin.close()
        try:
            self._process.wait(timeout=0.5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def error_from_reply(reply: dict[str, Any]) -> errors.ModelwrightError:
    """The exception of a worker's reply."""
    if reply["kind"] == "DataError":
        return errors.DataError([errors.Problem(where, message) for where, message in reply["problems"]])
    kinds = {"StorageError": errors.StorageError, "UsageError": errors.UsageError}
    return kinds.get(reply["kind"], errors.ModelwrightError)(reply["message"])


@dataclass(frozen=True)
class RankExecutor:
    """One of several processes on a shared disk, started by any launcher: rank r runs every n-th task."""

    rank: int
    """Rank of this process."""
    size: int
    """Number of processes."""

    def run(self, job: PrepareJob, step: str, numbers: Sequence[int]) -> Iterator[int]:
        for number in numbers[self.rank :: self.size]:
            steps.run_task(job, step, number)
            yield number
        deadline = time.monotonic() + WAIT_TIMEOUT_SECONDS
        while not (all(job.store.is_done(step, number) for number in numbers) or is_complete(job)):
            self._wait(deadline)

    def run_once(self, job: PrepareJob, done: Callable[[], bool], make: Callable[[], None]) -> None:
        if self.rank == 0:
            if not done():
                make()
            return
        deadline = time.monotonic() + WAIT_TIMEOUT_SECONDS
        while not (done() or is_complete(job)):  # the work folder may be deleted already
            self._wait(deadline)

    def close(self) -> None:
        pass

    def _wait(self, deadline: float) -> None:
        if time.monotonic() > deadline:
            minutes = f"{WAIT_TIMEOUT_SECONDS / 60:.0f} minutes"
            raise errors.Interrupted(f"rank {self.rank} waited {minutes} for the others; start again")
        time.sleep(POLL_SECONDS)


Columns = dict[str, NDArray]


@dataclass(frozen=True)
class RayExecutor(SerialExecutor):
    """Runs tasks on a Ray cluster."""

    count: int | None = None
    """CPUs of a local cluster, if none is running."""

    def run(self, job: PrepareJob, step: str, numbers: Sequence[int]) -> Iterator[int]:
        pending = [number for number in numbers if not job.store.is_done(step, number)]
        if not pending:
            return
        data = _init_ray_data(self.count)
        yield from (_run_bands(data, job, pending) if step == job.dedup_key else _run_slices(data, job, step, pending))


def _init_ray_data(count: int | None) -> Any:
    try:
        import ray
        import ray.data
    except ImportError:
        raise errors.UsageError("Ray is not installed; pip install 'modelwright[ray]'") from None
    if not ray.is_initialized():
        ray.init(num_cpus=count, include_dashboard=False, log_to_driver=False)
    ray.data.DataContext.get_current().enable_progress_bars = False
    return ray.data


def _run_slices(data: Any, job: PrepareJob, step: str, pending: list[int]) -> Iterator[int]:
    """One block per slice: Ray schedules them on free workers and retries lost ones."""
    folder = str(job.folder)

    def run(row: dict[str, Any]) -> dict[str, Any]:
        return {**row, "answer": json.dumps(try_task(PrepareJob.read(Path(folder)), step, row["number"]))}

    rows = data.from_items([{"number": number} for number in pending], override_num_blocks=len(pending))
    for row in rows.map(run).iter_rows():
        reply = json.loads(row["answer"])
        if not reply["done"]:
            raise error_from_reply(reply)
        yield int(row["number"])


def _run_bands(data: Any, job: PrepareJob, pending: list[int]) -> Iterator[int]:
    """Shuffle by band key: documents with equal keys meet in one partition and are compared there."""
    folder, partitions = str(job.folder), max(2, len(job.slices))
    slices = [{"slice": index} for index in range(len(job.slices))]
    keys = data.from_items(slices, override_num_blocks=len(slices)).map_batches(
        lambda batch: band_key_table(PrepareJob.read(Path(folder)), batch["slice"].tolist(), pending, partitions),
        batch_format="numpy",
    )
    compared = keys.groupby("part").map_groups(
        lambda group: verify_partition(PrepareJob.read(Path(folder)), group), batch_format="numpy"
    )
    batches = [(batch["band"], np.stack([batch["first"], batch["second"]], axis=1))
             for batch in compared.iter_batches(batch_format="numpy")]  # fmt: skip
    for band in pending:
        band_pairs = [pairs[bands == band] for bands, pairs in batches]
        with job.store.write_task(job.dedup_key, band) as task_dir:
            steps.save_pairs(task_dir, np.concatenate([np.zeros((0, 2), dtype=np.int64), *band_pairs]))
        yield band


def band_key_table(job: PrepareJob, slice_indices: Sequence[int], bands: Sequence[int], partitions: int) -> Columns:
    """Band keys of some slices: one row per document and band, with its partition."""
    first = np.asarray(job.store.load_array(f"exact_dedup-{job.clean_key}", 0, "first"))
    offsets = steps.slice_offsets(job)
    columns: dict[str, list[NDArray]] = {"part": [], "band": [], "key": [], "document": []}
    for index in slice_indices:
        documents = np.arange(offsets[index], offsets[index + 1])
        stored = job.store.load_array(job.clean_key, index, "bands")
        for band in bands:
            keys = np.asarray(stored[band])
            wanted = (keys != 0) & (first[documents] == documents)
            columns["key"].append(keys[wanted])
            columns["document"].append(documents[wanted])
            columns["band"].append(np.full(int(wanted.sum()), band))
            columns["part"].append((keys[wanted] % np.uint64(partitions)).astype(np.int64))
    return {name: np.concatenate(values) for name, values in columns.items()}


def verify_partition(job: PrepareJob, group: Columns) -> Columns:
    """Verified pairs among the documents of one partition, per band."""
    threshold, signatures = job.settings.jaccard_threshold, steps.signature_loader(job)
    columns: dict[str, list[NDArray]] = {"band": [], "first": [], "second": []}
    for band in np.unique(group["band"]):
        mask = group["band"] == band
        pairs = dedup.verify_bucket_pairs(group["document"][mask], group["key"][mask], signatures, threshold)
        columns["band"].append(np.full(len(pairs), band))
        columns["first"].append(pairs[:, 0])
        columns["second"].append(pairs[:, 1])
    return {name: np.concatenate(values) for name, values in columns.items()}


def try_task(job: PrepareJob, step: str, number: int) -> dict[str, Any]:
    """Run a task; an error becomes part of the reply."""
    try:
        steps.run_task(job, step, number)
    except errors.ProblemsError as error:
        problems = [(problem.where, problem.message) for problem in error.problems]
        return {"done": False, "kind": "DataError", "problems": problems}
    except errors.ModelwrightError as error:
        return {"done": False, "kind": type(error).__name__, "message": str(error)}
    except Exception as error:
        message = f"{type(error).__name__}: {error} (step {step.partition('-')[0]}, task {number})"
        return {"done": False, "kind": "", "message": message}
    return {"done": True}


def main() -> None:
    """Serve requests until stdin ends, which it does when the parent exits."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # keep the output of libraries out of the replies
    for line in sys.stdin:
        request = json.loads(line)
        job = PrepareJob.read(Path(request["folder"]))
        print(json.dumps(try_task(job, request["step"], request["number"])), file=replies, flush=True)


if __name__ == "__main__":
    main()
