"""The learning rate over the updates (section 5.3)."""

import keras
from keras import ops


@keras.saving.register_keras_serializable(package="keras_transformer")
class CustomSchedule(keras.optimizers.schedules.LearningRateSchedule):
    """d_model^-0.5 * min(step^-0.5, step * warmup_steps^-1.5) (equation 3): 0 at step 0, highest at warmup_steps.

    Args:
        d_model: the model's size.
        warmup_steps: the number of updates over which the rate rises; at least 1.
        peak: the highest rate, for the same curve at another height; None for the equation's,
            (d_model * warmup_steps)^-0.5.
    """

    def __init__(self, d_model, warmup_steps=4000, peak=None):
        super().__init__()
        if warmup_steps < 1:
            raise ValueError(f"warmup_steps must be at least 1, got {warmup_steps}")
        self.d_model = d_model
        self.warmup_steps = warmup_steps
        self.peak = peak

    def __call__(self, step):
        step = ops.cast(step, "float32")  # optimizers count in integers, which have no inverse square root
        rising = step * self.warmup_steps**-1.5
        # At step 0, where the inverse square root is infinite, the rising part is the smaller one anyway.
        falling = ops.rsqrt(ops.maximum(step, 1.0))
        scale = self.d_model**-0.5 if self.peak is None else self.peak * self.warmup_steps**0.5
        return scale * ops.minimum(rising, falling)

    def get_config(self):
        return {"d_model": self.d_model, "warmup_steps": self.warmup_steps, "peak": self.peak}
