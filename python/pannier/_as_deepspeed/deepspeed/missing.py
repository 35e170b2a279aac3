"""What Pannier does not have of DeepSpeed, and what to use instead: every absent name says so when it is asked for."""

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType

_NO_MODEL_PARALLELISM = "models are not cut over ranks; stages 1 to 3 and offload are what there is for large ones"
_TRAINING_ONLY = "Pannier trains; evaluate with the module itself"

# The longest name that the asked one begins with counts.
_INSTEAD = {
    "deepspeed.autotuning": "the planner measures and chooses; `pannier plan` prints what it would do",
    "deepspeed.checkpoint.ds_to_universal": "checkpoints load with any number of ranks as they are",
    "deepspeed.comm": "torch.distributed has no such name either",
    "deepspeed.compile": "compile the model with torch.compile before initialize() (stages 0 to 2)",
    "deepspeed.compression": "there is no compression of models",
    "deepspeed.elasticity": "start again with another number of ranks, and load the checkpoint",
    "deepspeed.inference": _TRAINING_ONLY,
    "deepspeed.init_inference": _TRAINING_ONLY,
    "deepspeed.InferenceEngine": _TRAINING_ONLY,
    "deepspeed.linear": "use torch.nn.Linear, or PEFT for adapters",
    "deepspeed.model_implementations": _TRAINING_ONLY,
    "deepspeed.module_inject": _TRAINING_ONLY,
    "deepspeed.moe": "there is no expert parallelism; a model with experts trains as any other, and at stage 3 "
    "deepspeed.utils.set_z3_leaf_modules() keeps its experts together",
    "deepspeed.monitor": "read engine.memory_stats(), engine.get_lr() and the loss, and log them yourself",
    "deepspeed.ops.lamb": "use AdamW, Adam, SGD, Adagrad or Lion",
    "deepspeed.ops.muon": "use AdamW, Adam, SGD, Adagrad or Lion",
    "deepspeed.ops.op_builder": "kernels are part of Pannier's library; nothing is built",
    "deepspeed.ops.sparse_attention": "use torch's attention",
    "deepspeed.ops.transformer": "use torch's attention",
    "deepspeed.pipe": _NO_MODEL_PARALLELISM,
    "deepspeed.PipelineModule": _NO_MODEL_PARALLELISM,
    "deepspeed.PipelineEngine": _NO_MODEL_PARALLELISM,
    "deepspeed.profiling": "use torch.profiler; units show in its trace",
    "deepspeed.runtime.fp16": "the engine scales the loss; see fp16 in the configuration",
    "deepspeed.runtime.pipe": _NO_MODEL_PARALLELISM,
    "deepspeed.runtime.sequence_parallel": _NO_MODEL_PARALLELISM,
    "deepspeed.runtime.tensor_parallel": _NO_MODEL_PARALLELISM,
    "deepspeed.runtime.zero.MiCS_Init": "use zero.Init",
    "deepspeed.runtime.zero.TiledLinear": "use torch.nn.Linear; parameter offload needs no tiles",
    "deepspeed.runtime.zero.unwrap_model_for_generation": "engine.module generates as it is",
    "deepspeed.sequence": _NO_MODEL_PARALLELISM,
    "deepspeed.tp_model_init": _NO_MODEL_PARALLELISM,
    "deepspeed.utils.groups": "torch.distributed has the groups; there is only data parallelism",
    "deepspeed.utils.is_initialized": "use deepspeed.comm.is_initialized()",
    "deepspeed.zero": "see docs/migrate.md",
}


def explain(name: str) -> str:
    """The message for a name that is not there."""
    found = max((known for known in _INSTEAD if name.startswith(known)), key=len, default=None)
    instead = "see docs/migrate.md" if found is None else _INSTEAD[found]
    return f"`deepspeed` is Pannier here, which has no {name}: {instead}"


def is_explained(name: str) -> bool:
    """Whether a name is known to be absent."""
    return any(name.startswith(known) for known in _INSTEAD)


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        # Asked last, so there is no such module. The error has no name: with one, `from deepspeed import moe` would
        # replace it by an error that says less.
        if fullname.startswith("deepspeed."):
            raise ModuleNotFoundError(explain(fullname))
        return None


def watch() -> None:
    """From now on modules that are not there say so."""
    sys.meta_path.append(_Finder())
