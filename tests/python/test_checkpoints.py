"""Checkpoints: a resume equals no interruption, any shape loads into any other, and what goes wrong is told in time."""

from __future__ import annotations

import json
import os
import pathlib
import sys
from collections.abc import Mapping
from typing import Any

import pytest
import torch

import frameworks
import pannier
import ranks
from reference import DTYPES, OPTIMIZERS, Zoo, config, gradients
from test_program import run
from test_ranks import digest
from test_stage_3 import TIMEOUT, Tower, settings, tokens

PROGRAMS: dict[str, Any] = {}


def program(body: Any) -> Any:
    PROGRAMS[body.__name__] = body
    return body


class Noisy(Tower):
    """Draws random numbers and has buffers, which differ between ranks."""

    def __init__(self, width: int = 24, seed: int = 5) -> None:
        super().__init__(width, seed)
        self.dropout = torch.nn.Dropout(0.2)
        self.register_buffer("seen", torch.zeros(3, dtype=torch.int64))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def forward(self, tokens: torch.Tensor, kind: str = "plain") -> torch.Tensor:
        self.seen += tokens.sum()
        return super().forward(tokens, kind) * self.dropout(torch.ones(8)).mean()


def held(engine: pannier.Engine) -> list[torch.Tensor]:
    """All that training has changed, whole on every rank."""
    states = engine.optimizer.state
    found = []
    for param in engine.module.parameters():
        if param in states:
            found.append(pannier.safe_get_full_fp32_param(param))
            found += [value for key, value in states[param].items() if key != "step"]
            found.append(torch.tensor(states[param]["step"]))
    return [*found, *engine.module.buffers(), torch.get_rng_state()]


def zoo_step(engine: pannier.Engine, step: int, dtype: str, gas: int = 1) -> None:
    for micro in range(gas):
        engine.backward(engine(gradients(step, micro, DTYPES[dtype])))
        engine.step()


def zoo_engine(rule: str = "AdamW", dtype: str = "bf16", **options: Any) -> pannier.Engine:
    model = Zoo()
    model.register_buffer("count", torch.arange(4.0))
    schedule = {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 20}}}
    engine, *_ = pannier.initialize(
        model=model, config=config(OPTIMIZERS[rule][0], dtype=dtype, zero=options.pop("zero", {}), **schedule, **options)
    )
    return engine


@pytest.mark.parametrize(
    ("stage", "offload", "dtype", "rule"),
    [
        (0, False, "fp32", "AdamW"),
        (1, True, "bf16", "AdamW"),
        (2, True, "fp16", "Adagrad"),
        (2, False, "bf16", "Nesterov"),
        (3, True, "bf16", "Lion"),
        (3, False, "fp16", "AdamL2"),
        (3, True, "fp32", "AdamW"),
        (1, False, "bf16", "SGD"),
    ],
)
def test_a_resume_equals_no_interruption(
    tmp_path: pathlib.Path, stage: int, offload: bool, dtype: str, rule: str
) -> None:
    engine = zoo_engine(rule, dtype, stage=stage, offload=offload, clipping=1.0)
    for step in range(3):
        zoo_step(engine, step, dtype)
    engine.save_checkpoint(tmp_path, client_state={"epoch": 7})
    for step in range(3, 6):
        zoo_step(engine, step, dtype)
    expected, lr, scale = digest(held(engine)), engine.get_lr(), engine.optimizer.cur_scale
    engine.destroy()
    engine = zoo_engine(rule, dtype, stage=stage, offload=offload, clipping=1.0)
    path, client_state = engine.load_checkpoint(tmp_path)
    assert (path, client_state) == (str(tmp_path / "global_step3"), {"epoch": 7})
    assert (engine.global_steps, engine.global_samples) == (3, 3)
    for step in range(3, 6):
        zoo_step(engine, step, dtype)
    assert digest(held(engine)) == expected
    assert (engine.get_lr(), engine.optimizer.cur_scale) == (lr, scale)


