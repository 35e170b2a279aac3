"""Marks of modules that stage 3 gathers whole. With one rank nothing is gathered, so only the marks remain."""

from collections.abc import Sequence

import torch

_MARK = "_z3_leaf"


def set_z3_leaf_modules(model: torch.nn.Module, leaf_module_classes: Sequence[type]) -> list[torch.nn.Module]:
    """Marks the modules of these classes and returns them."""
    return _mark(model, leaf_module_classes, True)


def unset_z3_leaf_modules(model: torch.nn.Module, leaf_module_classes: Sequence[type]) -> list[torch.nn.Module]:
    """Takes the marks back."""
    return _mark(model, leaf_module_classes, False)


def get_z3_leaf_modules(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The marked modules."""
    return [module for module in model.modules() if getattr(module, _MARK, False)]


def _mark(model: torch.nn.Module, classes: Sequence[type], value: bool) -> list[torch.nn.Module]:
    found = [module for module in model.modules() if isinstance(module, tuple(classes))]
    for module in found:
        setattr(module, _MARK, value)
    return found
