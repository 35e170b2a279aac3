"""Questions about torch."""

import torch
from packaging import version


def required_torch_version(min_version: float | str | None = None, max_version: float | str | None = None) -> bool:
    """Whether torch's version is in the range."""
    if min_version is None and max_version is None:
        raise AssertionError("required_torch_version() needs min_version or max_version")
    have = version.parse(torch.__version__)
    above = min_version is None or version.parse(str(min_version)) <= have
    return above and (max_version is None or have <= version.parse(str(max_version)))
