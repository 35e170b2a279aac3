"""The optimizer that `initialize` returns: the caller's parameter groups, and a view of what the engine holds.

`param_groups` is the list of the optimizer that the caller gave (or that the config describes), with the caller's own
dicts in it for life. Nothing here is a copy of the core's state: states, scale and norm are asked for when read.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from pannier import core, partition_names, saved_states
from pannier.errors import ConfigError, UsageError

if TYPE_CHECKING:
    from pannier.engine import Engine


class StateView(Mapping[torch.Tensor, dict[str, Any]]):
    """Optimizer states by parameter, each made into full-shape fp32 copies when it is read."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer

    def __getitem__(self, param: torch.Tensor) -> dict[str, Any]:
        index = self._indices().get(id(param))
        if index is None:
            raise KeyError(param)
        handle = self._optimizer.engine.core
        state: dict[str, Any] = {"step": core.call(handle.param_step, index)}
        for key in core.call(handle.state_keys):
            state[key] = core.call(handle.state_tensor, index, key)
        return state

    def __iter__(self) -> Iterator[torch.Tensor]:
        indices = self._indices()
        return (p for group in self._optimizer.param_groups for p in group["params"] if id(p) in indices)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def _indices(self) -> dict[int, int]:
        return self._optimizer.state_indices


