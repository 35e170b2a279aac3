"""Learning-rate schedules by the names of DeepSpeed's configuration.

The curves are the core's (pannier/optim/schedule.h). The classes here write its values into the optimizer's parameter
groups, in place, where `step()` of the engine and everybody else reads them.
"""

from __future__ import annotations

import inspect
import json
import logging
from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from pannier import core
from pannier.errors import ConfigError, UsageError

_log = logging.getLogger("pannier")

LR_RANGE_TEST = "LRRangeTest"
ONE_CYCLE = "OneCycle"
WARMUP_LR = "WarmupLR"
WARMUP_DECAY_LR = "WarmupDecayLR"
WARMUP_COSINE_LR = "WarmupCosineLR"
VALID_LR_SCHEDULES = [LR_RANGE_TEST, ONE_CYCLE, WARMUP_LR, WARMUP_DECAY_LR, WARMUP_COSINE_LR]


class LrSchedule:
    """A schedule bound to an optimizer's groups. Subclasses name the curve; their arguments are the curve's fields."""

    kind: ClassVar[str]
    positional: ClassVar[Sequence[str]] = ()

    def __init__(self, optimizer: torch.optim.Optimizer, *values: Any, **params: Any) -> None:
        if len(values) > len(self.positional):
            raise TypeError(f"{self.kind} takes at most {len(self.positional)} arguments, got {len(values)}")
        params.update(zip(self.positional, values, strict=False))
        if params.get("warmup_num_steps", 0) is None:
            raise ConfigError(f"{self.kind}: warmup_num_steps is None; leave it out, or give a whole number")
        params = {key: value for key, value in params.items() if value is not None}
        self.optimizer = optimizer
        self.org_lrs = [float(group["lr"]) for group in optimizer.param_groups]
        self._schedule = core.new_schedule(self.kind, json.dumps(params), self.org_lrs)
        total, warmup = params.get("total_num_steps"), params.get("warmup_num_steps", 1000)
        if total is not None and total < warmup:
            _log.warning(
                "%s: total_num_steps %s is less than warmup_num_steps %s, so the lr falls to its end right after the "
                "warm-up",
                self.kind,
                total,
                warmup,
            )
        # What was given can be read by its name, as with DeepSpeed's schedules.
        vars(self).update({key: value for key, value in params.items() if not hasattr(type(self), key)})
        self._last_lr: list[float] | None = None
        if self.last_batch_iteration == -1:
            self._write()

    @property
    def last_batch_iteration(self) -> int:
        """The iteration whose values the groups hold; -1 before the first step."""
        return core.call(self._schedule.iteration)

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Goes one iteration on, or to `last_batch_iteration`, and writes the values into the groups."""
        if last_batch_iteration is None:
            core.call(self._schedule.step)
        else:
            core.call(self._schedule.step_to, last_batch_iteration)
        self._write()

    def get_lr(self) -> list[float]:
        """The schedule's value for each group."""
        return core.call(self._schedule.lrs)

    def get_mom(self) -> list[tuple[float, float]] | None:
        """The betas of the cycle for each group, None where the schedule leaves them alone.

        Before the first step the groups hold the cycle's least momentum, as with DeepSpeed, and this is the greatest.
        """
        return _pairs(core.call(self._schedule.cycle_momenta)) or None

    def get_last_lr(self) -> list[float]:
        """The learning rates that were written last."""
        if self._last_lr is None:
            raise UsageError("need to call step() first")
        return self._last_lr

    def state_dict(self) -> dict[str, int]:
        """What a resume needs."""
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, sd: dict[str, int]) -> None:
        """Continues where `state_dict` was taken and writes the values of that iteration into the groups."""
        core.call(self._schedule.step_to, sd["last_batch_iteration"])
        self._write()

    def _of_each_group(self, field: str, default: list[float]) -> list[float]:
        value = vars(self).get(field)
        if value is None:
            return default
        return list(value) if isinstance(value, (list, tuple)) else [value] * len(default)

    def _write(self) -> None:
        groups = self.optimizer.param_groups
        for group, lr in zip(groups, core.call(self._schedule.lrs), strict=True):
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr
        for group, betas in zip(groups, _pairs(core.call(self._schedule.momenta)), strict=False):
            if "betas" in group:
                group["betas"] = betas
        self._last_lr = [group["lr"] for group in groups]


