"""DDP, FSDP2 and HSDP wrapping of a module, and conversion between full and distributed tensors."""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from modelwright.engine.distributed import World


def parallelize(
    module: nn.Module, world: World, sharding: str, compute_dtype: torch.dtype | None, bucket_cap_mb: int = 25
) -> nn.Module:
    """Wrap a module for DDP, FSDP2 or HSDP; the result is called instead of the module."""
    if world.size == 1:
        return module
    if sharding in ("fsdp", "hsdp"):
        mesh = _mesh(world, sharding)
        policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
        for layer in repeated_layers(module):
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        # inputs stay fp32: DPO's reference log-probs must not be rounded to bf16
        fully_shard(module, mesh=mesh, mp_policy=replace(policy, cast_forward_inputs=False))
        return module
    buffers: dict[str, Any] = {_buffer_sync_option(): bool(persistent_buffers(module))}
    return DistributedDataParallel(
        module,
        device_ids=[world.device] if world.device.type == "cuda" else None,
        bucket_cap_mb=bucket_cap_mb,
        **buffers,  # constant buffers need no broadcast
        gradient_as_bucket_view=True,
    )


def repeated_layers(module: nn.Module) -> list[nn.Module]:
    """The decoder layers (or blocks) of a model: its longest ModuleList of one class."""
    lists = [list(candidate) for candidate in module.modules() if isinstance(candidate, nn.ModuleList)]
    return max((layers for layers in lists if len({type(layer) for layer in layers}) == 1), key=len, default=[])


def persistent_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Persistent buffers of a module, such as the running statistics of batch norms."""
    weights = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    return {name: tensor for name, tensor in module.state_dict(keep_vars=True).items() if name not in weights}


def full_tensor(tensor: Tensor) -> Tensor:
    """The full tensor of a DTensor; a collective, so every rank must call it."""
    if not isinstance(tensor, DTensor):
        return tensor.detach()
    if tensor.dtype is torch.int16:  # NCCL and gloo have no int16
        wide = tensor.to(torch.int32)
        assert isinstance(wide, DTensor)
        return wide.full_tensor().to(torch.int16)
    return tensor.full_tensor()


def local_shard(tensor: Tensor) -> Tensor:
    """The local shard of a DTensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def distribute_like(full: Tensor, like: Tensor) -> Tensor:
    """A full tensor sharded and laid out in memory as another one, in its own dtype."""
    if isinstance(like, DTensor):
        # every rank has the full tensor: nothing is sent
        return distribute_tensor(full.to(like.device), like.device_mesh, like.placements, src_data_rank=None)
    # same strides: fused optimizers walk raw memory, and channels-last weights have another order
    return torch.empty_like(like, dtype=full.dtype, requires_grad=False).copy_(full)


def _buffer_sync_option() -> str:
    """Name of DDP's option to broadcast buffers in every forward; torch 2.13 renamed it."""
    known = inspect.signature(DistributedDataParallel.__init__).parameters
    return "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"


def _mesh(world: World, sharding: str) -> Any:
    """Mesh over all ranks; for hsdp, nodes × ranks per node, with one replica per node."""
    per_node = world.local_world_size
    if sharding == "hsdp" and world.size % per_node == 0 and per_node > 1:
        shape = (world.size // per_node, per_node)
        return init_device_mesh(world.device.type, shape, mesh_dim_names=("dp_replicate", "dp_shard"))
    return init_device_mesh(world.device.type, (world.size,))
