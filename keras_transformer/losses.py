"""Loss and accuracy over the real tokens: padding counts nowhere."""

import keras
from keras import ops

from keras_transformer.ids import PAD


def cross_entropy(real, logits, label_smoothing):
    """Smoothed cross-entropy of each position, with a gradient that is 0 at padding whatever the logits there.

    Left to automatic differentiation, the smoothed target and the mask are tensors of the logits' size; the vocabulary
    makes that the largest part of a small model's step.

    Args:
        real: ids (...,).
        logits: float32 (..., vocab_size).
        label_smoothing: see `loss_function`.

    Returns:
        float32 (...,); anything at padding.
    """
    vocab_size = logits.shape[-1]
    mask = ops.not_equal(real, PAD)[..., None]
    real = ops.expand_dims(real, -1)

    @ops.custom_gradient
    def losses(logits):
        right = ops.squeeze(ops.take_along_axis(logits, real, axis=-1), -1)
        log_sum = ops.logsumexp(logits, axis=-1)
        smoothed = (1 - label_smoothing) * right + label_smoothing * ops.mean(logits, axis=-1)

        def gradient(*args, upstream=None):
            upstream = (args[0] if upstream is None else upstream)[..., None]
            even = ops.softmax(logits) - label_smoothing / vocab_size
            hot = ops.one_hot(ops.squeeze(real, -1), vocab_size, dtype=logits.dtype) * (1 - label_smoothing)
            return ops.where(mask, (even - hot) * upstream, 0.0)

        return log_sum - smoothed, gradient

    return losses(logits)


@keras.saving.register_keras_serializable(package="keras_transformer")
def loss_function(real, pred, label_smoothing=0.0):
    """Cross-entropy in nats, summed over the real tokens and divided by their number; 0 if there are none.

    Args:
        real: ids (batch, tar_len), 0 = padding.
        pred: logits (batch, tar_len, vocab_size); at padding they may be anything, NaN included.
        label_smoothing: this share of the target probability is spread evenly over the vocabulary (section 5.4).

    Returns:
        A float32 scalar.
    """
    real, pred = ops.convert_to_tensor(real), ops.cast(ops.convert_to_tensor(pred), "float32")
    mask = ops.not_equal(real, PAD)
    losses = ops.where(mask, cross_entropy(real, pred, label_smoothing), 0.0)
    return ops.sum(losses) / ops.maximum(ops.sum(ops.cast(mask, "float32")), 1.0)


@keras.saving.register_keras_serializable(package="keras_transformer")
class MaskedCrossEntropy(keras.losses.Loss):
    """`loss_function` for `compile`, with its label smoothing kept when the model is saved."""

    def __init__(self, label_smoothing=0.0, name="masked_cross_entropy"):
        super().__init__(name=name)
        self.label_smoothing = label_smoothing

    def call(self, y_true, y_pred):
        return loss_function(y_true, y_pred, self.label_smoothing)

    def get_config(self):
        return {"label_smoothing": self.label_smoothing, "name": self.name}


@keras.saving.register_keras_serializable(package="keras_transformer")
class TokenAccuracy(keras.metrics.Mean):
    """The share of real tokens that have the highest logit, over all batches since the last reset."""

    def __init__(self, name="token_accuracy", dtype=None):
        super().__init__(name=name, dtype=dtype)

    def update_state(self, y_true, y_pred, sample_weight=None):
        y_true = ops.cast(y_true, "int32")
        right = ops.cast(ops.equal(ops.argmax(y_pred, axis=-1), y_true), "float32")
        weight = ops.cast(ops.not_equal(y_true, PAD), "float32")
        if sample_weight is not None:  # a weight for each row, (batch,), or for each token
            sample_weight = ops.cast(sample_weight, "float32")
            weight *= sample_weight[:, None] if len(sample_weight.shape) == 1 else sample_weight
        # Flat, or Mean would average within each row first and count a row of one token as much as one of nine.
        super().update_state(ops.reshape(right, (-1,)), sample_weight=ops.reshape(weight, (-1,)))
