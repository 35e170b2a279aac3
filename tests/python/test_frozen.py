"""Frozen parameters at stage 3: partitioned, gathered and at rest as trained ones are, and never written."""

from __future__ import annotations

import gc
import pathlib
from typing import Any

import pytest
import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import pannier
import ranks
from pannier import sharded
from reference import config
from test_checkpoints import safetensors_of
from test_ranks import digest

PROGRAMS: dict[str, ranks.Program] = {}
WIDTH, DEPTH, STEPS = 96, 4, 3
OPTIMIZER = {"type": "AdamW", "params": {"lr": 0.01, "eps": 1e-3}}


def program(body: ranks.Program) -> ranks.Program:
    PROGRAMS[body.__name__] = body
    return body


class Adapted(torch.nn.Module):
    """A frozen linear layer, in 16 bits if `dtype` says so, with a trained adapter beside it."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.base = torch.nn.Linear(WIDTH, WIDTH, dtype=dtype).requires_grad_(False)
        self.down = torch.nn.Linear(WIDTH, 4, bias=False)
        self.up = torch.nn.Linear(4, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.base(x.to(self.base.weight.dtype)).to(x.dtype).tanh() + self.up(self.down(x))


class Lora(torch.nn.Module):
    """Blocks with adapters between a frozen embedding and a head, which is tied to it and read outside of its module."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16, seed: int = 3) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = torch.nn.Embedding(128, WIDTH).requires_grad_(False)
        self.blocks = torch.nn.ModuleList(Adapted(dtype) for _ in range(DEPTH))
        self.norm = torch.nn.LayerNorm(WIDTH).requires_grad_(False)
        self.table = torch.nn.Parameter(torch.arange(WIDTH * 8).view(8, WIDTH), requires_grad=False)  # Of integers.
        self.other = torch.nn.Embedding(128, WIDTH)
        self.other.weight = self.embed.weight  # Tied.

    def forward(self, tokens: torch.Tensor, kind: str = "plain") -> torch.Tensor:
        x = self.embed(tokens) + self.other(tokens.flip(-1)) + self.table[:5].remainder(7).to(torch.float32) * 0.01
        if kind == "reentrant":  # It has no backward otherwise.
            x.requires_grad_()
        for block in self.blocks:
            x = block(x) if kind == "plain" else checkpoint(block, x, use_reentrant=kind == "reentrant")
        return functional.linear(self.norm(x), self.embed.weight).logsumexp(-1).mean()


def tokens(step: int, number: int = 0) -> torch.Tensor:
    return torch.randint(128, (3, 5), generator=torch.Generator().manual_seed(100 * step + number))


def settings(folder: str, home: str = "none", stage: int = 3, **more: Any) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage3_param_persistence_threshold": 200, **more.pop("zero", {})}
    if home != "none":
        zero["offload_param"] = {"device": home, "nvme_path": folder, "buffer_count": 2, "buffer_size": 2**18}
    return config(OPTIMIZER, stage=stage, zero=zero, pannier={"collective_timeout": 20}, **more)


def engine_of(model: torch.nn.Module, *arguments: Any, **more: Any) -> pannier.Engine:
    return pannier.initialize(model=model, config=settings(*arguments, **more))[0]


def train(engine: pannier.Engine, rank: int, world: int, kind: str = "plain", first: int = 0) -> None:
    for step in range(first, first + STEPS):
        engine.backward(engine(tokens(step, rank), kind))
        engine.step()


