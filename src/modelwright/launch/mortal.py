"""Imported first by the fork server: it dies with its agent, and its ranks with it.

Left alone it would live as long as any rank does, since each rank holds the other end of the pipe that it watches.
"""

from __future__ import annotations

from modelwright.runs.beat import die_with_parent

die_with_parent()
