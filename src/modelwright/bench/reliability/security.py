"""What malicious files, names and readers can do: code, secrets, paths, pages, pods, requests, installation."""

from __future__ import annotations

from modelwright.bench.reliability.fault import Fault

FAULTS: tuple[Fault, ...] = ()
