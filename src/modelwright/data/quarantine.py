"""Set aside rows that cannot be used, each with its place and reason; too many of them end everything."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from modelwright.data.files import Fault, Row
from modelwright.errors import DataError, Problem
from modelwright.runs.folder import write_text

QUARANTINE = "quarantine.jsonl"
MOST_SHOWN = 20
"""Problems named one by one; the rest are counted."""


@dataclass
class Aside:
    """What was set aside, and how much may be."""

    limit: float = 0.0
    """Largest share of rows."""
    rows: int = 0
    """Rows that were looked at."""
    faults: list[Fault] = field(default_factory=list)
    """Those that cannot be used."""

    def readable(self, items: Iterable[Row | Fault]) -> Iterator[Row]:
        """The rows that could be read; a file that cannot be read at all ends it at once."""
        for item in items:
            self.rows += 1
            if isinstance(item, Row):
                yield item
            elif item.whole_file:
                raise DataError([Problem(item.where, item.reason)])
            else:
                self.faults.append(item)

    def put(self, row: Row, reason: str) -> None:
        """Set a row aside."""
        self.faults.append(Fault(row.where, reason, json.dumps(row.values, ensure_ascii=False, default=str)[:120]))

    def refuse(self) -> None:
        """Raise when there are more than may be, all of them told."""
        if len(self.faults) > self.limit * self.rows:
            problems = tell([Problem(fault.where, fault.reason) for fault in self.faults])
            if self.limit:
                found = f"{len(self.faults):,} of {self.rows:,} rows cannot be used"
                problems.append(Problem("data", f"{found}, more than data.max_bad_share {self.limit:g} allows"))
            raise DataError(problems)


def tell(problems: Sequence[Problem]) -> list[Problem]:
    """The first problems one by one, the rest as a number."""
    more = len(problems) - MOST_SHOWN
    tail = [Problem(f"{more} more rows", "have problems like these")] if more > 0 else []
    return [*problems[:MOST_SHOWN], *tail]


def line_of(fault: Fault) -> str:
    """A fault as a line of quarantine.jsonl."""
    told = {"where": fault.where, "reason": fault.reason, "found": fault.found}
    return json.dumps(told, ensure_ascii=False) + "\n"


def write(path: Path, faults: Iterable[Fault]) -> None:
    """Every row that was set aside, a line each."""
    write_text(path, "".join(map(line_of, faults)))
