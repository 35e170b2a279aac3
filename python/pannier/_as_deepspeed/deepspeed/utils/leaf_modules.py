"""Marks of modules that stage 3 makes whole as one, whichever of their parts run: experts that a rank does not use, say.

They are read by `initialize`.
"""

from collections.abc import Callable, Sequence

import torch

from pannier.units import LEAF


def set_z3_leaf_modules(
    model: torch.nn.Module, leaf_module_classes: Sequence[type | str], raise_if_not_found: bool = True
) -> list[torch.nn.Module]:
    """Marks the modules of these classes, given or by name, and returns them."""
    return _mark(model, _of_class(leaf_module_classes), True, raise_if_not_found)


def set_z3_leaf_modules_by_name(
    model: torch.nn.Module, module_names: Sequence[str], raise_if_not_found: bool = True
) -> list[torch.nn.Module]:
    """Marks the modules of these names, as `named_modules()` has them."""
    return _mark(model, lambda name, module: name in module_names, True, raise_if_not_found)


def set_z3_leaf_modules_by_suffix(
    model: torch.nn.Module, module_name_suffixes: Sequence[str], raise_if_not_found: bool = True
) -> list[torch.nn.Module]:
    """Marks the modules whose names end so."""
    return _mark(model, lambda name, module: name.endswith(tuple(module_name_suffixes)), True, raise_if_not_found)


def unset_z3_leaf_modules(
    model: torch.nn.Module, leaf_module_classes: Sequence[type | str], raise_if_not_found: bool = True
) -> list[torch.nn.Module]:
    """Takes the marks back."""
    return _mark(model, _of_class(leaf_module_classes), False, raise_if_not_found)


def set_z3_leaf_module(model: torch.nn.Module, flag: bool) -> None:
    """Marks `model` itself, or takes the mark back."""
    setattr(model, LEAF, flag)


def z3_leaf_module(model: torch.nn.Module) -> bool:
    """Whether `model` is marked."""
    return bool(getattr(model, LEAF, False))


def z3_leaf_parameter(param: torch.nn.Parameter) -> bool:
    """Always False: parameters are not marked themselves."""
    return False


def get_z3_leaf_modules(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The marked modules."""
    return [module for module in model.modules() if z3_leaf_module(module)]


def _of_class(classes: Sequence[type | str]) -> Callable[[str, torch.nn.Module], bool]:
    def matches(name: str, module: torch.nn.Module) -> bool:
        kind = type(module)
        names = (kind.__name__, f"{kind.__module__}.{kind.__qualname__}")
        return any(kind_or_name in names if isinstance(kind_or_name, str) else isinstance(module, kind_or_name) for kind_or_name in classes)

    return matches


def _mark(
    model: torch.nn.Module, matches: Callable[[str, torch.nn.Module], bool], value: bool, raise_if_not_found: bool
) -> list[torch.nn.Module]:
    found = [module for name, module in model.named_modules() if matches(name, module)]
    if not found and raise_if_not_found:
        raise ValueError("no module of the model matches")
    for module in found:
        set_z3_leaf_module(module, value)
    return found
