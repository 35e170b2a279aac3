"""The model that the demo trains: a BERT-like encoder with a linear head, 95,069,488 parameters at its full size."""

import torch
from torch import nn

NUM_PARAMETERS = 95_069_488


class BigModel(nn.Module):
    """Reads a window of tokens [batch, sequence] and returns logits [batch, vocabulary]; the head acts on the mean."""

    def __init__(self, vocabulary: int = 30000, width: int = 1024, heads: int = 16, layers: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(
            [nn.TransformerEncoderLayer(d_model=width, nhead=heads, batch_first=True) for _ in range(layers)]
        )
        self.head = nn.Linear(width, vocabulary)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(dim=1))


def full_size_model() -> BigModel:
    """Returns the model at the size the demo speaks of, and checks that it is that size."""
    model = BigModel()
    count = sum(parameter.numel() for parameter in model.parameters())
    if count != NUM_PARAMETERS:
        raise AssertionError(f"BigModel has {count} parameters, expected {NUM_PARAMETERS}")
    return model
