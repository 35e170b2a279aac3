"""transformers' Trainer on Pannier: the same numbers as with plain torch, whatever the stage and the home."""

from __future__ import annotations

import json
import pathlib
import tempfile
from typing import Any

import pytest
import torch

import frameworks
from small_models import digest, llama, samples

STEPS = 30
CELLS = [(0, "none"), (1, "cpu"), (2, "none"), (2, "cpu"), (3, "none"), (3, "cpu"), (3, "param")]
AUTO_OPTIMIZER = {
    "type": "AdamW",
    "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
}
AUTO_SCHEDULER = {
    "type": "WarmupDecayLR",
    "params": {
        "warmup_min_lr": "auto",
        "warmup_max_lr": "auto",
        "warmup_num_steps": "auto",
        "total_num_steps": "auto",
        "warmup_type": "linear",
    },
}
BUILT: dict[str, dict[str, Any]] = {
    "both by the Trainer": {},
    "optimizer by the config": {"optimizer": AUTO_OPTIMIZER},
    "both by the config": {"optimizer": AUTO_OPTIMIZER, "scheduler": AUTO_SCHEDULER},
}


def settings(stage: int, home: str, **sections: Any) -> dict[str, Any]:
    """A configuration as people give it to the Trainer, with all that can be `auto`."""
    zero: dict[str, Any] = {
        "stage": stage,
        "overlap_comm": True,
        "contiguous_gradients": True,
        "sub_group_size": 1e9,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "stage3_gather_16bit_weights_on_model_save": True,
    }
    if home != "none":
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    if home == "param":
        zero["offload_param"] = {"device": "cpu", "pin_memory": True}
    return {
        "fp16": {"enabled": "auto", "loss_scale": 0, "initial_scale_power": 16},
        "bf16": {"enabled": "auto"},
        "zero_optimization": zero,
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "steps_per_print": 2000,
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "wall_clock_breakdown": False,
        **sections,
    }


def trainer(config: dict[str, Any] | None, *, model: Any = None, callbacks: Any = None, **more: Any) -> Any:
    """A Trainer of the small model; plain torch where `config` is None."""
    from accelerate.state import AcceleratorState, GradientState, PartialState
    from transformers import Trainer, TrainingArguments, set_seed

    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    if "accelerator_config" in more:
        PartialState(backend="gloo")
    set_seed(3)
    arguments = {
        "output_dir": tempfile.mkdtemp(),
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "max_steps": STEPS,
        "learning_rate": 1e-2,
        "warmup_steps": 5,
        "logging_steps": 1,
        "per_device_eval_batch_size": 2,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        **more,
    }
    arguments.update({"use_cpu": True} if config is None else {"deepspeed": config})
    return Trainer(
        model=llama() if model is None else model,
        args=TrainingArguments(**arguments),
        train_dataset=samples(),
        eval_dataset=samples(6),
        callbacks=callbacks,
    )


def losses(it: Any) -> list[float]:
    return [entry["loss"] for entry in it.state.log_history if "loss" in entry]


def ran_pannier(it: Any) -> bool:
    import pannier

    return isinstance(it.model_wrapped, pannier.Engine)


def same_losses() -> Any:
    """Losses, norms, learning rates and final weights of plain torch and of every cell."""
    results = {}
    for cell in [None, *CELLS]:
        for built, sections in BUILT.items():
            if cell is None and sections:
                continue
            it = trainer(None if cell is None else settings(*cell, **sections))
            it.train()
            log = [entry for entry in it.state.log_history if "loss" in entry]
            results[f"{cell}: {built}"] = {
                "losses": [entry["loss"] for entry in log],
                "norms": [entry["grad_norm"] for entry in log],
                "lrs": [entry["learning_rate"] for entry in log],
                "pannier": ran_pannier(it),
                "weights": digest(it.model),
                "shapes_are_whole": all(p.numel() for p in it.model.parameters()),
            }
            if cell is not None:
                it.model_wrapped.destroy()
    return results