class LossScaler:
    """The loss scale as the core has it, by DeepSpeed's names. Read only."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer

    @property
    def dynamic(self) -> bool:
        """Whether the scale changes with the gradients."""
        return self._optimizer.dynamic_loss_scale

    dynamic_loss_scale = dynamic

    @property
    def cur_scale(self) -> float:
        """The factor of the next loss."""
        return core.call(self._optimizer.engine.core.loss_scale)

    loss_scale = cur_scale

    @property
    def cur_iter(self) -> int:
        """Steps that the scaler has seen."""
        return int(self._state()["iteration"])

    @property
    def last_overflow_iter(self) -> int:
        """The iteration of the last skipped step; -1 before any."""
        return int(self._state()["last_overflow_iteration"])

    @property
    def cur_hysteresis(self) -> int:
        """Overflows left before the scale goes down."""
        return int(self._state()["hysteresis_left"])

    @property
    def scale_window(self) -> int:
        """Good steps before the scale doubles."""
        return int(self._optimizer.engine.config["fp16"]["loss_scale_window"])

    @property
    def scale_factor(self) -> float:
        """What the scale is multiplied or divided by."""
        return 2.0

    def _state(self) -> dict[str, float]:
        return core.call(self._optimizer.engine.core.scaler_state)


class Optimizer(torch.optim.Optimizer):
    """The optimizer of an engine."""

    optimizer: torch.optim.Optimizer
    """The optimizer that the groups come from: the caller's own, or a description made from the config."""

    def __init__(self, basic: torch.optim.Optimizer) -> None:
        super().__init__(basic.param_groups, basic.defaults)
        self.optimizer = basic
        self.state_indices: dict[int, int] = {}
        self._engine: weakref.ref[Engine] | None = None
        self._is_bound = True

    def bind(self, engine: Engine, state_indices: dict[int, int]) -> None:
        """Connects to the engine. `state_indices` maps id(parameter) to the core's index where there are states."""
        self._engine = weakref.ref(engine)
        self.state_indices = state_indices

    # torch's base class assigns the groups in its constructor. Afterwards they are the given optimizer's own, also where
    # somebody assigns a new list to either, as torch's load_state_dict does.
    @property  # type: ignore[override]
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameter groups of the optimizer that was given."""
        return self.optimizer.param_groups if self.__dict__.get("_is_bound") else self.__dict__["_first_groups"]

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        if self.__dict__.get("_is_bound"):
            self.optimizer.param_groups = groups
        else:
            self.__dict__["_first_groups"] = groups

    def run_step_hooks(self, kind: str) -> None:
        """Calls the step hooks of a kind, by torch's name of their dict: this optimizer's, and those of the one given."""
        for optimizer in (self, self.optimizer):
            for hook in list(getattr(optimizer, kind).values()):
                hook(optimizer, (), {})

    def mark_stepped(self) -> None:
        """Leaves the mark by which torch's schedulers see that an optimizer was stepped before them."""
        for optimizer in (self, self.optimizer):
            optimizer._opt_called = True  # type: ignore[attr-defined]

    @property
    def engine(self) -> Engine:
        """The engine that does the work."""
        engine = self.bound_engine()
        if engine is None:
            raise UsageError("this optimizer's engine is gone, or initialize() has not finished")
        return engine

    def bound_engine(self) -> Engine | None:
        """The engine that does the work; None where it is gone, or `initialize` has not finished."""
        return self._engine() if self._engine is not None else None

    # torch's base class assigns `state` in its constructor; the view stands in its place.
    @property  # type: ignore[override]
    def state(self) -> Mapping[torch.Tensor, dict[str, Any]]:
        """States by parameter, fp32 copies of full shape made on access. Empty until the first step."""
        return StateView(self)

    @state.setter
    def state(self, value: Any) -> None:
        if value or self.__dict__.get("_is_bound"):
            raise UsageError("optimizer.state can't be assigned; use load_state_dict()")

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UsageError("an engine's optimizer can't be copied, pickled or saved; use optimizer.state_dict()")

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """The engine's `step()`."""
        if closure is not None:
            raise UsageError("a closure is not supported; call backward() first")
        self.engine.step()

    step.hooked = True  # type: ignore[attr-defined]  # The engine runs the hooks; torch would run them again.

    def zero_grad(self, set_to_none: bool = True) -> None:
        """The engine's `zero_grad()`."""
        self.engine.zero_grad()

    def backward(self, loss: torch.Tensor, retain_graph: bool = False) -> None:
        """The engine's `backward()` without the division by the accumulation steps."""
        self.engine.backward(loss, retain_graph=retain_graph, scale_wrt_gas=False)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raises once the engine is there: what it manages is fixed by `initialize`."""
        if getattr(self, "_is_bound", False):
            raise UsageError("parameter groups can't be added after initialize()")
        super().add_param_group(param_group)

    @property
    def overflow(self) -> bool:
        """Whether the last step was skipped because a gradient was not finite."""
        return core.call(self.engine.core.overflow)

    @property
    def loss_scale(self) -> float:
        """The factor of the next loss; 1 where losses are not scaled."""
        return core.call(self.engine.core.loss_scale)

    cur_scale = loss_scale

    @property
    def loss_scaler(self) -> LossScaler:
        """The loss scaler, by DeepSpeed's names."""
        return LossScaler(self)

    loss_scale_config = loss_scaler

    @property
    def dynamic_loss_scale(self) -> bool:
        """Whether the loss scale changes with the gradients."""
        return self.engine.dynamic_loss_scale()

    @property
    def _global_grad_norm(self) -> float | None:
        return self.engine.get_global_grad_norm()

    @property
    def parameter_offload(self) -> Any:
        """At stage 3: what libraries look for before they generate. An AttributeError at other stages."""
        if self.engine.zero_optimization_stage() != 3:
            raise AttributeError("parameter_offload is there at stage 3 only")
        return partition_names.ParameterOffload(self.engine)

    def needs_scaler(self) -> bool:
        """Whether a loss must be scaled before its backward."""
        return self.engine.fp16_enabled()

    def set_lr(self, lr: float) -> None:
        """Writes `lr` into every group."""
        for group in self.param_groups:
            group["lr"] = lr

    def get_lr(self) -> float:
        """The first group's lr."""
        return self.param_groups[0]["lr"]

    def state_dict(self) -> dict[str, Any]:  # type: ignore[override]
        """Groups and states as torch packs them, with the fp32 masters and the loss scaler beside the states."""
        params = [param for group in self.param_groups for param in group["params"]]
        number_of = {id(param): number for number, param in enumerate(params)}
        handle = self.engine.core
        states: dict[int, dict[str, Any]] = {}
        for number, param in enumerate(params):
            if (index := self.state_indices.get(id(param))) is not None:
                master = core.call(handle.state_tensor, index, "fp32_param")
                states[number] = {**self.state[param], "fp32_param": master}
        groups = [
            {**group, "params": [number_of[id(param)] for param in group["params"]]} for group in self.param_groups
        ]
        return {"state": states, "param_groups": groups, "loss_scaler": core.call(handle.scaler_state)}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:  # type: ignore[override]
        """Takes over what `state_dict` gave. The groups' dicts stay the same objects; their values change."""
        if not isinstance(state_dict, Mapping) or not {"state", "param_groups"} <= state_dict.keys():
            raise ConfigError("state_dict must be a dict with state and param_groups")
        handle = self.engine.core
        keys = {*core.call(handle.state_keys), "fp32_param"}
        saved_groups, states = state_dict["param_groups"], state_dict["state"]
        # Everything is looked at before anything changes.
        numbers = saved_states.require_groups(self.param_groups, saved_groups, self.engine.fixed_values)
        params = [param for group in self.param_groups for param in group["params"]]
        saved_states.require_states(params, numbers, states, keys)
        if "loss_scaler" in state_dict:
            saved_states.require_scaler(state_dict["loss_scaler"], core.call(handle.scaler_state))
        number = iter(numbers)
        for group, saved in zip(self.param_groups, saved_groups, strict=True):
            group.update({key: value for key, value in saved.items() if key != "params"})
            for param in group["params"]:
                self._load_param(param, states.get(next(number), {}), group)
        if "loss_scaler" in state_dict:
            scaler = {key: float(value) for key, value in state_dict["loss_scaler"].items()}
            core.call(handle.load_scaler_state, scaler)

    def _load_param(self, param: torch.Tensor, state: Mapping[str, Any], group: Mapping[str, Any]) -> None:
        index = self.state_indices.get(id(param))
        if index is None:
            return
        handle = self.engine.core
        keys = core.call(handle.state_keys)
        # A parameter without saved states starts anew, as torch has it.
        for key in keys:
            value = state.get(key)
            if value is None:
                start = float(group.get("initial_accumulator_value", 0.0)) if key == "sum" else 0.0
                value = torch.full(param.shape, start)
            core.call(handle.set_state_tensor, index, key, value)
        if state.get("fp32_param") is not None:
            core.call(handle.set_state_tensor, index, "fp32_param", state["fp32_param"])
        if "momentum_buffer" in keys and state.get("momentum_buffer") is None:
            step = 0  # torch's SGD starts its buffer with the next gradient.
        elif "step" in state:
            step = saved_states.step_of(state["step"], "step")
        else:
            step = int(state.get("momentum_buffer") is not None)  # torch's SGD counts nothing.
        core.call(handle.set_param_step, index, step)
