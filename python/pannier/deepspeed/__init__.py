"""Runs programs that say `import deepspeed` on Pannier.

`python -m pannier.deepspeed script.py ARGUMENTS` from outside, or as a script's first lines::

    import pannier.deepspeed
    pannier.deepspeed.install()

Both put a folder with a real package named `deepspeed` first on `sys.path` and on PYTHONPATH, so that workers and child
processes find it too. It is on no path otherwise: a real DeepSpeed beside it is not disturbed.
"""

from __future__ import annotations

import os
import pathlib
import sys

_FOLDER = pathlib.Path(__file__).parent.parent / "_as_deepspeed"
_TOO_LATE = ("deepspeed", "accelerate", "transformers.integrations.deepspeed")


def install() -> None:
    """Makes `import deepspeed` mean Pannier, here and in processes started from here. Twice does nothing.

    Raises RuntimeError where something that binds to DeepSpeed was imported before.
    """
    folder = str(_FOLDER)
    loaded = sys.modules.get("deepspeed")
    if loaded is not None and pathlib.Path(loaded.__file__ or "").parent.parent == _FOLDER:
        return
    if early := [name for name in _TOO_LATE if name in sys.modules]:
        raise RuntimeError(f"pannier.deepspeed.install() must run before the first import of {early[0]}")
    if folder not in sys.path:
        sys.path.insert(0, folder)
    inherited = os.environ.get("PYTHONPATH", "")
    if folder not in inherited.split(os.pathsep):
        os.environ["PYTHONPATH"] = folder + (os.pathsep + inherited if inherited else "")
