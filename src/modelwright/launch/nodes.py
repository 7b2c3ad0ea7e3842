"""What each node of a run is told: by options, by an operator's variables, and as a command to type there."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from modelwright.errors import UsageError
from modelwright.launch.network import address_towards, interface_of
from modelwright.launch.wish import PORT, Nodes, Wish, parse_nodes
from modelwright.recipe.load import LoadedRecipe, dump

Told = dict[str, str | int]
GPUS = Path("/proc/driver/nvidia/gpus")
CHOSEN = "CUDA_VISIBLE_DEVICES"
EMBEDDED_FAMILY = {"smollm2-135m-instruct": "llama"}


@dataclass(frozen=True)
class Asked:
    """What a person wrote about nodes; None where nothing was written."""

    nodes: str | None = None
    """Nodes in all, as `2` or `1:2`."""
    node: int | None = None
    """This node's number."""
    address: str | None = None
    """Where the main node is reached."""
    port: int | None = None
    """Its port."""
    per_node: str | None = None
    """Ranks on each node: one number, or one for each node."""

    def or_operator(self, environ: Mapping[str, str]) -> Asked:
        """What was not written, from the variables that torchrun and the cluster's operators know."""
        count = environ.get("PET_NPROC_PER_NODE")
        return Asked(
            nodes=self.nodes or environ.get("PET_NNODES"),
            node=self.node if self.node is not None else _number(environ, "PET_NODE_RANK"),
            address=self.address or environ.get("PET_MASTER_ADDR"),
            port=self.port or _number(environ, "PET_MASTER_PORT"),
            per_node=self.per_node or (count if count and count.isdigit() else None),
        )


def operator_variables() -> Mapping[str, str]:
    """The variables of this process."""
    return os.environ


def ranks_here(asked: str | None, node: int = 0, environ: Mapping[str, str] | None = None) -> int:
    """Ranks on a node: as asked, or one for each GPU, or one."""
    environ = os.environ if environ is None else environ
    if asked is None:
        return max(1, count_gpus(environ))
    counts = asked.split(",")
    if len(counts) > 1 and node >= len(counts):
        told = f"--per-node is {asked!r}, which says nothing of node {node}"
        raise UsageError(f"{told}; it wants one number for all nodes, or one for each of them")
    try:
        count = int(counts[node] if len(counts) > 1 else counts[0])
    except ValueError:
        count = 0
    if count < 1:
        raise UsageError(f"--per-node is {asked!r}; it wants a number such as 2, or one for each node such as 4,2")
    chosen = environ.get(CHOSEN)
    if chosen and 0 < count_gpus(environ) < count:
        raise UsageError(f"--per-node is {asked}, but {CHOSEN}={chosen}; each rank wants a GPU of its own")
    return count


def count_gpus(environ: Mapping[str, str]) -> int:
    """GPUs that ranks would see, without asking torch."""
    chosen = environ.get(CHOSEN)
    if chosen is not None:
        return len([each for each in chosen.split(",") if each.strip() not in ("", "-1")])
    return len(list(GPUS.iterdir())) if GPUS.is_dir() else 0


def wish_for(loaded: LoadedRecipe, command: tuple[str, ...], asked: Asked, max_restarts: int) -> Wish:
    """This node's part, worked out."""
    nodes = parse_nodes(asked.nodes or "1")
    node, port = number_among(nodes, asked.node or 0), asked.port or PORT
    local, interface, address = "127.0.0.1", None, asked.address or "127.0.0.1"
    if nodes.most > 1:
        address, local, interface = _met_at(asked.address, node, port)
    return Wish(
        command=command,
        per_node=ranks_here(asked.per_node, node),
        logs=str(_log_folder(loaded)),
        nodes=nodes,
        node=node,
        address=address,
        port=port,
        local_address=local,
        interface=interface,
        max_restarts=max_restarts,
        preload=() if count_gpus(os.environ) else modules_for(loaded),
        fingerprint=fingerprint(loaded),
        leaves_precision=leaves_precision(loaded),
    )


def number_among(nodes: Nodes, node: int) -> int:
    """A node's number, if there can be one."""
    if not 0 <= node < nodes.most:
        raise UsageError(f"--node-rank is {node}; nodes are counted from 0, so that the last of {nodes.most} is "
                         f"{nodes.most - 1}")  # fmt: skip
    return node