def noisy_engine(rank: int, **options: Any) -> pannier.Engine:
    engine, *_ = pannier.initialize(model=Noisy(), config=settings(**options))
    torch.manual_seed(100 + rank)
    return engine


def noisy_step(engine: pannier.Engine, rank: int, world: int, step: int) -> None:
    for micro in range(engine.gradient_accumulation_steps()):
        engine.backward(engine(tokens(step, 10 * micro + rank)))
        engine.step()


@program
def resume(rank: int, world: int, folder: str, options: str) -> list[str]:
    """The digests of a run and of one that was interrupted."""
    chosen = json.loads(options)
    engine = noisy_engine(rank, **chosen)
    for step in range(2):
        noisy_step(engine, rank, world, step)
    engine.save_checkpoint(folder, client_state={"rank": rank})
    for step in range(2, 4):
        noisy_step(engine, rank, world, step)
    expected = digest(held(engine))
    engine.destroy()
    engine = noisy_engine(rank, **chosen)
    assert engine.load_checkpoint(folder)[1] == {"rank": 0}
    for step in range(2, 4):
        noisy_step(engine, rank, world, step)
    return [expected, digest(held(engine))]


@pytest.mark.parametrize(
    "options",
    [
        {"zero": {"stage": 1}, "dtype": "bf16", "gas": 2},
        {"zero": {"stage": 2}, "dtype": "fp32", "offload": True},
        {"zero": {"stage": 3}, "dtype": "bf16", "offload": True, "param_offload": True},
        {"zero": {"stage": 3}, "dtype": "fp32", "gas": 2},
    ],
)
def test_two_ranks_resume_as_if_never_interrupted(tmp_path: pathlib.Path, options: dict[str, Any]) -> None:
    for ended in ranks.run(__file__, "resume", 2, str(tmp_path), json.dumps(options)):
        expected, actual = ended.result
        assert actual == expected
    assert len(list((tmp_path / "global_step2").glob("*-rank-*.safetensors"))) == 2


@program
def write(rank: int, world: int, folder: str, options: str) -> str:
    engine = noisy_engine(rank, **json.loads(options))
    for step in range(2):
        noisy_step(engine, rank, world, step)
    engine.save_checkpoint(folder)
    return digest(held(engine)[:-3])  # Without buffers and random numbers, which are each rank's.


@program
def read(rank: int, world: int, folder: str, options: str) -> str:
    engine = noisy_engine(rank, **json.loads(options))
    engine.load_checkpoint(folder)
    assert engine.global_steps == 2
    return digest(held(engine)[:-3])


def test_any_shape_loads_into_any_other(tmp_path: pathlib.Path) -> None:
    def run(body: str, world: int, **options: Any) -> str:
        results = {ended.result for ended in ranks.run(__file__, body, world, str(tmp_path), json.dumps(options))}
        assert len(results) == 1
        return results.pop()

    expected = run("write", 2, zero={"stage": 1}, dtype="bf16")
    assert run("read", 3, zero={"stage": 3}, dtype="fp32", param_offload=True, offload=True) == expected
    assert run("read", 1, zero={"stage": 2}, dtype="fp16", offload=True) == expected
    assert run("read", 4, zero={"stage": 3}, dtype="bf16") == expected
    expected = run("write", 3, zero={"stage": 3}, dtype="fp32")
    assert run("read", 1, zero={"stage": 0}, dtype="bf16") == expected
    assert run("read", 2, zero={"stage": 2}, dtype="fp32") == expected


def on_disk(folder: pathlib.Path) -> dict[str, Any]:
    """A home for the optimizer's states, in chunks of one block."""
    return {"device": "nvme", "nvme_path": str(folder), "buffer_count": 2, "buffer_size": 2 * 4096 * 16}


