"""Small models of transformers made from configurations, and batches for them."""

from __future__ import annotations

import hashlib
from typing import Any

import torch

VOCABULARY = 64


def llama(**more: Any) -> Any:
    """Two layers, 32 wide, always the same weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    return LlamaForCausalLM(llama_config(LlamaConfig, **more))


def llama_config(kind: Any, **more: Any) -> Any:
    """Its configuration."""
    settings = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return kind(**{**settings, **more})


def samples(count: int = 64, length: int = 16) -> list[dict[str, torch.Tensor]]:
    """Tokens to learn by heart."""
    draw = torch.Generator().manual_seed(0)
    rows = [torch.randint(3, VOCABULARY, (length,), generator=draw) for _ in range(count)]
    return [{"input_ids": row, "labels": row} for row in rows]


def digest(model: torch.nn.Module) -> str:
    """A digest of all weights, bit for bit."""
    state = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        state.update(name.encode() + tensor.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return state.hexdigest()[:16]