def commands(recipe: str, rest: tuple[str, ...], asked: Asked, environ: Mapping[str, str]) -> list[Told]:
    """For every node the command to type there, and what torchrun and accelerate would be told instead.

    Where neither --per-node nor CUDA_VISIBLE_DEVICES was given, each node counts its own GPUs.
    """
    nodes, port = parse_nodes(asked.nodes or "2"), asked.port or PORT
    address = asked.address or "MAIN_ADDRESS"
    chosen = f"{CHOSEN}={environ[CHOSEN]} " if CHOSEN in environ else ""
    words = shlex.join((recipe, *rest))
    number = str(nodes.most) if not nodes.elastic else str(nodes)
    known = asked.per_node is not None or CHOSEN in environ
    counts = [ranks_here(asked.per_node, node, environ) for node in range(nodes.most)] if known else []
    told: list[Told] = []
    for node in range(nodes.most):
        here = f" --per-node {counts[node]}" if known else ""
        ranks = f"--nproc-per-node {counts[node] if known else 'gpu'}"
        place = f"--node-rank {node} {ranks} --master-addr {address} --master-port {port}"
        if nodes.elastic:
            place = f"{ranks} --rdzv-backend c10d --rdzv-endpoint {address}:{port}"
        told.append({
            "node": node,
            "command": f"{chosen}modelwright launch {words} --on nodes --nodes {number} --node-rank {node} "
            f"--main-address {address} --port {port}{here}",
            "torchrun": f"{chosen}torchrun --nnodes {number} {place} -m modelwright run {words}",
        })  # fmt: skip
        if not nodes.elastic and len(set(counts)) == 1:  # accelerate shares ranks out evenly, to all nodes or none
            told[-1]["accelerate"] = (
                f"{chosen}accelerate launch --multi_gpu --num_machines {nodes.most} --machine_rank {node} "
                f"--num_processes {sum(counts)} --main_process_ip {address} --main_process_port {port} "
                f"-m modelwright run {words}"
            )
    return told


def modules_for(loaded: LoadedRecipe) -> tuple[str, ...]:
    """What the ranks of a recipe will import, so that it is imported once for all of them and all their restarts."""
    recipe = loaded.recipe
    modules = ["modelwright.stages.pipeline"]
    name = recipe.model.name
    family = EMBEDDED_FAMILY.get(name) or _family(Path(name)) or _family(loaded.path.parent / name)
    if family:
        modules += ["transformers.tokenization_utils_tokenizers", f"transformers.models.{family}.modeling_{family}"]
    if any(getattr(getattr(stage, "trainable", None), "lora", False) for stage in recipe.stages.values()):
        modules.append("peft")
    return tuple(modules)


def _family(folder: Path) -> str | None:
    try:
        found = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("model_type")
    except (OSError, ValueError, AttributeError):
        return None
    return found if isinstance(found, str) and found.isidentifier() else None


def _met_at(address: str | None, node: int, port: int) -> tuple[str, str, str | None]:
    """The main node's address, this node's own, and the interface that leads there."""
    if address is None:
        raise UsageError("--main-address is missing; it wants the address of node 0, as the other nodes reach it")
    try:
        local = address_towards(address, port)
    except OSError as error:
        raise UsageError(f"--main-address {address} leads nowhere from here ({error.strerror or error})") from None
    return address, local, interface_of(local)


def _log_folder(loaded: LoadedRecipe) -> Path:
    folder = Path(loaded.recipe.run_dir) / "logs"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return Path(os.devnull).parent / "shm" if Path("/dev/shm").is_dir() else Path("/tmp")
    return folder.resolve()


def leaves_precision(loaded: LoadedRecipe) -> bool:
    """Whether a stage of the recipe computes in what suits its device."""
    return any(stage.precision == "auto" for stage in loaded.recipe.stages.values())


def fingerprint(loaded: LoadedRecipe) -> str:
    """The recipe in short: all nodes must mean the same."""
    import xxhash

    return xxhash.xxh3_64_hexdigest(dump(loaded.recipe).encode())


def _number(environ: Mapping[str, str], name: str) -> int | None:
    text = environ.get(name, "")
    if text and not text.isdigit():
        raise UsageError(f"{name} is {text!r}; it wants a whole number")
    return int(text) if text else None


__all__ = [
    "Asked",
    "Nodes",
    "commands",
    "fingerprint",
    "leaves_precision",
    "modules_for",
    "number_among",
    "operator_variables",
    "ranks_here",
    "wish_for",
]
