"""What model states need before anything is built, by DeepSpeed's names and formulas (pannier/plan/state_estimates.h).

They are rules of thumb; `engine.plan()` and `pannier plan` give the exact bytes.
"""

from __future__ import annotations

import torch

from pannier import core

_GIB = 2.0**30


def estimate_zero2_model_states_mem_needs(
    total_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    additional_buffer_factor: float = 1.5,
) -> tuple[int, int]:
    """Bytes of host memory of a node, and of each GPU, at stage 2."""
    return _estimate(
        2, total_params, 0, num_gpus_per_node, num_nodes, cpu_offload, False, True, additional_buffer_factor
    )


def estimate_zero3_model_states_mem_needs(
    total_params: int,
    largest_layer_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    cpu_offload_params: bool = True,
    zero_init: bool = True,
    additional_buffer_factor: float = 1.5,
) -> tuple[int, int, int]:
    """The same at stage 3, and the bytes of the largest layer."""
    host, device = _estimate(
        3,
        total_params,
        largest_layer_params,
        num_gpus_per_node,
        num_nodes,
        cpu_offload,
        cpu_offload_params,
        zero_init,
        additional_buffer_factor,
    )
    _, layer = _estimate(3, 0, largest_layer_params, 1, 1, True, True, True, 1.0)
    return host, device, layer


def estimate_zero2_model_states_mem_needs_all_live(
    model: torch.nn.Module, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Prints the estimates of stage 2 for `model`."""
    estimate_zero2_model_states_mem_needs_all_cold(
        _count(model), num_gpus_per_node, num_nodes, additional_buffer_factor
    )


def estimate_zero2_model_states_mem_needs_all_cold(
    total_params: int, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Prints the estimates of stage 2 for a model of `total_params`."""
    _print_head(2, total_params, None, num_gpus_per_node, num_nodes, additional_buffer_factor)
    for offload in (True, False):
        host, device = estimate_zero2_model_states_mem_needs(
            total_params, num_gpus_per_node, num_nodes, offload, additional_buffer_factor
        )
        _print_row(host, device, f"offload_optimizer={'cpu' if offload else 'none'}")


def estimate_zero3_model_states_mem_needs_all_live(
    model: torch.nn.Module, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Prints the estimates of stage 3 for `model`."""
    largest = max((sum(p.numel() for p in part.parameters(recurse=False)) for part in model.modules()), default=0)
    estimate_zero3_model_states_mem_needs_all_cold(
        _count(model), largest, num_gpus_per_node, num_nodes, additional_buffer_factor
    )


def estimate_zero3_model_states_mem_needs_all_cold(
    total_params: int,
    largest_layer_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
) -> None:
    """Prints the estimates of stage 3 for a model of `total_params`."""
    _print_head(3, total_params, largest_layer_params, num_gpus_per_node, num_nodes, additional_buffer_factor)
    for optimizer, params in ((True, True), (True, False), (False, False)):
        for shards in (True, False):
            host, device, _ = estimate_zero3_model_states_mem_needs(
                total_params,
                largest_layer_params,
                num_gpus_per_node,
                num_nodes,
                optimizer,
                params,
                shards,
                additional_buffer_factor,
            )
            homes = f"offload_param={'cpu' if params else 'none'}, offload_optimizer={'cpu' if optimizer else 'none'}"
            _print_row(host, device, f"{homes}, zero_init={int(shards)}")


def _estimate(*arguments: int | bool | float) -> tuple[int, int]:
    host, device = core.call(torch.ops.pannier.estimate_states, *arguments)
    return int(host), int(device)


def _count(model: torch.nn.Module) -> int:
    return sum(param.numel() for param in model.parameters())  # Tied ones come once.


def _print_head(stage: int, total: int, largest: int | None, gpus: int, nodes: int, factor: float) -> None:
    print(f"Estimated memory for parameters, gradients and optimizer states at stage {stage}: {nodes} nodes of {gpus} GPUs.")
    print(f"  {total:,} parameters" + ("" if largest is None else f", the largest layer {largest:,}"))
    print(f"  host memory is of a node and holds a factor of {factor} for buffers; activations are not in it")
    print(f"  {'host':>12} | {'each GPU':>12} | options")


def _print_row(host: int, device: int, options: str) -> None:
    print(f"  {host / _GIB:>8.2f} GiB | {device / _GIB:>8.2f} GiB | {options}")
