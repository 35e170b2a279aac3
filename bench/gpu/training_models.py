"""The models of the works and their data. Weights and tokens are the same for every contestant."""

from __future__ import annotations

import ast
import os
import pathlib
from typing import Any

import torch
from torch import nn

from gpu.works import Shape, Work

_SCRIPT = pathlib.Path(__file__).parents[2] / "examples" / "seed_script.py"
_NOISE_NUMEL = 4_194_301  # Odd, so that no two rows of a weight are alike.


class TinyModel(nn.Module):
    """A language model of a few thousand parameters that is called as a Qwen2 is."""

    def __init__(self, vocab: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, 16)
        self.mix = nn.GRU(16, 16, batch_first=True)
        self.head = nn.Linear(16, vocab)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens)
        return self.head(hidden + self.mix(hidden)[0])


def build(work: Work, device: torch.device) -> nn.Module:
    """The work's model on `device`: in the work's precision, or in fp32 for fp16, which contestants convert."""
    torch.manual_seed(0)
    if work.shape is not None:
        return _qwen2(work.shape, work.sequence, device)
    if work.name == "tiny":
        return TinyModel(work.vocab).to(device=device, dtype=torch.bfloat16)
    return _seed_model().to(device)


def batch_of(work: Work, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and labels of a step, random with a seed fixed for each rank."""
    generator = torch.Generator().manual_seed(int(os.environ.get("RANK", "0")))
    tokens = torch.randint(0, work.vocab, (work.batch, work.sequence), generator=generator)
    labels = torch.randint(0, work.vocab, (work.batch,), generator=generator) if work.name == "seed" else tokens.clone()
    return tokens.to(device), labels.to(device)


def loss_of(work: Work, model: Any, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The loss of `model`, which may be an engine around one."""
    if work.shape is not None:
        return model(input_ids=inputs, labels=labels).loss
    logits = model(inputs)
    return nn.functional.cross_entropy(logits.flatten(0, -2), labels.flatten())


def numel(model: nn.Module) -> int:
    """Parameters, tied ones once."""
    return sum(param.numel() for param in model.parameters())


def _qwen2(shape: Shape, sequence: int, device: torch.device) -> nn.Module:
    from transformers import Qwen2Config, Qwen2ForCausalLM  # noqa: PLC0415  (only these works need it)

    config = Qwen2Config(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        intermediate_size=shape.intermediate,
        tie_word_embeddings=shape.tied,
        max_position_embeddings=sequence,
        use_cache=False,
    )
    # Initializing billions of weights on a CPU takes minutes; a model without storage takes none.
    with torch.device("meta"):
        model = Qwen2ForCausalLM._from_config(config, attn_implementation="sdpa", dtype=torch.bfloat16)  # noqa: SLF001
    model.to_empty(device=device)
    model.tie_weights()
    model.model.rotary_emb = type(model.model.rotary_emb)(config=config).to(device)  # Its buffers are in no checkpoint.
    _fill(model, device)
    if shape.tied and model.lm_head.weight is not model.model.embed_tokens.weight:
        raise RuntimeError("the embedding and the head are not one parameter")
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model.train()


@torch.no_grad()
def _fill(model: nn.Module, device: torch.device) -> None:
    # Repeats one stretch of noise of standard deviation 0.02: the same weights on every device, at the speed of a copy.
    generator = torch.Generator().manual_seed(0)
    noise = (torch.randn(_NOISE_NUMEL, generator=generator) * 0.02).to(device=device, dtype=torch.bfloat16)
    for name, param in model.named_parameters():
        if param.dim() < 2:
            param.fill_(0.0 if name.endswith("bias") else 1.0)
            continue
        for piece in param.view(-1).split(_NOISE_NUMEL):
            piece.copy_(noise[: piece.numel()])


def _seed_model() -> nn.Module:
    # Takes the class out of the script, which trains as soon as it is imported.
    tree = ast.parse(_SCRIPT.read_text(encoding="utf-8"))
    classes = (node for node in tree.body if isinstance(node, ast.ClassDef))
    only_class: list[ast.stmt] = [node for node in classes if node.name == "BigModel"]
    names: dict[str, Any] = {"nn": nn, "__name__": "seed_script"}
    exec(compile(ast.Module(only_class, type_ignores=[]), str(_SCRIPT), "exec"), names)  # noqa: S102  (our own example)
    return names["BigModel"]()
