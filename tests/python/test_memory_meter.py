"""torch's CPU memory counts as device memory, to the byte, wherever in torch it is asked for."""

from __future__ import annotations

import json

import pytest
import torch

import pannier


def in_use() -> int:
    return json.loads(torch.ops.pannier.device_memory())["current"]


def test_tensors_count_by_their_bytes() -> None:
    before = in_use()
    held = [torch.zeros(1000), torch.empty(3, dtype=torch.int8), torch.empty(0), torch.empty(5, 0)]
    assert in_use() - before == 4003
    assert held[2].data_ptr() == 0
    held[0].resize_(2000)
    assert in_use() - before == 8003
    del held
    assert in_use() == before


def test_memory_is_aligned_and_usable() -> None:
    for numel in (1, 7, 64, 1025):
        tensor = torch.full((numel,), 3.0)
        assert tensor.data_ptr() % 64 == 0 and tensor.sum() == 3.0 * numel


def test_raw_allocations_of_torchs_libraries() -> None:
    before = in_use()
    image = torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last)
    convolution = torch.nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    convolution(image).sum().backward()
    del image, convolution
    assert in_use() == before


def test_cap_refuses_and_recovers() -> None:
    held = torch.ones(100)
    cap = in_use() + 10_000
    torch.ops.pannier.add_device_memory_cap(cap)
    try:
        with pytest.raises(pannier.OutOfMemoryError, match=r"CPU out of memory\. Tried to allocate"):
            torch.zeros(10_000)
        assert torch.zeros(1000).sum() == 0
        with pytest.raises(ValueError, match="cap"):
            torch.ops.pannier.add_device_memory_cap(1)
    finally:
        torch.ops.pannier.remove_device_memory_cap(cap)
    assert torch.zeros(10_000).numel() == 10_000 and held.sum() == 100
