"""The ids that every vocabulary begins with, and the check of ids against a vocabulary's size."""

import numpy as np
import pytest
import tensorflow as tf

from keras_transformer.ids import END, PAD, START, UNK, check_ids

GOOD = np.array([[5, 6, 39]], "int32")
BAD = [(40, [[5, 40, 6]]), (-1, [[5, -1, 6]])]


def test_the_special_ids_are_the_first_four():
    assert (PAD, UNK, START, END) == (0, 1, 2, 3)


@pytest.mark.parametrize("ids", [[[0, 39]], [[7]], np.zeros((2, 0), "int32"), np.array([3], "uint8")])
def test_ids_from_0_to_the_last_pass(ids):
    assert check_ids(ids, 40, "source") is ids


@pytest.mark.parametrize(("bad", "ids"), BAD)
def test_an_eager_call_names_the_id_and_the_size(bad, ids):
    """D13, https://github.com/tensorflow/tensorflow/issues/27033 and /5847: a GPU reads zeros for a bad id."""
    with pytest.raises(ValueError, match=rf"source ids must be from 0 to 39 \(vocabulary size 40\), got {bad}$"):
        check_ids(ids, 40, "source")


@pytest.mark.parametrize(("bad", "ids"), BAD)
def test_a_graph_names_the_id_and_the_size(bad, ids):
    """D13, https://github.com/tensorflow/tensorflow/issues/27033 and /5847: the check holds in tf.function too."""

    @tf.function(input_signature=[tf.TensorSpec((None, None), "int32")])
    def checked(ids):
        check_ids(ids, 40, "source")
        return ids

    assert checked(tf.constant(GOOD)).numpy().tolist() == GOOD.tolist()
    with pytest.raises(tf.errors.InvalidArgumentError, match=rf"vocabulary size 40[\s\S]*{bad}"):
        checked(tf.constant(ids))


@pytest.mark.parametrize(("bad", "ids"), BAD)
@pytest.mark.parametrize("side", ["encoder", "decoder"])
def test_the_model_refuses_an_id_without_a_row(tiny, side, bad, ids):
    """D13, https://github.com/tensorflow/tensorflow/issues/27033 and /5847: on the source side and the target side,
    eager and in a graph."""
    model = tiny()
    ids = np.array(ids, "int32")
    pair = (ids, GOOD) if side == "encoder" else (GOOD, ids)
    with pytest.raises(ValueError, match=rf"{side} ids must be from 0 to 39 \(vocabulary size 40\), got {bad}"):
        model(pair)
    with pytest.raises(tf.errors.InvalidArgumentError, match=rf"{side} ids must be from 0 to 39"):
        tf.function(model)(pair)


def test_sizes_of_source_and_target_are_checked_apart(tiny):
    """Id 45 has a row among 50 targets, none among 40 sources."""
    model = tiny(target_vocab_size=50)
    high = np.array([[5, 45]], "int32")
    assert model((GOOD, high)).shape == (1, 2, 50)
    with pytest.raises(ValueError, match=r"encoder ids must be from 0 to 39 .*got 45"):
        model((high, high))


def test_a_compiled_program_takes_good_ids(tiny):
    """XLA has no assertions: the check must not keep a model from being compiled."""
    model = tiny(num_layers=1)
    pair = (GOOD, GOOD)
    compiled = tf.function(model, jit_compile=True)(pair)
    np.testing.assert_allclose(compiled, model(pair), atol=1e-5)
