"""The processes in which torch compiles kernels for a GPU: their end is heard, and others take their place.

Whoever stops a whole group of processes, or is short of memory, ends them too, and the work that waits for them must
not wait for ever: a step is done otherwise, and the checkpoint is written.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Any

import torch


def hear_their_end() -> None:
    """Have them started, where a GPU is compiled for in parallel, so that torch learns when they are gone."""
    if not torch.cuda.is_available():  # what is compiled for the CPU waits for threads of this process
        return
    with suppress(Exception):  # without them or their names in another torch, work goes on as torch has it
        from torch._inductor import config
        from torch._inductor.async_compile import AsyncCompile, get_compile_threads, shutdown_compile_workers

        if config.worker_start_method != "subprocess" or get_compile_threads() < 2:
            return
        pool: Any = AsyncCompile.process_pool()
        if not pool.running:
            if timer := getattr(pool, "timer", None):  # it would speak to them again, and be heard on the screen
                timer.quit()
            shutdown_compile_workers()
            pool = AsyncCompile.process_pool()
        let_pipes_end(pool)


def let_pipes_end(pool: Any) -> None:
    """Close the workers' ends of the pipes in this process: torch keeps them, and so never reads that they are gone."""
    ends = [int(word.split("=")[1]) for word in pool.process.args if "-fd=" in word]
    ours = {_which(pipe.fileno()) for pipe in (pool.read_pipe, pool.write_pipe)}
    for end in ends:
        with suppress(OSError):  # closed already: by us, or by a torch that does so itself
            if _which(end) in ours:  # both ends of a pipe are one file; its number may belong to another by now
                os.close(end)


def _which(file: int) -> tuple[int, int]:
    found = os.fstat(file)
    return found.st_dev, found.st_ino
