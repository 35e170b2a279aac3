"""Names of pipeline parallelism, which Pannier does not have."""

from ..absent import absent_class

PipelineModule = absent_class("deepspeed.pipe", "PipelineModule")
LayerSpec = absent_class("deepspeed.pipe", "LayerSpec")
TiedLayerSpec = absent_class("deepspeed.pipe", "TiedLayerSpec")

__all__ = ["LayerSpec", "PipelineModule", "TiedLayerSpec"]
