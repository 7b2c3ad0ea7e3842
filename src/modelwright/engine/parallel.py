"""DDP, FSDP2 and HSDP wrapping of a module, and conversion between full and distributed tensors."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from modelwright.engine.distributed import World


def parallelize(
    module: nn.Module, world: World, sharding: str, compute_dtype: torch.dtype | None, bucket_cap_mb: int = 25
) -> nn.Module:
    """Spread a module over the world; what comes back is called in its place."""
    if sharding in ("fsdp", "hsdp"):
        mesh = _mesh(world, sharding)
        policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
        for layer in repeated_layers(module):
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        # what the model is given stays exact: a reference of preferences, cast to bf16, would be of another model
        fully_shard(module, mesh=mesh, mp_policy=replace(policy, cast_forward_inputs=False))
        return module
    if world.size == 1:
        return module
    buffers: dict[str, Any] = {_buffer_sync_option(): bool(persistent_buffers(module))}
    return DistributedDataParallel(
        module,
        device_ids=[world.device] if world.device.type == "cuda" else None,
        bucket_cap_mb=bucket_cap_mb,
        **buffers,  # what never changes need not be sent each time
        gradient_as_bucket_view=True,
    )


@contextmanager
def gradient_sync(module: nn.Module, enabled: bool) -> Iterator[None]:
    """Exchange gradients only in the last micro-batch of a step."""
    if isinstance(module, FSDPModule):
        module.set_requires_gradient_sync(enabled)
    context: Any = module.no_sync() if isinstance(module, DistributedDataParallel) and not enabled else nullcontext()
    with context:
        yield


def repeated_layers(module: nn.Module) -> list[nn.Module]:
    """The repeated layers of a model: the members of its longest list of modules of one kind."""
    lists = [list(candidate) for candidate in module.modules() if isinstance(candidate, nn.ModuleList)]
    return max(
        (candidate for candidate in lists if len({type(layer) for layer in candidate}) == 1), key=len, default=[]
    )


def persistent_buffers(module: nn.Module) -> dict[str, Tensor]:
    """What a module keeps besides its weights, such as the running statistics of batch norms."""
    weights = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    return {name: tensor for name, tensor in module.state_dict(keep_vars=True).items() if name not in weights}


def full_tensor(tensor: Tensor) -> Tensor:
    """The full tensor of a shard; every rank must ask."""
    if not isinstance(tensor, DTensor):
        return tensor.detach()
    if tensor.dtype is torch.int16:  # which no backend can send
        wide = tensor.to(torch.int32)
        assert isinstance(wide, DTensor)
        return wide.full_tensor().to(torch.int16)
    return tensor.full_tensor()


def total_grad_norm(gradients: list[Tensor]) -> Tensor:
    """How long they are together, in fp32 where they are no wider; every rank must ask."""
    parts = torch._foreach_norm(gradients, 2, dtype=torch.float32)
    return full_tensor(torch.linalg.vector_norm(torch.stack(parts)))


def distribute_like(full: Tensor, like: Tensor) -> Tensor:
    """A full tensor laid out as another one is, in its own type."""
    if isinstance(like, DTensor):
        # every rank has all of it, so nothing need be sent
        return distribute_tensor(full.to(like.device), like.device_mesh, like.placements, src_data_rank=None)
    # in the other's own memory layout: fused optimizers walk memory, and a channels-last weight has another order
    return torch.empty_like(like, dtype=full.dtype, requires_grad=False).copy_(full)


def _buffer_sync_option() -> str:
    """What DDP calls its option to send buffers in every forward; torch 2.13 has renamed it."""
    known = inspect.signature(DistributedDataParallel.__init__).parameters
    return "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"


def _mesh(world: World, sharding: str) -> Any:
    """One line of ranks that share the weights; for hsdp one line a node, each with a copy of its own."""
    if (
        world.size > 1
        and sharding == "hsdp"
        and world.size % world.local_world_size == 0
        and world.local_world_size > 1
    ):
        shape = (world.size // world.local_world_size, world.local_world_size)
        return init_device_mesh(world.device.type, shape, mesh_dim_names=("dp_replicate", "dp_shard"))
    return init_device_mesh(world.device.type, (world.size,)) if world.size > 1 else _single_rank_mesh(world)


def _single_rank_mesh(world: World) -> Any:
    if not dist.is_initialized():
        backend = "gloo" if world.device.type == "cpu" else "nccl"
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    return init_device_mesh(world.device.type, (1,))