def test_any_home_loads_into_any_other(tmp_path: pathlib.Path) -> None:
    disk = {"zero": {"offload_optimizer": on_disk(tmp_path)}}
    homes = {"device": {}, "host": {"offload": True}, "disk": disk}
    written = {}
    for home, options in homes.items():
        engine = zoo_engine(**options)
        for step in range(3):
            zoo_step(engine, step, "bf16")
        engine.save_checkpoint(tmp_path, tag=home)
        written[home] = digest(held(engine)[:-1])
        engine.destroy()
    assert len(set(written.values())) == 1
    for tag, home in (("host", "disk"), ("disk", "host"), ("disk", "device"), ("device", "disk"), ("disk", "disk")):
        engine = zoo_engine(**homes[home])
        engine.load_checkpoint(tmp_path, tag=tag)
        assert digest(held(engine)[:-1]) == written[tag], (tag, home)
        zoo_step(engine, 3, "bf16")
        engine.destroy()


@program
def write_on_disk(rank: int, world: int, folder: str) -> str:
    return write(rank, world, folder, json.dumps({"zero": {"stage": 2, "offload_optimizer": on_disk(folder)}}))


def test_disks_of_two_ranks_load_into_one(tmp_path: pathlib.Path) -> None:
    expected = {ended.result for ended in ranks.run(__file__, "write_on_disk", 2, str(tmp_path))}
    for options in ({"zero": {"stage": 2, "offload_optimizer": on_disk(tmp_path)}}, {"zero": {"stage": 3}}):
        assert {read(0, 1, str(tmp_path), json.dumps(options))} == expected


class Long(torch.nn.Module):
    """Enough parameters that buffers are seen beside them."""

    def __init__(self, numel: int = 3 << 20) -> None:
        super().__init__()
        self.parts = torch.nn.ParameterList(torch.linspace(-1, 1, numel // 4) for _ in range(4))

    def forward(self) -> torch.Tensor:
        return torch.stack([part.float().square().mean() for part in self.parts]).sum()


@pytest.mark.parametrize("home", ["device", "host", "disk"])
def test_loading_takes_a_tenth_more_memory_at_most(tmp_path: pathlib.Path, home: str) -> None:
    disk = {"device": "nvme", "nvme_path": str(tmp_path), "buffer_count": 4, "buffer_size": 1 << 20}
    zero = {"device": {}, "host": {"offload_optimizer": {"device": "cpu"}}, "disk": {"offload_optimizer": disk}}[home]

    def make() -> pannier.Engine:
        return pannier.initialize(model=Long(), config=config(OPTIMIZERS["AdamW"][0], dtype="bf16", zero=zero))[0]

    engine = make()
    engine.backward(engine())
    engine.step()
    engine.save_checkpoint(tmp_path)
    expected = [part.detach().clone() for part in engine.module.parts]
    engine.destroy()
    engine = make()
    engine.optimizer.zero_grad()
    engine.reset_peak_memory()
    engine.load_checkpoint(tmp_path)
    stats = engine.memory_stats()
    peak = sum(stats[tier]["peak"] for tier in ("device", "host"))
    assert peak <= 1.1 * sum(stats[tier]["current"] for tier in ("device", "host")), stats
    assert all(torch.equal(part, other) for part, other in zip(engine.module.parts, expected, strict=True))


@program
def only_on_rank_0(rank: int, world: int, folder: str) -> str:
    engine, *_ = pannier.initialize(model=Noisy(), config=settings(pannier={"collective_timeout": 3}))
    if rank == 0:
        with pytest.raises(pannier.CollectiveError) as caught:
            engine.save_checkpoint(folder)
        return str(caught.value)
    import time

    time.sleep(6)
    return "rank 1"


def test_a_save_on_rank_0_only_is_told_in_time(tmp_path: pathlib.Path) -> None:
    first, _ = ranks.run(__file__, "only_on_rank_0", 2, str(tmp_path))
    assert "rank 1 has not come after 3 s" in first.result
    assert not list(tmp_path.glob("*/manifest.json"))


@program
def one_rank_fails(rank: int, world: int, folder: str) -> str:
    engine = noisy_engine(rank)
    engine.save_checkpoint(folder, tag="good")
    if rank == 1:
        import resource

        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
        import signal

        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    with pytest.raises(pannier.IoError) as caught:
        engine.save_checkpoint(folder, tag="bad")
    return str(caught.value)


def test_where_one_rank_cannot_write_all_are_told(tmp_path: pathlib.Path) -> None:
    first, second = (ended.result for ended in ranks.run(__file__, "one_rank_fails", 2, str(tmp_path)))
    assert "rank 1: write " in first and "File too large" in first
    assert second.startswith("[Errno 27] write ")
    assert (tmp_path / "latest").read_text() == "good"
    assert [path.name for path in (tmp_path / "bad").iterdir()] == []


@program
def tags_differ(rank: int, world: int, folder: str, validation: str) -> str:
    engine = noisy_engine(rank, checkpoint={"tag_validation": validation})
    try:
        engine.save_checkpoint(folder, tag=f"tag{rank}")
    except pannier.ConfigError as error:
        return str(error)
    return (pathlib.Path(folder) / "latest").read_text()


def test_tags_that_differ_are_rank_0s_or_an_error(tmp_path: pathlib.Path) -> None:
    assert [ended.result for ended in ranks.run(__file__, "tags_differ", 2, str(tmp_path), "Warn")] == ["tag0", "tag0"]
    for ended in ranks.run(__file__, "tags_differ", 2, str(tmp_path), "Fail"):
        assert "tag 'tag1' on rank 1, 'tag0' on rank 0" in ended.result


# --- what a checkpoint keeps beside the tensors ---


def small_engine(**options: Any) -> pannier.Engine:
    engine, *_ = pannier.initialize(
        model=torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.BatchNorm1d(6)),
        config=config(OPTIMIZERS["AdamW"][0], **options),
    )
    return engine


def small_step(engine: pannier.Engine, step: int) -> None:
    dtype = next(engine.parameters()).dtype
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(step)).to(dtype)
    engine.backward(engine(x).float().pow(2).mean())
    engine.step()


