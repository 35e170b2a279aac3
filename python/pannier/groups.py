"""From what the caller gives (an optimizer, a function, groups, a config section) to one torch optimizer that holds the
parameter groups, the rule that the core updates by, and the numbers that each step reads from the groups.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from pannier import core, saved_states
from pannier.config import Config
from pannier.descriptors import DeepSpeedCPUAdagrad, DeepSpeedCPUAdam, DeepSpeedCPULion, FusedAdam, FusedLion
from pannier.errors import ConfigError, UsageError
from pannier.group_values import require_valid_group
from pannier.optimizer import Optimizer

_SUPPORTED = (
    "torch.optim Adam, AdamW, SGD and Adagrad, and DeepSpeedCPUAdam, FusedAdam, DeepSpeedCPUAdagrad, "
    "DeepSpeedCPULion and FusedLion"
)


def build_optimizer(
    client: Any, model_parameters: Any, named_params: Mapping[str, torch.nn.Parameter], config: Config
) -> torch.optim.Optimizer | None:
    """The optimizer that holds the groups: the caller's, the one its function returns, or one from the config."""
    if isinstance(client, torch.optim.Optimizer):
        return client.optimizer if isinstance(client, Optimizer) else client  # One that an earlier engine returned.
    section = config.value("optimizer")
    if client is None and not section:
        return None
    given = list(named_params.values()) if model_parameters is None else _listed(model_parameters)
    if client is not None:
        if not callable(client):
            raise ConfigError(f"optimizer must be a torch optimizer or a function, not {type(client).__name__}")
        built = client(given)
        if not isinstance(built, torch.optim.Optimizer):
            raise ConfigError(f"the optimizer function returned {type(built).__name__}, not a torch optimizer")
        return built
    if not any(param.requires_grad for param in named_params.values()):
        raise ConfigError("the model has no trainable parameters, but the config asks for an optimizer")
    try:
        return _from_section(section, given, config)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"optimizer: {_with_names(error, given, named_params)}") from None


def _listed(model_parameters: Any) -> list[Any]:
    if isinstance(model_parameters, torch.nn.Module):
        return list(model_parameters.parameters())
    # A tensor would fall apart into its rows, and a dict into its keys.
    if isinstance(model_parameters, (torch.Tensor, Mapping)) or not isinstance(model_parameters, Iterable):
        raise ConfigError(
            f"model_parameters must be parameters, or groups, in a list, not a {type(model_parameters).__name__}"
        )
    given = list(model_parameters)
    for index, entry in enumerate(given):
        if isinstance(entry, Mapping) and "params" not in entry:
            raise ConfigError(f"model_parameters: group {index} has no params, only {', '.join(map(str, entry))}")
    return given


def _from_section(section: Mapping[str, Any], given: list[Any], config: Config) -> torch.optim.Optimizer:
    kind, params = str(section["type"]).lower(), dict(section.get("params") or {})
    offloaded = config.value("zero_optimization", "offload_optimizer", "device") in ("cpu", "nvme")
    if "betas" in params:
        params["betas"] = tuple(params["betas"])

    def chosen(*names: str) -> dict[str, Any]:
        return {name: params[name] for name in names if name in params}

    if kind in ("adam", "adamw"):
        arguments = chosen("lr", "betas", "eps", "weight_decay", "bias_correction")
        decoupled = kind == "adamw" or params.get("adam_w_mode", True)
        if offloaded:
            return DeepSpeedCPUAdam(given, adamw_mode=decoupled, **arguments)
        return FusedAdam(given, adam_w_mode=decoupled, **arguments)
    if kind == "adagrad":
        if offloaded and not params.get("lr_decay") and not params.get("initial_accumulator_value"):
            return DeepSpeedCPUAdagrad(given, **chosen("lr", "eps", "weight_decay"))
        return torch.optim.Adagrad(
            given, **chosen("lr", "lr_decay", "weight_decay", "initial_accumulator_value", "eps")
        )
    if kind == "lion":
        arguments = chosen("lr", "betas", "weight_decay")
        return DeepSpeedCPULion(given, **arguments) if offloaded else FusedLion(given, **arguments)
    if kind == "sgd":
        return torch.optim.SGD(given, **chosen("lr", "momentum", "dampening", "weight_decay", "nesterov"))
    raise ConfigError(f"type {section['type']!r} is not supported")