def whole(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    with pannier.zero.GatheredParameters(list(model.parameters())):
        return {name: param.detach().clone() for name, param in model.named_parameters()}


def frozen_of(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    return [param for param in model.parameters() if not param.requires_grad]


def nbytes(params: Any) -> int:
    return sum(param.numel() * param.element_size() for param in params)


def owner_bytes(engine: pannier.Engine, tier: str, when: str = "current") -> int:
    return engine.memory_stats()[tier]["by_owner"].get("parameters", {}).get(when, 0)


@program
def adapters(rank: int, world: int, folder: str) -> Any:
    """Every home and kind of forward; says what is wrong."""
    wrong: list[str] = []
    bits: dict[str, str] = {}
    for home, stage, kind in (
        ("none", 2, "plain"),
        ("none", 3, "plain"),
        ("cpu", 3, "plain"),
        ("nvme", 3, "plain"),
        ("cpu", 3, "not reentrant"),
        ("nvme", 3, "reentrant"),
    ):
        cell = f"{home}, stage {stage}, {kind}"
        model = Lora()
        given = {name: param.detach().clone() for name, param in model.named_parameters()}
        everything, largest = nbytes(frozen_of(model)), nbytes([model.embed.weight])
        engine = engine_of(model, folder, home, stage)
        engine.reset_peak_memory()
        resting = owner_bytes(engine, "device")
        if stage == 3 and (world > 1 or home != "none"):
            share = everything / world if home == "none" else 0
            if resting > share + everything * 0.25:  # Cut in whole blocks.
                wrong.append(f"{cell}: {resting} bytes rest on the device, {everything} are frozen")
            try:
                model.embed.weight.sum().item()
                wrong.append(f"{cell}: a partitioned parameter was read")
            except RuntimeError as error:
                if "parameter embed.weight was read while it was partitioned" not in str(error):
                    wrong.append(f"{cell}: {error}")
        train(engine, rank, world, kind, 0)
        have = whole(model)
        for name, param in model.named_parameters():
            if not param.requires_grad and not torch.equal(have[name], given[name]):
                wrong.append(f"{cell}: {name} changed")
            if not param.requires_grad and pannier.safe_get_full_fp32_param(param) is not None:
                wrong.append(f"{cell}: {name} has a state")
        bits[cell] = digest(list(have.values()))
        plan = engine.plan()
        if owner_bytes(engine, "host", "peak") > plan["host"]["parameters"]:
            wrong.append(f"{cell}: {owner_bytes(engine, 'host', 'peak')} bytes on the host, planned {plan['host']}")
        if owner_bytes(engine, "device", "peak") > plan["device"]["parameters"] + largest:  # What `whole` holds.
            wrong.append(f"{cell}: {owner_bytes(engine, 'device', 'peak')} bytes on the device, planned {plan['device']}")
        if home == "nvme" and plan["nvme"]["parameters"] != engine.memory_stats()["nvme"]["current"]:
            wrong.append(f"{cell}: planned {plan['nvme']}")
        engine.destroy()
        del model, engine, have
        gc.collect()
    if len(set(bits.values())) != 1:
        wrong.append(f"bits differ: {bits}")
    return {"wrong": wrong, "bits": sorted(set(bits.values()))}


@pytest.mark.parametrize("world", [1, 2])
def test_adapters_train_as_beside_a_base_that_is_whole(world: int, tmp_path: pathlib.Path) -> None:
    results = [ended.result for ended in ranks.run(__file__, "adapters", world, str(tmp_path))]
    assert [result["wrong"] for result in results] == [[]] * world
    assert all(result["bits"] == results[0]["bits"] for result in results)


def spoilt() -> Lora:
    """A model of other values, in every parameter."""
    model = Lora(seed=9)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(1)
    return model


@program
def saves(rank: int, world: int, folder: str) -> Any:
    """Saves from every home, into folders of their own; returns the digest of what was saved."""
    bits = []
    for home, asynchronous in (("none", False), ("cpu", False), ("nvme", True)):
        model = Lora()
        engine = engine_of(model, folder, home, checkpoint={"async": asynchronous})
        train(engine, rank, world)
        engine.save_checkpoint(f"{folder}/{home}")
        engine.save_checkpoint(f"{folder}/{home}", tag="adapters", save_latest=False, exclude_frozen_parameters=True)
        engine.save_16bit_model(f"{folder}/{home}/model")
        if asynchronous:
            engine.finish_checkpoint()
        bits.append(digest([*whole(model).values()]))
        engine.destroy()
    return bits


@program
def loads(rank: int, world: int, folder: str) -> Any:
    """Loads them into other homes and stages; returns digests."""
    bits = []
    for saved, home, stage in (("none", "cpu", 3), ("cpu", "nvme", 3), ("nvme", "none", 3), ("cpu", "none", 2)):
        model = spoilt()
        engine = engine_of(model, folder, home, stage)
        frozen = digest([whole(model)[name] for name, param in model.named_parameters() if not param.requires_grad])
        engine.load_checkpoint(f"{folder}/{saved}", tag="adapters")
        have = [whole(model)[name] for name, param in model.named_parameters() if not param.requires_grad]
        assert digest(have) == frozen, "a checkpoint without frozen parameters changed them"
        engine.load_checkpoint(f"{folder}/{saved}")
        bits.append(digest([*whole(model).values()]))
        if stage == 2:
            engine.save_checkpoint(f"{folder}/stage 2 of {world}")
        engine.destroy()
    model = spoilt()
    engine = engine_of(model, folder, "cpu")
    engine.load_checkpoint(f"{folder}/stage 2 of {world}")
    bits.append(digest([*whole(model).values()]))
    engine.destroy()
    return bits


def test_checkpoints_go_between_ranks_homes_and_stages(tmp_path: pathlib.Path) -> None:
    saved = [ended.result for ended in ranks.run(__file__, "saves", 2, str(tmp_path))]
    assert len({bits for result in saved for bits in result}) == 1
    for world in (1, 2):
        for ended in ranks.run(__file__, "loads", world, str(tmp_path)):
            assert set(ended.result) == {saved[0][0]}
    models = [safetensors_of(tmp_path / home / "model" / "model.safetensors") for home in ("none", "cpu", "nvme")]
    expected = {name: param for name, param in Lora().state_dict().items() if "up" not in name and "down" not in name}
    for model in models:
        for name, value in expected.items():
            if name in model:  # A tied one has one name.
                assert torch.equal(model[name], value) and model[name].dtype is value.dtype, name
        assert len(model) >= len(expected) - 1


@program
def access(rank: int, world: int, folder: str) -> Any:
    """What reads and edits frozen parameters from outside of a training step; says what is wrong."""
    wrong: list[str] = []

    def check(holds: bool, what: str) -> None:
        if not holds:
            wrong.append(what)

    plain = Lora()
    given = {name: value.clone() for name, value in plain.state_dict().items()}
    for home in ("none", "cpu", "nvme"):
        model = Lora()
        engine = engine_of(model, folder, home)
        written = engine.memory_stats()["nvme"].get("written", 0)
        state = model.state_dict()
        check(all(torch.equal(state[name], value) for name, value in given.items()), f"{home}: state_dict()")
        state = engine._zero3_consolidated_16bit_state_dict()
        check(rank > 0 or all(torch.equal(state[name], value) for name, value in given.items()), f"{home}: consolidated")
        engine.eval()
        with torch.no_grad():
            check(torch.equal(engine(tokens(7)), plain(tokens(7))), f"{home}: eval()")
            check(torch.equal(model(tokens(7)), plain(tokens(7))), f"{home}: eval() of the module")
        engine.train()
        train(engine, rank, world)
        grown = engine.memory_stats()["nvme"].get("written", 0) - written
        check(grown < nbytes(frozen_of(model)), f"{home}: {grown} bytes were written to the disk in {STEPS} steps")

        weight = model.blocks[1].base.weight
        check(sharded.is_away(weight) == (world > 1 or home != "none"), f"{home}: is partitioned")
        with pannier.zero.GatheredParameters([weight], modifier_rank=0), torch.no_grad():
            if rank == 0:
                weight.fill_(0.5)
        with pannier.zero.GatheredParameters([weight]):
            check(bool((weight == 0.5).all()), f"{home}: an edit by one rank")
        model.load_state_dict(given)
        check(all(torch.equal(whole(model)[name], given[name]) for name in given if name in whole(model)), f"{home}: load_state_dict()")
        weight.requires_grad_(True)
        engine.backward(engine(tokens(0, rank)))
        said = ranks.error_of(engine.step)
        check("requires a gradient now" in said and "base.weight" in said, f"{home}: unfrozen: {said}")
        engine.destroy()
    return wrong


@pytest.mark.parametrize("world", [1, 2])
def test_frozen_parameters_are_read_and_edited_as_trained_ones(world: int, tmp_path: pathlib.Path) -> None:
    results = [ended.result for ended in ranks.run(__file__, "access", world, str(tmp_path))]
    assert results == [[]] * world


@program
def in_shares(rank: int, world: int) -> Any:
    """Under `zero.Init` no rank has a frozen parameter whole before, in or after initialize()."""
    from pannier import early

    bits = []
    for built_in_shares in (False, True):
        if built_in_shares:
            with pannier.zero.Init():
                model = Lora(seed=3 + rank)
            frozen = frozen_of(model)
            assert all(early.is_away(param) for param in frozen)
        else:
            model = Lora()
        gather, early.gather = early.gather, None  # type: ignore[assignment]  # Nobody may call it.
        engine = engine_of(model, "")
        early.gather = gather
        if built_in_shares:
            assert owner_bytes(engine, "device") < 0.7 * nbytes(frozen)
        train(engine, rank, world)
        bits.append(digest([*whole(model).values()]))
        engine.destroy()
    return bits


def test_a_frozen_base_built_in_shares_is_never_whole() -> None:
    for ended in ranks.run(__file__, "in_shares", 2):
        assert len(set(ended.result)) == 1


@program
def in_nodes(rank: int, world: int) -> Any:
    """With copies on each of two nodes."""
    bits = []
    for nodes in (1, 2):
        model = Lora()
        zero = {} if nodes == 1 else {"zero_hpz_partition_size": world // nodes}
        engine = engine_of(model, "", "cpu", zero=zero)
        train(engine, rank, world)
        before = engine.wire_bytes().get("parameters between nodes", 0)
        train(engine, rank, world)
        bits.append(digest([*whole(model).values()]))
        more = engine.wire_bytes().get("parameters between nodes", 0) - before
        assert more < nbytes(frozen_of(model)) / 4, "frozen parameters went between nodes again"
        engine.destroy()
    return bits


def test_copies_of_a_frozen_base_on_nodes() -> None:
    for ended in ranks.run(__file__, "in_nodes", 4):
        assert len(set(ended.result)) == 1


def test_a_parameter_of_no_group_and_one_that_shares_memory_with_a_buffer(tmp_path: pathlib.Path) -> None:
    model = Lora(torch.float32)
    model.register_buffer("rows", model.blocks[0].base.weight.data[:3])
    model.blocks[1].base.weight.requires_grad_(True)  # In no group: autograd's own gradient stays with it.
    trained = [param for name, param in model.named_parameters() if "up" in name or "down" in name]
    engine, _, _, _ = pannier.initialize(model=model, model_parameters=trained, config=settings(str(tmp_path), "cpu"))
    assert not sharded.is_away(model.blocks[0].base.weight)
    assert model.rows.data_ptr() == model.blocks[0].base.weight.data_ptr()
    assert sharded.is_away(model.blocks[1].base.weight)
    train(engine, 0, 1)
    assert model.blocks[1].base.weight.grad is not None
    plain = Lora(torch.float32)
    have = whole(model)
    assert all(torch.equal(have[name], param) for name, param in plain.named_parameters() if "base" in name)
    engine.destroy()


if __name__ == "__main__":
    ranks.main(PROGRAMS)