@pytest.fixture
def saved(tmp_path: pathlib.Path) -> pathlib.Path:
    """A folder with a checkpoint of a small engine."""
    engine = small_engine()
    small_step(engine, 0)
    engine.save_checkpoint(tmp_path, tag="one")
    engine.destroy()
    return tmp_path


def test_in_the_middle_of_a_window_it_refuses(tmp_path: pathlib.Path) -> None:
    engine = small_engine(gas=2)
    small_step(engine, 0)
    with pytest.raises(pannier.ConfigError, match="1 of 2 micro-batches"):
        engine.save_checkpoint(tmp_path)
    small_step(engine, 1)
    engine.save_checkpoint(tmp_path)
    small_step(engine, 2)
    engine.load_checkpoint(tmp_path)
    assert engine.pending_micro_batches() == 0


def test_without_latest_nothing_is_loaded(tmp_path: pathlib.Path) -> None:
    assert small_engine().load_checkpoint(tmp_path) == (None, {})


def test_group_values_come_back_into_the_same_dicts(tmp_path: pathlib.Path) -> None:
    engine = small_engine()
    group = engine.optimizer.param_groups[0]
    group["lr"], group["betas"] = 0.125, (0.5, 0.75)
    small_step(engine, 0)
    engine.save_checkpoint(tmp_path)
    group["lr"], group["betas"] = 1.0, (0.0, 0.0)
    engine.load_checkpoint(tmp_path)
    assert engine.optimizer.param_groups[0] is group
    assert (group["lr"], group["betas"]) == (0.125, (0.5, 0.75))


