"""Attention (section 3.2).

Shapes: q (..., seq_len_q, depth), k (..., seq_len_k, depth), v (..., seq_len_k, depth_v), mask broadcast to
(..., seq_len_q, seq_len_k), where ... is (batch, num_heads) inside MultiHeadAttention.
"""

import keras
import ml_dtypes
from keras import ops

from keras_transformer.calls import ExplicitCall


def scaled_dot_product_attention(q, k, v, mask=None, dropout=None):
    """softmax(q k^T / sqrt(d_k)) v (equation 1).

    Args:
        q, k, v: queries, keys and values.
        mask: 1 (or True) = blocked, of any dtype. A row with every key blocked attends to all of them alike.
        dropout: a function applied to the weights before they meet the values.

    Returns:
        output: (..., seq_len_q, depth_v).
        attention_weights: (..., seq_len_q, seq_len_k), before dropout; each row sums to 1.
    """
    q, k, v = ops.convert_to_tensor(q), ops.convert_to_tensor(k), ops.convert_to_tensor(v)
    logits = ops.matmul(q * q.shape[-1] ** -0.5, ops.swapaxes(k, -2, -1))  # (..., seq_len_q, seq_len_k)
    if mask is not None:
        # The lowest finite number, not -1e9: float16 has no -1e9, and -inf makes NaN of a row that is blocked whole.
        dtype = keras.backend.standardize_dtype(logits.dtype)
        lowest = ops.convert_to_tensor(ml_dtypes.finfo(dtype).min, dtype)
        logits = ops.where(ops.cast(mask, "bool"), lowest, logits)
    # Keras warns of a softmax over one element, which is what the first token's attention to itself is.
    attention_weights = ops.ones_like(logits) if logits.shape[-1] == 1 else ops.softmax(logits, axis=-1)
    kept = attention_weights if dropout is None else dropout(attention_weights)
    return ops.matmul(kept, v), attention_weights


