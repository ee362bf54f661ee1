"""Positions: the sinusoidal table of section 3.5, and the layer that adds it."""

import keras
import numpy as np
from keras import ops

from keras_transformer.calls import ExplicitCall


def positional_encoding(position: int, d_model: int) -> np.ndarray:
    """The table of section 3.5: sines in the even channels, cosines in the odd ones.

    PE(pos, 2i) = sin(pos / 10000^(2i / d_model)), PE(pos, 2i + 1) = cos of the same angle. A shift by k positions turns
    each pair of channels by a fixed angle, so PE(pos + k) is a fixed linear map of PE(pos).

    Args:
        position: the number of positions.
        d_model: the number of channels.

    Returns:
        float32 (1, position, d_model), computed in float64.
    """
    channels = np.arange(d_model)
    angles = np.arange(position)[:, None] / np.power(10000.0, 2 * (channels // 2) / d_model)
    table = np.where(channels % 2 == 0, np.sin(angles), np.cos(angles))
    return table[None].astype("float32")


@keras.saving.register_keras_serializable(package="keras_transformer")
class PositionalEncoding(ExplicitCall, keras.layers.Layer):
    """Adds the encoding of its position to each vector of a sequence. Override `table` for another encoding.

    Args:
        maximum_position_encoding: the longest sequence it takes.
        d_model: the vectors' size.

    Call arguments:
        x: (batch, seq_len, d_model).
        start: the position of the first vector.

    Returns:
        The same shape. A longer sequence raises ValueError, or InvalidArgumentError in a graph that does not know its
        length beforehand.
    """

    def __init__(self, maximum_position_encoding, d_model, **kwargs):
        super().__init__(**kwargs)
        self.maximum_position_encoding = maximum_position_encoding
        self.d_model = d_model
        # float32 until it is added: bfloat16 does not hold the angles of positions above 256.
        self.encoding = self.table()

    def table(self) -> np.ndarray:
        return positional_encoding(self.maximum_position_encoding, self.d_model)

    def build(self, x_shape):
        self.built = True

    def call(self, x, start=0):
        seq_len = ops.shape(x)[1]
        if isinstance(start, int) and isinstance(seq_len, int) and start + seq_len > self.maximum_position_encoding:
            raise ValueError(
                f"a sequence of {start + seq_len} positions is longer than the position table, "
                f"which has {self.maximum_position_encoding}"
            )
        # A slice of exactly seq_len rows: `[:, :seq_len]` past the table's end would be short, and one row would be
        # added to every position.
        rows = ops.slice(ops.convert_to_tensor(self.encoding), (0, start, 0), (1, seq_len, self.d_model))
        return x + ops.cast(rows, x.dtype)

    def compute_output_shape(self, x_shape):
        return x_shape

    def get_config(self):
        config = {"maximum_position_encoding": self.maximum_position_encoding, "d_model": self.d_model}
        return {**super().get_config(), **config}
