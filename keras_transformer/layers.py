"""The two layers of the model (section 3.1): attention and feed-forward, each inside a residual and a normalisation."""

from typing import Any, NamedTuple

import keras
from keras import ops

from keras_transformer.attention import MultiHeadAttention
from keras_transformer.calls import ExplicitCall

NORMS = ("post", "pre")


def point_wise_feed_forward_network(d_model, dff, activation="relu", rate=0.0, name=None, dtype=None):
    """max(0, x W1 + b1) W2 + b2 at each position (equation 2); dropout `rate` on the inner activations."""
    inner = [keras.layers.Dense(dff, activation=activation, name="inner", dtype=dtype)]
    if rate:
        inner.append(keras.layers.Dropout(rate, name="dropout", dtype=dtype))
    # Sequential does not hand its dtype on to the layers inside.
    return keras.Sequential([*inner, keras.layers.Dense(d_model, name="outer", dtype=dtype)], name=name)


def layer_normalization(epsilon, name, dtype):
    return keras.layers.LayerNormalization(epsilon=epsilon, name=name, dtype=dtype)


class ResidualLayer(ExplicitCall, keras.layers.Layer):
    """What EncoderLayer and DecoderLayer share: their arguments, their feed-forward network, their residuals.

    Args:
        d_model: the size of the vectors in and out.
        num_heads: the number of attention heads; divides d_model.
        dff: the size inside the feed-forward network.
        rate: dropout on each sublayer's output (section 5.4), from 0 to 1.
        norm: "post" normalises the residual sum, as the paper does; "pre" the sublayer's input.
        activation: of the feed-forward network, as Keras names it.
        attention_rate: dropout on the attention weights.
        ffn_rate: dropout inside the feed-forward network.
        norm_epsilon: added to the variance when normalising.
    """

    def __init__(
        self,
        d_model,
        num_heads,
        dff,
        rate=0.1,
        norm="post",
        activation="relu",
        attention_rate=0.0,
        ffn_rate=0.0,
        norm_epsilon=1e-6,
        **kwargs,
    ):
        super().__init__(**kwargs)
        if norm not in NORMS:
            raise ValueError(f"norm must be one of {', '.join(NORMS)}, got {norm!r}")
        self.d_model = d_model
        self.num_heads = num_heads
        self.dff = dff
        self.rate = rate
        self.norm = norm
        self.activation = activation
        self.attention_rate = attention_rate
        self.ffn_rate = ffn_rate
        self.norm_epsilon = norm_epsilon
        self.make_sublayers()
        self.ffn = point_wise_feed_forward_network(d_model, dff, activation, ffn_rate, "ffn", self.dtype_policy)

    def normalization(self, name):
        return layer_normalization(self.norm_epsilon, name, self.dtype_policy)

    def attention(self, name):
        return MultiHeadAttention(self.d_model, self.num_heads, self.attention_rate, name=name, dtype=self.dtype_policy)

    def residual(self, x, sublayer, layernorm, dropout, training):
        """x + dropout(sublayer(x)) and its normalisation, around a sublayer that returns (output, weights)."""
        output, weights = sublayer(layernorm(x) if self.norm == "pre" else x)
        x = x + dropout(output, training=training)
        return (x if self.norm == "pre" else layernorm(x)), weights

    def feed_forward(self, x):
        for layer in self.ffn.layers:  # not self.ffn(x): a Sequential takes no other rank than it was built for
            x = layer(x)
        return x, None

    def get_config(self):
        names = ("d_model", "num_heads", "dff", "rate", "norm", "activation", "attention_rate", "ffn_rate")
        names += ("norm_epsilon",)
        return {**super().get_config(), **{name: getattr(self, name) for name in names}}


@keras.saving.register_keras_serializable(package="keras_transformer")
class EncoderLayer(ResidualLayer):
    """Self-attention, then the feed-forward network; the arguments are ResidualLayer's.

    Call arguments, in this order:
        x: (batch, inp_len, d_model).
        training: whether to apply dropout.
        mask: broadcast to (batch, num_heads, inp_len, inp_len); 1 = blocked.

    Returns:
        (batch, inp_len, d_model).
    """

    def make_sublayers(self):
        self.mha = self.attention("mha")
        self.layernorm1 = self.normalization("layernorm1")
        self.layernorm2 = self.normalization("layernorm2")
        self.dropout1 = keras.layers.Dropout(self.rate, name="dropout1", dtype=self.dtype_policy)
        self.dropout2 = keras.layers.Dropout(self.rate, name="dropout2", dtype=self.dtype_policy)

    def build(self, x_shape):
        self.mha.build(x_shape, x_shape, x_shape)
        for sublayer in (self.ffn, self.layernorm1, self.layernorm2):
            sublayer.build(x_shape)
        self.built = True

    def call(self, x, training=None, mask=None):
        x, _ = self.residual(x, lambda y: self.mha(y, y, y, mask, training), self.layernorm1, self.dropout1, training)
        x, _ = self.residual(x, self.feed_forward, self.layernorm2, self.dropout2, training)
        return x


