"""ZeRO-Offload in one script, as it is written for DeepSpeed: 95 M parameters, optimizer states in host memory.

    ./dev run python -m pannier.deepspeed examples/seed_script.py

Nothing in it knows Pannier. Where there is no GPU, Pannier counts torch's CPU memory as device memory, so the script asks
the engine where to put its tensors and how much memory they took.
"""
import torch
import deepspeed
import torch.nn as nn


class BigModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(30000, 1024)
        self.blocks = nn.ModuleList([
            nn.TransformerEncoderLayer(d_model=1024, nhead=16, batch_first=True)
            for _ in range(4)
        ])
        self.head = nn.Linear(1024, 30000)

    def forward(self, x):
        x = self.embed(x)
        for blk in self.blocks:
            x = blk(x)
        return self.head(x.mean(dim=1))


model = BigModel()
model_engine, optimizer, _, _ = deepspeed.initialize(
    model=model,
    model_parameters=model.parameters(),
    config={
        "train_batch_size": 8,
        "optimizer": {
            "type": "Adam",
            "params": {"lr": 1e-4}
        },
        "zero_optimization": {
            "stage": 2,
            "offload_optimizer": {
                "device": "cpu",
                "pin_memory": True
            }
        },
        "fp16": {"enabled": True}
    }
)

# Random sequences stand in for data.
torch.manual_seed(42)
seq_len = 128
device = model_engine.device
for step in range(20):
    input_ids = torch.randint(0, 30000, (8, seq_len)).to(device)
    labels = torch.randint(0, 30000, (8,)).to(device)
    outputs = model_engine(input_ids)
    loss = nn.CrossEntropyLoss()(outputs, labels)
    model_engine.backward(loss)
    model_engine.step()
    if step % 5 == 0:
        print(f"step {step}, loss={loss.item():.4f}")

if device.type == "cuda":
    torch.cuda.synchronize()
    peak_mem = torch.cuda.max_memory_allocated() / 1024**3
else:
    peak_mem = model_engine.memory_stats()["device"]["peak"] / 1024**3
print(f"peak device memory: {peak_mem:.2f} GB")