def _pairs(flat: Sequence[float]) -> list[tuple[float, float]]:
    return list(zip(flat[0::2], flat[1::2], strict=True))


class WarmupLR(LrSchedule):
    """Rises from `warmup_min_lr` to `warmup_max_lr` (default: each group's own lr), then stays."""

    kind = WARMUP_LR
    positional = ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "warmup_type", "last_batch_iteration")

    @property
    def min_lrs(self) -> list[float]:
        """Where each group's lr starts."""
        return self._of_each_group("warmup_min_lr", [0.0] * len(self.org_lrs))

    @property
    def max_lrs(self) -> list[float]:
        """What each group's lr rises to."""
        return self._of_each_group("warmup_max_lr", self.org_lrs)


class WarmupDecayLR(WarmupLR):
    """Rises as WarmupLR does, then falls in a straight line to 0 at `total_num_steps`."""

    kind = WARMUP_DECAY_LR
    positional = ("total_num_steps", *WarmupLR.positional)


class WarmupCosineLR(LrSchedule):
    """Rises to each group's own lr, then follows a cosine to `cos_min_ratio` of it at `total_num_steps`."""

    kind = WARMUP_COSINE_LR
    positional = (
        "total_num_steps",
        "warmup_min_ratio",
        "warmup_num_steps",
        "cos_min_ratio",
        "warmup_type",
        "last_batch_iteration",
    )

    def get_lr_ratio(self) -> float:
        """The schedule's factor on every group's own lr."""
        for lr, own in zip(self.get_lr(), self.org_lrs, strict=True):
            if own:
                return lr / own
        return 0.0


class OneCycle(LrSchedule):
    """Up to `cycle_max_lr` and back to `cycle_min_lr`, then a decay; beta1 runs the other way."""

    kind = ONE_CYCLE
    positional = (
        "cycle_min_lr",
        "cycle_max_lr",
        "decay_lr_rate",
        "cycle_first_step_size",
        "cycle_second_step_size",
        "cycle_first_stair_count",
        "cycle_second_stair_count",
        "decay_step_size",
        "cycle_momentum",
        "cycle_min_mom",
        "cycle_max_mom",
        "decay_mom_rate",
        "last_batch_iteration",
    )

    @property
    def min_lrs(self) -> list[float]:
        """The low end of each group's cycle."""
        return self._of_each_group("cycle_min_lr", self.org_lrs)

    @property
    def max_lrs(self) -> list[float]:
        """The high end of each group's cycle."""
        return self._of_each_group("cycle_max_lr", self.org_lrs)


class LRRangeTest(LrSchedule):
    """Rises without end, to find the greatest lr that trains."""

    kind = LR_RANGE_TEST
    positional = (
        "lr_range_test_min_lr",
        "lr_range_test_step_size",
        "lr_range_test_step_rate",
        "lr_range_test_staircase",
        "last_batch_iteration",
    )


def needs_arguments(scheduler: Any) -> bool:
    """Whether its `step()` can't be called without arguments, as ReduceLROnPlateau's, which wants a metric."""
    try:
        inspect.signature(scheduler.step).bind()
    except TypeError:
        return True
    except (ValueError, AttributeError):
        return False
    return False


class StepWatch:
    """Notices a caller who steps the scheduler that the engine steps after each update too, so that it runs at twice the pace.

    A single change between two of the engine's steps may be a resume; the same one twice in a row is a habit.
    """

    def __init__(self) -> None:
        self._left_at: int | None = None
        self._times = 0

    def before(self, scheduler: Any) -> bool:
        """Whether, just before the engine steps `scheduler`, it has become plain that the caller does too."""
        at = _iteration(scheduler)
        moved = at is not None and self._left_at is not None and at - self._left_at == 1
        self._times = self._times + 1 if moved else 0
        return self._times == 2

    def after(self, scheduler: Any) -> None:
        """Remembers where the engine left `scheduler`."""
        self._left_at = _iteration(scheduler)


def _iteration(scheduler: Any) -> int | None:
    value = getattr(scheduler, "last_batch_iteration", getattr(scheduler, "last_epoch", None))
    return value if isinstance(value, int) else None


BY_NAME: dict[str, type[LrSchedule]] = {
    kind.kind: kind for kind in (WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle, LRRangeTest)
}
