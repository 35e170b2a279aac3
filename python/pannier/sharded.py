"""What stage 3 needs of the module: who is about to read which parameters, in forward and in backward.

The core makes a unit's parameters whole before the unit runs and takes them apart after; here are the hooks that tell it.
A unit's backward begins when the gradient of what it returned is about to be used, and ends when the gradient of what
it was given is. Hooks are plain functions that look the engine up by the module's identity, so that modules copy and
pickle with them.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from pannier import managed, overlap, returned_tensors, units
from pannier.errors import UsageError

if TYPE_CHECKING:
    from pannier.engine import Engine

_log = logging.getLogger("pannier")
Hook = Callable[..., Any]
# Process-wide by nature, like the table of managed parameters: the engine of a part of a model, its unit there (0: the
# whole model; -1: none of its own), and what it reads.
_parts: WeakIdKeyDictionary = WeakIdKeyDictionary()
_externals: WeakIdKeyDictionary = WeakIdKeyDictionary()


def parameters_of_units(model: torch.nn.Module, params: Sequence[torch.Tensor]) -> list[list[int]]:
    """For each unit, counted from 1, the indices in `params` of what it reads; before them, those of no unit.

    A unit reads what is below it but for parts that are units of their own, whose hooks say when they run.
    """
    index_of = {id(param): index for index, param in enumerate(params)}
    all_units = units.units_of(model)
    known = {id(unit) for unit in all_units}
    read = [sorted(_read_by(unit, known, index_of)) for unit in all_units]
    in_no_unit = sorted(set(range(len(params))).difference(*read))
    return [in_no_unit, *read]


def _read_by(module: torch.nn.Module, known_units: set[int], index_of: Mapping[int, int]) -> set[int]:
    found = {index_of[id(param)] for param in module.parameters(recurse=False) if id(param) in index_of}
    for child in module.children():
        if id(child) not in known_units:
            found |= _read_by(child, known_units, index_of)
    return found


def watch(model: torch.nn.Module, engine: Engine, params: Sequence[torch.Tensor]) -> list[RemovableHandle]:
    """Installs the hooks. Returns what removes them."""
    owner = weakref.ref(engine)
    read = parameters_of_units(model, params)
    index_of = {id(param): index for index, param in enumerate(params)}
    unit_of = {id(unit): number for number, unit in enumerate(units.units_of(model), 1)}
    handles: list[RemovableHandle] = []
    for part in model.modules():
        if isinstance(part, torch.jit.ScriptModule):
            continue
        own = [index_of[id(param)] for param in part.parameters(recurse=False) if id(param) in index_of]
        unit = unit_of.get(id(part), 0 if part is model else -1)
        _parts[part] = (owner, unit, sorted({*own, *(read[unit] if unit > 0 else [])}))
        handles += _hooks_of_state_dicts(part)
        handles.append(_renewed(part._forward_pre_hooks, part.register_forward_pre_hook, before_any))
        if unit >= 0:
            handles.append(_renewed(part._forward_pre_hooks, part.register_forward_pre_hook, before_unit, prepend=True))
            handles.append(
                _renewed(part._forward_hooks, part.register_forward_hook, after_unit, with_kwargs=True, always_call=True)
            )
        if part is model and unit > 0:
            handles.append(_renewed(part._forward_pre_hooks, part.register_forward_pre_hook, before_model, prepend=True))
            handles.append(_renewed(part._forward_hooks, part.register_forward_hook, after_model, with_kwargs=True, always_call=True))
        part._parameters = WatchedParameters(part._parameters)
    return handles


def _hooks_of_state_dicts(part: torch.nn.Module) -> list[RemovableHandle]:
    return [
        _renewed(part._state_dict_pre_hooks, part.register_state_dict_pre_hook, before_state_dict),
        _renewed(part._state_dict_hooks, part.register_state_dict_post_hook, after_state_dict),
        _renewed(part._load_state_dict_pre_hooks, part.register_load_state_dict_pre_hook, before_load),
        _renewed(part._load_state_dict_post_hooks, part.register_load_state_dict_post_hook, after_load),
    ]


class WatchedParameters(dict[str, Any]):
    """A module's own parameters, by name. Whoever asks for one that is taken apart while the model runs gets it whole.

    That is how a weight can be read outside of its module (a head that uses the embedding's weight, say). It copies and
    pickles as the plain dict that it was.
    """

    def __getitem__(self, name: str) -> Any:
        param = super().__getitem__(name)
        if param is not None and is_away(param):
            owner = managed.owner_of(param)
            if owner is not None:
                owner[0].use_parameter(owner[1])
        return param

    def __reduce__(self) -> Any:
        return dict, (dict(self),)


class Call:
    """One run of a unit, as its backward will see it."""

    def __init__(self, owner: weakref.ref[Engine], unit: int) -> None:
        self.owner = owner
        self.unit = unit
        self.is_open = False
        self.num_missing = 0
        self.leaf_hooks: list[RemovableHandle] = []

    def begin(self) -> None:
        """Its backward begins."""
        engine = self.owner()
        if engine is not None and not self.is_open:
            self.is_open = True
            engine.tell("begin_unit_backward", self.unit)

    def begin_at_node(self, *gradients: Any) -> None:
        """The same, found out by a node. A backward that builds a graph of its own (create_graph) leaves nodes that read
        parameters too, and nothing says when they have run: they stay whole until the engine's next backward ends."""
        if not torch.is_grad_enabled():
            self.begin()
        elif (engine := self.owner()) is not None and not self.is_open:
            engine.tell("begin_unit_backward", self.unit)

    def end(self, *args: Any) -> None:
        """No node of its backward is left that could read a parameter."""
        engine = self.owner()
        if engine is not None and self.is_open:
            self.is_open = False
            engine.tell("end_unit_backward", self.unit)

    def end_of_leaf(self, gradient: torch.Tensor) -> None:
        """The same, if it was the last of the leaves that it was given. A leaf may be ready before the gradients of
        parameters that the same node had, so this waits until the backward that runs now ends."""
        self.num_missing -= 1
        if self.num_missing == 0:
            for hook in self.leaf_hooks:
                hook.remove()
            torch.autograd.Variable._execution_engine.queue_callback(self.end)

    def watch(self, given: Any, returned: Sequence[torch.Tensor]) -> None:
        """Waits for its backward. Autograd runs nodes that were made later first, so when the node that made one of its
        inputs runs, none of its own is left; a leaf may be ready earlier, so all of them count."""
        for node in {tensor.grad_fn for tensor in returned if tensor.grad_fn is not None}:
            node.register_prehook(self.begin_at_node)
        inputs = [tensor for tensor in returned_tensors.plain(given) if tensor.requires_grad]
        nodes = {tensor.grad_fn for tensor in inputs if tensor.grad_fn is not None}
        for node in nodes:
            node.register_prehook(self.end)
        leaves = [] if nodes else [tensor for tensor in inputs if managed.owner_of(tensor) is None]
        self.num_missing = len(leaves)
        self.leaf_hooks = [leaf.register_hook(self.end_of_leaf) for leaf in leaves]


def before_unit(module: torch.nn.Module, args: Any) -> None:
    """Hook of a unit."""
    engine, unit = _running(module)
    if engine is not None:
        engine.tell("begin_unit_forward", unit)


def before_any(module: torch.nn.Module, args: Any) -> None:
    """Hook of every part: parameters that were registered as its own."""
    for param in _externals.get(module, ()):
        if is_away(param) and (owner := managed.owner_of(param)) is not None:
            owner[0].use_parameter(owner[1])


def external_parameters(module: torch.nn.Module) -> list[torch.Tensor]:
    """Parameters of other modules that `module` reads by other ways than an attribute of theirs; may be changed."""
    return _externals.setdefault(module, [])


def registered_parameters(module: torch.nn.Module) -> Sequence[torch.Tensor]:
    """The same, to be read only."""
    return _externals.get(module, ())


def after_unit(module: torch.nn.Module, args: Any, kwargs: Any, output: Any) -> None:
    """Hook of a unit, called after an error too, with no output."""
    _after(module, _running(module)[1], (args, kwargs), output)


def before_model(module: torch.nn.Module, args: Any) -> None:
    """Hook of a model that is a unit too, since it has parameters of its own."""
    engine, _ = _running(module)
    if engine is not None:
        engine.tell("begin_unit_forward", 0)


def after_model(module: torch.nn.Module, args: Any, kwargs: Any, output: Any) -> None:
    """Hook of a model that is a unit too."""
    _after(module, 0, (args, kwargs), output)


def before_state_dict(module: torch.nn.Module, prefix: str, keep_vars: bool) -> None:
    """Hook of every part of the module."""
    _hold(module)


def after_state_dict(module: torch.nn.Module, state: dict[str, Any], prefix: str, local_metadata: Any) -> None:
    """Hook of every part of the module: what the dict has of parameters must outlive them."""
    for name, param in module._parameters.items():
        if isinstance(value := state.get(prefix + name), torch.Tensor) and value is not param:
            state[prefix + name] = value.clone()
    _let_go(module)


def before_load(module: torch.nn.Module, *args: Any) -> None:
    """Hook of every part of the module."""
    _hold(module)


def after_load(module: torch.nn.Module, incompatible_keys: Any) -> None:
    """Hook of every part of the module."""
    _let_go(module)


def require_not_compiled(model: torch.nn.Module) -> None:
    """Raises where a part of `model` is compiled: what is traced into one graph has no hooks that run."""
    if overlap.is_compiled(model):
        raise UsageError(
            "torch.compile does not work with partitioned or offloaded parameters (zero_optimization.stage 3): use stage "
            "2, or do not compile the model"
        )


def _running(module: torch.nn.Module) -> tuple[Engine | None, int]:
    owner, unit, _ = _parts.get(module, (None, -1, []))
    engine = None if owner is None else owner()
    return (None, unit) if engine is None or engine.is_closed else (engine, unit)


def _after(module: torch.nn.Module, unit: int, given: Any, output: Any) -> None:
    engine, _ = _running(module)
    if engine is None:
        return
    if torch.is_grad_enabled():
        returned = returned_tensors.with_gradient(output)
        if returned:
            call = Call(weakref.ref(engine), unit)
            call.watch(given, returned)
            if torch._C._current_graph_task_id() != -1:
                call.begin()  # A recomputation: its backward follows at once.
        elif (kind := returned_tensors.opaque_kind(output)) is not None:
            _keep_whole(module, engine, unit, kind)
    engine.tell("end_unit_forward", unit)


def _keep_whole(module: torch.nn.Module, engine: Engine, unit: int, kind: str) -> None:
    # Nothing says when its backward begins and ends: it stays whole until the engine's next backward has ended.
    engine.tell("begin_unit_backward", unit)
    if not engine.said_once(f"opaque output of unit {unit}"):
        _log.warning(
            "a %s returned a %s, in which tensors can't be found, so its parameters stay whole until the next backward has "
            "ended; return tensors, or lists, dicts or objects that hold them",
            type(module).__name__,
            kind,
        )


def _hold(module: torch.nn.Module) -> None:
    owner, _, params = _parts.get(module, (None, -1, []))
    if params and (engine := owner()) is not None:
        engine.hold_parameters(params)


def _let_go(module: torch.nn.Module) -> None:
    owner, _, params = _parts.get(module, (None, -1, []))
    if params and (engine := owner()) is not None:
        engine.let_go_parameters(params)


def is_away(param: torch.Tensor) -> bool:
    """Whether `param` is taken apart, so that reading it would raise."""
    try:
        param.data_ptr()
    except RuntimeError:
        return True
    return False


def _renewed(hooks: Any, register: Any, hook: Hook, **options: Any) -> RemovableHandle:
    # A copy of a module comes with its hooks.
    for key in [key for key, there in hooks.items() if getattr(there, "hook", there) is hook]:
        del hooks[key]
    return register(hook, **options)
