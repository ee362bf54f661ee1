"""The table of positions and the layer that adds it."""

import math

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_transformer import PositionalEncoding, positional_encoding


def test_sines_and_cosines_alternate():
    """P3, https://github.com/tensorflow/text/issues/1122: interleaved as in the paper, not one half after the other."""
    table = positional_encoding(2, 8)
    assert table.shape == (1, 2, 8) and table.dtype == "float32"
    np.testing.assert_array_equal(table[0, 0], [0, 1, 0, 1, 0, 1, 0, 1])
    np.testing.assert_allclose(
        table[0, 1], [0.841471, 0.540302, 0.099833, 0.995004, 0.01, 0.99995, 0.001, 1.0], atol=1e-6
    )


@pytest.mark.parametrize("d_model", [2, 5, 6])
def test_the_table_is_the_formula(d_model):
    table = positional_encoding(50, d_model)[0]
    for position in (0, 1, 7, 49):
        for channel in range(d_model):
            angle = position / 10000 ** (2 * (channel // 2) / d_model)
            wanted = math.cos(angle) if channel % 2 else math.sin(angle)
            assert table[position, channel] == pytest.approx(wanted, abs=1e-6)


@pytest.mark.parametrize("shift", [1, 3, 17])
def test_a_shift_is_a_fixed_linear_map(shift):
    """The first document: PE(pos + shift) = R PE(pos) with the same R at every position. R turns each pair of channels
    by shift * frequency: [[cos, sin], [-sin, cos]] of the pair (sin, cos)."""
    d_model = 8
    table = positional_encoding(200, d_model)[0].astype("float64")
    rotation = np.zeros((d_model, d_model))
    for pair in range(d_model // 2):
        angle = shift / 10000 ** (2 * pair / d_model)
        block = [[math.cos(angle), math.sin(angle)], [-math.sin(angle), math.cos(angle)]]
        rotation[2 * pair : 2 * pair + 2, 2 * pair : 2 * pair + 2] = block
    np.testing.assert_allclose(table[:-shift] @ rotation.T, table[shift:], atol=1e-6)


def test_the_table_is_as_long_as_asked_not_as_the_vocabulary(tiny):
    """P1, https://github.com/tensorflow/tensorflow/issues/43674, https://github.com/tensorflow/text/pull/850: 8000
    ids and pe_input 60 make a table of 60."""
    model = tiny(num_layers=1, input_vocab_size=8000, pe_input=60)
    assert model.encoder.pos_encoding.encoding.shape == (1, 60, 16)
    tar = np.array([[2, 5]], "int32")
    assert model((np.full((1, 60), 7999), tar)).shape == (1, 2, 40)
    long = np.full((1, 61), 5)
    for call in (model, tf.function(model)):
        with pytest.raises(ValueError, match=r"61 positions[\s\S]*60"):
            call((long, tar))
    in_a_graph = tf.function(lambda inp: model((inp, tar)), input_signature=[tf.TensorSpec((None, None), "int32")])
    assert in_a_graph(np.full((1, 60), 5)).shape == (1, 2, 40)
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"60[\s\S]*61"):
        in_a_graph(long)


@pytest.mark.parametrize(("pe_target", "tar_len"), [(8, 11), (1, 5), (1, 2)])
def test_a_target_longer_than_the_table_is_refused(tiny, pe_target, tar_len):
    """P2, https://github.com/spring-media/headliner/issues/17: never a clash of shapes in mid-epoch, never one row
    broadcast over all positions."""
    model = tiny(num_layers=1, pe_target=pe_target)
    inp = np.array([[5, 6]], "int32")
    with pytest.raises(ValueError, match=rf"{tar_len} positions is longer than .* which has {pe_target}\b"):
        model((inp, np.full((1, tar_len), 5)))
    with pytest.raises(ValueError, match=rf"{tar_len} positions"):
        model((keras.Input((2,), dtype="int32"), keras.Input((tar_len,), dtype="int32")))
    in_a_graph = tf.function(lambda tar: model((inp, tar)), input_signature=[tf.TensorSpec((None, None), "int32")])
    with pytest.raises(tf.errors.InvalidArgumentError):
        in_a_graph(np.full((1, tar_len), 5))
    assert model((inp, np.full((1, pe_target), 5))).shape == (1, pe_target, 40)


@pytest.mark.parametrize(("policy", "tolerance"), [("mixed_float16", 1e-3), ("mixed_bfloat16", 5e-3)])
def test_half_precision_keeps_the_positions_apart(policy, tolerance):
    """P5, https://github.com/wfondrie/depthcharge/pull/82: float16 has no 2049, bfloat16 no 257; the angles need
    them."""
    layer = PositionalEncoding(4096, 16, dtype=policy)
    added = keras.ops.convert_to_numpy(keras.ops.cast(layer(np.zeros((1, 4096, 16))), "float32"))[0]
    angles = np.arange(4096)[:, None] / 10000.0 ** (2 * (np.arange(16) // 2) / 16)
    exact = np.where(np.arange(16) % 2, np.cos(angles), np.sin(angles))
    assert np.abs(added - exact).max() < tolerance
    assert np.abs(added[2049] - added[2048]).max() > 0.1


def test_the_layer_adds_row_by_row(rng):
    x = rng.normal(size=(2, 3, 6)).astype("float32")
    table = positional_encoding(10, 6)
    np.testing.assert_allclose(PositionalEncoding(10, 6)(x), x + table[:, :3], atol=1e-7)


def test_another_encoding_needs_only_its_table():
    class Counting(PositionalEncoding):
        def table(self):
            return np.arange(self.maximum_position_encoding, dtype="float32")[None, :, None] * np.ones(self.d_model)

    np.testing.assert_array_equal(Counting(5, 2)(np.zeros((1, 3, 2))), [[[0, 0], [1, 1], [2, 2]]])