class LayerState(NamedTuple):
    """What a DecoderLayer keeps between two tokens, (batch, num_heads, length, depth) each.

    `keys` and `values` are the decoded tokens', their length is tar_len * beam_size, the beam's slots of one token
    beside each other, or, with room for those to come, shaped as `MultiHeadAttention.self_step` has it; `enc_keys` and
    `enc_values` are the encoder output's, made once.
    """

    keys: Any
    values: Any
    enc_keys: Any
    enc_values: Any


@keras.saving.register_keras_serializable(package="keras_transformer")
class DecoderLayer(ResidualLayer):
    """Self-attention, attention to the encoder's output, then the feed-forward network; ResidualLayer's arguments.

    Call arguments, in this order:
        x: (batch, tar_len, d_model).
        enc_output: (batch, inp_len, d_model).
        training: whether to apply dropout.
        look_ahead_mask: broadcast to (batch, num_heads, tar_len, tar_len); 1 = blocked.
        padding_mask: the source's padding, broadcast to (batch, num_heads, tar_len, inp_len); 1 = blocked.

    Returns:
        out: (batch, tar_len, d_model).
        attention_weights_block1: the self-attention's, (batch, num_heads, tar_len, tar_len).
        attention_weights_block2: the attention to the source's, (batch, num_heads, tar_len, inp_len).
    """

    def make_sublayers(self):
        self.mha1 = self.attention("mha1")
        self.mha2 = self.attention("mha2")
        self.layernorm1 = self.normalization("layernorm1")
        self.layernorm2 = self.normalization("layernorm2")
        self.layernorm3 = self.normalization("layernorm3")
        self.dropout1 = keras.layers.Dropout(self.rate, name="dropout1", dtype=self.dtype_policy)
        self.dropout2 = keras.layers.Dropout(self.rate, name="dropout2", dtype=self.dtype_policy)
        self.dropout3 = keras.layers.Dropout(self.rate, name="dropout3", dtype=self.dtype_policy)

    def build(self, x_shape, enc_output_shape):
        self.mha1.build(x_shape, x_shape, x_shape)
        self.mha2.build(enc_output_shape, enc_output_shape, x_shape)
        for sublayer in (self.ffn, self.layernorm1, self.layernorm2, self.layernorm3):
            sublayer.build(x_shape)
        self.built = True

    def call(self, x, enc_output, training=None, look_ahead_mask=None, padding_mask=None):
        x, weights1 = self.residual(
            x, lambda y: self.mha1(y, y, y, look_ahead_mask, training), self.layernorm1, self.dropout1, training
        )
        x, weights2 = self.residual(
            x,
            lambda y: self.mha2(enc_output, enc_output, y, padding_mask, training),
            self.layernorm2,
            self.dropout2,
            training,
        )
        x, _ = self.residual(x, self.feed_forward, self.layernorm3, self.dropout3, training)
        return x, weights1, weights2

    def init_state(self, enc_output, room=None) -> LayerState:
        """The state before the first token, from the encoder's output (batch, inp_len, d_model).

        With `room` for so many tokens, of a beam of one, it keeps its shapes.
        """
        enc_keys, enc_values = self.mha2.keys_values(enc_output, enc_output)
        if room is None:
            keys = values = ops.zeros_like(enc_keys[:, :, :0])
        else:
            batch_size, num_heads, _, depth = ops.shape(enc_keys)
            keys = ops.zeros((batch_size * num_heads, depth, room), enc_keys.dtype)
            values = ops.swapaxes(keys, 1, 2)
        return LayerState(keys, values, enc_keys, enc_values)

    def step(self, x, state, mask, padding_mask, beam_size, fused_weights, place=None):
        """One token of each hypothesis: `call` on x (batch * beam_size, d_model), with what `state` keeps.

        Args:
            mask: broadcast to (batch, num_heads, beam_size, (tar_len + 1) * beam_size); 1 = blocked, such as the
                tokens of another hypothesis. With a place (..., room), and those to come are blocked.
            padding_mask: the source's padding, broadcast to (batch, num_heads, beam_size, inp_len); 1 = blocked.
            fused_weights: of mha1, `MultiHeadAttention.fused_weights`.
            place: how many tokens there were before, for a state with room.

        Returns:
            (batch * beam_size, d_model), and the state with this token.
        """

        def self_attention(y):
            before = (state.keys, state.values)
            output, *kept = self.mha1.self_step(y, *before, mask, beam_size, fused_weights, place)
            return output, kept

        def source_attention(y):
            return self.mha2.step(y, state.enc_keys, state.enc_values, padding_mask, beam_size), None

        x, (keys, values) = self.residual(x, self_attention, self.layernorm1, self.dropout1, False)
        x, _ = self.residual(x, source_attention, self.layernorm2, self.dropout2, False)
        x, _ = self.residual(x, self.feed_forward, self.layernorm3, self.dropout3, False)
        return x, state._replace(keys=keys, values=values)
