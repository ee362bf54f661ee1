"""Greedy decoding over hand-made step functions."""

import numpy as np
import tensorflow as tf

from keras_transformer.decoding import greedy
from keras_transformer.ids import END, PAD, START


def constant(probabilities):
    """The same next-token distribution at every step, whatever came before."""
    logits = np.full(6, -1e4, np.float32)
    for token, probability in probabilities.items():
        logits[token] = np.log(probability)
    return lambda ids: tf.tile(logits[None], [tf.shape(ids)[0], 1])


def test_ends_with_the_end_token_and_sums_the_log_probabilities():
    """First 5 with 0.6, then the end with 0.9: ln 0.6 + ln 0.9."""

    def next_logits(ids):
        first = tf.math.log([[1e-9, 1e-9, 1e-9, 0.4, 1e-9, 0.6]])
        then = tf.math.log([[1e-9, 1e-9, 1e-9, 0.9, 1e-9, 0.1]])
        return tf.where(tf.shape(ids)[1] == 1, first, then)

    ids, scores = greedy(next_logits, tf.constant([10]))
    assert ids.numpy().tolist() == [[5, END]]
    np.testing.assert_allclose(scores, [np.log(0.6) + np.log(0.9)], rtol=1e-5)


def test_stops_at_each_rows_own_maximum():
    """B8, https://github.com/CyberZHG/keras-transformer/issues/3: a model that never ends comes to the limit."""
    ids, scores = greedy(constant({4: 1.0}), tf.constant([3, 1, 0]))
    assert ids.numpy().tolist() == [[4, 4, 4], [4, PAD, PAD], [PAD, PAD, PAD]]
    np.testing.assert_allclose(scores, [0, 0, 0], atol=1e-6)


def test_padding_and_start_are_never_chosen_and_leave_the_rest_as_it_was():
    """They are the most probable here; the third, with 0.1, is taken, and counts as ln 0.1."""
    ids, scores = greedy(constant({PAD: 0.5, START: 0.4, END: 0.1}), tf.constant([5]))
    assert ids.numpy().tolist() == [[END]]
    np.testing.assert_allclose(scores, [np.log(0.1)], rtol=1e-5)


def test_a_finished_row_is_all_padding_and_the_loop_ends_with_the_last_row():
    """Row 0 ends at its second token, row 1 at its fourth; nothing more is decoded.

    B7, https://github.com/tensorflow/tensorflow/issues/21920: junk after the end, and a loop that runs to the limit.
    """
    steps = []

    def next_logits(ids):
        steps.append(int(tf.shape(ids)[1]))
        ends = tf.constant([2, 4]) == tf.shape(ids)[1]
        return tf.one_hot(tf.where(ends, END, 4), 6, on_value=0.0, off_value=-1e4)

    ids, _ = greedy(next_logits, tf.constant([50, 50]))
    assert ids.numpy().tolist() == [[4, END, PAD, PAD], [4, 4, 4, END]]
    assert steps == [1, 2, 3, 4]


def test_an_empty_batch_gives_nothing():
    ids, scores = greedy(constant({END: 1.0}), tf.zeros([0], tf.int32))
    assert ids.shape[0] == 0 and scores.shape == (0,)
