"""The logger that scripts set levels on."""

import logging
from collections.abc import Sequence

from pannier import comm

logger = logging.getLogger("DeepSpeed")


def log_dist(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """Logs on the given ranks (-1: all)."""
    if not ranks or -1 in ranks or comm.get_rank() in ranks:
        logger.log(level, "[Rank %d] %s", comm.get_rank(), message)
