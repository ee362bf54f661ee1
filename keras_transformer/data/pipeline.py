"""From sentence pairs to batches of ids: (inp, tar), padded, each holding about as many tokens as a budget allows."""

import itertools
import logging
from dataclasses import dataclass

import numpy as np
import tensorflow as tf

from keras_transformer.data.sources import Pairs
from keras_transformer.data.tokenizer import Tokenizer, Tokenizers
from keras_transformer.errors import DataError
from keras_transformer.ids import START

LINES_AT_ONCE = 8192
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Corpus:
    """Encoded pairs. Source ids (size, None) end with the end id; target ids also begin with the start id."""

    source: tf.RaggedTensor
    target: tf.RaggedTensor

    @property
    def size(self) -> int:
        return int(self.source.nrows())


def encode_lines(tokenizer: Tokenizer, lines: list[str]) -> tf.RaggedTensor:
    chunks = [tokenizer.encode(tf.constant(lines[i : i + LINES_AT_ONCE])) for i in range(0, len(lines), LINES_AT_ONCE)]
    return tf.concat(chunks, axis=0)


def encode_pairs(pairs: Pairs, tokenizers: Tokenizers, pe_input: int, pe_target: int, name: str) -> Corpus:
    """Encode the pairs that can be trained on, and log how many were left out.

    A pair is left out whole when a side is blank or has more ids than its position table: cut short, its target would
    teach the model to stop in the middle.

    Raises:
        DataError: no pair is left.
    """
    filled = [(source, target) for source, target in pairs if source.strip() and target.strip()]
    if not filled:
        raise DataError(f"{name}: none of the {len(pairs)} pairs has text on both sides")
    source = encode_lines(tokenizers.source, [source for source, _ in filled])
    target = encode_lines(tokenizers.target, [target for _, target in filled])
    target = tf.concat([tf.fill([target.nrows(), 1], START), target], axis=1)
    # The decoder reads a target without its end id: one less than its length.
    fits = (source.row_lengths() <= pe_input) & (target.row_lengths() - 1 <= pe_target)
    corpus = Corpus(tf.ragged.boolean_mask(source, fits), tf.ragged.boolean_mask(target, fits))
    log.info(
        "%s: %d pairs, %d source and %d target tokens; left out: %d with a blank side, %d too long",
        name,
        corpus.size,
        corpus.source.flat_values.shape[0],
        corpus.target.flat_values.shape[0],
        len(pairs) - len(filled),
        len(filled) - corpus.size,
    )
    if not corpus.size:
        raise DataError(f"{name}: every pair has more tokens than the position tables ({pe_input} and {pe_target})")
    return corpus


def plan_batches(
    source_lengths: np.ndarray, target_lengths: np.ndarray, tokens_per_batch: int, random: np.random.Generator
) -> list[np.ndarray]:
    """Rows of like length together, at most `tokens_per_batch` positions on either side, in random order.

    Rows of the same two lengths are shuffled among themselves, so every epoch has as many batches, of other rows.

    Args:
        source_lengths, target_lengths: ids per row, (size,); the target's count both markers.
        tokens_per_batch: the most positions, padding included, of a batch's source and of its decoder input. A row
            longer than that makes a batch of its own.
        random: draws the orders.

    Returns:
        Row numbers of each batch.
    """
    order = np.lexsort((random.random(len(source_lengths)), source_lengths, target_lengths))
    width = np.maximum(source_lengths, target_lengths - 1)[order]
    batches, start = [], 0
    while start < len(order):
        most = max(1, tokens_per_batch // width[start])
        widest = np.maximum.accumulate(width[start : start + most])
        rows = max(1, np.count_nonzero(widest * np.arange(1, len(widest) + 1) <= tokens_per_batch))
        batches.append(order[start : start + rows])
        start += rows
    return [batches[i] for i in random.permutation(len(batches))]


def epoch_batches(corpus: Corpus, tokens_per_batch: int, seed: int, epoch: int) -> list[np.ndarray]:
    """The rows of each batch of one epoch, counted from 0: the same for the same seed."""
    lengths = corpus.source.row_lengths().numpy(), corpus.target.row_lengths().numpy()
    return plan_batches(*lengths, tokens_per_batch, np.random.default_rng((seed, epoch)))


def token_batches(
    corpus: Corpus,
    tokens_per_batch: int,
    seed: int,
    epochs: int | None = None,
    step: int = 0,
    worker: int = 0,
    workers: int = 1,
    replicas: int = 1,
) -> tf.data.Dataset:
    """Batches (inp, tar): source ids (batch, inp_len) and target ids (batch, tar_len), 0 = padding.

    Args:
        corpus: the encoded pairs.
        tokens_per_batch: as in `plan_batches`.
        seed: of the order, which is new in each epoch.
        epochs: how many epochs; without end if None.
        step: how many batches of that endless sequence to leave out at the beginning, to go on from there.
    """

    in_epoch = len(epoch_batches(corpus, tokens_per_batch, seed, 0))

    def rows():
        first, done = divmod(step, in_epoch)
        for epoch in itertools.count(first) if epochs is None else range(first, epochs):
            yield from epoch_batches(corpus, tokens_per_batch, seed, epoch)[done if epoch == first else 0 :]

    def own():
        for number, batch in enumerate(rows()):
            if number // replicas % workers == worker:
                yield batch

    def batch(rows):
        return tf.gather(corpus.source, rows).to_tensor(), tf.gather(corpus.target, rows).to_tensor()

    dataset = tf.data.Dataset.from_generator(own, output_signature=tf.TensorSpec((None,), tf.int64))
    # Keras warns at the end of a data set that has not said how long it is.
    length = tf.data.INFINITE_CARDINALITY if epochs is None else max(0, epochs * in_epoch - step)
    return dataset.map(batch).prefetch(4).apply(tf.data.experimental.assert_cardinality(length))


def teacher_forcing(inp: tf.Tensor, tar: tf.Tensor) -> tuple[tuple[tf.Tensor, tf.Tensor], tf.Tensor]:
    """(inp, tar) to ((inp, tar_inp), tar_real), as `fit` takes it: each decoder input beside the id that follows it."""
    return (inp, tar[:, :-1]), tar[:, 1:]
