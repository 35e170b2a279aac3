"""What `engine.plan()` returns."""

from __future__ import annotations

from typing import Any


class Plan(dict[str, Any]):
    """The plan's numbers; printing it shows the table."""

    def __str__(self) -> str:
        return str(self.get("text", dict.__str__(self)))
