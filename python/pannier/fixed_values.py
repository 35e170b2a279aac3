"""Dicts and lists that say no to whoever writes into them: `engine.config` shows what was read, and is read no more."""

from __future__ import annotations

from typing import Any, NoReturn

from pannier.errors import UsageError


def fixed(value: Any) -> Any:
    """`value` with every dict and list in it fixed. Copies and pickles are plain ones."""
    if isinstance(value, dict):
        return _FixedDict((key, fixed(item)) for key, item in value.items())
    if isinstance(value, list):
        return _FixedList(map(fixed, value))
    return value


def _refuse(self: Any, *args: Any, **kwargs: Any) -> NoReturn:
    raise UsageError(
        "engine.config shows the configuration as initialize() read it, and writing into it would change nothing; give the "
        "value to initialize(), or look for a method of the engine (set_train_batch_size, optimizer.param_groups and so on)"
    )


class _FixedDict(dict[str, Any]):
    __setitem__ = __delitem__ = __ior__ = clear = pop = popitem = setdefault = update = _refuse  # type: ignore[assignment]

    def __deepcopy__(self, memo: Any) -> dict[str, Any]:
        return _plain(self)

    def __reduce__(self) -> Any:
        return dict, (_plain(self),)


class _FixedList(list[Any]):
    __setitem__ = __delitem__ = __iadd__ = __imul__ = _refuse  # type: ignore[assignment]
    append = clear = extend = insert = pop = remove = reverse = sort = _refuse  # type: ignore[assignment]

    def __deepcopy__(self, memo: Any) -> list[Any]:
        return _plain(self)

    def __reduce__(self) -> Any:
        return list, (_plain(self),)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list) else value