def test_partial_loads(saved: pathlib.Path) -> None:
    engine = small_engine()
    for step in range(3):
        small_step(engine, 10 + step)
    moment = pannier.safe_get_full_optimizer_state(engine.module[0].weight, "exp_avg")
    assert engine.load_checkpoint(saved, load_module_only=True) == (str(saved / "one"), {})
    assert engine.global_steps == 3
    assert torch.equal(pannier.safe_get_full_optimizer_state(engine.module[0].weight, "exp_avg"), moment)
    engine.load_checkpoint(saved, load_optimizer_states=False)
    assert engine.global_steps == 1
    assert torch.equal(pannier.safe_get_full_optimizer_state(engine.module[0].weight, "exp_avg"), moment)
    engine.load_checkpoint(saved)
    assert not torch.equal(pannier.safe_get_full_optimizer_state(engine.module[0].weight, "exp_avg"), moment)


def test_a_custom_load_function_gets_the_state_dict(saved: pathlib.Path) -> None:
    engine = small_engine()
    names: list[str] = []

    def load(src: Mapping[str, torch.Tensor], dst: torch.nn.Module) -> None:
        names.extend(src)
        with torch.no_grad():
            dst[0].bias.copy_(src["0.bias"] + 1)

    engine.load_checkpoint(saved, load_optimizer_states=False, custom_load_fn=load)
    assert set(names) == set(engine.module.state_dict())
    other = small_engine()
    other.load_checkpoint(saved)
    assert torch.equal(engine.module[0].bias, other.module[0].bias + 1)


def test_another_model_is_refused_by_name_and_loads_in_part(saved: pathlib.Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.ReLU(), torch.nn.Linear(6, 2))
    engine, *_ = pannier.initialize(model=model, config=config(OPTIMIZERS["AdamW"][0]))
    before = engine.module[0].weight.detach().clone()
    with pytest.raises(pannier.ConfigError, match="of another model: it has no 2.weight, 2.bias; this model has no 1"):
        engine.load_checkpoint(saved)
    assert torch.equal(engine.module[0].weight, before)
    model = torch.nn.Sequential(torch.nn.Linear(5, 6), torch.nn.BatchNorm1d(6))
    engine, *_ = pannier.initialize(model=model, config=config(OPTIMIZERS["AdamW"][0]))
    with pytest.raises(pannier.ConfigError, match=r"'model.0.weight' has shape \[6, 4\], the model's has \[6, 5\]"):
        engine.load_checkpoint(saved)
    engine, *_ = pannier.initialize(
        model=torch.nn.Sequential(torch.nn.Linear(4, 6)), config=config(OPTIMIZERS["SGD"][0])
    )
    assert engine.load_checkpoint(saved, load_module_strict=False, load_optimizer_states=False)[0] is not None
    other = small_engine()
    other.load_checkpoint(saved)
    assert torch.equal(engine.module[0].weight, other.module[0].weight)


def test_client_states_that_run_code_are_refused_at_the_save(tmp_path: pathlib.Path) -> None:
    engine = small_engine()
    kept = {"args": __import__("argparse").Namespace(lr=1), "tensor": torch.ones(2), "path": pathlib.Path("/x")}
    engine.save_checkpoint(tmp_path, client_state=kept)
    loaded = engine.load_checkpoint(tmp_path)[1]
    assert (loaded["args"], loaded["path"]) == (kept["args"], kept["path"])
    with pytest.raises(pannier.ConfigError, match="add_safe_globals"):
        engine.save_checkpoint(tmp_path, tag="other", client_state={"object": Noisy})
    with pytest.raises(pannier.ConfigError, match="can't be pickled"):
        engine.save_checkpoint(tmp_path, tag="other", client_state={"object": lambda: 1})


