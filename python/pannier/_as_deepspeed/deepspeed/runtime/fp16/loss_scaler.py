"""The loss scale, by DeepSpeed's names."""

from pannier.optimizer import LossScaler

INITIAL_LOSS_SCALE = "init_scale"
SCALE_WINDOW = "scale_window"
DELAYED_SHIFT = "delayed_shift"
CONSECUTIVE_HYSTERESIS = "consecutive_hysteresis"
MIN_LOSS_SCALE = "min_scale"

__all__ = ["CONSECUTIVE_HYSTERESIS", "DELAYED_SHIFT", "INITIAL_LOSS_SCALE", "LossScaler", "MIN_LOSS_SCALE", "SCALE_WINDOW"]
