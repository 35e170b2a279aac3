"""The errors that Pannier raises.

`ConfigError` says what the user wrote that cannot be, `IoError` what the machine refused, `OutOfMemoryError` what did
not fit, `InternalError` a bug of Pannier's own. All of them arrive from the core with their message as it is.
"""

from __future__ import annotations

import torch

OutOfMemoryError = torch.OutOfMemoryError


class ConfigError(ValueError):
    """The user asked for something that cannot be: a wrong key, value, parameter or order of calls."""


class UsageError(ConfigError, AssertionError):
    """A wrong order of calls. Also an AssertionError, because that is what DeepSpeed raises for the same mistake."""


class IoError(OSError):
    """The machine refused an operation on a file or device; `errno` is set."""


class CollectiveError(RuntimeError):
    """The ranks can't go on together: one died, failed, is late or does something else. The message names it."""


class InternalError(RuntimeError):
    """A promise that Pannier makes to itself was broken. Always a bug of ours."""
