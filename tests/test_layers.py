"""The feed-forward network and the two layers, against their equations."""

import keras
import numpy as np
import pytest

from keras_transformer import DecoderLayer, EncoderLayer, create_look_ahead_mask, point_wise_feed_forward_network


def normalized(x):
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-6)


@pytest.fixture
def x(rng):
    return rng.normal(size=(2, 4, 8)).astype("float32")


@pytest.fixture
def enc_output(rng):
    return rng.normal(size=(2, 5, 8)).astype("float32")


def test_feed_forward_by_hand():
    """max(0, [1, 2] W1 + b1) = max(0, [3, -1, 2]) = [3, 0, 2]; times W2, plus b2: [3 + 4 + 10, 3 + 20]."""
    ffn = point_wise_feed_forward_network(2, 3)
    ffn.build((None, None, 2))
    w1, b1 = [[1, 1, 0], [1, -1, 0]], [0, 0, 2]
    w2, b2 = [[1, 1], [5, 5], [2, 0]], [10, 20]
    ffn.set_weights([np.array(weight) for weight in (w1, b1, w2, b2)])
    np.testing.assert_array_equal(ffn(np.array([[[1.0, 2.0]]])), [[[17, 23]]])


def test_feed_forward_takes_each_position_by_itself(x):
    ffn = point_wise_feed_forward_network(8, 16)
    together = ffn(x)
    for position in range(4):
        np.testing.assert_allclose(ffn(x[:, position : position + 1]), together[:, position : position + 1], atol=1e-6)


def test_feed_forward_drops_inner_activations_in_training_alone(x):
    keras.utils.set_random_seed(0)
    ffn = point_wise_feed_forward_network(8, 16, rate=0.5)
    np.testing.assert_array_equal(ffn(x), ffn(x, training=False))
    assert np.abs(ffn(x, training=True) - ffn(x)).max() > 1e-3
    silent = point_wise_feed_forward_network(8, 16, rate=1.0)
    np.testing.assert_allclose(silent(x, training=True), np.zeros((2, 4, 8)), atol=1e-7)  # the bias alone, 0


@pytest.mark.parametrize("layer_class", [EncoderLayer, DecoderLayer])
def test_an_unknown_norm_is_refused(layer_class):
    with pytest.raises(ValueError, match="norm must be one of post, pre, got 'middle'"):
        layer_class(8, 2, 16, norm="middle")


@pytest.mark.parametrize("norm", ["post", "pre"])
@pytest.mark.parametrize("training", [True, False])
def test_encoder_layer_by_its_equations(norm, training, x):
    """Post: LN(x + f(x)) twice. Pre: x + f(LN(x)) twice."""
    mask = np.array([0, 0, 0, 1.0])
    layer = EncoderLayer(8, 2, 16, 0.0, norm)
    got = layer(x, training, mask)

    def attend(y):
        return np.array(layer.mha(y, y, y, mask)[0])

    def feed_forward(y):
        inner, outer = layer.ffn.layers
        return np.maximum(0, y @ inner.kernel.numpy() + inner.bias) @ outer.kernel.numpy() + outer.bias.numpy()

    if norm == "post":
        out1 = normalized(x + attend(x))
        wanted = normalized(out1 + feed_forward(out1))
    else:
        out1 = x + attend(normalized(x))
        wanted = out1 + feed_forward(normalized(out1))
    np.testing.assert_allclose(got, wanted, atol=1e-5)


@pytest.mark.parametrize("norm", ["post", "pre"])
def test_decoder_layer_by_its_equations(norm, x, enc_output):
    """Self-attention, attention to the encoder's output (values and keys from there, queries from here),
    feed-forward."""
    look_ahead_mask, padding_mask = create_look_ahead_mask(4), np.array([0, 0, 1, 1, 1.0])
    layer = DecoderLayer(8, 2, 16, 0.0, norm)
    got, weights1, weights2 = layer(x, enc_output, False, look_ahead_mask, padding_mask)

    def step(y, sublayer):
        if norm == "post":
            return normalized(y + np.array(sublayer(y)))
        return y + np.array(sublayer(normalized(y)))

    out1 = step(x, lambda y: layer.mha1(y, y, y, look_ahead_mask)[0])
    out2 = step(out1, lambda y: layer.mha2(enc_output, enc_output, y, padding_mask)[0])
    np.testing.assert_allclose(got, step(out2, layer.ffn), atol=1e-5)
    assert weights1.shape == (2, 2, 4, 4) and weights2.shape == (2, 2, 4, 5)
    np.testing.assert_array_equal(np.triu(weights1, 1), np.zeros((2, 2, 4, 4)))
    np.testing.assert_array_equal(weights2[..., 2:], np.zeros((2, 2, 4, 3)))


@pytest.mark.parametrize("norm", ["post", "pre"])
def test_rate_drops_each_sublayers_output_not_the_residual(norm, x, enc_output):
    """With rate 1 nothing of the sublayers is left in training: "pre" gives x itself, "post" x normalised."""
    wanted = normalized(x) if norm == "post" else x
    np.testing.assert_allclose(EncoderLayer(8, 2, 16, 1.0, norm)(x, True), wanted, atol=1e-4)
    np.testing.assert_allclose(DecoderLayer(8, 2, 16, 1.0, norm)(x, enc_output, True)[0], wanted, atol=1e-4)
    assert np.abs(EncoderLayer(8, 2, 16, 1.0, norm)(x, False) - wanted).max() > 0.1


@pytest.mark.parametrize("rates", [{"attention_rate": 0.5}, {"ffn_rate": 0.5}])
def test_the_other_rates_act_in_training_alone(rates, x, enc_output):
    keras.utils.set_random_seed(0)
    encoder_layer, decoder_layer = EncoderLayer(8, 2, 16, 0.0, **rates), DecoderLayer(8, 2, 16, 0.0, **rates)
    for call in (lambda t: encoder_layer(x, t), lambda t: decoder_layer(x, enc_output, t)[0]):
        np.testing.assert_array_equal(call(False), call(None))
        assert np.abs(call(True) - call(False)).max() > 1e-2
        assert np.abs(call(True) - call(True)).max() > 1e-2  # drawn anew each time


def test_activation_is_the_feed_forward_networks(x):
    keras.utils.set_random_seed(0)
    layer = EncoderLayer(8, 2, 16, 0.0, activation="gelu")
    layer(x)
    inner, outer = layer.ffn.layers
    before = x @ inner.kernel.numpy() + inner.bias.numpy()
    np.testing.assert_allclose(layer.ffn(x), outer(keras.activations.gelu(before)), atol=1e-5)
    assert (np.array(inner(x)) < 0).any()  # as relu never is
