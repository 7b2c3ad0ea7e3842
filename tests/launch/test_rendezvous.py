"""Nodes are counted by their own numbers, whoever comes first and whatever its address."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from modelwright.launch import agent
from modelwright.launch.agent import OrderedRendezvousHandler, create_rdzv_handler
from modelwright.launch.config import LaunchConfig, NodeRange
from tests.faults.fork_server import free_port

RankAndStore = tuple[int, int, str, int]


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a meeting sets for its process, which here is the tests', goes with the test."""
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "0")


def nodes_at(addresses: dict[int, str], nodes: NodeRange) -> dict[int, OrderedRendezvousHandler]:
    """Every node's side, by its number; the main one is first since it keeps the store where they meet."""
    port = free_port()
    configs = {
        node: LaunchConfig(("run",), 1, "", nodes, node, master_port=port, local_addr=at)
        for node, at in addresses.items()
    }
    return {node: create_rdzv_handler(config) for node, config in sorted(configs.items())}


def come(node: OrderedRendezvousHandler) -> RankAndStore:
    """Rank, nodes in all, the address of the ranks' store, and how many had written there when all have."""
    from torch.distributed import TCPStore

    info: Any = node.next_rendezvous()
    where = info.bootstrap_store_info
    store = TCPStore(where.master_addr, where.master_port, is_master=False)
    if store.add("met", 1) == info.world_size:
        store.set("all", "")
    store.get("all")
    return info.rank, info.world_size, where.master_addr, store.add("met", 0)


def test_ranks_follow_the_numbers_of_the_nodes_at_every_meeting_where_torch_would_sort_addresses() -> None:
    main = "127.0.0.9"
    nodes = nodes_at({0: main, 1: "127.0.0.5", 3: "127.0.0.1"}, NodeRange(3, 3))
    with ThreadPoolExecutor(3) as pool:
        for _ in range(2):
            met = list(pool.map(come, [nodes[3], nodes[1], nodes[0]]))
            assert met == [(2, 3, main, 3), (1, 3, main, 3), (0, 3, main, 3)]
    assert {node.node_ranks for node in nodes.values()} == {(0, 1, 3)}


def test_two_nodes_of_one_number_are_refused_by_all() -> None:
    nodes = nodes_at({0: "127.0.0.9", 1: "127.0.0.1", 2: "127.0.0.5"}, NodeRange(3, 3))
    nodes[2]._node_rank = 1
    with ThreadPoolExecutor(3) as pool:
        meetings = [pool.submit(node.next_rendezvous) for node in nodes.values()]
    assert {str(meeting.exception()) for meeting in meetings} == {
        "2 nodes have --node-rank 1; each wants its own number, from 0"
    }


def test_a_node_that_trains_meets_again_where_another_comes_with_its_number() -> None:
    from torch.distributed import HashStore

    class Torchs:
        """Three nodes have met, two of one number; then the two that were there before."""

        meetings = iter(((1, [0, 1, 1]), (1, [0, 1])))

        def next_rendezvous(self) -> Any:
            rank, numbers = next(self.meetings)
            store = HashStore()
            for position, number in enumerate(numbers):
                store.set(f"modelwright/node/{position}", str(number))
            for key, value in (("MASTER_ADDR", main), ("MASTER_PORT", "29500")):
                store.set(f"modelwright/{key}", value)
            return SimpleNamespace(store=store, rank=rank, world_size=len(numbers))

    main = "127.0.0.9"
    node = OrderedRendezvousHandler(Torchs(), 1, "127.0.0.1")
    node.node_ranks = (0, 1)
    met = node.next_rendezvous()
    assert (met.rank, met.world_size, node.node_ranks) == (1, 2, (0, 1))


def stay(node: OrderedRendezvousHandler, rank_and_store: RankAndStore) -> RankAndStore:
    """Come again whenever another node waits, as the agent does, which then starts its ranks again; until both met."""
    deadline = time.monotonic() + 240
    while rank_and_store[1] < 2 and time.monotonic() < deadline:
        if not rank_and_store[1] or node.num_nodes_waiting():
            rank_and_store = come(node)
        time.sleep(0.05)
    return rank_and_store


def test_a_node_that_comes_later_is_counted_by_its_number_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent, "LAST_CALL_TIMEOUT", 1)
    main = "127.0.0.9"
    nodes = nodes_at({0: main, 1: "127.0.0.1"}, NodeRange(1, 2))
    alone, nowhere = come(nodes[0]), (0, 0, "", 0)
    assert alone == (0, 1, main, 1)
    with ThreadPoolExecutor(2) as pool:
        met = list(pool.map(stay, [nodes[0], nodes[1]], [alone, nowhere]))
    assert met == [(0, 2, main, 2), (1, 2, main, 2)]