@pytest.mark.parametrize("which", ["pinned", "newest"])
def test_losses_are_those_of_plain_torch_and_offload_keeps_the_bits(which: str) -> None:
    (results,) = frameworks.run(__file__, "same_losses", which=which)
    plain = results.pop("None: both by the Trainer")
    assert not plain["pannier"] and len(plain["losses"]) == STEPS
    for built in BUILT:
        rows = {name: result for name, result in results.items() if name.endswith(built)}
        assert len(rows) == len(CELLS) and all(result["pannier"] for result in rows.values())
        assert len({json.dumps(result) for result in rows.values()}) == 1, rows
        row = next(iter(rows.values()))
        if built == "both by the config":
            continue  # DeepSpeed's schedules begin one step later than the Trainer's.
        assert row["losses"] == pytest.approx(plain["losses"], rel=1e-5)
        assert row["norms"] == pytest.approx(plain["norms"], rel=1e-4)
        if built == "both by the Trainer":  # The engine steps a schedule that it knows before the Trainer logs its lr.
            assert row["lrs"] == pytest.approx(plain["lrs"], rel=1e-6)


def two_ranks() -> Any:
    """Two ranks of two samples: the batch of one rank with twice as many."""
    results = {}
    for stage, home in CELLS:
        it = trainer(
            settings(stage, home), gradient_accumulation_steps=1, accelerator_config={"use_configured_state": True}
        )
        it.train()
        state = it.model.state_dict()
        results[f"{stage} {home}"] = {
            "losses": losses(it),
            "pannier": ran_pannier(it),
            "world": it.model_wrapped.world_size,
            "names": sorted(state),
        }
        it.model_wrapped.destroy()
    return results


def test_two_ranks_train_alike() -> None:
    both = frameworks.run(__file__, "two_ranks", world=2, ACCELERATE_USE_DEEPSPEED="true")
    assert both[0].keys() == both[1].keys()
    all_losses = [result["losses"] for results in both for result in results.values()]
    assert all(result["pannier"] and result["world"] == 2 for results in both for result in results.values())
    assert all(losses == pytest.approx(all_losses[0], rel=1e-5) for losses in all_losses)
    assert all(len(result["names"]) == 21 for result in both[0].values())


def in_between() -> Any:
    """Evaluation, prediction and generation between steps change nothing; recomputation neither."""
    from transformers import TrainerCallback

    results: dict[str, Any] = {}

    class Between(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            if state.global_step % 5 == 0:
                model.eval()
                with torch.no_grad():
                    tokens = model.generate(torch.tensor([[5, 6]]), max_new_tokens=4, do_sample=False)
                texts.append(tokens.tolist())
                model.train()

    for stage, home in CELLS:
        texts: list[Any] = []
        for kind, more in {
            "plain": {},
            "evaluated": {"eval_strategy": "steps", "eval_steps": 3},
            "recomputed": {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}},
            "recomputed, reentrant": {
                "gradient_checkpointing": True,
                "gradient_checkpointing_kwargs": {"use_reentrant": True},
            },
        }.items():
            callbacks = [Between()] if kind == "evaluated" else None
            it = trainer(settings(stage, home), callbacks=callbacks, max_steps=10, **more)
            it.train()
            evaluated = it.evaluate()["eval_loss"]
            predicted = it.predict(samples(4)).predictions.shape
            results[f"{stage} {home}, {kind}"] = {
                "losses": losses(it),
                "evaluated": evaluated,
                "predicted": list(predicted),
                "training": it.model_wrapped.training,
                "pannier": ran_pannier(it),
                "weights": digest(it.model),
            }
            it.model_wrapped.destroy()
        results[f"{stage} {home}, texts"] = texts
    return results


def test_what_happens_between_steps_changes_nothing() -> None:
    (results,) = frameworks.run(__file__, "in_between")
    texts = [results.pop(f"{stage} {home}, texts") for stage, home in CELLS]
    assert all(text == texts[0] and len(text) == 2 for text in texts)
    rows = {json.dumps({k: v for k, v in row.items() if k != "training"}) for row in results.values()}
    assert len(rows) == 1, results
    assert all(row["training"] and row["pannier"] for row in results.values())


