"""How layers may be called: everything by position, masks always explicit."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_transformer import Decoder, DecoderLayer, Encoder, EncoderLayer, MultiHeadAttention, create_masks
from keras_transformer.calls import ExplicitCall

X = np.random.default_rng(0).normal(size=(2, 4, 8)).astype("float32")
IDS = np.array([[5, 6, 7, 0], [8, 9, 0, 0]], "int32")
MASK = np.array([[0, 0, 0, 1], [0, 0, 1, 1]], "float32")[:, None, None, :]


class Echo(ExplicitCall, keras.layers.Layer):
    """Gives back what it was called with, so a test can see where each argument landed."""

    def call(self, x, training=None, mask=None, scale=1.0):
        self.seen = {"training": training, "mask": mask, "scale": scale}
        return x * scale


def test_every_argument_may_be_given_by_position():
    echo = Echo()
    np.testing.assert_array_equal(echo(X, True, MASK, 2.0), X * 2)
    assert echo.seen["training"] is True
    np.testing.assert_array_equal(echo.seen["mask"], MASK)


@pytest.mark.parametrize("training", [True, False, None])
def test_training_arrives_as_it_was_given(training):
    echo = Echo()
    echo(X, training)
    assert echo.seen["training"] in ((None, False) if training is None else (training,))


def test_an_argument_given_twice_is_refused():
    with pytest.raises(TypeError, match="Echo got two values for argument 'training'"):
        Echo()(X, True, training=False)


def test_one_argument_too_many_is_refused():
    with pytest.raises(TypeError, match="too many positional arguments"):
        Echo()(X, True, None, 1.0, "more")


@pytest.mark.parametrize("how", ["by position", "by name", "mixed", "without a mask"])
def test_attention_takes_the_classic_order(how):
    """S7, https://github.com/keras-team/keras/issues/18676: Keras 3 refuses positional arguments that are no
    tensors."""
    keras.utils.set_random_seed(0)
    mha = MultiHeadAttention(8, 2)
    v, k, q = X, X * 2, X * 3
    by_name = mha(v=v, k=k, q=q, mask=MASK)
    if how == "without a mask":
        calls = [mha(v, k=k, q=q, mask=None), mha(v, k, q, None), mha(v, k, q)]
        by_name = mha(v=v, k=k, q=q, mask=np.zeros_like(MASK))
    else:
        calls = {
            "by position": [mha(v, k, q, MASK), mha(v, k, q, MASK, False)],
            "by name": [mha(mask=MASK, q=q, k=k, v=v)],
            "mixed": [mha(v, k=k, q=q, mask=MASK), mha(v, k, q, mask=MASK, training=False)],
        }[how]
    for output, weights in calls:
        np.testing.assert_array_equal(output, by_name[0])
        np.testing.assert_array_equal(weights, by_name[1])
    assert np.abs(by_name[0] - mha(k, v, q, MASK)[0]).max() > 1e-3  # keys and values are not the same thing


def test_layers_and_model_take_training_by_position(tiny):
    """S7, https://github.com/keras-team/keras/issues/18676: `True` in the middle of the tensors, eager and in a
    graph."""
    encoder_layer, decoder_layer = EncoderLayer(8, 2, 16, 0.0), DecoderLayer(8, 2, 16, 0.0)
    encoder, decoder = Encoder(1, 8, 2, 16, 40, 60, 0.0), Decoder(1, 8, 2, 16, 40, 60, 0.0)
    model = tiny(num_layers=1)
    enc_mask, look_ahead, dec_mask = create_masks(IDS, IDS)
    positional = [
        lambda flag: encoder_layer(X, flag, enc_mask),
        lambda flag: decoder_layer(X, X, flag, look_ahead, dec_mask),
        lambda flag: encoder(IDS, flag, enc_mask),
        lambda flag: decoder(IDS, X, flag, look_ahead, dec_mask),
        lambda flag: model(IDS, IDS, flag, enc_mask, look_ahead, dec_mask),
    ]
    named = [
        lambda: encoder_layer(X, mask=enc_mask),
        lambda: decoder_layer(X, X, look_ahead_mask=look_ahead, padding_mask=dec_mask),
        lambda: encoder(IDS, mask=enc_mask),
        lambda: decoder(IDS, X, look_ahead_mask=look_ahead, padding_mask=dec_mask),
        lambda: model(IDS, IDS, enc_padding_mask=enc_mask, look_ahead_mask=look_ahead, dec_padding_mask=dec_mask),
    ]
    for by_position, by_name in zip(positional, named, strict=True):
        wanted = keras.tree.flatten(by_name())
        for got in (by_position(True), by_position(False), tf.function(lambda f=by_position: f(True))()):
            for one, other in zip(keras.tree.flatten(got), wanted, strict=True):
                np.testing.assert_allclose(one, other, atol=1e-5)


def test_the_first_call_inside_a_function_makes_the_variables_once(tiny):
    """S7, https://github.com/keras-team/keras/issues/18676: first called under tf.function, then in a second one,
    then eagerly: the same 88 variables.

    Encoder: 1 embedding, and in each of 2 layers 4 + 2 dense (12) and 2 normalisations (4); decoder: 1, and in each
    of 2 layers 8 + 2 dense (20) and 3 normalisations (6); the last projection: 2. 1 + 32 + 1 + 52 + 2 = 88.
    """
    model = tiny()
    masks = create_masks(IDS, IDS)
    first = tf.function(lambda inp, tar: model(inp, tar, True, *masks)[0])(IDS, IDS)
    ids_of_variables = [id(v) for v in model.variables]
    assert len(ids_of_variables) == len(set(ids_of_variables)) == 88
    second = tf.function(lambda inp, tar: model(inp, tar, True, *masks)[0])(IDS, IDS)
    eager = model(IDS, IDS, True, *masks)[0]
    assert [id(v) for v in model.variables] == ids_of_variables
    np.testing.assert_allclose(second, first, atol=1e-6)
    np.testing.assert_allclose(eager, first, atol=1e-5)


@pytest.fixture
def masked():
    """Vectors with Keras's implicit mask on them, as an Embedding with mask_zero gives them."""
    return keras.layers.Embedding(10, 8, mask_zero=True)(IDS)


