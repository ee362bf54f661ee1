"""Decoding over a step function; nothing here knows a model."""

from collections.abc import Callable

import tensorflow as tf

from keras_transformer.ids import END, PAD, START


def greedy(next_logits: Callable[[tf.Tensor], tf.Tensor], max_lengths: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """The most probable next token, again and again, until every row has ended.

    Padding and start are never chosen; that does not change the log-probabilities of the rest.

    Args:
        next_logits: from the ids so far, (batch, n) beginning with the start id, to logits (batch, vocab_size).
        max_lengths: the most tokens of each row, the end token counted, (batch,).

    Returns:
        ids: (batch, longest), without the start id; padding after a row's end.
        scores: each row's summed log-probability, its end token included, (batch,) float32.
    """
    batch = tf.shape(max_lengths)[0]

    def unfinished(ids, scores, done):
        return ~tf.reduce_all(done)

    def step(ids, scores, done):
        log_probs = tf.nn.log_softmax(tf.cast(next_logits(ids), tf.float32))
        vocab = tf.range(tf.shape(log_probs)[-1])
        allowed = tf.where((vocab == PAD) | (vocab == START), log_probs.dtype.min, log_probs)
        token = tf.where(done, PAD, tf.argmax(allowed, -1, tf.int32))
        scores += tf.where(done, 0.0, tf.reduce_max(allowed, -1))
        done |= (token == END) | (tf.shape(ids)[1] >= max_lengths)
        return tf.concat([ids, token[:, None]], 1), scores, done

    ids, scores, _ = tf.while_loop(
        unfinished,
        step,
        (tf.fill([batch, 1], START), tf.zeros([batch]), max_lengths < 1),
        shape_invariants=(tf.TensorShape([None, None]), tf.TensorShape([None]), tf.TensorShape([None])),
    )
    return ids[:, 1:], scores