def smaller_batches() -> Any:
    """`auto_find_batch_size`: an out-of-memory error in forward, then a batch that fits."""
    results = {}
    for stage, home in CELLS[:4]:  # The Trainer itself refuses it at stage 3.
        model = llama()
        seen: list[int] = []

        def hook(module: Any, args: Any, kwargs: Any, seen: list[int] = seen) -> None:
            rows = kwargs["input_ids"].shape[0]
            seen.append(rows)
            # In mid-window, so that gradients are pending.
            if rows > 2 and len(seen) > 1:
                raise RuntimeError("CUDA out of memory.")

        model.register_forward_pre_hook(hook, with_kwargs=True)
        it = trainer(
            settings(stage, home), model=model, per_device_train_batch_size=8, auto_find_batch_size=True, max_steps=4
        )
        it.train()
        results[f"{stage} {home}"] = {"losses": losses(it), "last": seen[-1], "pannier": ran_pannier(it)}
        it.model_wrapped.destroy()
    return results


def test_batch_size_is_found() -> None:
    (results,) = frameworks.run(__file__, "smaller_batches")
    assert all(row["pannier"] and row["last"] <= 2 and len(row["losses"]) == 4 for row in results.values()), results


def pretrained() -> Any:
    """`from_pretrained` and `from_config` where a stage-3 configuration is alive, so under zero.Init."""
    import deepspeed
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
    from transformers.integrations import HfDeepSpeedConfig, is_deepspeed_zero3_enabled

    from small_models import llama_config

    saved = tempfile.mkdtemp()
    llama().save_pretrained(saved)
    results = {}
    torch.distributed.is_initialized() or deepspeed.init_distributed()
    for home in ("none", "cpu", "param"):
        config = settings(3, home, train_micro_batch_size_per_gpu=2, gradient_accumulation_steps=2, train_batch_size=4)
        alive = HfDeepSpeedConfig(config)
        assert is_deepspeed_zero3_enabled()
        fresh = LlamaForCausalLM(llama_config(LlamaConfig))
        model = AutoModelForCausalLM.from_pretrained(saved)
        assert digest(model) == digest(llama())
        model.resize_token_embeddings(80)
        assert model.get_input_embeddings().weight.shape == (80, 32)
        it = trainer(settings(3, home), model=AutoModelForCausalLM.from_pretrained(saved), max_steps=4)
        it.train()
        results[home] = {"losses": losses(it), "pannier": ran_pannier(it), "fresh": fresh.num_parameters()}
        it.model_wrapped.destroy()
        del alive
    it = trainer(settings(2, "cpu"), max_steps=4)
    it.train()
    results["built whole"] = {"losses": losses(it), "pannier": ran_pannier(it), "fresh": llama().num_parameters()}
    return results


@pytest.mark.parametrize("which", ["pinned", "newest"])
def test_models_load_under_zero_init(which: str) -> None:
    (results,) = frameworks.run(__file__, "pretrained", which=which)
    assert len({json.dumps(row) for row in results.values()}) == 1 and results["param"]["pannier"], results


def adapters() -> Any:
    """PEFT: LoRA and DoRA over a frozen base, adapters in another type than the base."""
    from peft import LoraConfig, get_peft_model

    results = {}
    for use_dora in (False, True):
        for stage, home in CELLS:
            model = llama()
            base = model.model.layers[0].self_attn.k_proj.weight
            before = base.detach().clone()
            model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], use_dora=use_dora))
            model.print_trainable_parameters()
            it = trainer(settings(stage, home), model=model, max_steps=10)
            it.train()
            trainable, everything = it.model.get_nb_trainable_parameters()
            state = {name: tensor for name, tensor in it.model.state_dict().items() if "lora" in name}
            results[f"{use_dora} {stage} {home}"] = {
                "losses": losses(it),
                "trainable": [trainable, everything],
                "moved": sum(float(tensor.abs().sum()) for name, tensor in state.items() if "lora_B" in name) > 0,
                "base": torch.equal(it.model.state_dict()[next(n for n in it.model.state_dict() if n.endswith("layers.0.self_attn.k_proj.weight"))], before),
                "pannier": ran_pannier(it),
            }
            it.model_wrapped.destroy()
    return results


