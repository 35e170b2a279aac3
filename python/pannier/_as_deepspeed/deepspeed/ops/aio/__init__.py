"""Names of asynchronous files; the core has its own."""

from ..op_builder import AsyncIOBuilder

__all__ = ["AsyncIOBuilder"]
