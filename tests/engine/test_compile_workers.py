"""Compile worker processes may be killed: waiting callers get an error, and new workers are started."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator

import pytest
from torch._inductor import config
from torch._inductor.async_compile import AsyncCompile, shutdown_compile_workers

from modelwright.engine import fallback

SOON, LATE = 400, 3000

pytestmark = pytest.mark.timeout(1500)  # each start of a worker imports torch


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Two compilers, as if there were a GPU to compile for."""
    monkeypatch.setattr(fallback.torch.cuda, "is_available", lambda: True)
    with config.patch(compile_threads=2):
        shutdown_compile_workers()
        fallback.detect_dead_compile_workers()
        yield
        shutdown_compile_workers()


def stop_with_its_workers(process: int) -> None:
    os.kill(process, signal.SIGSTOP)  # it starts no other worker while they are listed
    workers = subprocess.run(["ps", "-o", "pid=", "--ppid", str(process)], capture_output=True, text=True).stdout
    for each in (process, *map(int, workers.split())):
        os.kill(each, signal.SIGTERM)
    os.kill(process, signal.SIGCONT)


def test_a_process_that_waits_for_a_stopped_compiler_gets_an_error(started: None) -> None:
    pool = AsyncCompile.process_pool()
    assert pool.submit(os.getpid).result(SOON) != os.getpid()
    waits = pool.submit(time.sleep, LATE)
    stop_with_its_workers(pool.process.pid)
    with pytest.raises(RuntimeError, match="SubprocPool closed"):
        waits.result(SOON)
    with pytest.raises(RuntimeError, match="closed pool"):
        AsyncCompile.process_pool().submit(os.getpid)
    fallback.detect_dead_compile_workers()
    assert AsyncCompile.process_pool().submit(os.getpid).result(SOON) != os.getpid()


def test_files_that_took_the_numbers_of_closed_pipes_are_left_alone(started: None) -> None:
    pipes = [os.pipe() for _ in range(4)]
    fallback.detect_dead_compile_workers()
    for read, write in pipes:
        os.write(write, b"open")
        assert os.read(read, 4) == b"open"
        os.close(read)
        os.close(write)
