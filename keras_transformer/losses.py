"""Loss and accuracy over the real tokens: padding counts nowhere."""

import keras
from keras import ops

from keras_transformer.ids import PAD


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
    mask = ops.not_equal(real, PAD)
    # Masked before the logarithm: NaN times 0 is NaN, in the gradient too.
    logits = ops.where(mask[..., None], ops.cast(pred, "float32"), 0.0)
    if label_smoothing:
        vocab_size = pred.shape[-1]
        target = ops.one_hot(real, vocab_size) * (1.0 - label_smoothing) + label_smoothing / vocab_size
        losses = ops.categorical_crossentropy(target, logits, from_logits=True)  # (batch, tar_len)
    else:
        losses = ops.sparse_categorical_crossentropy(real, logits, from_logits=True)
    mask = ops.cast(mask, "float32")
    return ops.sum(losses * mask) / ops.maximum(ops.sum(mask), 1.0)


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
        mask = ops.cast(ops.not_equal(y_true, PAD), "float32")
        weight = mask if sample_weight is None else mask * ops.cast(sample_weight, "float32")
        super().update_state(right, sample_weight=weight)
