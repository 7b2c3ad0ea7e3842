"""Have the nodes meet by torch's rendezvous, and count them in the order of their own numbers.

Torch counts nodes by address and process id, so that any of them may get the first rank. Here the lowest `--node-rank`
of those that have met does: it prints, it writes, and the ranks' store is on it, anew for each meeting.
"""

from __future__ import annotations

import os
from typing import Any

from modelwright.errors import UsageError
from modelwright.launch.wish import Wish

LAST_CALL_SECONDS, KEEP_ALIVE_SECONDS, KEEP_ALIVE_TRIES = 5, 3, 4
"""When a node is lost: 12 s until it counts as lost, 5 s for late ones; torch's own are 15 and 30."""


class Rendezvous:
    """What torch's agent asks for a world, in place of the handler inside, which answers everything else."""

    use_agent_store = True
    """Ranks take the store that this opens for them."""

    def __init__(self, handler: Any, node: int, local_address: str) -> None:
        self._handler, self._node, self._local_address = handler, node, local_address
        self._store: Any = None
        self.members: tuple[int, ...] = ()
        """Numbers of the nodes that met last, in the order of their ranks."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._handler, name)

    def next_rendezvous(self) -> Any:
        """Meet; returns what torch's handler does, with our order and a store on the first node of it."""
        from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
        from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousStoreInfo

        met = self._handler.next_rendezvous()
        ours = PrefixStore("modelwright", met.store)  # each meeting has a store of its own below torch's
        ours.set(f"node/{met.rank}", str(self._node))
        numbers = [int(ours.get(f"node/{place}")) for place in range(met.world_size)]
        if twice := [number for number in numbers if numbers.count(number) > 1]:
            if self.members:  # the one that came later is refused, and those that were here meet again
                return self.next_rendezvous()
            times = numbers.count(twice[0])
            raise UsageError(f"{times} nodes say --node-rank {twice[0]}; each wants a number of its own, from 0 on")
        order = sorted(range(met.world_size), key=numbers.__getitem__)
        rank, self.members = order.index(met.rank), tuple(sorted(numbers))
        self._store = TCPStore(self._local_address, 0, is_master=True, multi_tenant=True) if rank == 0 else None
        port = self._store.port if self._store else None
        where = RendezvousStoreInfo.build(rank, ours, self._local_address, server_port=port)
        return RendezvousInfo(met.store, rank, met.world_size, where)


def meet(wish: Wish) -> Rendezvous:
    """This node's way to the others: torch's c10d rendezvous at the main node's port."""
    from torch.distributed.elastic.rendezvous import RendezvousParameters, registry

    alone = wish.nodes.most == 1
    parameters = RendezvousParameters(
        backend="c10d",
        endpoint="127.0.0.1:0" if alone else f"{wish.address}:{wish.port}",
        run_id="modelwright",
        min_nodes=wish.nodes.fewest,
        max_nodes=wish.nodes.most,
        local_addr=wish.local_address,
        is_host=wish.node == 0,
        join_timeout=wish.join_seconds,
        last_call_timeout=LAST_CALL_SECONDS,
        keep_alive_interval=KEEP_ALIVE_SECONDS,
        keep_alive_max_attempt=KEEP_ALIVE_TRIES,
        timeout=wish.join_seconds,
    )
    # its own store for the ranks is opened once, on the node that it counts first; one that comes later waits in vain
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    return Rendezvous(registry.get_rendezvous_handler(parameters), wish.node, wish.local_address)