@pytest.mark.parametrize(
    "call",
    [
        lambda x: MultiHeadAttention(8, 2)(x, x, x),
        lambda x: MultiHeadAttention(8, 2)(X, x, X),
        lambda x: EncoderLayer(8, 2, 16)(x),
        lambda x: DecoderLayer(8, 2, 16)(x, X),
        lambda x: DecoderLayer(8, 2, 16)(X, x),
    ],
    ids=["attention", "attention's keys", "encoder layer", "decoder layer", "decoder layer's encoder output"],
)
def test_an_implicit_mask_is_refused_not_ignored(masked, call):
    """M6, https://github.com/keras-team/keras/issues/18416, https://github.com/keras-team/keras-hub/issues/2220:
    padding must not be attended to because a mask was dropped on the way."""
    with pytest.raises(ValueError, match=r"implicit mask[\s\S]*pass mask=, where 1 is blocked"):
        call(masked)


def test_an_explicit_mask_replaces_the_implicit_one(masked):
    keras.utils.set_random_seed(0)
    layer = EncoderLayer(8, 2, 16)
    plain = np.array(masked)
    with_both = layer(masked, mask=MASK)
    np.testing.assert_array_equal(with_both, layer(plain, mask=MASK))
    assert np.abs(with_both - layer(plain)).max() > 1e-3
    assert getattr(with_both, "_keras_mask", None) is None


def test_no_mask_travels_on_with_the_outputs(masked):
    """A mask of ours among the arguments must not come out as Keras's, where it would mean the opposite."""
    mha = MultiHeadAttention(8, 2)
    output, weights = mha(masked, masked, masked, mask=MASK)
    decoded = DecoderLayer(8, 2, 16)(masked, X, look_ahead_mask=MASK, padding_mask=MASK)
    for tensor in (output, weights, *decoded):
        assert getattr(tensor, "_keras_mask", None) is None
    assert mha.compute_mask([X], [MASK]) is None
