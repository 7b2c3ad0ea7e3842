"""Imported first by the fork server, for its side effect: the fork server and its ranks die with the agent.

Without it the fork server would outlive the agent: each rank holds the other end of the pipe that it watches."""

from __future__ import annotations

from modelwright.runs.heartbeat import set_pdeathsig

set_pdeathsig()
