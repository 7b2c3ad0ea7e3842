"""LaunchConfig of one node, from command-line options and PET_ variables; and the command to type on each node."""

from __future__ import annotations

import fcntl
import json
import os
import shlex
import socket
import struct
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from modelwright.errors import UsageError
from modelwright.recipe.load import LoadedRecipe, dump_yaml
from modelwright.runs.folder import read_json_object

DEFAULT_MASTER_PORT = 29500
JOIN_TIMEOUT = 600
"""Timeout of the first rendezvous, in seconds."""
REJOIN_TIMEOUT = 40
"""Timeout of a later one when a node is lost; otherwise the first one's timeout applies."""


@dataclass(frozen=True)
class NodeRange:
    """How many nodes a run may have."""

    min_nodes: int = 1
    """Minimum number of nodes; with fewer it waits."""
    max_nodes: int = 1
    """Maximum number of nodes."""

    @property
    def elastic(self) -> bool:
        """Whether nodes may join and leave."""
        return self.min_nodes != self.max_nodes

    def __str__(self) -> str:
        return f"{self.min_nodes}:{self.max_nodes}"


def recipe_hash(loaded: LoadedRecipe) -> str:
    """Hash of the recipe: all nodes must have the same."""
    import xxhash

    return xxhash.xxh3_64_hexdigest(dump_yaml(loaded.recipe).encode())


@dataclass(frozen=True)
class LaunchConfig:
    """One node's part of a launch."""

    rank_args: tuple[str, ...]
    """Arguments of `modelwright` that every rank runs."""
    nproc_per_node: int
    """Ranks on this node."""
    log_dir: str
    """Folder of the ranks' stderr logs."""
    nnodes: NodeRange = NodeRange()
    """Nodes in all."""
    node_rank: int = 0
    """This node's rank; node 0 hosts the rendezvous."""
    master_addr: str = "127.0.0.1"
    """Where node 0 is reached."""
    master_port: int = DEFAULT_MASTER_PORT
    """Its port."""
    local_addr: str = "127.0.0.1"
    """Address at which the other nodes reach this one."""
    socket_ifname: str | None = None
    """The network interface that has this address."""
    max_restarts: int = 3
    """Restarts allowed without a completed step in between."""
    forkserver_preload: tuple[str, ...] = ()
    """Modules that the fork server imports, so that a restart does not import them again; none: spawn.

    Ranks with GPUs are spawned: CUDA initialised by an import cannot be used after a fork.
    """
    recipe_hash: str = ""
    """Hash of the recipe: all nodes must have the same."""
    auto_precision: bool = True
    """Whether a stage has `precision: auto`, which must then resolve alike on all nodes."""

    def to_json(self) -> str:
        """The configuration as one command-line argument."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> LaunchConfig:
        """Parse what `to_json` wrote."""
        value: dict[str, Any] = json.loads(text)
        value |= {"nnodes": NodeRange(**value["nnodes"])}
        value |= {key: tuple(item) for key, item in value.items() if isinstance(item, list)}
        return LaunchConfig(**value)


def parse_nnodes(text: str) -> NodeRange:
    """`2`, or `1:2` where nodes may join and leave."""
    min_nodes, _, max_nodes = text.partition(":")
    try:
        nodes = NodeRange(int(min_nodes), int(max_nodes or min_nodes))
    except ValueError:
        nodes = NodeRange(0, 0)
    if not 1 <= nodes.min_nodes <= nodes.max_nodes:
        raise UsageError(f"--nnodes is {text!r}; it wants a number such as 2, or a range such as 1:2")
    return nodes


NodeCommand = dict[str, str | int]
SIOCGIFADDR = 0x8915
NVIDIA_PROC_DIR = Path("/proc/driver/nvidia/gpus")
CUDA_VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
EMBEDDED_MODEL_TYPES = {"smollm2-135m-instruct": "llama"}


@dataclass(frozen=True)
class NodeOptions:
    """Node options of the command line; None where not given."""

    nnodes: str | None = None
    """Nodes in all, as `2` or `1:2`."""
    node_rank: int | None = None
    """This node's number."""
    master_addr: str | None = None
    """Where node 0 is reached."""
    master_port: int | None = None
    """Its port."""
    nproc_per_node: str | None = None
    """Ranks on each node: one number, or one for each node."""

    def with_pet_defaults(self, environ: Mapping[str, str] | None = None) -> NodeOptions:
        """Missing options filled from the PET_ variables of torchrun and the cluster's operators."""
        environ = os.environ if environ is None else environ
        count = environ.get("PET_NPROC_PER_NODE")
        return NodeOptions(
            nnodes=self.nnodes or environ.get("PET_NNODES"),
            node_rank=self.node_rank if self.node_rank is not None else _env_int(environ, "PET_NODE_RANK"),
            master_addr=self.master_addr or environ.get("PET_MASTER_ADDR"),
            master_port=self.master_port or _env_int(environ, "PET_MASTER_PORT"),
            nproc_per_node=self.nproc_per_node or (count if count and count.isdigit() else None),
        )


