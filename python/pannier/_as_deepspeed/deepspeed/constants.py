"""Constants that scripts import."""

TORCH_DISTRIBUTED_DEFAULT_PORT = 29500