class Numbers(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([float(index), torch.rand(()).item()])


@pytest.mark.parametrize("kind", ["distributed", "random"])
def test_our_loader_goes_on_where_it_was(tmp_path: pathlib.Path, kind: str) -> None:
    def make() -> tuple[pannier.Engine, Any]:
        engine = small_engine(train_micro_batch_size_per_gpu=2)
        sampler = torch.utils.data.RandomSampler(Numbers()) if kind == "random" else None
        engine.training_dataloader = engine.deepspeed_io(Numbers(), data_sampler=sampler)
        return engine, engine.training_dataloader

    def rest(batches: Any, loader: Any) -> list[Any]:
        found = [batch.tolist() for batch in batches]
        return found + [batch.tolist() for batch in loader]  # The next way through, too.

    torch.manual_seed(4)
    engine, loader = make()
    batches = iter(loader)
    for _ in range(2):
        next(batches)
    small_step(engine, 0)
    engine.save_checkpoint(tmp_path)
    expected = rest(batches, loader)
    torch.manual_seed(99)
    engine, loader = make()
    earlier = iter(loader)
    next(earlier)
    engine.load_checkpoint(tmp_path)
    assert rest(earlier, loader) == expected


def test_excluded_frozen_parameters_are_not_missed(tmp_path: pathlib.Path) -> None:
    engine = zoo_engine()
    engine.save_checkpoint(tmp_path, exclude_frozen_parameters=True)
    names = pannier.checkpoints.state_dict_of(tmp_path)
    assert "frozen" not in names and "matrix" in names
    with torch.no_grad():
        engine.module.frozen.fill_(3.0)
    engine.load_checkpoint(tmp_path)
    assert engine.module.frozen.tolist() == [3.0] * 3


# --- models for others, and the command ---


def safetensors_of(path: pathlib.Path) -> dict[str, torch.Tensor]:
    """The tensors of a file, read by its format alone."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    types = {"F32": torch.float32, "BF16": torch.bfloat16, "I64": torch.int64}
    found = {}
    for name, entry in header.items():
        if name != "__metadata__":
            begin, end = (8 + length + offset for offset in entry["data_offsets"])
            flat = torch.frombuffer(bytearray(data[begin:end]), dtype=types[entry["dtype"]]) if begin < end else torch.empty(0)
            found[name] = flat.reshape(entry["shape"])
    return found


@program
def export(rank: int, world: int, folder: str, options: str) -> bool:
    engine = noisy_engine(rank, **json.loads(options))
    noisy_step(engine, rank, world, 0)
    engine.save_checkpoint(folder)
    engine.save_16bit_model(pathlib.Path(folder) / "model")
    engine.save_16bit_model(pathlib.Path(folder) / "bin", "pytorch_model.bin")
    return True


@pytest.mark.parametrize("stage", [2, 3])
def test_models_are_the_models_own_values(tmp_path: pathlib.Path, stage: int) -> None:
    options = json.dumps({"zero": {"stage": stage}, "dtype": "bf16"})
    assert all(ended.result for ended in ranks.run(__file__, "export", 2, str(tmp_path), options))
    exported = safetensors_of(tmp_path / "model" / "model.safetensors")
    pickled = torch.load(tmp_path / "bin" / "pytorch_model.bin", weights_only=True)
    names = set(Noisy().state_dict())
    assert set(pickled) == names and set(exported) == names - {"side.weight"}
    run("checkpoint", "consolidate", tmp_path, tmp_path / "bf16", "--max-shard-size", "6KB")
    index = json.loads((tmp_path / "bf16" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(exported)
    run("checkpoint", "consolidate", tmp_path, tmp_path / "fp32", "--dtype", "fp32")
    wide = safetensors_of(tmp_path / "fp32" / "model.safetensors")
    for name, tensor in exported.items():
        shard = safetensors_of(tmp_path / "bf16" / index["weight_map"][name])
        assert torch.equal(shard[name], tensor) and torch.equal(pickled[name], tensor), name
        assert torch.allclose(wide[name].double(), tensor.double(), rtol=2**-8), name
    assert torch.equal(pickled["side.weight"], pickled["embed.weight"])


def test_the_command_lists_verifies_compares_and_prunes(saved: pathlib.Path) -> None:
    engine = small_engine()
    engine.load_checkpoint(saved)
    small_step(engine, 5)
    engine.save_checkpoint(saved, tag="two")
    listed = run("checkpoint", "list", saved).stdout
    assert "one" in listed and "two" in listed and listed.count("latest") == 1
    assert "every byte is as it was written" in run("checkpoint", "verify", saved).stdout
    assert "no difference" in run("checkpoint", "diff", saved, "--tag", "two").stdout
    compared = run("checkpoint", "diff", saved, "--tag", "one").stdout
    assert "step 1 of 1 ranks, step 2 of 1 ranks" in compared and "model.0.weight: 24 of 24 elements differ" in compared
    assert "optimizer.exp_avg.0.weight F32 [6, 4]" in run("checkpoint", "show", saved).stdout
    flip(shard_of(saved))
    assert "checksum" in run("checkpoint", "verify", saved, "--tag", "one", code=1).stderr
    assert "keep must be at least 1" in run("checkpoint", "prune", saved, "--keep", "0", code=2).stderr
    assert run("checkpoint", "prune", saved, "--keep", "1").stdout == "removed one\n"
    assert not (saved / "one").exists()


@program
def compare_logits(folder: str) -> list[bool]:
    """Whether transformers loads the exports of an engine, and computes what the engine's own model does."""
    import transformers

    torch.manual_seed(0)
    shape = transformers.Qwen2Config(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=32, tie_word_embeddings=True, torch_dtype="bfloat16",
    )  # fmt: skip
    model = transformers.Qwen2ForCausalLM(shape)
    engine, *_ = pannier.initialize(model=model, config=settings(dtype="bf16", zero={"stage": 2}))
    words = torch.arange(12).reshape(2, 6)
    engine.backward(engine(input_ids=words, labels=words).loss)
    engine.step()
    expected = model.eval()(input_ids=words).logits.detach()
    home = pathlib.Path(folder)
    engine.save_checkpoint(home / "run")
    engine.save_16bit_model(home / "exported", max_shard_size="20KB")
    run("checkpoint", "consolidate", home / "run", home / "consolidated", "--max-shard-size", "20KB")
    same = []
    for name in ("exported", "consolidated"):
        shape.save_pretrained(home / name)
        loaded = transformers.AutoModelForCausalLM.from_pretrained(home / name, dtype=torch.bfloat16)
        same.append(torch.equal(loaded.eval()(input_ids=words).logits, expected))
    return same


def test_transformers_loads_what_is_exported_and_computes_the_same(tmp_path: pathlib.Path) -> None:
    (same,) = frameworks.run(__file__, "compare_logits", str(tmp_path), starter=())
    assert same == [True, True]


# --- what goes wrong ---


def shard_of(folder: pathlib.Path) -> pathlib.Path:
    return next((folder / "one").glob("*-rank-*.safetensors"))


def flip(path: pathlib.Path) -> None:
    data = bytearray(path.read_bytes())
    data[-5] ^= 4
    path.write_bytes(data)


BREAKS: dict[str, tuple[Any, str]] = {
    "missing shard": (lambda folder: shard_of(folder).unlink(), "open '.*rank-00000.safetensors'"),
    "torn shard": (
        lambda folder: shard_of(folder).write_bytes(shard_of(folder).read_bytes()[:-9]),
        r"bytes, \d+ were expected",
    ),
    "latest nowhere": (lambda folder: (folder / "latest").write_text("two"), "folder '.*two'"),
    "latest outside": (lambda folder: (folder / "latest").write_text("../one"), "is no tag"),
    "changed manifest": (
        lambda folder: (folder / "one" / "manifest.json").write_text(
            (folder / "one" / "manifest.json").read_text().replace('"step":1', '"step":2')
        ),
        "it was changed",
    ),
    "newer version": (
        lambda folder: (folder / "one" / "manifest.json").write_text('{"format_version": 99}'),
        "a newer one is needed",
    ),
    "no manifest": (lambda folder: (folder / "one" / "manifest.json").unlink(), "manifest.json"),
}


@pytest.mark.parametrize("kind", BREAKS)
def test_what_is_broken_is_named_before_anything_changes(saved: pathlib.Path, kind: str) -> None:
    engine = small_engine()
    before = engine.module[0].weight.detach().clone()
    breaks, message = BREAKS[kind]
    breaks(saved)
    with pytest.raises(OSError, match=message):
        engine.load_checkpoint(saved)
    assert torch.equal(engine.module[0].weight, before)
    small_step(engine, 0)


def test_a_flipped_bit_is_found_and_the_engine_says_so_until_a_good_load(saved: pathlib.Path) -> None:
    engine = small_engine()
    engine.save_checkpoint(saved, tag="good")
    flip(shard_of(saved))
    with pytest.raises(pannier.IoError, match="checksum .* was expected"):
        engine.load_checkpoint(saved, tag="one")
    with pytest.raises(pannier.ConfigError, match="a mixture of old and new values"):
        engine(torch.zeros(3, 4))
    with pytest.raises(pannier.ConfigError, match="a mixture of old and new values"):
        engine.save_checkpoint(saved)
    engine.load_checkpoint(saved, tag="good")
    small_step(engine, 0)


def test_tags_cannot_leave_the_folder(saved: pathlib.Path) -> None:
    engine = small_engine()
    for tag in ("../x", "..", "a/b", "a b"):
        with pytest.raises(pannier.ConfigError, match="letters, digits"):
            engine.save_checkpoint(saved, tag=tag)


def test_a_folder_that_cannot_be_is_an_error(tmp_path: pathlib.Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(pannier.IoError, match="make folder"):
        small_engine().save_checkpoint(tmp_path / "file" / "below")


def test_a_full_disk_harms_nothing_and_leaves_nothing(saved: pathlib.Path) -> None:
    import resource
    import signal

    engine = small_engine()
    before = sorted(saved.rglob("*"))
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (600, limit[1]))
    try:
        with pytest.raises(pannier.IoError, match="write .*File too large"):
            engine.save_checkpoint(saved, tag="one")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, handler)
    assert sorted(saved.rglob("*")) == before
    engine.load_checkpoint(saved)


