"""Cache the outputs of a model's frozen layers, computed once per example, in memory or on disk.

The last two layers and the head of a 3 B model, 16 rows a step: 920 rows/s with the cache and a shared prefix, 180
without both (H200, 2026-11-15, `python -m benchmarks.speed --work survival-3b`; alone: `benchmarks.ablation --only
frozen-cache`).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import xxhash
from torch import Tensor, nn

from modelwright.data.chat_tokens import TokenizedRow
from modelwright.engine.distributed import World
from modelwright.engine.task import MicroBatch
from modelwright.errors import StorageError, first_line
from modelwright.models.attention import SharedPrefixLayout, hidden_states, is_random, probe_tokens, unwrap_peft
from modelwright.models.prefix_sharing import shared_prefix_layout, shared_prefix_mask
from modelwright.models.trainable import decoder_layers
from modelwright.plan.hardware import available_memory
from modelwright.runs.folder import read_json, write_json
from modelwright.tasks.batching import CPU_ALIGNMENT, RowLayout, cache_index_of, collate_rows, layout_packs, to_varlen

TOKENS_PER_FORWARD = {"cpu": 2048, "cuda": 16384}
"""Tokens of one block: enough to keep the device busy, few enough to verify and recompute."""
GPU_PAD_MULTIPLE = 128
"""Multiple of row lengths and loss positions on a GPU: each new shape costs a tenth of a second of planning, and sizes
that never come again fragment its memory."""
Layout = Tensor | SharedPrefixLayout | None
"""cu_seqlens of packed examples, or the varlen layout of a shared prefix."""
STATES_FILE, CACHE_MANIFEST = "states.bin", "manifest.json"
MAX_CACHE_FRACTION = 0.25
"""Largest fraction of free memory for the cache."""


@dataclass(frozen=True)
class CacheBlock:
    """Hidden states computed together, at indices first:stop of the cache."""

    rows: RowLayout
    first: int
    stop: int


@dataclass(frozen=True)
class CacheLocation:
    """Where the cache is stored."""

    setting: str
    """auto, memory or disk."""
    folder: Path
    """The folder for disk."""
    fingerprint: str
    """Changes with the model and the precision."""


class HiddenStateCache:
    """Hidden states of all examples, in blocks; a shared prefix is stored once, first."""

    def __init__(
        self,
        frozen_layers: FrozenLayers,
        examples: Sequence[TokenizedRow],
        prefix_length: int,
        device: torch.device,
        use_varlen_prefix: bool = False,
    ) -> None:
        """use_varlen_prefix: share the prefix by varlen attention instead of a mask."""
        self.frozen_layers, self.examples = frozen_layers, examples
        self.prefix_length, self._use_varlen_prefix = prefix_length, use_varlen_prefix
        self.lengths, self.offsets = [len(example) for example in examples], [0] * len(examples)
        self.blocks: list[CacheBlock] = []
        self.states: Tensor | None = None
        self._device = device
        self._row_multiple = CPU_ALIGNMENT if device.type == "cpu" else GPU_PAD_MULTIPLE
        self._plan_blocks(TOKENS_PER_FORWARD[device.type])

    def _plan_blocks(self, block_tokens: int) -> None:
        """Examples of similar length share a block, independent of world size and sampling order."""
        block_examples: list[int] = []
        first, size = 0, 0
        for number in sorted(range(len(self.examples)), key=self.lengths.__getitem__):
            length = self.lengths[number] - self.prefix_length
            if block_examples and size + length > block_tokens:
                first = self._add_block(block_examples, first)
                block_examples, size = [], 0
            block_examples.append(number)
            size += length
        self._add_block(block_examples, first)

    def _add_block(self, numbers: Sequence[int], first: int) -> int:
        stop = first + (self.prefix_length if first == 0 else 0)
        for number in numbers:
            self.offsets[number] = stop - self.prefix_length
            stop += self.lengths[number] - self.prefix_length
        packs = [[number] for number in numbers]
        rows = layout_packs(packs, self.lengths, self.prefix_length, self._use_varlen_prefix)
        self.blocks.append(CacheBlock(rows, first, stop))
        return stop

    @property
    def num_states(self) -> int:
        """Number of hidden states."""
        return self.blocks[-1].stop

    def compute(self, block: CacheBlock) -> Tensor:
        """Hidden states of a block: [tokens, width], on the device."""
        micro_batch = collate_rows(block.rows, self.examples, self.prefix_length, self._row_multiple)
        inputs, layout = micro_batch.inputs_on(self._device), None
        if self._use_varlen_prefix:
            on_cpu = shared_prefix_layout(micro_batch.inputs["segment_ids"])
            tensors = {name: each.to(self._device) for name, each in on_cpu.tensors.items()}
            layout = SharedPrefixLayout.of(tensors, on_cpu.max_seqlen_k)
        segment_ids = None if self._use_varlen_prefix else inputs.get("segment_ids")
        states = self.frozen_layers.forward_frozen(inputs["tokens"], inputs["positions"], segment_ids, layout)
        source_index, target_index, offset = [], [], 0
        cache_index = cache_index_of(block.rows, self.offsets, inputs["tokens"].shape, self.prefix_length)
        for row, row_index in zip(block.rows, cache_index, strict=True):
            used = sum(span.stop - span.start for span in row)
            skipped = self.prefix_length if block.first or offset else 0  # the prefix is taken from one row only
            source_index.append(np.arange(offset + skipped, offset + used))
            target_index.append(row_index[skipped:used])
            offset += len(row_index)
        order = np.argsort(np.concatenate(target_index), kind="stable")
        return states.flatten(0, 1)[torch.from_numpy(np.concatenate(source_index)[order]).to(self._device)]

    def batch(self, rows: RowLayout) -> MicroBatch:
        """A micro-batch with cached states: by index if they are on the device, else copied along."""
        assert self.states is not None, "the cache is filled before the first batch"
        pad = self._device.type != "cpu"
        micro_batch = collate_rows(rows, self.examples, self.prefix_length, self._row_multiple, pad_loss_positions=pad)
        micro_batch = to_varlen(micro_batch) if self._use_varlen_prefix else micro_batch
        shape = micro_batch.inputs["tokens"].shape
        cache_index = torch.from_numpy(cache_index_of(rows, self.offsets, shape, self.prefix_length))
        is_on_device = self.states.device == self._device
        extra_inputs = {"cache_index": cache_index} if is_on_device else {"states": self.states[cache_index]}
        return replace(micro_batch, inputs={**micro_batch.inputs, **extra_inputs})

    def fill(self, world: World, autocast: Callable[[], AbstractContextManager[Any]], location: CacheLocation) -> str:
        """Compute missing blocks, distributed over ranks; returns a line that says where they are stored."""
        began = time.monotonic()
        with autocast():
            first = self.compute(self.blocks[0])
        size = self.num_states * first.shape[1] * first.element_size()
        where = choose_location(size, world, location.setting)
        missing = list(range(len(self.blocks)))
        if where == "disk":
            fingerprint = self._fingerprint(location.fingerprint, first)
            find_missing = partial(_missing_blocks, location.folder, fingerprint, self.blocks, first)
            missing = world.on_rank0_broadcast(find_missing)
            self.states = _map_file(location.folder / STATES_FILE, self.num_states, first)
        else:
            device = self._device if where == "device memory" else torch.device("cpu")
            self.states = torch.empty((self.num_states, first.shape[1]), dtype=first.dtype, device=device)
        for turn, number in enumerate(missing):
            block = self.blocks[number]
            block_states = first.new_empty((block.stop - block.first, first.shape[1]))
            if turn % world.size == world.rank:
                with autocast():
                    block_states = first if number == 0 else self.compute(block)
            if world.size > 1:
                dist.broadcast(block_states, turn % world.size)
            if where != "disk" or world.is_main:
                self.states[block.first : block.stop] = block_states.to(self.states.device)
        if where == "disk":
            world.on_rank0_broadcast(lambda: _write_manifest(location.folder, fingerprint, self.blocks, self.states))
        summary = f"{self.frozen_layers.num_layers} frozen layers cached for {len(self.examples)} rows"
        recomputed = f", {len(missing)} of {len(self.blocks)} blocks recomputed" if where == "disk" else ""
        return f"{summary}: {size / 1e9:.2f} GB in {where}{recomputed}, {time.monotonic() - began:.1f} s"

    def _fingerprint(self, model: str, first: Tensor) -> str:
        layout_key = f"{self.prefix_length}:{self._use_varlen_prefix}:{self._device.type}"
        digest = xxhash.xxh3_128(f"{model}:{self.frozen_layers.num_layers}:{layout_key}".encode())
        digest.update(f"{first.dtype}:{tuple(first.shape)}:{torch.__version__}".encode())
        for example in self.examples:
            digest.update(example.input_ids.tobytes())
            digest.update(b"\0")
        return digest.hexdigest()


def choose_location(size: int, world: World, setting: str) -> str:
    """Where this many bytes are stored: on the device, in host memory or on disk."""
    if setting == "disk":
        return "disk"
    if world.device.type == "cuda" and size <= MAX_CACHE_FRACTION * torch.cuda.mem_get_info(world.device)[0]:
        return "device memory"
    if size * world.size <= MAX_CACHE_FRACTION * available_memory() or setting == "memory":
        return "memory" if world.device.type == "cuda" else "device memory"
    return "disk"


def _map_file(path: Path, num_states: int, like: Tensor) -> Tensor:
    width = like.shape[1]
    return torch.from_file(str(path), shared=True, size=num_states * width, dtype=like.dtype).view(num_states, width)


def _missing_blocks(folder: Path, fingerprint: str, blocks: Sequence[CacheBlock], like: Tensor) -> list[int]:
    """Blocks that are not on disk or are damaged; creates the file if there is none."""
    size = blocks[-1].stop * like.shape[1] * like.element_size()
    manifest: dict[str, Any] = {}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if (folder / CACHE_MANIFEST).exists() and (folder / STATES_FILE).exists():
            manifest = read_json(folder / CACHE_MANIFEST)
        if manifest.get("fingerprint") != fingerprint or (folder / STATES_FILE).stat().st_size != size:
            manifest = {}
            with (folder / STATES_FILE).open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, size)  # a full disk fails here, not as SIGBUS in mapped memory
    except (OSError, ValueError) as error:
        raise StorageError(f"{folder}: {size / 1e9:.2f} GB of cached hidden states do not fit ({error})") from None
    hashes = manifest.get("blocks", [])
    if len(hashes) != len(blocks):
        return list(range(len(blocks)))
    states = _map_file(folder / STATES_FILE, blocks[-1].stop, like)
    return [number for number, block in enumerate(blocks) if _block_hash(states, block) != hashes[number]]


def _write_manifest(folder: Path, fingerprint: str, blocks: Sequence[CacheBlock], states: Tensor | None) -> None:
    assert states is not None
    hashes = [_block_hash(states, block) for block in blocks]
    write_json(folder / CACHE_MANIFEST, {"fingerprint": fingerprint, "blocks": hashes})


def _block_hash(states: Tensor, block: CacheBlock) -> str:
    return xxhash.xxh3_128_hexdigest(states[block.first : block.stop].contiguous().view(torch.uint8).numpy().data)


class FrozenLayers:
    """The frozen layers below the first trainable one."""

    def __init__(self, model: Any, num_layers: int) -> None:
        """num_layers: layers that are frozen with everything below them (see `num_frozen_layers`)."""
        self.model, self.num_layers = model, num_layers
        self.layers = list(decoder_layers(unwrap_peft(model)))
        self._returns_tuple = False

    @torch.no_grad()
    def forward_frozen(
        self, tokens: Tensor, positions: Tensor, segment_ids: Tensor | None = None, layout: Layout = None
    ) -> Tensor:
        """Output of the last frozen layer: [rows, length, width]. Shapes as in `hidden_states`."""
        outputs: list[Tensor] = []

        def capture(_layer: nn.Module, _args: Any, output: Any) -> None:
            self._returns_tuple = isinstance(output, tuple)
            outputs.append(output[0] if self._returns_tuple else output)

        hook = self.layers[self.num_layers - 1].register_forward_hook(capture)
        try:
            with _bypassed(
                self.layers[self.num_layers :], lambda hidden_states, *_, **__: self._layer_output(hidden_states)
            ):
                hidden_states(self.model, tokens, positions, self._mask(positions, segment_ids), layout)
        finally:
            hook.remove()
        return outputs[0]

    def forward_rest(
        self, states: Tensor, positions: Tensor, segment_ids: Tensor | None = None, layout: Layout = None
    ) -> Tensor:
        """Hidden states before the LM head, from the frozen layers' output. states: [rows, length, width]."""
        with _bypassed(self.layers[: self.num_layers], lambda *_, **__: self._layer_output(states)):
            return hidden_states(self.model, states, positions, self._mask(positions, segment_ids), layout)

    @torch.no_grad()
    def blocker(self) -> str | None:
        """Why the outputs of the frozen layers cannot be cached; None if they draw no random numbers and both halves
        together equal the full model bit for bit, on 16 tokens."""
        tokens = probe_tokens(self.model)[:, :16]
        positions = torch.arange(16, device=tokens.device).unsqueeze(0)
        was_training = self.model.training
        try:
            if is_random(self.model, lambda: self.forward_frozen(tokens, positions)):
                return "they draw random numbers in training (dropout or jitter)"
            self.model.eval()
            full = hidden_states(self.model, tokens, positions)
            rest = self.forward_rest(self.forward_frozen(tokens, positions), positions)
        except (TypeError, ValueError, RuntimeError, AttributeError, IndexError) as error:
            return f"this family cannot be split ({first_line(error)})"
        finally:
            self.model.train(was_training)
        return None if torch.equal(rest, full) else "this family cannot be split exactly"

    def _mask(self, positions: Tensor, segment_ids: Tensor | None) -> Any:
        return None if segment_ids is None else shared_prefix_mask(self.model, positions, segment_ids)

    def _layer_output(self, hidden: Tensor) -> Any:
        return (hidden,) if self._returns_tuple else hidden