def resolve_nproc_per_node(
    nproc_per_node: str | None, node_rank: int = 0, environ: Mapping[str, str] | None = None
) -> int:
    """Ranks on a node: as given, else one for each GPU, else one."""
    environ = os.environ if environ is None else environ
    if nproc_per_node is None:
        return max(1, count_visible_gpus(environ))
    counts = nproc_per_node.split(",")
    if len(counts) > 1 and node_rank >= len(counts):
        problem = f"--nproc-per-node is {nproc_per_node!r}, which has no value for node {node_rank}"
        raise UsageError(f"{problem}; it wants one number for all nodes, or one for each of them")
    try:
        count = int(counts[node_rank] if len(counts) > 1 else counts[0])
    except ValueError:
        count = 0
    if count < 1:
        wants = "it wants a number such as 2, or one for each node such as 4,2"
        raise UsageError(f"--nproc-per-node is {nproc_per_node!r}; {wants}")
    visible_devices = environ.get(CUDA_VISIBLE_DEVICES)
    if visible_devices and 0 < count_visible_gpus(environ) < count:
        problem = f"--nproc-per-node is {nproc_per_node}, but {CUDA_VISIBLE_DEVICES}={visible_devices}"
        raise UsageError(f"{problem}; each rank wants a GPU of its own")
    return count


def count_visible_gpus(environ: Mapping[str, str]) -> int:
    """GPUs that ranks would see, without asking torch."""
    visible_devices = environ.get(CUDA_VISIBLE_DEVICES)
    if visible_devices is not None:
        return len([device for device in visible_devices.split(",") if device.strip() not in ("", "-1")])
    return len(list(NVIDIA_PROC_DIR.iterdir())) if NVIDIA_PROC_DIR.is_dir() else 0


def build_launch_config(
    loaded: LoadedRecipe, rank_args: tuple[str, ...], options: NodeOptions, max_restarts: int
) -> LaunchConfig:
    """The resolved configuration of this node."""
    nodes = parse_nnodes(options.nnodes or "1")
    node, port = check_node_rank(nodes, options.node_rank or 0), options.master_port or DEFAULT_MASTER_PORT
    address, local, interface = options.master_addr or "127.0.0.1", "127.0.0.1", None
    if nodes.max_nodes > 1:
        address, local, interface = resolve_master_addr(options.master_addr, port)
    return LaunchConfig(
        rank_args=rank_args,
        nproc_per_node=resolve_nproc_per_node(options.nproc_per_node, node),
        log_dir=str(_make_log_dir(loaded)),
        nnodes=nodes,
        node_rank=node,
        master_addr=address,
        master_port=port,
        local_addr=local,
        socket_ifname=interface,
        max_restarts=max_restarts,
        forkserver_preload=() if count_visible_gpus(os.environ) else modules_to_preload(loaded),
        recipe_hash=recipe_hash(loaded),
        auto_precision=uses_auto_precision(loaded),
    )


def check_node_rank(nodes: NodeRange, node_rank: int) -> int:
    """The node rank, if it is in range."""
    if not 0 <= node_rank < nodes.max_nodes:
        last = nodes.max_nodes - 1
        raise UsageError(f"--node-rank is {node_rank}; nodes count from 0, so the last of {nodes.max_nodes} is {last}")
    return node_rank


