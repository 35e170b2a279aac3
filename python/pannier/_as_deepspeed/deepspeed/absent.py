"""Classes that other code imports without using them: they are there, and say what to use when they are made."""

from typing import Any

from .missing import explain


def absent_class(module: str, name: str) -> type:
    """A class of that name. Making one raises NotImplementedError; nothing is an instance of it."""

    def refuse(self: Any, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError(explain(f"{module}.{name}"))

    return type(name, (), {"__init__": refuse, "__module__": module, "__doc__": "Not part of Pannier."})