def num_frozen_layers(model: Any) -> int:
    """Layers that are frozen with everything below them; 0 if something below is trainable."""
    core = unwrap_peft(model)
    layers = decoder_layers(core)
    params_above = _params_above(core, layers)
    if any(weight.requires_grad and id(weight) not in params_above for weight in core.parameters()):
        return 0
    trainable = (index for index, layer in enumerate(layers) if any(w.requires_grad for w in layer.parameters()))
    return next(trainable, len(layers))


def _params_above(core: Any, layers: nn.ModuleList) -> set[int]:
    """Ids of the parameters of the layers and of everything after them, without those shared with the embeddings."""
    parts: list[nn.Module] = [layers]
    for parent in core.modules():
        children = list(parent.children())
        if any(child is layers for child in children):
            index = next(index for index, child in enumerate(children) if child is layers)
            parts += children[index + 1 :]
    if (head := core.get_output_embeddings()) is not None:
        parts.append(head)
    below = {id(weight) for weight in core.get_input_embeddings().parameters()}
    return {id(weight) for part in parts for weight in part.parameters()} - below


@contextmanager
def _bypassed(layers: Sequence[nn.Module], forward: Callable[..., Any]) -> Iterator[None]:
    """Replace the forward of these layers, uncompiled, inside."""
    before = [(layer.__dict__.get("forward"), layer._compiled_call_impl) for layer in layers]
    for layer in layers:
        layer.__dict__["forward"], layer.__dict__["_compiled_call_impl"] = forward, None
    try:
        yield
    finally:
        for layer, (own, call) in zip(layers, before, strict=True):
            del layer.__dict__["forward"]
            layer.__dict__["_compiled_call_impl"] = call
            if own is not None:
                layer.__dict__["forward"] = own
