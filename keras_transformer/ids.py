"""The four ids every vocabulary here begins with, and the check that an id has a row in its embedding."""

import keras
from keras import ops

PAD, UNK, START, END = 0, 1, 2, 3


def check_ids(ids, vocab_size: int, name: str):
    """The ids, or an error if one has no row: a GPU's lookup would give zeros for it, Keras's takes -1 for the last.

    Eager calls raise ValueError. Inside `tf.function` it is an assertion (InvalidArgumentError), which XLA leaves out.

    Args:
        ids: integers of any shape.
        vocab_size: the number of rows.
        name: what the ids are, for the message.

    Returns:
        The same ids; in a graph, a lookup of these waits for the check.
    """
    wanted = f"{name} ids must be from 0 to {vocab_size - 1} (vocabulary size {vocab_size})"
    low, high = ops.min(ids, initial=0), ops.max(ids, initial=0)
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf  # Keras's own backend, loaded already

        if not tf.executing_eagerly():
            check = tf.debugging.Assert((low >= 0) & (high < vocab_size), [wanted, "got", low, "to", high])
            with tf.control_dependencies([check]):
                return tf.identity(ids)
    elif keras.backend.backend() == "jax" and not hasattr(low, "addressable_shards"):
        return ids  # a tracer: JAX cannot raise from compiled code
    if int(low) < 0 or int(high) >= vocab_size:
        raise ValueError(f"{wanted}, got {int(low) if int(low) < 0 else int(high)}")
    return ids
