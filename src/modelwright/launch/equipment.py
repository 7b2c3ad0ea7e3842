"""What the nodes compute on: each looks at its devices, bf16 and free space, and is held against the main one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from modelwright.launch import devices, doctor
from modelwright.launch.doctor import Check, examine
from modelwright.launch.wish import Wish


def look_at_equipment(wish: Wish, store: Any, folder: Path) -> list[Check]:
    """This node's equipment and how it goes with the main node's; the main node tells those of all."""

    def disk() -> Check:
        return doctor.disk(folder)

    found = examine([devices.devices, devices.bf16, disk])
    facts = {**computes_on(wish), "checks": [check.as_json() for check in found]}
    store.set(f"equipment/{wish.node}", json.dumps(facts))
    main = json.loads(store.get("equipment/0"))
    told: list[Check] = []
    for node in range(wish.nodes.most) if wish.node == 0 else (wish.node,):
        other = json.loads(store.get(f"equipment/{node}"))
        checks = [Check(**check) for check in other["checks"]]
        told += [replace(check, name=f"node {node}: {check.name}") for check in checks]
        told += [alike(main, other, node)] if node else []
    return told


def alike(main: Mapping[str, Any], other: Mapping[str, Any], node: int) -> Check:
    """Whether ranks on both nodes would compute the same way, and as fast."""
    name, facts = f"node {node}: like the main node", {"main": main["device"], "node": other["device"]}
    both = f"the main node has {main['device']}, node {node} {other['device']}"
    if main["kind"] != other["kind"]:
        fix = "give every node a GPU, or hide those that are there with CUDA_VISIBLE_DEVICES="
        return Check(name, "fail", f"{both}: one exchanges by NCCL, the other by gloo", fix, facts)
    if main["precision"] != other["precision"]:
        found = f"{both}: precision auto is {main['precision']} there and {other['precision']} here"
        slower = "fp16" if "fp16" in (main["precision"], other["precision"]) else "fp32"
        return Check(name, "fail", found, f"write it in the recipe, such as precision: {slower}", facts)
    if main["device"] != other["device"] and main["kind"] == "cuda":
        return Check(name, "warn", both, "every step waits for the slowest: use equal cards", facts)
    return Check(name, "ok", both, facts=facts)


def computes_on(wish: Wish) -> dict[str, str]:
    """The device of a rank here, and what precision auto would mean where the recipe leaves it to the device."""
    import torch

    from modelwright.plan.facts import here, probe
    from modelwright.plan.sheet import facts_of
    from modelwright.plan.stage import choose_precision

    # the driver's word is enough, and wakes no GPU in a process that trains nothing
    found = facts_of(here()) if torch.cuda.is_available() else probe()
    precision = choose_precision(found)[0] if wish.leaves_precision else "as the recipe says"
    return {"kind": found.device, "device": found.name, "precision": precision}
