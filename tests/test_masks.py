"""Masks: 1 is blocked."""

import numpy as np
import pytest
import tensorflow as tf

from keras_transformer import create_length_mask, create_look_ahead_mask, create_masks, create_padding_mask


def test_one_is_blocked():
    """M3, https://github.com/tensorflow/text/pull/894: the meaning of 1 is not Keras's."""
    np.testing.assert_array_equal(create_look_ahead_mask(3), [[0, 1, 1], [0, 0, 1], [0, 0, 0]])
    np.testing.assert_array_equal(create_padding_mask([[7, 0]]), [[[[0, 1]]]])


@pytest.mark.parametrize("dtype", ["int32", "int64", "uint16"])
def test_ids_of_any_integer_type(dtype):
    ids = np.array([[7, 6, 0, 0, 1], [1, 2, 3, 0, 0]], dtype)
    mask = create_padding_mask(ids)
    assert mask.shape == (2, 1, 1, 5) and mask.dtype == "float32"
    np.testing.assert_array_equal(mask[:, 0, 0], [[0, 0, 1, 1, 0], [0, 0, 0, 1, 1]])


@pytest.mark.parametrize("size", [1, 2, 5])
def test_look_ahead_blocks_what_comes_after(size):
    mask = create_look_ahead_mask(size)
    assert mask.shape == (size, size)
    for query in range(size):
        for key in range(size):
            assert mask[query, key] == (1 if key > query else 0)


@pytest.mark.parametrize("lengths", [[3, 1, 5, 0], np.array([5, 5, 2, 4], "int64"), tf.constant([1, 2, 3, 4])])
def test_lengths_and_padded_ids_give_the_same_mask(lengths):
    """The first document blocks by `valid_lens`, the second by ids: on padded ids it is the same mask."""
    ids = np.zeros((4, 5), "int32")
    for row, length in enumerate(np.array(lengths)):
        ids[row, :length] = 7
    by_length = create_length_mask(lengths, 5)
    np.testing.assert_array_equal(by_length, create_padding_mask(ids))
    assert by_length.shape == (4, 1, 1, 5) and by_length.dtype == "float32"


def test_a_length_past_the_end_blocks_nothing():
    np.testing.assert_array_equal(create_length_mask([9, 2], 3)[:, 0, 0], [[0, 0, 0], [0, 0, 1]])


def test_create_masks_by_brute_force():
    """M1, https://github.com/keras-team/keras-io/pull/1046, https://github.com/keras-team/keras-io/issues/1964: the
    decoder's attention to the source is blocked by the source's padding, and by nothing of the target."""
    inp = np.array([[5, 6, 7, 8, 9, 0, 0], [5, 6, 0, 0, 0, 0, 0]])
    tar = np.array([[2, 6, 7, 0, 0], [0, 6, 0, 8, 9]])
    enc_padding_mask, look_ahead_mask, dec_padding_mask = create_masks(inp, tar)
    assert enc_padding_mask.shape == dec_padding_mask.shape == (2, 1, 1, 7)
    assert look_ahead_mask.shape == (2, 1, 5, 5)
    for row in range(2):
        for key in range(7):
            assert enc_padding_mask[row, 0, 0, key] == dec_padding_mask[row, 0, 0, key] == (inp[row, key] == 0)
        for query in range(5):
            for key in range(5):
                assert look_ahead_mask[row, 0, query, key] == (key > query or tar[row, key] == 0)


@pytest.mark.parametrize("jit_compile", [False, True])
def test_lengths_known_only_at_run_time(jit_compile):
    spec = tf.TensorSpec((None, None), "int32")
    inp, tar = np.array([[5, 0, 0]], "int32"), np.array([[2, 6, 0, 0]], "int32")
    if jit_compile:  # XLA wants the shapes at compile time
        compiled = tf.function(create_masks, jit_compile=True)(tf.constant(inp), tf.constant(tar))
    else:
        compiled = tf.function(create_masks, input_signature=[spec, spec])(inp, tar)
    for got, wanted in zip(compiled, create_masks(inp, tar), strict=True):
        np.testing.assert_array_equal(got, wanted)
    np.testing.assert_array_equal(compiled[1][0, 0], [[0, 1, 1, 1], [0, 0, 1, 1], [0, 0, 1, 1], [0, 0, 1, 1]])
