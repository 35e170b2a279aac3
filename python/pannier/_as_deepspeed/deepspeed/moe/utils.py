"""Groups of parameters by experts, which are parameters like all others here."""

from collections.abc import Sequence
from typing import Any


def split_params_into_different_moe_groups_for_optimizer(
    param_groups: dict[str, Any] | Sequence[dict[str, Any]], max_group_size: float = 178956971
) -> list[dict[str, Any]]:
    """The groups as a list: experts are not cut over ranks, so they need none of their own."""
    return [param_groups] if isinstance(param_groups, dict) else list(param_groups)


def is_moe_param(param: Any) -> bool:
    """Always False: experts are parameters like all others."""
    return False
