"""The processes in which torch compiles kernels for a GPU: their end is heard, and others can take their place.

Whoever stops a whole group of processes, or is short of memory, ends them too, and the work that waits for them must
not wait for ever: a step is done otherwise, and the checkpoint is written.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Any

import torch


def hear_their_end() -> None:
    """Start them, where a GPU's kernels will be compiled in parallel, so that torch learns when they are gone."""
    if not torch.cuda.is_available():  # what is compiled for the CPU waits for threads of this process
        return
    from torch._inductor import config
    from torch._inductor.async_compile import AsyncCompile, get_compile_threads

    if config.worker_start_method == "subprocess" and get_compile_threads() > 1:
        let_pipes_end(AsyncCompile.process_pool())


def start_others() -> None:
    """Leave those that there are, which may be gone, for new ones."""
    if torch.cuda.is_available():
        from torch._inductor.async_compile import shutdown_compile_workers

        shutdown_compile_workers()
        hear_their_end()


def let_pipes_end(pool: Any) -> None:
    """Close the workers' ends of the pipes in this process: torch keeps them, and so never reads that they are gone."""
    ends = [int(word.split("=")[1]) for word in pool.process.args if "-fd=" in word]
    ours = {os.fstat(pipe.fileno()).st_ino for pipe in (pool.read_pipe, pool.write_pipe) if not pipe.closed}
    for end in ends:
        with suppress(OSError):  # closed already: by us, or by a torch that does so itself
            if os.fstat(end).st_ino in ours:  # both ends of a pipe have one number, and no other file has it
                os.close(end)
