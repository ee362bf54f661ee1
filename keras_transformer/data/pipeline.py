"""From sentence pairs to batches of ids: (inp, tar), padded, each holding about as many tokens as a budget allows."""

import functools
import itertools
import logging
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import tensorflow as tf

from keras_transformer.data.tokenizer import Tokenizer, Tokenizers
from keras_transformer.errors import DataError
from keras_transformer.ids import PAD, START

LINES_AT_ONCE = 8192
log = logging.getLogger(__name__)
Pair = tuple[str, str]


@dataclass(frozen=True)
class Rows:
    """Rows of different lengths, end to end, in memory or in files: row i is values[offsets[i] : offsets[i + 1]]."""

    values: np.ndarray
    offsets: np.ndarray

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, row: int) -> np.ndarray:
        return self.values[self.offsets[row] : self.offsets[row + 1]]

    @property
    def lengths(self) -> np.ndarray:
        return np.diff(self.offsets)

    def where(self, keep: np.ndarray) -> "Rows":
        """The rows of which `keep` (size,) is True."""
        lengths = self.lengths
        return Rows(self.values[np.repeat(keep, lengths)], offsets_of([lengths[keep]]))

    def padded(self, rows: np.ndarray) -> np.ndarray:
        """The rows of these numbers (batch,) as int32 (batch, longest), 0 = padding."""
        starts = self.offsets[rows]
        lengths = self.offsets[rows + 1] - starts
        columns = np.arange(lengths.max())
        filled = columns < lengths[:, None]  # (batch, longest)
        ids = np.full(filled.shape, PAD, np.int32)
        ids[filled] = self.values[(starts[:, None] + columns)[filled]]
        return ids


def offsets_of(lengths: list[np.ndarray]) -> np.ndarray:
    """Where the rows of these lengths, given in parts, begin, and where the last ends."""
    return np.concatenate([[0], *lengths]).cumsum(dtype=np.int64)


class SubwordDropout:
    """The text of a corpus, segmented anew each time a row is in a batch (BPE-dropout, Provilkov et al. 2020).

    SentencePiece draws by random numbers of its own, which have no seed: a run that is resumed sees the same text in
    the same order, but other pieces of it.

    Args:
        source, target: the rows' text in UTF-8, bytes as numbers.
        tokenizers: give the usual segmentation.
        rate: the probability with which a merge is left out.
        pe_input, pe_target: the lengths of the position tables.

    Attributes:
        growth: batches are planned for so many times the usual numbers of ids.
    """

    def __init__(self, source: Rows, target: Rows, tokenizers: Tokenizers, rate: float, pe_input: int, pe_target: int):
        self.source, self.target, self.tables = source, target, (pe_input, pe_target)
        self.growth = 1 + 5 * rate
        self.tokenizers = Tokenizers(*(tokenizer.with_dropout(rate) for tokenizer in tokenizers))

    def texts(self, rows: np.ndarray) -> tuple[list[bytes], list[bytes]]:
        return tuple([side[row].tobytes() for row in rows] for side in (self.source, self.target))

    def draw(self, tokens_per_batch, inp, tar, source, target) -> tuple[tf.Tensor, tf.Tensor]:
        """The usual ids (batch, inp_len) and (batch, tar_len), and both texts (batch,), to (inp, tar) drawn anew.

        A text of which more was drawn than the batch or the position table has room for is segmented as usual.
        """
        room = tokens_per_batch // tf.shape(inp)[0]
        inp = draw_side(self.tokenizers.source, source, inp, tf.minimum(room, self.tables[0]))
        tar = draw_side(self.tokenizers.target, target, tar[:, 1:], tf.minimum(room, self.tables[1]))
        return inp, tf.concat([tf.fill([tf.shape(tar)[0], 1], START), tar], axis=1)


def draw_side(tokenizer: Tokenizer, text: tf.Tensor, usual: tf.Tensor, longest: tf.Tensor) -> tf.Tensor:
    drawn = tokenizer.encode(text)
    usual = tf.RaggedTensor.from_tensor(usual, padding=PAD)  # no id of a text is PAD
    rows, size = tf.range(drawn.nrows()), drawn.nrows()
    rows = tf.where(drawn.row_lengths() <= tf.cast(longest, tf.int64), rows, rows + size)
    return tf.gather(tf.concat([drawn, usual], axis=0), rows).to_tensor(PAD)


@dataclass(frozen=True)
class Corpus:
    """Encoded pairs. Source ids end with the end id; target ids also begin with the start id."""

    source: Rows
    target: Rows
    subwords: SubwordDropout | None = None

    @property
    def size(self) -> int:
        return len(self.source)

    def batch(self, rows: np.ndarray) -> tuple:
        """(inp, tar) of these rows, padded; with subword dropout also their texts."""
        texts = self.subwords.texts(rows) if self.subwords else ()
        return self.source.padded(rows), self.target.padded(rows), *texts


def encode_lines(tokenizer: Tokenizer, lines: list[str], begin: tuple[int, ...] = ()) -> Rows:
    """The ids of each line, with `begin` before them."""
    ids = tokenizer.encode(tf.constant(lines, tf.string))
    ids = tf.concat([tf.tile(tf.constant([begin], tf.int32), [len(lines), 1]), ids], axis=1)
    return Rows(ids.flat_values.numpy(), ids.row_splits.numpy())


def chunks(pairs: Iterable[Pair]) -> Iterator[list[Pair]]:
    """As many pairs at a time as are tokenised together."""
    pairs = iter(pairs)
    while chunk := list(itertools.islice(pairs, LINES_AT_ONCE)):
        yield chunk


