"""Groups of parameters by experts."""

from typing import Any

from ..missing import explain


def split_params_into_different_moe_groups_for_optimizer(param_groups: Any, *args: Any, **kwargs: Any) -> Any:
    """Raises: experts are not cut over ranks."""
    raise NotImplementedError(explain("deepspeed.moe.utils.split_params_into_different_moe_groups_for_optimizer"))


def is_moe_param(param: Any) -> bool:
    """Always False: experts are parameters like all others."""
    return False
