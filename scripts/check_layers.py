#!/usr/bin/env python3
"""Fails on an #include that points up the house of docs/architecture.md."""
import pathlib
import re
import sys

FLOOR = {"base": 0, "layout": 1, "plan": 1, "kernels": 2, "mem": 2, "io": 2, "hardware": 2, "ckpt": 2, "tier": 3, "device": 3, "comm": 3,
         "optim": 4, "zero": 5, "engine": 6, "binding": 6}
# Inside one floor, these arrows only.
MAY_USE = {"plan": {"layout"}, "mem": {"hardware"}, "io": {"hardware", "mem"}, "ckpt": {"io", "kernels"}, "tier": {"device"}, "binding": {"engine"}}
TORCH_FREE = re.compile(r'#include [<"](torch/|ATen/|c10/)')
errors = []
source = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else ".") / "src/pannier"
for path in sorted(p for suffix in ("*.h", "*.cc", "*.cu") for p in source.rglob(suffix)):
    folder = path.relative_to(source).parts[0]
    for number, line in enumerate(path.read_text().splitlines(), 1):
        used = re.match(r'#include "pannier/(\w+)/', line)
        if used and used[1] != folder and FLOOR[used[1]] >= FLOOR[folder] and used[1] not in MAY_USE.get(folder, set()):
            errors.append(f"{path}:{number}: {folder} may not include {used[1]}")
        if FLOOR[folder] < 3 and TORCH_FREE.match(line):
            errors.append(f"{path}:{number}: {folder} is below the torch line")
print("\n".join(errors) or "layers: every arrow points down")
sys.exit(bool(errors))