def test_saving_over_a_tag_replaces_it_and_leaves_no_old_file(saved: pathlib.Path) -> None:
    engine = small_engine()
    (saved / "one" / "notes.txt").write_text("mine")
    for step in range(3):
        small_step(engine, step)
    engine.save_checkpoint(saved, tag="one")
    names = sorted(path.name for path in (saved / "one").iterdir())
    kinds = sorted(name.split("-")[2] for name in names if name.startswith("pannier-"))
    assert kinds == ["exp_avg", "exp_avg_sq", "extra", "rank"]  # Of one save.
    assert len(names) == len(kinds) + 2 and {"manifest.json", "notes.txt"} < set(names)
    engine.load_checkpoint(saved)
    assert engine.global_steps == 3


@program
def save_for_ever(rank: int, world: int, folder: str) -> None:
    engine, *_ = pannier.initialize(
        model=torch.nn.Linear(300, 300), config=config(OPTIMIZERS["AdamW"][0])
    )
    print("ready", flush=True)
    for count in range(100_000):
        with torch.no_grad():
            engine.module.weight.fill_(float(count))
            engine.module.bias.fill_(float(count))
        engine.save_checkpoint(folder, tag=f"t{count % 3}", client_state={"count": count})


def test_killed_at_any_moment_of_saving_the_last_one_loads(tmp_path: pathlib.Path) -> None:
    import random

    draw = random.Random(5)
    engine, *_ = pannier.initialize(model=torch.nn.Linear(300, 300), config=config(OPTIMIZERS["AdamW"][0]))
    kills = int(os.environ.get("PANNIER_KILLS", "6"))
    for _ in range(kills):
        ranks.run_and_kill(__file__, "save_for_ever", str(tmp_path), after=0.05 + 0.5 * draw.random())
        _, client_state = engine.load_checkpoint(tmp_path)
        assert set(engine.module.weight.flatten().tolist()) == {float(client_state["count"])}
        assert set(engine.module.bias.tolist()) == {float(client_state["count"])}


if __name__ == "__main__":
    frameworks.main(PROGRAMS) if "compare_logits" in sys.argv else ranks.main(PROGRAMS)
