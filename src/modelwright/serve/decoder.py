"""Decode many prompts in one batch: rows that come and go, and the host one step behind the device."""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from modelwright.models import attention as attn
from modelwright.serve.kv_cache import DecoderCache, SharedCache, choose_cache, compiled_cache
from modelwright.serve.sampling import DecodeRequest, Sampler, kernel_samples_exactly

MAX_ROWS = {"cpu": 32, "cuda": 64}
"""Rows that are decoded at once."""
PREFILL_TOKENS = 8192
"""Prompt tokens computed in one forward pass on a GPU; on a CPU every prompt is computed alone, since it costs the same
and the result does not depend on its neighbours."""
COMPILE_STEPS = 5000
"""Steps from which on compiled layers are worth their compilation: norms, MLP and RoPE of a 4 B model took 13 s to
compile and saved 4 ms a step with 32 rows (H200, 2026-11-18)."""


class SampledTokens(NamedTuple):
    """The tokens of one step, on their way from the device."""

    requests: list[DecodeRequest]
    """One for each row."""
    values: Tensor
    """[2, rows] float64, tokens and their log-probs, on the host as soon as the event has come."""
    event: Any
    """None on a CPU."""

    @classmethod
    def of(cls, requests: Sequence[DecodeRequest], tokens: Tensor, logprobs: Tensor) -> SampledTokens:
        """Start to copy the tokens to the host."""
        values, event = torch.stack([tokens.double(), logprobs.double()]).to("cpu", non_blocking=True), None
        if tokens.is_cuda:
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
        return cls(list(requests), values, event)

    def add_to_requests(self) -> None:
        """Wait for the tokens; a row that was finished in the meantime has one too many."""
        if self.event is not None:
            self.event.synchronize()
        tokens, logprobs = self.values.tolist()
        for request, token, logprob in zip(self.requests, tokens, logprobs, strict=True):
            if not request.finished:
                request.add(int(token), logprob)


