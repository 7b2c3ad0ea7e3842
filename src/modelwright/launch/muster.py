"""Before nodes train together each is held against the main one; then they keep touch.

Held against it are clock, versions, recipe, and what it computes on and in.

All of it goes through the store on the main node's port, the same that the rendezvous uses. The library's rendezvous
compares wall clocks of different machines: with 90 s between them one node would train alone and call it done.
"""

from __future__ import annotations

import json
import os
import platform
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from modelwright import __version__
from modelwright.errors import Refused, UsageError, first_line
from modelwright.launch.equipment import alike, computes_on
from modelwright.launch.signs import Signs
from modelwright.launch.wish import Wish

CLOCK_SECONDS = 2.0
"""Clocks may differ by so much: the rendezvous takes a node for lost after 12 s without a sign, by its own clock."""
ANSWER_SECONDS = 60.0
PULSE_SECONDS = 2.0
Facts = Mapping[str, Any]


def facts_of(wish: Wish) -> dict[str, Any]:
    """What this node says about itself."""
    return {
        "node": wish.node,
        "address": wish.local_address,
        "modelwright": __version__,
        "torch": _installed("torch"),
        "transformers": _installed("transformers"),
        "python": ".".join(platform.python_version_tuple()[:2]),
        "recipe": wish.fingerprint,
        "per_node": wish.per_node,
    }


def objections(main: Facts, other: Facts, ahead_seconds: float) -> list[str]:
    """Why a node may not join; each with what would do."""
    who = f"node {other['node']} ({other['address']})"
    found = []
    if abs(ahead_seconds) > CLOCK_SECONDS:
        way = "ahead of" if ahead_seconds > 0 else "behind"
        found.append(
            f"the clock of {who} is {abs(ahead_seconds):.1f} s {way} the main node's; "
            "set both by a time server (chronyc makestep)"
        )
    for package in ("modelwright", "torch", "transformers", "python"):
        if main[package] != other[package]:
            found.append(f"{who} has {package} {other[package]}, the main node {main[package]}; install the same")
    if main["recipe"] != other["recipe"]:
        found.append(f"{who} was started with another recipe or other --set words than the main node")
    return found


def refusals(main: Facts, other: Facts, ahead_seconds: float) -> list[str]:
    """Why a node may not train with the main one: what `objections` finds, or a device that computes otherwise."""
    check = alike(main["computes"], other["computes"], int(other["node"]))
    unlike = [f"{check.found}; {check.fix}"] if check.state == "fail" else []
    return [*objections(main, other, ahead_seconds), *unlike]


class Muster:
    """One node's side of the store: the main node answers, the others ask; both feel each other's pulse."""

    def __init__(self, wish: Wish, signs: Signs) -> None:
        self._wish, self._signs = wish, signs
        self._store = _connect(wish, is_main=wish.node == 0)
        self._members: tuple[int, ...] = ()
        self._changed: dict[int, tuple[bytes, float]] = {}
        self._turn = 0

    def join(self) -> None:
        """Be accepted by the main node, or refused with its letter; then keep a pulse."""
        if self._wish.node == 0:
            self._in_background(self._answer_all)
        else:
            self._ask()
        self._in_background(self._keep_pulse)

    def watch(self, members: tuple[int, ...]) -> None:
        """These nodes train together from now on; how silent they were before is forgotten."""
        self._members, self._changed = members, {}
        self._signs.pulse(self._turn, dict.fromkeys(members, 0.0))

    def _ask(self) -> None:
        store = self._store
        ticket = store.add("muster/tickets", 1)
        facts = {**facts_of(self._wish), "computes": computes_on(self._wish)}
        store.set(f"muster/{ticket}/facts", json.dumps(facts))
        try:
            store.wait([f"muster/{ticket}/ask"], timedelta(seconds=ANSWER_SECONDS))
            store.set(f"muster/{ticket}/answer", repr(time.time()))
            verdict = json.loads(store.get(f"muster/{ticket}/verdict"))
            store.set(f"muster/{ticket}/read", "")
        except RuntimeError as error:
            raise UsageError(f"the main node does not answer ({first_line(error)})") from None
        if verdict:
            raise Refused("\n".join(verdict))

    def _answer_all(self) -> None:
        store, answered = _connect(self._wish, is_main=False), 0
        main = {**facts_of(self._wish), "computes": computes_on(self._wish)}
        while True:
            while answered < store.add("muster/tickets", 0):
                answered += 1
                with suppress(RuntimeError):  # it went away while it was asked
                    self._answer(store, answered, main)
            time.sleep(0.2)

    def _answer(self, store: Any, ticket: int, main: Facts) -> None:
        key = f"muster/{ticket}"
        store.wait([f"{key}/facts"], timedelta(seconds=ANSWER_SECONDS))
        other = json.loads(store.get(f"{key}/facts"))
        asked = time.time()
        store.set(f"{key}/ask", "")
        store.wait([f"{key}/answer"], timedelta(seconds=ANSWER_SECONDS))
        told, heard = float(store.get(f"{key}/answer")), time.time()
        refused = refusals(main, other, ahead(asked, told, heard))
        store.set(f"{key}/verdict", json.dumps(refused))
        if refused and not self._wish.nodes.elastic:
            with suppress(RuntimeError):  # it went away before it had read it
                store.wait([f"{key}/read"], timedelta(seconds=ANSWER_SECONDS))  # the store goes with this process
            self._signs.end(Refused.exit_code, "\n".join(refused))
            os._exit(Refused.exit_code)

    def _keep_pulse(self) -> None:
        """Say that this node is there, and write down who else has been silent, and for how long."""
        store = _connect(self._wish, is_main=False)
        while True:
            self._turn += 1
            with suppress(RuntimeError):
                store.set(f"alive/{self._wish.node}", str(self._turn))
                members = self._members
                silences = {node: self._silence(store, node) for node in members}
                if members is self._members:
                    self._signs.pulse(self._turn, silences)
            time.sleep(PULSE_SECONDS)

    def _silence(self, store: Any, node: int) -> float:
        now, changed = time.monotonic(), self._changed
        before = changed.get(node)
        if node == self._wish.node:
            return 0.0
        value = store.get(f"alive/{node}") if store.check([f"alive/{node}"]) else b""
        if before is None or before[0] != value:
            changed[node] = (value, now)
        return now - changed[node][1]

    def _in_background(self, action: Callable[[], None]) -> None:
        threading.Thread(target=action, daemon=True, name=action.__name__.strip("_")).start()


def ahead(asked: float, told: float, heard: float) -> float:
    """Seconds that another clock is ahead for certain: what it told lies between two looks at this one."""
    if told < asked:
        return told - asked
    return max(0.0, told - heard)


def _connect(wish: Wish, is_main: bool) -> Any:
    """A line to the store; the main node keeps it, the others wait until it is there."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    patience = timedelta(seconds=wish.join_seconds)
    return TCPStore(wish.address, wish.port, is_master=is_main, multi_tenant=True, timeout=patience)


def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
