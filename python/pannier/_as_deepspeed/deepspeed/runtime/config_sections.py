"""Sections of the configuration as objects, read apart from an engine."""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pannier.config
from pannier import comm

# Names that DeepSpeed's objects give to keys.
_ATTRIBUTES = {"stage3_gather_16bit_weights_on_model_save": "gather_16bit_weights_on_model_save"}


def read_section(path: str, values: Mapping[str, Any], **beside: Any) -> SimpleNamespace:
    """The section at a dotted path, checked and with its defaults; `beside` are keys that its parents must have."""
    section: Any = dict(values)
    for key in reversed(path.split(".")):
        section = {key: section}
    for key, more in beside.items():
        section[key] = {**section.get(key, {}), **more}
    text, _ = pannier.config.find(None, {"train_batch_size": comm.get_world_size(), **section}, None)
    found = pannier.config.Config(text, "", brings_optimizer=False, brings_scheduler=False).config
    for key in path.split("."):
        found = found[key]
    return SimpleNamespace(**found, **{_ATTRIBUTES[key]: found[key] for key in found if key in _ATTRIBUTES})