def _with_names(error: Exception, given: Iterable[Any], named_params: Mapping[str, torch.nn.Parameter]) -> str:
    names = _repeated(given, named_params)
    return f"{error}: {', '.join(names)}" if names else str(error)


def _repeated(given: Iterable[Any], named_params: Mapping[str, torch.nn.Parameter]) -> list[str]:
    name_of = {id(param): name for name, param in named_params.items()}
    seen: dict[int, int] = {}
    for entry in given:
        for param in _members(entry.get("params", ())) if isinstance(entry, dict) else [entry]:
            seen[id(param)] = seen.get(id(param), 0) + 1
    return [name_of.get(key, "a parameter that is not the model's") for key, count in seen.items() if count > 1]


def _members(params: Any) -> list[Any]:
    return [params] if isinstance(params, torch.Tensor) else list(params)


def update_rule(optimizer: torch.optim.Optimizer) -> str:
    """The core's name for the update that `optimizer` stands for."""
    kind = type(optimizer)
    if kind in (torch.optim.Adam, torch.optim.AdamW):
        modes = {
            bool(group.get("decoupled_weight_decay", kind is torch.optim.AdamW)) for group in optimizer.param_groups
        }
        if len(modes) > 1:
            raise ConfigError("decoupled_weight_decay must be the same in all parameter groups")
        return "AdamW" if modes == {True} else "Adam"
    if kind in (DeepSpeedCPUAdam, FusedAdam, DeepSpeedCPUAdagrad, DeepSpeedCPULion, FusedLion):
        return optimizer.rule  # type: ignore[attr-defined]
    rules: dict[type, str] = {torch.optim.SGD: "SGD", torch.optim.Adagrad: "Adagrad"}
    if kind not in rules:
        # DeepSpeed asserts that it knows the optimizer.
        raise UsageError(f"optimizer {kind.__module__}.{kind.__qualname__} is not supported; use {_SUPPORTED}")
    return rules[kind]


def group_indices(optimizer: torch.optim.Optimizer | None, named_params: Mapping[str, torch.nn.Parameter]) -> list[int]:
    """For each parameter of the model the index of its group, -1 for none. Checks what the groups ask for."""
    if optimizer is None:
        return [-1] * len(named_params)
    index_of: dict[int, int] = {}
    name_of = {id(param): name for name, param in named_params.items()}
    for index, group in enumerate(optimizer.param_groups):
        require_valid_group(f"parameter group {index}", group)
        if float(group.get("lr", 0.0)) < 0:
            raise ConfigError(f"parameter group {index}: lr must be at least 0, not {group['lr']!r}")
        for param in group["params"]:
            name = name_of.get(id(param))
            if name is None:
                shape = tuple(getattr(param, "shape", ()))
                raise ConfigError(f"parameter group {index} holds a parameter of shape {shape} that is not the model's")
            if id(param) in index_of:
                raise ConfigError(f"parameter {name} is in parameter groups {index_of[id(param)]} and {index}")
            index_of[id(param)] = index
    if not any(param.requires_grad for param in named_params.values() if id(param) in index_of):
        raise ConfigError("no parameter group holds a trainable parameter, but an optimizer is asked for")
    return [index_of.get(id(param), -1) for param in named_params.values()]


class KnownGroups:
    """Which parameters were in which group at `initialize`: a step trains those, whatever the groups hold by then."""

    def __init__(self, optimizer: Optimizer | None) -> None:
        self._members = [] if optimizer is None else _members_of(optimizer)

    def require_unchanged(self, optimizer: Optimizer) -> None:
        """Raises where groups or their parameters were added, removed or exchanged, or states were loaded past the engine."""
        members = _members_of(optimizer)
        if len(members) != len(self._members):
            raise UsageError(
                f"the optimizer has {len(members)} parameter groups, but had {len(self._members)} at initialize(); "
                "groups can't be added or removed while an engine manages them"
            )
        for index, (now, then) in enumerate(zip(members, self._members, strict=True)):
            if now != then:
                raise UsageError(
                    f"parameter group {index} does not hold the {len(then)} parameters that it held at initialize() "
                    f"(it holds {len(now)}); destroy() the engine and initialize() again to train others"
                )
        if optimizer.optimizer.state:
            raise UsageError(
                f"the {type(optimizer.optimizer).__name__} that was given to initialize() has states of its own, which "
                "the engine does not see; load states into the optimizer that initialize() returned"
            )