@keras.saving.register_keras_serializable(package="keras_transformer")
class MultiHeadAttention(ExplicitCall, keras.layers.Layer):
    """Attention in num_heads subspaces of depth d_model / num_heads (section 3.2.2).

    Args:
        d_model: the size of the vectors in and out; a multiple of num_heads.
        num_heads: the number of heads.
        rate: dropout on the attention weights, from 0 to 1.

    Call arguments, in this order:
        v, k: (batch, seq_len_k, d_model).
        q: (batch, seq_len_q, d_model).
        mask: broadcast to (batch, num_heads, seq_len_q, seq_len_k); 1 = blocked.
        training: whether to apply dropout.

    Returns:
        output: (batch, seq_len_q, d_model).
        attention_weights: (batch, num_heads, seq_len_q, seq_len_k).
    """

    def __init__(self, d_model, num_heads, rate=0.0, **kwargs):
        super().__init__(**kwargs)
        if d_model % num_heads:
            raise ValueError(
                f"d_model must be a multiple of num_heads, got d_model={d_model} and num_heads={num_heads}"
            )
        self.d_model = d_model
        self.num_heads = num_heads
        self.rate = rate
        self.depth = d_model // num_heads
        self.wq, self.wk, self.wv = (self.projection(name) for name in ("wq", "wk", "wv"))
        self.dense = keras.layers.Dense(d_model, name="dense", dtype=self.dtype_policy)
        self.dropout = keras.layers.Dropout(rate, name="dropout", dtype=self.dtype_policy)

    def projection(self, name):
        # At first as Glorot has one matrix of (d_model, 3 * d_model). With norm="post" a small model learns to look at
        # the source several times sooner than from three of (d_model, d_model).
        initializer = keras.initializers.VarianceScaling(0.5, "fan_avg", "uniform")
        return keras.layers.Dense(self.d_model, kernel_initializer=initializer, name=name, dtype=self.dtype_policy)

    def build(self, v_shape, k_shape, q_shape):
        self.wq.build(q_shape)
        self.wk.build(k_shape)
        self.wv.build(v_shape)
        self.dense.build((*q_shape[:-1], self.d_model))
        self.built = True

    def split_heads(self, x, batch_size):
        """(batch, seq_len, d_model) to (batch, num_heads, seq_len, depth)."""
        # Not -1 for the length: of an empty batch any length would do.
        x = ops.reshape(x, (batch_size, ops.shape(x)[1], self.num_heads, self.depth))
        return ops.transpose(x, (0, 2, 1, 3))

    def keys_values(self, k, v):
        """The heads of keys and values, (batch, num_heads, seq_len_k, depth) each."""
        return self.split_heads(self.wk(k), ops.shape(k)[0]), self.split_heads(self.wv(v), ops.shape(v)[0])

    def call(self, v, k, q, mask=None, training=None):
        batch_size, seq_len_q = ops.shape(q)[:2]
        q = self.split_heads(self.wq(q), batch_size)  # (batch, num_heads, seq_len_q, depth)
        k, v = self.keys_values(k, v)
        return self.attend(q, k, v, mask, (batch_size, seq_len_q, self.d_model), training)

    def attend(self, q, k, v, mask, shape, training=None):
        """The attention of heads, (batch, num_heads, seq_len, depth) each, put together to `shape`, (..., d_model)."""
        dropout = (lambda weights: self.dropout(weights, training=training)) if self.rate else None
        attention, attention_weights = scaled_dot_product_attention(q, k, v, mask, dropout)
        attention = ops.transpose(attention, (0, 2, 1, 3))  # (batch, seq_len_q, num_heads, depth)
        return self.dense(ops.reshape(attention, shape)), attention_weights

    def fused_weights(self):
        """Kernel and bias of wq, wk and wv side by side: in `self_step`, one product instead of three."""
        denses = (self.wq, self.wk, self.wv)
        return tuple(ops.concatenate([getattr(dense, name) for dense in denses], -1) for name in ("kernel", "bias"))

    def step(self, x, keys, values, mask, beam_size):
        """Each hypothesis's newest vector, x (batch * beam_size, d_model), attends to keys and values made before.

        Rows in one matrix, not (batch, beam_size, d_model): TensorFlow then adds the bias inside the product.
        """
        q = ops.reshape(self.wq(x), (ops.shape(keys)[0], beam_size, self.num_heads, self.depth))
        return self.attend(ops.transpose(q, (0, 2, 1, 3)), keys, values, mask, ops.shape(x))[0]

    def self_step(self, x, keys, values, mask, beam_size, fused_weights, place=None):
        """As `step`, to itself as well: its own keys and values are put after those before, or at their place.

        Args:
            x: (batch * beam_size, d_model).
            keys, values: of the tokens before, (batch, num_heads, tar_len * beam_size, depth).
            mask: broadcast to (batch, num_heads, beam_size, (tar_len + 1) * beam_size), with a place (..., room); 1 =
                blocked.
            fused_weights: what the method of that name gives.
            place: how many tokens were before, if keys and values have room for those to come, of a beam of one: (batch
                * num_heads, depth, room) and (batch * num_heads, room, depth), in which XLA writes without a copy.

        Returns:
            output: (batch * beam_size, d_model).
            keys, values: (batch, num_heads, (tar_len + 1) * beam_size, depth); with a place, the shapes that they had.
        """
        kernel, bias = fused_weights
        batch_size = ops.shape(keys)[0] // (1 if place is None else self.num_heads)
        shape = (batch_size, beam_size, 3, self.num_heads, self.depth)
        heads = ops.reshape(ops.add(ops.matmul(x, kernel), bias), shape)
        q, k, v = ops.unstack(ops.transpose(heads, (2, 0, 3, 1, 4)), 3)  # (batch, num_heads, beam_size, depth) each
        if place is None:
            k = keys = ops.concatenate([keys, k], 2)
            v = values = ops.concatenate([values, v], 2)
        else:
            keys = ops.slice_update(keys, (0, 0, place), ops.reshape(k, (-1, self.depth, 1)))
            values = ops.slice_update(values, (0, place, 0), ops.reshape(v, (-1, 1, self.depth)))
            k = ops.swapaxes(ops.reshape(keys, (batch_size, self.num_heads, self.depth, -1)), 2, 3)
            v = ops.reshape(values, (batch_size, self.num_heads, -1, self.depth))
        return self.attend(q, k, v, mask, ops.shape(x))[0], keys, values

    def get_config(self):
        config = {"d_model": self.d_model, "num_heads": self.num_heads, "rate": self.rate}
        return {**super().get_config(), **config}
