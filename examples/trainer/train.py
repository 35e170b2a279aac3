"""Trains a small Llama with Hugging Face's Trainer, as any script does: nothing here knows of Pannier.

The model is made from a configuration and the tokens from a seed, so nothing is downloaded.
"""

import torch
from transformers import HfArgumentParser, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

VOCABULARY, LENGTH, ROWS = 500, 32, 64


def rows() -> list[dict[str, torch.Tensor]]:
    """Texts to learn by heart."""
    draw = torch.Generator().manual_seed(0)
    texts = [torch.randint(3, VOCABULARY, (LENGTH,), generator=draw) for _ in range(ROWS)]
    return [{"input_ids": text, "labels": text} for text in texts]


def main() -> None:
    """Trains, and says what the losses and the memory were."""
    (arguments,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
    torch.manual_seed(1)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
            pad_token_id=0,
        )
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=rows())
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, loss {losses[0]:.2f} to {losses[-1]:.2f}")
    engine = trainer.model_wrapped
    memory = engine.memory_stats()
    for tier in ("device", "host"):
        states = memory[tier]["by_owner"].get("optimizer states", {"current": 0})["current"]
        print(f"{type(engine).__module__}: optimizer states in {tier} memory {states / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
