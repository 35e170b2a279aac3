"""The engine and what belongs to it."""

from . import config, dataloader, engine, lr_schedules, utils, zero

__all__ = ["config", "dataloader", "engine", "lr_schedules", "utils", "zero"]