def node_commands(
    recipe: str,
    rest: tuple[str, ...],
    options: NodeOptions,
    environ: Mapping[str, str] | None = None,
    launch_args: tuple[str, ...] = (),
) -> list[NodeCommand]:
    """The command to type on each node, and the equivalent for torchrun and accelerate.

    Where neither --nproc-per-node nor CUDA_VISIBLE_DEVICES was given, each node counts its own GPUs.
    """
    environ = os.environ if environ is None else environ
    nodes, port = parse_nnodes(options.nnodes or "2"), options.master_port or DEFAULT_MASTER_PORT
    address = options.master_addr or "MASTER_ADDR"
    env_prefix = f"{CUDA_VISIBLE_DEVICES}={environ[CUDA_VISIBLE_DEVICES]} " if CUDA_VISIBLE_DEVICES in environ else ""
    args, launch = shlex.join((recipe, *rest)), shlex.join((recipe, *rest, *launch_args))
    nnodes = str(nodes.max_nodes) if not nodes.elastic else str(nodes)
    known = options.nproc_per_node is not None or CUDA_VISIBLE_DEVICES in environ
    counted_nodes = range(nodes.max_nodes) if known else ()
    counts = [resolve_nproc_per_node(options.nproc_per_node, node, environ) for node in counted_nodes]
    result: list[NodeCommand] = []
    for node in range(nodes.max_nodes):
        nproc_option = f" --nproc-per-node {counts[node]}" if known else ""
        ranks = f"--nproc-per-node {counts[node] if known else 'gpu'}"
        torchrun_args = f"--node-rank {node} {ranks} --master-addr {address} --master-port {port}"
        if nodes.elastic:
            torchrun_args = f"{ranks} --rdzv-backend c10d --rdzv-endpoint {address}:{port}"
        result.append({
            "node": node,
            "command": f"{env_prefix}modelwright launch {launch} --on nodes --nnodes {nnodes} --node-rank {node} "
            f"--master-addr {address} --master-port {port}{nproc_option}",
            "torchrun": f"{env_prefix}torchrun --nnodes {nnodes} {torchrun_args} -m modelwright run {args}",
        })  # fmt: skip
        if not nodes.elastic and len(set(counts)) == 1:  # accelerate shares ranks out evenly, to all nodes or none
            result[-1]["accelerate"] = (
                f"{env_prefix}accelerate launch --multi_gpu --num_machines {nodes.max_nodes} --machine_rank {node} "
                f"--num_processes {sum(counts)} --main_process_ip {address} --main_process_port {port} "
                f"-m modelwright run {args}"
            )
    return result


def modules_to_preload(loaded: LoadedRecipe) -> tuple[str, ...]:
    """Modules that the ranks of a recipe import; the fork server imports them once, for all ranks and restarts."""
    recipe = loaded.recipe
    modules = ["modelwright.stages.pipeline"]
    name = recipe.model.display_name
    model_type = EMBEDDED_MODEL_TYPES.get(name) or _model_type(Path(name)) or _model_type(loaded.path.parent / name)
    if model_type:
        modules.append("transformers.tokenization_utils_tokenizers")
        modules.append(f"transformers.models.{model_type}.modeling_{model_type}")
    if recipe.lora_stages:
        modules.append("peft")
    return tuple(modules)


def _model_type(folder: Path) -> str | None:
    model_type = read_json_object(folder / "config.json").get("model_type")
    return model_type if isinstance(model_type, str) and model_type.isidentifier() else None


def resolve_master_addr(address: str | None, port: int) -> tuple[str, str, str | None]:
    """Node 0's address, this node's own, and the interface of that."""
    if address is None:
        raise UsageError("--master-addr is missing; it wants the address of node 0, as the other nodes reach it")
    try:
        local = local_addr_towards(address, port)
    except OSError as error:
        raise UsageError(f"--master-addr {address} is not routable from here ({error.strerror or error})") from None
    return address, local, interface_of_addr(local)


def _make_log_dir(loaded: LoadedRecipe) -> Path:
    folder = Path(loaded.recipe.run_dir) / "logs"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return Path(os.devnull).parent / "shm" if Path("/dev/shm").is_dir() else Path("/tmp")
    return folder.resolve()


def uses_auto_precision(loaded: LoadedRecipe) -> bool:
    """Whether a stage of the recipe has `precision: auto`."""
    return any(stage.precision == "auto" for stage in loaded.recipe.stages.values())


def _env_int(environ: Mapping[str, str], name: str) -> int | None:
    text = environ.get(name, "")
    if text and not text.isdigit():
        raise UsageError(f"{name} is {text!r}; it wants a whole number")
    return int(text) if text else None


def local_addr_towards(host: str, port: int) -> str:
    """Source address of packets to a host; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))
        return str(probe.getsockname()[0])


def interface_of_addr(address: str) -> str | None:
    """The network interface that has an address."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                reply = fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:
                continue  # it has no address
            if socket.inet_ntoa(reply[20:24]) == address:
                return name
    return None