class Decoder:
    """Decodes requests in batches: a row that is finished is taken by the next request.

    Whoever calls `step` advances all requests, so that several threads may wait for answers; with `in_thread` a thread
    does it that lives as long as there is work. Where the cache is static, the tokens of a step are read after the next
    one is launched, so that the device does not wait for the host; a row that is finished has computed one token more.
    """

    def __init__(self, model: Any, cache: DecoderCache | None = None, max_rows: int | None = None) -> None:
        self.cache = choose_cache(model) if cache is None else cache
        self._device, self._dtype = next(model.parameters()).device, model.dtype
        self.max_rows = max_rows or MAX_ROWS.get(self._device.type, MAX_ROWS["cpu"])
        rope = attn.rope_limit(model)
        self._rope_limit: float = rope.max_length if rope else math.inf
        is_shared = isinstance(self.cache, SharedCache)
        self._prefill_tokens = PREFILL_TOKENS if is_shared and self._device.type == "cuda" else 0
        self._reads_late = isinstance(self.cache, SharedCache) and self.cache.static and not rope
        self._rows: list[DecodeRequest] = []
        self._joining: list[DecodeRequest] = []
        self._waiting: deque[DecodeRequest] = deque()
        self._sampler: Sampler | None = None  # None after rows have come or gone
        self._tokens = torch.empty(0)
        self._unread: SampledTokens | None = None
        self._step_lock, self._queue_lock = threading.Lock(), threading.Lock()
        self._thread_runs = False
        self._steps, self._is_compiled, self._kernel = 0, False, False

    @property
    def can_compile(self) -> bool:
        """Whether the layers can be compiled: only a static cache calls them with few shapes."""
        return isinstance(self.cache, SharedCache) and self.cache.static and not self._is_compiled

    def compile_for(self, steps: float) -> None:
        """Compile the layers if that is worth it for so many steps more; until then nobody gets a token."""
        if self._steps + steps < COMPILE_STEPS or not self.can_compile:
            return
        with self._step_lock:
            self._remove_finished()
            if isinstance(self.cache, SharedCache) and self.can_compile and not self._rows:
                self.cache, self._is_compiled = compiled_cache(self.cache), True
                if self.cache.compiled and self._device.type == "cuda":
                    self._kernel = kernel_samples_exactly(self._device, self._dtype)

    def submit(self, *requests: DecodeRequest, in_thread: bool = False) -> None:
        """Queue requests, in order of arrival."""
        with self._queue_lock:
            self._waiting.extend(requests)
            if in_thread and not self._thread_runs:
                self._thread_runs = True
                threading.Thread(target=self._run, name="decoder").start()

    def _run(self) -> None:
        while True:
            self.step()
            with self._step_lock, self._queue_lock:
                if not self._rows and not self._waiting:
                    self._thread_runs = False
                    return

    def cancel_all(self) -> None:
        """Drop every request."""
        with self._queue_lock:
            requests = [*self._rows, *self._joining, *self._waiting]
        for request in requests:
            request.cancelled = True
            request.notify()

    def step(self) -> None:
        """Decode one token of every row, with waiting requests in the rows that are free."""
        with self._step_lock, torch.no_grad():
            try:
                self._remove_finished()
                self._admit()
                if self._rows:
                    self._advance()
            except Exception as error:  # such as too little memory: nobody may wait for ever
                self._fail(error)

    def _advance(self) -> None:
        """Launch the next step, unless all answers are complete with what is not read yet, and read the last one."""
        unread = self._unread
        room = (each.params.max_new_tokens - len(each.token_ids) for each in self._rows)
        self._unread = self._launch() if max(room) > (unread is not None) else None
        if unread is not None:
            unread.add_to_requests()
        if not self._reads_late:
            self._read()
        if not self._reads_late or all(request.finished for request in self._rows):
            self._remove_finished()

    def _launch(self) -> SampledTokens:
        """Compute a token of every row."""
        if self._sampler is None:  # nothing is unread
            self._sampler = Sampler(self._rows, self._device, self._kernel)
            self._tokens = torch.tensor([request.token_ids[-1] for request in self._rows], device=self._device)
        self._tokens, logprobs = self._sampler(self._forward())
        self._steps += 1
        return SampledTokens.of(self._rows, self._tokens, logprobs)

    def _read(self) -> None:
        """Read the tokens of the last step."""
        if unread := self._unread:
            self._unread = None
            unread.add_to_requests()

    def _forward(self) -> Tensor:
        """Logits after the last token of every row; one that exceeds the RoPE limit is alone, and computed anew."""
        first = self._rows[0]
        if len(first.prompt) + len(first.token_ids) == self._rope_limit + 1:
            self.cache.clear()
            return self.cache.admit([[*first.prompt, *first.token_ids]])
        return self.cache.forward(self._tokens)

    def _admit(self) -> None:
        while group := self._next_group():
            self._joining = group
            self._read()
            self._remove_finished()
            logits = self.cache.admit([request.prompt for request in group])
            self._rows, self._joining, self._sampler = [*self._rows, *group], [], None
            SampledTokens.of(group, *Sampler(group, self._device, self._kernel)(logits)).add_to_requests()
            self._remove_finished()

    def _next_group(self) -> list[DecodeRequest]:
        """Waiting requests whose prompts are computed together: on a CPU, those of one prompt."""
        group: list[DecodeRequest] = []
        longest = max((request.max_length for request in self._rows), default=0)
        with self._queue_lock:
            while self._waiting and len(self._rows) + len(group) < self.max_rows:
                request = self._waiting[0]
                if request.finished:
                    self._waiting.popleft()
                    continue
                longest, rows = max(longest, request.max_length), len(self._rows) + len(group)
                if rows and (longest > self._rope_limit or not self.cache.fits(rows + 1, longest)):
                    break
                width = max(len(each.prompt) for each in (*group, request))
                if group and request.prompt != group[0].prompt and width * (len(group) + 1) > self._prefill_tokens:
                    break
                group.append(self._waiting.popleft())
        return group

    def _remove_finished(self) -> None:
        if any(request.finished for request in self._rows):
            self._read()
            self._sampler = None
        for row in reversed(range(len(self._rows))):
            if self._rows[row].finished:
                self.cache.remove(row)
                last = self._rows.pop()
                if row < len(self._rows):
                    self._rows[row] = last

    def _fail(self, error: Exception) -> None:
        with self._queue_lock:
            requests = [*self._rows, *self._joining, *self._waiting]
            self._waiting.clear()
        self._rows, self._joining, self._unread, self._sampler = [], [], None, None
        self.cache.clear()
        for request in requests:
            request.error = error
            request.notify()