def _members_of(optimizer: Optimizer) -> list[list[int]]:
    return [[id(param) for param in group["params"]] for group in optimizer.param_groups]


def require_states(optimizer: torch.optim.Optimizer | None, named_params: Mapping[str, torch.nn.Parameter]) -> None:
    """Raises where a state that the optimizer already has does not fit its parameter."""
    if optimizer is None:
        return
    for name, param in named_params.items():
        for key, value in optimizer.state.get(param, {}).items():
            if key == "step":
                saved_states.step_of(value, f"optimizer state step of parameter {name}")
            elif value is not None:
                saved_states.require_tensor(value, param, f"optimizer state {key} of parameter {name}", "the parameter")


@contextlib.contextmanager
def restored_on_failure(optimizer: torch.optim.Optimizer | None) -> Iterator[None]:
    """Puts the values of the groups back where the block raises: schedulers write into them."""
    before = [] if optimizer is None else [dict(group) for group in optimizer.param_groups]
    lrs = [group["lr"].clone() if isinstance(group.get("lr"), torch.Tensor) else None for group in before]
    try:
        yield
    except BaseException:
        for group, values, lr in zip([] if optimizer is None else optimizer.param_groups, before, lrs, strict=True):
            group.clear()
            group.update(values)
            if lr is not None:
                group["lr"].copy_(lr)
        raise


def take_states(optimizer: torch.optim.Optimizer | None) -> dict[int, dict[str, Any]]:
    """States that the optimizer already has, by id(parameter). It lets go of them: the engine is to hold them.

    A fresh torch Adagrad has sums; they are remembered as one number each, so that nothing is held twice.
    """
    if optimizer is None:
        return {}
    states: dict[int, dict[str, Any]] = {}
    for group in optimizer.param_groups:
        for param in group["params"]:
            state = dict(optimizer.state.pop(param, {}))
            if type(optimizer) is torch.optim.Adagrad and state and float(state["step"]) == 0:
                initial = float(group["initial_accumulator_value"])
                state = {"sum": initial} if initial else {}
            if state:
                states[id(param)] = state
    return states


def restore_states(optimizer: torch.optim.Optimizer | None, states: Mapping[int, dict[str, Any]]) -> None:
    """Undoes `take_states`, for an `initialize` that failed."""
    if optimizer is None:
        return
    for group in optimizer.param_groups:
        for param in group["params"]:
            state = states.get(id(param), {})
            if type(optimizer) is torch.optim.Adagrad and "step" not in state:
                sums = torch.full_like(param, group["initial_accumulator_value"], memory_format=torch.preserve_format)
                state = {"step": torch.tensor(0.0), "sum": sums}
            if state:
                optimizer.state[param] = state


def give_states(handle: Any, states: Mapping[int, Mapping[str, Any]], params: Mapping[int, torch.Tensor]) -> None:
    """Hands states that `take_states` took to the core. `params` maps the core's index to the parameter."""
    known = set(core.call(handle.state_keys))
    for index, param in params.items():
        state = states.get(id(param), {})
        for key in known & state.keys():
            if state[key] is not None:
                value = torch.as_tensor(state[key], dtype=torch.float32).expand(param.shape)
                core.call(handle.set_state_tensor, index, key, value)
        if state.get("momentum_buffer") is not None and "step" not in state:
            core.call(handle.set_param_step, index, 1)  # torch's SGD counts nothing; a momentum means a step was made.
        elif "step" in state:
            core.call(handle.set_param_step, index, saved_states.step_of(state["step"], "step"))
