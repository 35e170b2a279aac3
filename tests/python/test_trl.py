"""TRL on Pannier: supervised fine-tuning, preference training with a reference model, and generation at stage 3."""

from __future__ import annotations

import tempfile
from typing import Any

import pytest
import torch

import frameworks
from small_models import digest, llama, samples
from test_accelerate import plugin_of
from test_trainer import losses, ran_pannier, settings

CELLS = [(2, "cpu"), (3, "none"), (3, "param")]
PLAIN = (-1, "plain torch")


def tokenizer() -> Any:
    """64 words, no downloads."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0, "<s>": 1, "</s>": 2, **{f"w{number}": number for number in range(3, 64)}}
    plain = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=plain, pad_token="<pad>", bos_token="<s>", eos_token="</s>")


def text(row: torch.Tensor) -> str:
    return " ".join(f"w{number}" for number in row.tolist())


def start(kind: Any, arguments: Any, stage: int, home: str, data: Any, **more: Any) -> dict[str, Any]:
    from accelerate.state import AcceleratorState, GradientState
    from transformers import set_seed

    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    set_seed(3)
    it = kind(
        model=llama(),
        args=arguments(
            output_dir=tempfile.mkdtemp(),
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            max_steps=8,
            learning_rate=1e-2,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            bf16=False,
            gradient_checkpointing=False,
            **({"use_cpu": True} if (stage, home) == PLAIN else {"deepspeed": settings(stage, home)}),
        ),
        train_dataset=data,
        processing_class=tokenizer(),
        **more,
    )
    it.train()
    result = {"losses": losses(it), "pannier": ran_pannier(it), "weights": digest(it.model)}
    if not result["pannier"]:
        return result
    reference = getattr(it, "ref_model", None)
    if reference is not None:
        result["reference"] = f"{type(reference).__name__}, training {reference.training}, {type(reference.optimizer).__name__}"
        reference.destroy()
    it.model_wrapped.destroy()
    return result


def fine_tuning() -> Any:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    data = Dataset.from_list([{"text": text(sample["input_ids"])} for sample in samples(32)])
    return {f"{stage} {home}": start(SFTTrainer, SFTConfig, stage, home, data) for stage, home in (PLAIN, *CELLS)}


def test_fine_tuning() -> None:
    (results,) = frameworks.run(__file__, "fine_tuning")
    plain, *rows = results.values()
    assert not plain["pannier"] and all(row["pannier"] and len(row["losses"]) == 8 for row in rows)
    assert all(row == rows[0] for row in rows), results
    assert rows[0]["losses"] == pytest.approx(plain["losses"], rel=1e-5)


def preferences() -> Any:
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    def row(sample: dict[str, torch.Tensor]) -> dict[str, str]:
        tokens = sample["input_ids"]
        return {"prompt": text(tokens[:4]), "chosen": " " + text(tokens[4:10]), "rejected": " " + text(tokens[10:])}

    data = Dataset.from_list([row(sample) for sample in samples(32)])
    return {
        f"{stage} {home}": start(DPOTrainer, DPOConfig, stage, home, data, ref_model=llama()) for stage, home in (PLAIN, *CELLS)
    }


def test_preferences_with_a_reference_model() -> None:
    (results,) = frameworks.run(__file__, "preferences")
    plain, *rows = results.values()
    assert not plain["pannier"] and all(row["pannier"] for row in rows)
    assert all(row["reference"] == "Engine, training False, NoneType" for row in rows), rows
    assert all(row["losses"] == pytest.approx(plain["losses"], rel=1e-5) for row in rows)


def generation() -> Any:
    """Each rank generates another number of tokens, with whole parameters; training goes on as without."""
    from trl.models.utils import unwrap_model_for_generation

    results = {}
    for home in ("none", "cpu", "param"):
        for generates in (False, True):
            it = two_rank_accelerator(home)
            model = llama()
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
            loader = torch.utils.data.DataLoader(samples(16), batch_size=2)
            engine, optimizer, loader = it.prepare(model, optimizer, loader)
            counts = []
            for batch in loader:
                if generates:
                    with unwrap_model_for_generation(engine, it) as whole, torch.no_grad():
                        assert whole is model
                        tokens = whole.generate(
                            batch["input_ids"][:1, :3],
                            attention_mask=torch.ones(1, 3, dtype=torch.long),
                            min_new_tokens=2 + 3 * it.process_index,
                            max_new_tokens=2 + 3 * it.process_index,
                            do_sample=False,
                        )
                    counts.append(tokens.shape[1])
                it.backward(engine(**batch).loss)
                optimizer.step()
                optimizer.zero_grad()
            results[f"{home} {generates}"] = {"weights": digest(model), "counts": sorted(set(counts))}
            engine.destroy()
    return results


def two_rank_accelerator(home: str) -> Any:
    from accelerate import Accelerator, PartialState
    from accelerate.state import AcceleratorState, GradientState
    from accelerate.utils import set_seed

    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    PartialState(backend="gloo")
    set_seed(3)
    return Accelerator(deepspeed_plugin=plugin_of(3, home, gas=1))


def test_generation_at_stage_3() -> None:
    both = frameworks.run(__file__, "generation", world=2, ACCELERATE_USE_DEEPSPEED="true")
    weights = {row["weights"] for results in both for row in results.values()}
    assert len(weights) == 1, both
    assert [results["param True"]["counts"] for results in both] == [[5], [8]]


PROGRAMS = {body.__name__: body for body in (fine_tuning, preferences, generation)}

if __name__ == "__main__":
    frameworks.main(PROGRAMS)