def test_adapters_train_over_a_frozen_base() -> None:
    (results,) = frameworks.run(__file__, "adapters")
    for kind in ("False", "True"):
        rows = {name: row for name, row in results.items() if name.startswith(kind)}
        assert len({json.dumps(row) for row in rows.values()}) == 1, rows
        row = next(iter(rows.values()))
        assert row["moved"] and row["base"] and row["pannier"]


def kept() -> Any:
    """Saving, resuming and the best model: a run that is cut in two is the run that is not."""
    from transformers import AutoModelForCausalLM

    results = {}
    for stage, home in ((2, "cpu"), (3, "none"), (3, "param")):
        folder = tempfile.mkdtemp()
        keeping = {"save_strategy": "steps", "save_steps": 4, "eval_strategy": "steps", "eval_steps": 4}
        keeping.update(max_steps=8, save_total_limit=2, load_best_model_at_end=True, metric_for_best_model="loss")
        whole = trainer(settings(stage, home), output_dir=folder, **keeping)
        whole.train()
        whole_losses, best = losses(whole), whole.state.best_model_checkpoint
        evaluated = {entry["step"]: entry["eval_loss"] for entry in whole.state.log_history if "eval_loss" in entry}
        whole.save_model(folder + "/final")
        final, best_loss = digest(whole.model), whole.evaluate()["eval_loss"]
        whole.model_wrapped.destroy()
        del whole
        loaded = digest(AutoModelForCausalLM.from_pretrained(folder + "/final"))
        again = trainer(settings(stage, home), output_dir=folder, **{**keeping, "load_best_model_at_end": False})
        again.train(resume_from_checkpoint=folder + "/checkpoint-4")
        results[f"{stage} {home}"] = {
            "losses": whole_losses,
            "resumed": losses(again),
            "steps": again.model_wrapped.global_steps,
            "is_best": pathlib.Path(best).name == f"checkpoint-{min(evaluated, key=lambda step: evaluated[step])}",
            "best_is_back": abs(best_loss - min(evaluated.values())) < 1e-6,
            "loaded": loaded == final,
            "pannier": ran_pannier(again),
        }
        again.model_wrapped.destroy()
    return results


def test_saving_resuming_and_the_best_model() -> None:
    (results,) = frameworks.run(__file__, "kept")
    for row in results.values():
        assert row["pannier"] and row["is_best"] and row["best_is_back"] and row["loaded"] and row["steps"] == 8, row
        assert row["resumed"] == row["losses"], row  # The log's first half comes from the checkpoint, the rest was trained.
    assert len({json.dumps(row) for row in results.values()}) == 1, results


def of_the_command_line(path: str) -> Any:
    """The arguments of a script that parses them: `--deepspeed FILE`."""
    from transformers import HfArgumentParser, Trainer, TrainingArguments

    words = ["--output_dir", tempfile.mkdtemp(), "--deepspeed", path, "--max_steps", "3", "--report_to", "none"]
    (arguments,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(
        [*words, "--save_strategy", "no", "--logging_steps", "1", "--disable_tqdm", "true"]
    )
    it = Trainer(model=llama(), args=arguments, train_dataset=samples())
    it.train()
    return {"losses": len(losses(it)), "pannier": ran_pannier(it), "batch": it.model_wrapped.get_batch_info()}


def test_configuration_file_of_the_command_line(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(settings(2, "cpu", optimizer=AUTO_OPTIMIZER, scheduler=AUTO_SCHEDULER)))
    (result,) = frameworks.run(__file__, "of_the_command_line", str(path))
    assert result == {"losses": 3, "pannier": True, "batch": [8, 8, 1]}


PROGRAMS = {
    body.__name__: body
    for body in (same_losses, two_ranks, in_between, smaller_batches, pretrained, adapters, kept, of_the_command_line)
}

if __name__ == "__main__":
    frameworks.main(PROGRAMS)
