"""Adagrad."""

from pannier import DeepSpeedCPUAdagrad

__all__ = ["DeepSpeedCPUAdagrad"]
