"""Moving an engine's states off the device for a while: DeepSpeed's `offload_states` and `reload_states`."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from pannier.errors import UsageError


class StateMoves:
    """What rests outside the device already has nowhere to go; the rest has no way there."""

    sparse_tensor_module_names: frozenset[str] = frozenset()
    """Gradients are dense."""

    def offload_states(
        self, include: Collection[Any] | None = None, device: Any = "cpu", pin_memory: bool = True, non_blocking: bool = False
    ) -> None:
        """Nothing with `offload_optimizer`, whose states are off the device; a UsageError without."""
        if not self.zero_use_cpu_optimizer():
            raise UsageError(
                "offload_states() has no states to move: give zero_optimization.offload_optimizer a device, "
                "and they rest there from the start"
            )

    def reload_states(self, non_blocking: bool = False) -> None:
        """Nothing: states that rest outside the device stay there."""

    def empty_partition_cache(self) -> None:
        """Nothing: what a module gathered is let go when it has run."""

    def get_pld_theta(self) -> None:
        """None: there is no progressive layer dropping."""

    def zero_use_cpu_optimizer(self) -> bool:
        """Whether optimizer states rest outside the device."""
        raise NotImplementedError
