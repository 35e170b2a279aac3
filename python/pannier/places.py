"""Where in the module its parameters sit, and which of them are frozen.

An engine trains the parameter objects that it was given. One that is replaced in the module afterwards (by assignment,
by `weight_norm`, by a whole new submodule) would train on unseen while the module runs with another; so each step looks.
"""

from __future__ import annotations

from typing import Any, Iterable

import torch

from pannier.errors import UsageError


class Places:
    """Remembers which object every submodule and parameter name of a module stands for.

    `optimized` are the parameters of the optimizer's groups; of those, the frozen ones are remembered too.
    """

    def __init__(self, module: torch.nn.Module, optimized: Iterable[torch.Tensor]) -> None:
        wanted = {id(param) for param in optimized}
        self._frozen = [
            (name, param)
            for name, param in module.named_parameters()
            if id(param) in wanted and not param.requires_grad
        ]
        # The part and not its dict, which stage 3 replaces.
        self._links: list[tuple[torch.nn.Module, str, str, Any, str]] = []
        for prefix, part in module.named_modules():
            for slots in ("_modules", "_parameters"):
                for key, value in getattr(part, slots).items():
                    if value is not None:
                        self._links.append((part, slots, key, value, f"{prefix}.{key}" if prefix else key))

    def require_unchanged(self) -> None:
        """Raises naming the first place that holds another object, or the first parameter that was unfrozen."""
        for part, slots, key, value, name in self._links:
            if getattr(part, slots).get(key) is not value:
                raise UsageError(
                    f"{name} is not the object that initialize() saw, so the engine trains what the module no longer "
                    "uses; change a parameter in place, or destroy() the engine and initialize() again"
                )
        for name, param in self._frozen:
            if param.requires_grad:
                raise UsageError(
                    f"parameter {name} was frozen at initialize() and requires a gradient now, but the engine has no "
                    "state for it; destroy() the engine and initialize() again"
                )
