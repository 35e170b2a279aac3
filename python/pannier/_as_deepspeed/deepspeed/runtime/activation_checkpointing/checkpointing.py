"""DeepSpeed's entry points to recomputation, over torch's."""

from collections.abc import Callable, Sequence
from typing import Any

import torch.utils.checkpoint


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Runs `function` and recomputes it in backward instead of keeping its activations. Of several outputs, a tuple."""
    return _run(_by_position(function, len(args), *kwargs), [*args, *kwargs.values()], use_reentrant=True)


def non_reentrant_checkpoint(function: Callable[..., Any], *args: Any) -> Any:
    """The same, for inputs of which none needs a gradient."""
    return _run(_by_position(function, len(args)), args, use_reentrant=False)


def _by_position(function: Callable[..., Any], num_positional: int, *names: str) -> Callable[..., Any]:
    # torch's own takes tensors with gradients by position alone, and gives them back in tuples alone.
    def call(*values: Any) -> Any:
        output = function(*values[:num_positional], **dict(zip(names, values[num_positional:], strict=True)))
        return tuple(output) if isinstance(output, list) else output

    return call


def _run(function: Callable[..., Any], values: Sequence[Any], use_reentrant: bool) -> Any:
    output = torch.utils.checkpoint.checkpoint(function, *values, use_reentrant=use_reentrant)
    return output[0] if isinstance(output, tuple) and len(output) == 1 else output


def partition_activations_in_checkpoint(partition_activation: bool) -> None:
    """Nothing: activations stay whole."""


def set_num_layers(nlayers: int) -> None:
    """Nothing: no memory is set aside for layers."""


def configure(*args: Any, **kwargs: Any) -> None:
    """Nothing to configure: activations are neither partitioned nor moved."""


def is_configured() -> bool:
    """Always ready."""
    return True


def reset() -> None:
    """Nothing is kept between iterations."""