def encode_chunk(
    pairs: list[Pair],
    tokenizers: Tokenizers,
    pe_input: int,
    pe_target: int,
    left_out: Counter,
    max_length: int | None = None,
    max_ratio: float | None = None,
) -> tuple[list[Pair], Rows, Rows]:
    """The pairs that can be trained on, and their source and target ids.

    A pair is left out whole when a side is blank or has more ids than its position table: cut short, its target would
    teach the model to stop in the middle.

    Args:
        left_out: what was left out, counted by reason; it is added to.
        max_length: the most ids of a side, the end id counted.
        max_ratio: so many times as many ids as the shorter side's, at most, may the longer have.
    """
    filled = [pair for pair in pairs if pair[0].strip() and pair[1].strip()]
    left_out["with a blank side"] += len(pairs) - len(filled)
    source = encode_lines(tokenizers.source, [source for source, _ in filled])
    target = encode_lines(tokenizers.target, [target for _, target in filled], (START,))
    inp, tar = source.lengths, target.lengths - 1  # the decoder reads a target without its end id
    longer, shorter = np.maximum(inp, tar), np.minimum(inp, tar)
    rules = {"too long": (inp <= pe_input) & (tar <= pe_target)}
    if max_length is not None:
        rules["over max_length"] = longer <= max_length
    if max_ratio is not None:
        rules["over max_ratio"] = longer <= max_ratio * shorter
    keep = np.ones(len(filled), bool)
    for reason, passed in rules.items():
        left_out[reason] += int(np.count_nonzero(keep & ~passed))
        keep &= passed
    return list(itertools.compress(filled, keep)), source.where(keep), target.where(keep)


def reasons(left_out: Counter) -> str:
    return ", ".join(f"{count} {reason}" for reason, count in left_out.items())


def log_corpus(name: str, corpus: Corpus, left_out: Counter) -> None:
    tokens = len(corpus.source.values), len(corpus.target.values)
    log.info(
        "%s: %d pairs, %d source and %d target tokens; left out: %s", name, corpus.size, *tokens, reasons(left_out)
    )


def encode_pairs(pairs: Iterable[Pair], tokenizers: Tokenizers, pe_input: int, pe_target: int, name: str) -> Corpus:
    """Encode the pairs that can be trained on (see `encode_chunk`), and log how many were left out.

    Raises:
        DataError: no pair is left.
    """
    left_out: Counter = Counter()
    encoded = [encode_chunk(chunk, tokenizers, pe_input, pe_target, left_out)[1:] for chunk in chunks(pairs)]
    if not any(len(source) for source, _ in encoded):
        raise nothing_left(name, left_out, pe_input, pe_target)
    corpus = Corpus(*(join(parts) for parts in zip(*encoded, strict=True)))
    log_corpus(name, corpus, left_out)
    return corpus


def join(parts: tuple[Rows, ...]) -> Rows:
    return Rows(np.concatenate([rows.values for rows in parts]), offsets_of([rows.lengths for rows in parts]))


def nothing_left(name: str, left_out: Counter, pe_input: int, pe_target: int) -> DataError:
    return DataError(
        f"{name}: none of the {left_out.total()} pairs is left: {reasons(left_out)} "
        f"(the position tables hold {pe_input} and {pe_target} tokens)"
    )


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
    lengths = corpus.source.lengths, corpus.target.lengths
    if corpus.subwords:
        lengths = (np.ceil(corpus.subwords.growth * side).astype(np.int64) for side in lengths)
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

    Several workers share one sequence of batches: each takes the next `replicas` of it in turn.

    Args:
        corpus: the encoded pairs.
        tokens_per_batch: as in `plan_batches`.
        seed: of the order, which is new in each epoch.
        epochs: how many epochs; without end if None.
        step: how many batches of that sequence, all workers' together, to leave out at the beginning, to go on from
            there.
        worker, workers: which worker's batches, counted from 0, of how many.
        replicas: how many batches a worker takes at a time.
    """

    in_epoch = len(epoch_batches(corpus, tokens_per_batch, seed, 0))

    def batches():
        number = step // in_epoch * in_epoch
        for epoch in itertools.count(step // in_epoch) if epochs is None else range(step // in_epoch, epochs):
            for rows in epoch_batches(corpus, tokens_per_batch, seed, epoch):
                if number >= step and number // replicas % workers == worker:
                    yield corpus.batch(rows)
                number += 1

    ids, text = tf.TensorSpec((None, None), tf.int32), tf.TensorSpec((None,), tf.string)
    signature = (ids, ids, text, text) if corpus.subwords else (ids, ids)
    dataset = tf.data.Dataset.from_generator(batches, output_signature=signature)
    if corpus.subwords:
        draw = functools.partial(corpus.subwords.draw, tokens_per_batch)
        dataset = dataset.map(draw, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)
    # Keras warns at the end of a data set that has not said how long it is.
    length = tf.data.INFINITE_CARDINALITY
    if epochs is not None:
        length = np.count_nonzero(np.arange(step, epochs * in_epoch) // replicas % workers == worker)
    return dataset.prefetch(4).apply(tf.data.experimental.assert_cardinality(length))


def teacher_forcing(inp: tf.Tensor, tar: tf.Tensor) -> tuple[tuple[tf.Tensor, tf.Tensor], tf.Tensor]:
    """(inp, tar) to ((inp, tar_inp), tar_real), as `fit` takes it: each decoder input beside the id that follows it."""
    return (inp, tar[:, :-1]), tar[:, 1:]
