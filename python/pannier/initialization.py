"""`initialize`: checks everything that was given, then builds the engine. What raises leaves the model as it was."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from pannier import comm, core, devices, early, foreign_use, groups, lr_schedules, managed, sharded
from pannier import config as configuration
from pannier.config import Config
from pannier.engine import Engine
from pannier.errors import ConfigError, UsageError
from pannier.group_values import fixed_by, hyperparameters
from pannier.loader import Loader
from pannier.optimizer import Optimizer

_WRAPPERS = ("DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule")


@comm.told_to_all
def initialize(
    args: Any = None,
    model: torch.nn.Module | None = None,
    optimizer: torch.optim.Optimizer | Callable[[Iterable[Any]], torch.optim.Optimizer] | None = None,
    model_parameters: Iterable[Any] | torch.nn.Module | None = None,
    training_data: torch.utils.data.Dataset[Any] | None = None,
    lr_scheduler: Any = None,
    distributed_port: int = 29500,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    config: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    mesh_param: Any = None,
    config_params: str | os.PathLike[str] | Mapping[str, Any] | None = None,
) -> tuple[Engine, Optimizer | None, Loader | None, Any]:
    """Makes an engine that trains `model`.

    Args:
        args: A namespace; `args.deepspeed_config` is the configuration where `config` is not given.
        model: The module to train. Its parameters stay the same objects.
        optimizer: An optimizer, or a function of the parameters that returns one. It comes before the config's.
        model_parameters: Parameters or parameter groups for the config's optimizer; default: all of the model's.
        training_data: A dataset, for which a loader of micro-batches is returned.
        lr_scheduler: A scheduler, or a function of the optimizer that returns one. It comes before the config's.
        distributed_port: Where ranks meet, where the environment does not say.
        mpu: Must be None: model parallelism is not supported.
        dist_init_required: False: torch's process group must be there already.
        collate_fn: Makes a batch of a list of samples, for the loader.
        config: A dict (never changed), a path, or a text of JSON, plain or in base64.
        mesh_param: Must be None: sequence parallelism is not supported.
        config_params: Another name of `config`.

    Returns:
        engine, optimizer (None where none is asked for), loader (None without `training_data`), scheduler (or None).

    Raises:
        ConfigError: for anything given that can't be.
        OutOfMemoryError: where the plan does not fit; nothing was allocated.
    """
    if model is None:
        raise UsageError("initialize() needs a model")
    if not isinstance(model, torch.nn.Module):
        raise ConfigError(f"model must be a torch.nn.Module, not {type(model).__name__}")
    if mpu is not None or mesh_param is not None:
        raise ConfigError("mpu and mesh_param are not supported: there is no model or sequence parallelism")
    patience = 0.0
    try:
        text, origin = configuration.find(args, config, config_params)
        read = Config(text, origin, brings_optimizer=optimizer is not None, brings_scheduler=lr_scheduler is not None)
        patience = read.config["pannier"]["collective_timeout"]
    finally:  # Connected in any case, so that all ranks learn of a mistake.
        rank, world_size = comm.ensure_group(dist_init_required, patience)
    read.require_resolved()
    read.resolve_batch(world_size=world_size, loader_batch=0)
    params = checked_parameters(model)
    device = devices.choose(model, read.config["pannier"]["device"])
    loader = None if training_data is None else _build_loader(training_data, collate_fn, read, rank, world_size)
    basic = groups.build_optimizer(optimizer, model_parameters, params, read)
    rule = "" if basic is None else groups.update_rule(basic)
    group_of = groups.group_indices(basic, params)
    trained = {
        index: param
        for index, (param, group) in enumerate(zip(params.values(), group_of, strict=True))
        if group >= 0 and param.requires_grad
    }
    # Frozen parameters are partitioned as trained ones.
    partitions = basic is not None and read.zero_optimization_stage() == 3
    placed = range(len(params)) if partitions else trained
    groups.require_states(basic, params)
    with groups.restored_on_failure(basic):
        wrapped = None if basic is None else Optimizer(basic)
        scheduler = None if wrapped is None else _build_scheduler(lr_scheduler, wrapped, read)
        numbers = [] if wrapped is None else hyperparameters(wrapped.param_groups, fixed_by(rule))
        states = groups.take_states(basic)
        group: Any = None
        try:
            group = comm.engine_group(device or _device_of(params), read.config["pannier"]["collective_timeout"])
            handle = core.new_engine(
                read.core,
                rule,
                list(params),
                list(params.values()),
                group_of,
                numbers,
                list(model.buffers()),
                device,
                sharded.parameters_of_units(model, list(params.values())),
                early.shares_of(list(params.values()), placed),
                None if group is None else group.boxed(),
            )
            early.forget(params.values())
            engine = Engine(model, read, handle, list(params.values()), wrapped, rank, world_size, group)
            groups.give_states(handle, states, trained)
        except Exception:
            groups.restore_states(basic, states)
            comm.end_engine_group(group)
            raise
    engine.collate_fn = collate_fn
    engine.lr_scheduler = scheduler
    engine.training_dataloader = loader
    if wrapped is not None:
        wrapped.bind(engine, {id(param): index for index, param in trained.items()})
    for param in params.values():
        param.grad = None  # The first window starts empty.
    foreign_use.watch()
    return engine, engine.optimizer, engine.training_dataloader, engine.lr_scheduler


def _device_of(params: dict[str, torch.nn.Parameter]) -> str:
    return next((str(param.device) for param in params.values()), "cpu")


def _build_loader(
    data: Any, collate_fn: Callable[[list[Any]], Any] | None, config: Config, rank: int, world_size: int
) -> Loader:
    Loader.require_dataset(data)
    batch = config.config.get("train_micro_batch_size_per_gpu")
    if not isinstance(batch, int) or batch < 1:
        raise ConfigError(
            f"training_data needs a train_micro_batch_size_per_gpu to make batches of, but that is {batch!r}"
        )
    return Loader(
        data,
        batch,
        world_size=world_size,
        rank=rank,
        collate_fn=collate_fn,
        drop_last=config.dataloader_drop_last(),
        pin_memory=True,
    )


def checked_parameters(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """The model's parameters by name, tied ones once. Raises for those that can't be managed."""
    _require_unwrapped(model)
    params = {managed.plain_name(name): param for name, param in model.named_parameters()}
    if any(managed.owner_of(param) is not None for param in params.values()):
        gc.collect()  # An engine that nobody holds may wait for this, in a cycle of a trainer's, say.
    for name, param in params.items():
        if torch.nn.parameter.is_lazy(param):
            raise ConfigError(f"parameter {name} has no shape yet: a lazy module gets one in its first forward; run one first")
        if is_traceable_wrapper_subclass(param):
            raise ConfigError(
                f"parameter {name} is a {type(param).__name__}, which has no memory of its own; only plain tensors are "
                "supported"
            )
        if managed.owner_of(param) is not None:
            raise ConfigError(
                f"the model is already managed by an engine (parameter {name}); call that engine's destroy() first"
            )
        if param.device.type not in ("cpu", "cuda"):
            raise ConfigError(f"parameter {name} is on device {param.device}; expected cpu or cuda")
        if param.layout != torch.strided:
            raise ConfigError(f"parameter {name} has layout {param.layout}; only strided parameters are supported")
        if param.is_inference():
            raise ConfigError(
                f"parameter {name} was made inside torch.inference_mode(), so that it can't be trained; make the model "
                "outside, or clone its parameters there"
            )
        if _overlaps(param):
            raise ConfigError(
                f"parameter {name} of shape {tuple(param.shape)} and strides {param.stride()} overlaps itself in "
                "memory (an expanded tensor); make it contiguous first"
            )
    _require_buffers_apart(model, params)
    return params


def _require_unwrapped(model: torch.nn.Module) -> None:
    """Raises for a model that another way of training on several ranks has taken over."""
    for name, part in model.named_modules():
        for kind in type(part).__mro__:
            if kind.__name__ in _WRAPPERS and kind.__module__.startswith("torch."):
                raise ConfigError(
                    f"{f'module {name}' if name else 'the model'} is wrapped in {kind.__name__}, which shares gradients "
                    "among ranks by itself; give initialize() the module that was wrapped"
                )


def _require_buffers_apart(model: torch.nn.Module, params: dict[str, torch.nn.Parameter]) -> None:
    """Raises for a buffer that shows a trained parameter: the engine moves parameters, and it would stay as it was."""
    trained: dict[int, list[tuple[range, str]]] = {}
    for name, param in params.items():
        if param.requires_grad and param.numel() > 0 and not sharded.is_away(param):
            trained.setdefault(param.untyped_storage().data_ptr(), []).append((_bytes_of(param), name))
    for buffer_name, buffer in model.named_buffers():
        if buffer.layout != torch.strided or buffer.numel() == 0 or sharded.is_away(buffer):
            continue
        seen = _bytes_of(buffer)
        for taken, name in trained.get(buffer.untyped_storage().data_ptr(), ()):
            if seen.start < taken.stop and taken.start < seen.stop:
                raise ConfigError(
                    f"buffer {buffer_name} is a view of parameter {name}, which it would not follow while that is "
                    "trained; make it a copy (.clone()), or read the parameter instead"
                )


def _bytes_of(tensor: torch.Tensor) -> range:
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return range(tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size())


def _overlaps(param: torch.Tensor) -> bool:
    # Sorted by stride, each dimension must step over all that the smaller ones span.
    span = 1
    for stride, size in sorted(
        (stride, size) for stride, size in zip(param.stride(), param.shape, strict=True) if size > 1
    ):
        if stride < span:
            return True
        span = stride * (size - 1) + span
    return False


def _build_scheduler(given: Any, optimizer: Optimizer, config: Config) -> Any:
    if given is not None and callable(given):
        built = given(optimizer)
        if built is not None:
            _require_scheduler(built, optimizer)
        return built
    if given is not None:
        _require_scheduler(given, optimizer)
        return given
    if config.torch_scheduler is not None:
        kind, params = config.torch_scheduler
        if left := [key for key, value in params.items() if value == "auto"]:
            raise ConfigError(f'scheduler.params.{left[0]}: still "auto", and {kind} needs to know; write a value')
        try:
            built = getattr(torch.optim.lr_scheduler, kind)(optimizer, **params)
        except (TypeError, ValueError, LookupError, AttributeError, NotImplementedError) as error:
            raise ConfigError(f"scheduler {kind}: {error}") from None
        if lr_schedules.needs_arguments(built):
            raise ConfigError(
                f"scheduler {kind}: its step() needs arguments that the engine does not have; pass it as lr_scheduler, "
                "and call its step() yourself"
            )
        return built
    section = config.value("scheduler")
    if not section or not section.get("type"):
        return None
    return lr_schedules.BY_NAME[section["type"]](optimizer, **(section.get("params") or {}))


def _require_scheduler(scheduler: Any, optimizer: Optimizer) -> None:
    if not callable(getattr(scheduler, "step", None)):
        raise ConfigError(
            f"lr_scheduler must be a scheduler, or a function of the optimizer that returns one; "
            f"{type(scheduler).__name__} has no step()"
        )
    # A scheduler of another optimizer would write into dicts that nobody reads.
    its_groups = getattr(getattr(scheduler, "optimizer", None), "param_groups", None)
    if its_groups is not None and {id(group) for group in its_groups}.isdisjoint(map(id, optimizer.param_groups)):
        raise ConfigError(
            "lr_scheduler was built on an optimizer that is not the one given to initialize(); "
            "give that optimizer too, or a function that builds the scheduler"
        )
