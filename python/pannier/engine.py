"""The engine: the user's model, and the verbs that train it.

Everything that computes or remembers is the core's. This class checks the order of calls, keeps Python's side of the
objects together (module, optimizer, scheduler, loader) and closes the core when it goes.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import logging
import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from pannier import backward_checks, comm, core, early, groups, inputs, lr_schedules, managed, overlap, sharded, units
from pannier.batches import Batches
from pannier.checkpoints import Checkpoints
from pannier.config import Config
from pannier.errors import ConfigError, UsageError
from pannier.group_values import fixed_by, hyperparameters
from pannier.optimizer import Optimizer
from pannier.places import Places
from pannier.plan import Plan
from pannier.state_moves import StateMoves

_log = logging.getLogger("pannier")
_APPLIED = 1
_PRE_HOOKS, _POST_HOOKS = "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"


def close_core(
    handle: Any,
    process_id: int,
    params: Sequence[weakref.ref[torch.Tensor]],
    hooks: Sequence[RemovableHandle],
    group: Any,
    world_size: int,
) -> None:
    """Ends a core engine and its group, in the process that made it; a forked child leaves it alone."""
    if os.getpid() != process_id:
        return
    units.unwatch(hooks)
    living = {index: param for index, ref in enumerate(params) if (param := ref()) is not None}
    managed.release(living.values())
    try:
        if _process_ends or not any(map(sharded.is_away, living.values())):
            core.call(handle.close)
            return
        left = core.call(handle.close_and_hand_over)
    finally:
        comm.end_engine_group(group)
    away = {index: param for index, param in living.items() if sharded.is_away(param)}
    early.take_over([(away.pop(index), begin, values) for index, begin, values in left if index in away], world_size)
    early.say_lost(away.values())


_process_ends: list[bool] = []  # Not empty once it does: nobody goes on with a model then.


@functools.cache
def _note_the_end() -> None:
    """Has `close_core` know that the process ends. After the first finalizer was made, so that this is called before it."""
    atexit.register(_process_ends.append, True)


class Engine(Batches, Checkpoints, StateMoves, torch.nn.Module):
    """Trains `module`. Made by `pannier.initialize`; one thread at a time."""

    def __init__(
        self,
        module: torch.nn.Module,
        config: Config,
        handle: Any,
        params: Sequence[torch.nn.Parameter],
        optimizer: Optimizer | None,
        rank: int = 0,
        world_size: int = 1,
        group: Any = None,
    ) -> None:
        super().__init__()
        self.module = module
        self.training = module.training
        self.optimizer = optimizer
        self.lr_scheduler: Any = None
        self._scheduler_watch = lr_schedules.StepWatch()
        self.training_dataloader: Any = None
        self.collate_fn: Callable[[list[Any]], Any] | None = None
        self.global_rank = rank
        self.local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        self.world_size = world_size
        self.dp_world_size = world_size
        self._config = config
        self._core = handle
        self._process_id = os.getpid()
        self._params = list(params)
        rule = "" if optimizer is None else groups.update_rule(optimizer.optimizer)
        # Only SGD reads a momentum; other groups may hold one for the caller's own use.
        self.fixed_values = fixed_by(rule, rule != "SGD" or "momentum_buffer" in core.call(handle.state_keys))
        self._known_groups = groups.KnownGroups(optimizer)
        optimized = [] if optimizer is None else [p for group in optimizer.param_groups for p in group["params"]]
        self._places = Places(module, optimized)
        self._holding = ""  # The context that adds gradients up, while inside one.
        self._step_applied = False
        self._said: set[str] = set()
        self._input_hook = inputs.prepare(module, self)
        managed.register(self, self._params)
        refs: list[weakref.ref[torch.Tensor]] = [weakref.ref(param) for param in self._params]
        hooks = list(units.watch(module, self)) if core.call(handle.wants_ticks) else []
        hooks += overlap.watch(module, self, handle, self._params)
        self._overlaps = core.call(handle.overlaps)
        self._partitions = core.call(handle.partitions)
        if self._partitions:
            hooks += sharded.watch(module, self, self._params)
        self._finalizer = weakref.finalize(self, close_core, handle, self._process_id, refs, hooks, group, world_size)
        _note_the_end()

    # --- the verbs of a training loop ---

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Runs the module."""
        if not torch.compiler.is_compiling():  # A finalizer can't be traced. Verbs after forward check the same.
            core.call(self.core.tick_forward, 0)
            self.wait_before_forward()
            if self._partitions:
                sharded.require_not_compiled(self.module)
        self._look_at_batch(inputs, kwargs)
        return self.module(*inputs, **kwargs)

    def backward(self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> torch.Tensor:
        """Backward of a scalar loss; gradients go to the engine. Returns the loss divided by the accumulation steps."""
        self._require_optimizer("backward")
        handle = self.core
        self._resolve_batch()
        backward_checks.require_loss(loss)
        returned, root = core.call(handle.begin_backward, loss, scale_wrt_gas)
        try:
            root.backward(retain_graph=retain_graph)
        except BaseException as error:
            from_core = isinstance(error, Exception) and backward_checks.comes_from_core(error)
            cause = core.lost_ranks(handle) if from_core else None
            core.call(handle.abort_backward, f"{type(error).__name__}: {error}")
            if cause is not None:
                raise cause from None
            if isinstance(error, Exception) and from_core:
                raise core.translated(error) from None
            raise
        core.call(handle.end_backward)
        return returned

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss for a backward that the caller runs: `engine.scale(loss).backward()`."""
        self._require_optimizer("scale")
        self._resolve_batch()
        backward_checks.require_loss(loss)
        return core.call(self.core.scale, loss)

    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        """Ends a micro-batch; at the end of a window updates the parameters and steps the scheduler."""
        optimizer = self._require_optimizer("step")
        if self._holding:
            raise UsageError(
                f"It is illegal to call Engine.step() inside {self._holding} context manager "
                "(no_sync and coalesce_grad_reduction only add gradients up)"
            )
        self._known_groups.require_unchanged(optimizer)
        self._places.require_unchanged()
        self._resolve_batch()
        self._step_applied = False
        if self.is_gradient_accumulation_boundary():
            optimizer.run_step_hooks(_PRE_HOOKS)
        numbers = hyperparameters(optimizer.param_groups, self.fixed_values)
        try:
            outcome = core.call(self.core.step, numbers)
        except ConfigError as error:
            raise UsageError(str(error)) from None
        if outcome == 0:
            return
        optimizer.mark_stepped()
        self._step_applied = outcome == _APPLIED
        if self._step_applied:
            optimizer.run_step_hooks(_POST_HOOKS)
        if self._step_applied and self.lr_scheduler is not None:
            self._step_scheduler(lr_kwargs or {})

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops gradients, but for those of an accumulation window that is partly filled, which the engine still needs.

        What was put into `.grad` of a parameter goes in any case.
        """
        self.core  # noqa: B018
        for param in self._params:
            param.grad = None
        if self.pending_micro_batches() == 0:
            self.drop_gradients()
        elif not self.said_once("zero_grad"):
            _log.warning(
                "zero_grad() in the middle of an accumulation window keeps the gradients of the window; "
                "engine.drop_gradients() drops them"
            )

    def drop_gradients(self) -> None:
        """Drops all gradients that no step has used yet; a partly filled accumulation window starts anew."""
        core.call(self.core.drop_gradients)

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the next `step()` updates."""
        return core.call(self.core.is_boundary)

    def set_gradient_accumulation_boundary(self, is_boundary: bool | None) -> None:
        """Says whether the next backward and step end a window; None goes back to counting."""
        if not self.managed_gradient_accumulation():
            raise UsageError(
                "set_gradient_accumulation_boundary() needs managed_gradient_accumulation: "
                "without it every step() ends a window"
            )
        core.call(self.core.set_boundary, -1 if is_boundary is None else int(bool(is_boundary)))

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward that adds up on each rank; ranks share the sums, in fp32, in the next backward outside or in `step()`."""
        if self.zero_optimization_partition_gradients():
            raise UsageError(
                f"no_sync context manager is incompatible with ZeRO stage {self.zero_optimization_stage()}, "
                "which partitions gradients"
            )
        with self._no_step_inside("no_sync"):
            core.call(self.core.hold_gradients, True)
            try:
                yield
            finally:
                core.call(self.core.hold_gradients, False)

    @contextlib.contextmanager
    def coalesce_grad_reduction(self) -> Iterator[None]:
        """Several backwards with one reduction at the end."""
        if not self.managed_gradient_accumulation():
            raise UsageError("coalesce_grad_reduction() needs managed_gradient_accumulation")
        if self.zero_optimization_stage() == 0:
            raise NotImplementedError("coalesce_grad_reduction() needs ZeRO stage 1, 2 or 3, got stage 0")
        with self._no_step_inside("coalesce_grad_reduction"):
            yield

    # --- what a loop reads ---

    def get_global_grad_norm(self) -> float | None:
        """The gradients' 2-norm of the last window, unscaled and before clipping. None before the first step."""
        return core.call(self.core.grad_norm)

    def was_step_applied(self) -> bool:
        """Whether the last `step()` changed the parameters."""
        return self._step_applied

    def get_lr(self) -> list[float]:
        """Each group's lr."""
        return self._of_groups("lr")

    def get_type(self) -> list[Any]:
        """Each group's `type`, 0.0 where there is none."""
        return self._of_groups("type")

    def get_mom(self) -> list[Any]:
        """Each group's betas, or momentum for SGD."""
        return self._of_groups("momentum" if self.optimizer_name() == "SGD" else "betas")

    def optimizer_name(self) -> str | None:
        """The class of the optimizer whose groups these are."""
        return None if self.optimizer is None else type(self.optimizer.optimizer).__name__

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return self._params[0].device if self._params else torch.device("cpu")

    @property
    def global_steps(self) -> int:
        """Windows that ended, skipped ones too."""
        return self._counter("global_steps")

    @property
    def micro_steps(self) -> int:
        """Calls of `step()`."""
        return self._counter("micro_steps")

    @property
    def skipped_steps(self) -> int:
        """Windows that changed nothing because a gradient was not finite."""
        return self._counter("skipped_steps")

    @property
    def global_samples(self) -> int:
        """Samples seen."""
        return self._counter("global_samples")

    def memory_stats(self) -> dict[str, Any]:
        """Bytes by tier (device, host, nvme) and owner, current and peak."""
        return json.loads(core.call(self.core.memory_stats))

    def wire_bytes(self) -> dict[str, int]:
        """Bytes that this rank has sent to others since the engine was made, by what they were; "total" counts stamps and
        headers too."""
        names = ("gradients", "parameters", "parameters between nodes", "votes", "other", "total")
        return dict(zip(names, core.call(self.core.wire_bytes), strict=True))

    def reset_peak_memory(self) -> None:
        """Starts the peaks of `memory_stats` anew."""
        core.call(self.core.reset_peak)

    def start_memory_timeline(self) -> None:
        """Starts recording device memory over time by owner."""
        core.call(self.core.start_timeline)

    def memory_timeline(self) -> list[Any]:
        """What was recorded: [seconds, {owner: bytes}]."""
        return json.loads(core.call(self.core.timeline))

    def plan(self) -> Plan:
        """What goes where, and what it should cost. Prints as a table."""
        return Plan(json.loads(core.call(self.core.plan)))

    # --- weights ---

    def parameters_changed(self) -> None:
        """Says that parameters were written through `.data`, which torch does not count. Other edits are noticed."""
        core.call(self.core.parameters_changed)

    def synchronize(self) -> None:
        """Waits until every parameter and state is in place."""
        core.call(self.core.synchronize)

    # --- life ---

    @property
    def core(self) -> Any:
        """The core's engine. Raises where there is none to use."""
        if not self._finalizer.alive:
            raise UsageError(
                "this engine was destroyed, by destroy() or by a library: Accelerate's free_memory() does so, with which every "
                "Trainer.train() begins, so make a new Trainer for another run, or for train() after evaluate()"
            )
        if os.getpid() != self._process_id:
            raise UsageError(
                f"this engine belongs to process {self._process_id}, and can't be used in process {os.getpid()}"
            )
        return self._core

    @property
    def is_closed(self) -> bool:
        """Whether `destroy()` was called."""
        return not self._finalizer.alive

    def destroy(self) -> None:
        """Lets go of the module, which can be given to `initialize` again. Calling it twice does nothing."""
        if self._input_hook is not None:
            self._input_hook.remove()
            self._input_hook = None
        self._finalizer()

    def train(self, mode: bool = True) -> Engine:
        """Switches the module between training and evaluation, for which all parameters are in place."""
        if not mode:
            self.wait_for_parameters()
        return super().train(mode)

    def wait_for_parameters(self) -> None:
        """With "overlap_step": waits until all parameters are in place. States may still travel."""
        if self._overlaps and self._finalizer.alive and os.getpid() == self._process_id:
            core.call(self._core.wait_for_parameters)

    def wait_before_forward(self) -> None:
        """With "overlap_step": waits for what a forward of the module must find in place when it begins."""
        if self._overlaps and overlap.needs_everything(self.module):
            self.wait_for_parameters()
        elif self._overlaps and self._finalizer.alive and os.getpid() == self._process_id:
            core.call(self._core.wait_for_unit, 0)

    def tick_forward(self, unit: int) -> None:
        """Tells the core that a unit is about to run. Nothing after `destroy()`, and in a forked child."""
        if self._finalizer.alive and os.getpid() == self._process_id:
            core.call(self._core.tick_forward, unit)

    def tell(self, what: str, unit: int) -> None:
        """With partitioned parameters: tells the core that a unit begins or ends. Nothing after `destroy()`."""
        if self._finalizer.alive and os.getpid() == self._process_id:
            core.call(getattr(self._core, what), unit)

    def use_parameter(self, index: int) -> None:
        """With partitioned parameters: somebody in the model reads one whose module does not run."""
        self.tell("use_parameter", index)

    def hold_parameters(self, indices: Sequence[int], watches: bool = False) -> None:
        """Makes parameters whole until `let_go_parameters`. All ranks call it. `watches`: values that are written until
        then through `.data`, which torch does not count, count too."""
        core.call(self.core.hold, list(indices), watches)

    def let_go_parameters(self, indices: Sequence[int], modifier_rank: int | None = None) -> None:
        """Ends `hold_parameters`. With `modifier_rank` all ranks get that rank's values."""
        core.call(self.core.let_go, list(indices), -1 if modifier_rank is None else modifier_rank)

    def said_once(self, what: str) -> bool:
        """Whether this engine said `what` before; from now on it did."""
        if what in self._said:
            return True
        self._said.add(what)
        return False

    def pending_micro_batches(self) -> int:
        """Micro-batches of the open window that `step()` has counted."""
        return core.call(self.core.pending_micro_batches)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            pass
        module = self.__dict__.get("_modules", {}).get("module")
        if module is None:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        try:
            return getattr(module, name)
        except AttributeError:
            if hasattr(type(module), name):
                raise  # A property of the module's that fails; its own words say why.
            kind = type(module).__name__
            raise AttributeError(f"neither the engine nor its module, a {kind}, has an attribute {name!r}") from None

    def _step_scheduler(self, arguments: Mapping[str, Any]) -> None:
        if arguments or not lr_schedules.needs_arguments(self.lr_scheduler):
            if self._scheduler_watch.before(self.lr_scheduler) and not self.said_once("lr_scheduler twice"):
                _log.warning(
                    "%s is stepped by the engine after each update and by the caller too, so it runs at twice the pace: "
                    "leave out one of them (the engine leaves alone what initialize() is not given)",
                    type(self.lr_scheduler).__name__,
                )
            self.lr_scheduler.step(**arguments)
            self._scheduler_watch.after(self.lr_scheduler)
        elif not self.said_once("lr_scheduler"):
            _log.warning(
                "%s.step() needs arguments, so the engine does not call it: call it yourself, or pass them to "
                "engine.step() as lr_kwargs",
                type(self.lr_scheduler).__name__,
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> Engine:
        raise UsageError("an engine can't be copied; copy engine.module, and initialize() the copy")

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UsageError(
            "an engine can't be copied, pickled or saved; use engine.module or engine.module.state_dict(), and "
            "optimizer.state_dict()"
        )

    def _require_optimizer(self, verb: str) -> Optimizer:
        if self.optimizer is None:
            raise UsageError(f"{verb}() needs an optimizer, and initialize() was given none")
        return self.optimizer

    def _counter(self, name: str) -> int:
        return int(core.call(self.core.counters)[name])

    def _of_groups(self, key: str) -> list[Any]:
        return [] if self.optimizer is None else [group.get(key, 0.0) for group in self.optimizer.param_groups]

    @contextlib.contextmanager
    def _no_step_inside(self, name: str) -> Iterator[None]:
        if self._holding:
            how = "reentry is unsupported" if self._holding == name else f"can't be nested in {self._holding}"
            raise UsageError(f"{name} context manager {how}; leave the outer one (no_sync or coalesce_grad_reduction) first")
        self._holding = name
        try:
            yield
        finally:
            self._holding = ""
