"""What is to be started, and where: the words of a launch, worked out and ready to be handed on."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from modelwright.errors import UsageError

PORT = 29500


@dataclass(frozen=True)
class Nodes:
    """How many nodes a run may have."""

    fewest: int = 1
    """With fewer it waits."""
    most: int = 1
    """More are not taken in."""

    @property
    def elastic(self) -> bool:
        """Whether nodes may come and go."""
        return self.fewest != self.most

    def __str__(self) -> str:
        return f"{self.fewest}:{self.most}"


@dataclass(frozen=True)
class Wish:
    """One node's part of a launch."""

    command: tuple[str, ...]
    """The words after `modelwright` that every rank runs."""
    per_node: int
    """Ranks on this node."""
    logs: str
    """Folder where what ranks write on stderr is kept."""
    nodes: Nodes = Nodes()
    """Nodes in all."""
    node: int = 0
    """This node's number; node 0 is the main one, where all meet."""
    address: str = "127.0.0.1"
    """Where the main node is reached."""
    port: int = PORT
    """Its port."""
    local_address: str = "127.0.0.1"
    """Where the other nodes reach this one."""
    interface: str | None = None
    """The network interface that has this address."""
    max_restarts: int = 3
    """Failures without any progress between them that are met with a restart."""
    join_seconds: int = 600
    """How long the first meeting of the nodes may take."""
    rejoin_seconds: int = 40
    """How long a later one may take when a node has fallen silent; one that answers is given the first one's time."""
    preload: tuple[str, ...] = ()
    """Modules that the ranks are forked with, so that a restart does not import them again; none: started afresh.

    Ranks with GPUs are: a library that touches one when it is imported spoils it for all that are forked later.
    """
    fingerprint: str = ""
    """Hash of the recipe as it was read here: all nodes must mean the same."""

    leaves_precision: bool = True
    """Whether a stage computes in what suits its device, which must then be the same on all nodes."""

    def as_text(self) -> str:
        """The wish as one word of a command line."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_text(text: str) -> Wish:
        """What `as_text` wrote."""
        value: dict[str, Any] = json.loads(text)
        value |= {"nodes": Nodes(**value["nodes"])}
        value |= {key: tuple(item) for key, item in value.items() if isinstance(item, list)}
        return Wish(**value)


def parse_nodes(text: str) -> Nodes:
    """`2`, or `1:2` where nodes may come and go."""
    fewest, _, most = text.partition(":")
    try:
        nodes = Nodes(int(fewest), int(most or fewest))
    except ValueError:
        nodes = Nodes(0, 0)
    if not 1 <= nodes.fewest <= nodes.most:
        raise UsageError(f"--nodes is {text!r}; it wants a number such as 2, or a range such as 1:2")
    return nodes
