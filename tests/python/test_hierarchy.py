"""Nodes that each keep a copy of stage 3's parameters: the bits of one copy over all ranks, and fewer bytes between nodes."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

import hosts
import pannier
import ranks
from test_ranks import digest
from test_stage_3 import Even, Tower, settings, tokens, weights

STEPS = 3


def train(rank: int, world: int, folder: str = "", **options: Any) -> str:
    """The bits of all masters after some steps, with what a user does between steps; `folder` takes a checkpoint."""
    model = Tower()
    engine, _, _, _ = pannier.initialize(model=model, config=settings(gas=2, **options))
    for step in range(STEPS):
        for number in range(2):
            engine.backward(engine(tokens(step, number * world + rank)))
            engine.step()
        if step == 0:
            pannier.safe_set_full_fp32_param(model.shift, torch.linspace(-1, 1, model.shift.numel()))
            with pannier.zero.GatheredParameters(model.blocks[0].up.bias, modifier_rank=0):
                if rank == 0:
                    with torch.no_grad():
                        model.blocks[0].up.bias.fill_(0.25)
        elif step == 1:
            with torch.no_grad():
                engine(tokens(9, rank))
            if folder:
                engine.save_checkpoint(folder, tag="middle")
    if folder:
        end = digest(list(weights(model).values()))
        engine.load_checkpoint(folder, tag="middle")
        for number in range(2):
            engine.backward(engine(tokens(2, number * world + rank)))
            engine.step()
        assert digest(list(weights(model).values())) == end
    bits = digest(list(weights(model).values()))
    engine.destroy()
    return bits


def bits(rank: int, world: int, folder: str) -> Any:
    found = {}
    for size, offload, param_offload in ((1, False, False), (world, True, False), (2, False, False), (2, False, True), (2, True, True)):
        found[f"{size} {offload} {param_offload}"] = train(
            rank,
            world,
            folder if offload and param_offload else "",
            offload=offload,
            param_offload=param_offload,
            zero={"zero_hpz_partition_size": size},
        )
    return found


@pytest.mark.parametrize("world", [4, 6])
def test_a_copy_in_each_node_changes_no_bit(world: int, tmp_path: Any) -> None:
    ended = ranks.run(__file__, "bits", world, str(tmp_path))
    assert len({bits for rank in ended for bits in rank.result.values()}) == 1, [rank.result for rank in ended]


def counts(rank: int, world: int) -> Any:
    torch.manual_seed(0)
    engine, _, _, _ = pannier.initialize(
        model=Even(), config=settings(dtype="bf16", gas=2, zero={"zero_hpz_partition_size": 2, "stage3_prefetch_bucket_size": 1})
    )
    planned = engine.plan()["device"]["parameters"]
    sent = []
    for _ in range(2):
        before = engine.wire_bytes()
        for _ in range(2):
            engine.backward(engine(torch.ones(2, 128, dtype=torch.bfloat16)))
            engine.step()
        after = engine.wire_bytes()
        sent.append({key: after[key] - before[key] for key in after})
    held = engine.memory_stats()["device"]["by_owner"]["parameters"]["current"]
    engine.destroy()
    return {"sent": sent, "held": held, "planned": planned}


def test_bytes_between_nodes_are_sent_once_a_step() -> None:
    world, node, numel = 4, 2, 4 * 128 * 128
    for ended in ranks.run(__file__, "counts", world):
        for sent in ended.result["sent"]:
            # Two gathers a micro-batch within the node, and each shard once to the other node.
            assert sent["parameters"] == pytest.approx(2 * 2 * (node - 1) / node * numel * 2, rel=0.01)
            assert sent["parameters between nodes"] == pytest.approx((world // node - 1) / world * numel * 2, rel=0.01)
        # A rank's share of all, and of its node's copy.
        assert ended.result["held"] == pytest.approx((1 / world + 1 / node) * numel * 2, rel=0.02)
        assert ended.result["held"] <= ended.result["planned"]


def uneven(rank: int, world: int) -> str:
    try:
        pannier.initialize(model=Even(), config=settings(zero={"zero_hpz_partition_size": 2}))
    except pannier.ConfigError as error:
        return str(error)
    return "no error"


def test_ranks_that_make_no_whole_nodes_are_refused() -> None:
    for ended in ranks.run(__file__, "uneven", 3):
        assert "zero_hpz_partition_size: 3 ranks make no whole nodes of 2" in ended.result


def on_hosts(rank: int, world: int) -> Any:
    assert os.environ["LOCAL_RANK"] == str(rank % 2)
    return {size: train(rank, world, offload=True, zero={"zero_hpz_partition_size": int(size)}) for size in ("1", "2")}


def test_two_hosts_of_two_ranks() -> None:
    with hosts.two_hosts() as machines:
        if not machines:
            pytest.skip("network namespaces are not allowed here")
        (address, _), _ = machines
        ended = ranks.run(__file__, "on_hosts", 4, machines=[before for _, before in machines], address=address)
    assert len({bits for rank in ended for bits in rank.result.values()}) == 1, [rank.result for rank in ended]


if __name__ == "__main__":
    ranks.main({"bits": bits, "counts": counts, "uneven": uneven, "on_hosts": on_hosts})
