"""Batches: every pair once an epoch, within the budget, in an order that can be gone on with."""

import logging
from itertools import islice

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_transformer.data.phrasebook import phrasebook
from keras_transformer.data.pipeline import (
    Corpus,
    Rows,
    SubwordDropout,
    encode_pairs,
    offsets_of,
    plan_batches,
    teacher_forcing,
    token_batches,
)
from keras_transformer.data.tokenizer import train_tokenizers
from keras_transformer.errors import DataError
from keras_transformer.ids import END, PAD, START
from keras_transformer.step import make_train_step


def rows_of(lists, number_type=np.int32):
    values = np.concatenate([np.array(list(row), number_type) for row in lists])
    return Rows(values, offsets_of([np.array([len(row) for row in lists])]))


def make_corpus(lengths):
    """Rows of the given (source, target) lengths with markers, each with ids of its own."""
    source = [[10 * row + 4] * (length - 1) + [END] for row, (length, _) in enumerate(lengths)]
    target = [[START] + [10 * row + 5] * (length - 2) + [END] for row, (_, length) in enumerate(lengths)]
    return Corpus(rows_of(source), rows_of(target))


def lists(batches):
    """Batches as lists, with the padding on."""
    return [(inp.numpy().tolist(), tar.numpy().tolist()) for inp, tar in batches]


def captions(rng, size):
    """Lengths in tokens like those of captions: some 20, a few over 100, both sides alike."""
    source = np.clip(rng.gamma(2.0, 10.0, size), 1, 250)
    target = source * rng.normal(1.1, 0.2, size)
    return source.astype(int) + 1, np.clip(target, 1, 250).astype(int) + 2


@pytest.mark.parametrize("budget", [1, 60, 300, 4096])
@pytest.mark.parametrize("size", [1, 7, 500])
def test_plan_batches_by_brute_force(rng, size, budget):
    """Every row once; neither side over the budget, but for a row alone that is longer."""
    source, target = captions(rng, size)
    epochs = [plan_batches(source, target, budget, np.random.default_rng((1, epoch))) for epoch in range(3)]
    for batches in epochs:
        assert sorted(np.concatenate(batches).tolist()) == list(range(size))
        for rows in batches:
            widest = max(source[rows].max(), target[rows].max() - 1)
            assert len(rows) * widest <= budget or len(rows) == 1
    assert len({len(batches) for batches in epochs}) == 1


def test_plan_batches_by_hand():
    """A decoder input has one token less than its target. Sorted by target, then source: rows 1, 3, 0, 2, 4."""
    source, target = np.array([4, 2, 2, 4, 12]), np.array([5, 3, 7, 3, 7])
    batches = plan_batches(source, target, 12, np.random.default_rng(0))
    assert sorted(sorted(rows.tolist()) for rows in batches) == [[0, 1, 3], [2], [4]]


def test_epochs_differ_and_seeds_repeat(rng):
    source, target = captions(rng, 500)

    def plan(*seed):
        return [rows.tolist() for rows in plan_batches(source, target, 300, np.random.default_rng(seed))]

    assert plan(1, 0) == plan(1, 0)
    assert plan(1, 0) != plan(1, 1) != plan(2, 1)
    widths = [source[rows].max() for rows in plan(1, 0)]
    assert widths != sorted(widths)  # the batches are not in the order of their lengths


def test_rows_of_one_length_are_mixed_anew(rng):
    """In each epoch a batch has other rows, not only another place."""
    lengths = np.full(100, 9)
    batches = [
        {tuple(sorted(rows)) for rows in plan_batches(lengths, lengths, 90, np.random.default_rng((1, epoch)))}
        for epoch in (0, 1)
    ]
    assert len(batches[0]) == 10 and not batches[0] & batches[1]


@pytest.mark.parametrize(("text", "budget"), [("phrasebook", 2048), ("captions", 4096)])
def test_most_positions_are_real(rng, text, budget):
    """5,000 pairs, 25 and 43 batches: at least 95 % of the target positions are tokens, and batches are nearly as large
    as they may be."""
    if text == "phrasebook":
        pairs = phrasebook("en", "de", pairs=6000)["train"][:5000]
        corpus = encode_pairs(pairs, train_tokenizers(pairs, 1000, True), 256, 256, "train")
        source, target = corpus.source.lengths, corpus.target.lengths
    else:
        source, target = captions(rng, 5000)
    assert len(source) == 5000
    batches = plan_batches(source, target, budget, rng)
    real = sum((target[rows] - 1).sum() for rows in batches)
    positions = sum(len(rows) * (target[rows].max() - 1) for rows in batches)
    assert 0.95 < real / positions <= 1
    filled = sum(len(rows) * max(source[rows].max(), target[rows].max() - 1) for rows in batches)
    assert 0.9 < filled / (len(batches) * budget) <= 1


def test_batches_hold_the_corpus():
    """Padding comes after the ids, and without it every pair is there once."""
    lengths = [(2, 3), (4, 5), (4, 7), (3, 3), (7, 4), (2, 9)]
    corpus, found = make_corpus(lengths), []
    for inp, tar in token_batches(corpus, 16, seed=1, epochs=1):
        assert inp.dtype == tar.dtype == tf.int32
        for source, target in zip(inp.numpy().tolist(), tar.numpy().tolist(), strict=True):
            ends = source.index(END) + 1, target.index(END) + 1
            assert set(source[ends[0] :]) <= {PAD} and set(target[ends[1] :]) <= {PAD}
            found.append((source[: ends[0]], target[: ends[1]]))
    assert sorted(found) == sorted(
        (corpus.source[row].tolist(), corpus.target[row].tolist()) for row in range(len(lengths))
    )


def test_rows_by_hand():
    """Rows 5 6, 7, and 8 9 4, end to end."""
    rows = Rows(np.array([5, 6, 7, 8, 9, 4], np.uint16), np.array([0, 2, 3, 6]))
    assert len(rows) == 3 and rows.lengths.tolist() == [2, 1, 3] and rows[2].tolist() == [8, 9, 4]
    padded = rows.padded(np.array([2, 1]))
    assert padded.dtype == np.int32 and padded.tolist() == [[8, 9, 4], [7, 0, 0]]
    kept = rows.where(np.array([True, False, True]))
    assert kept.values.tolist() == [5, 6, 8, 9, 4] and kept.offsets.tolist() == [0, 2, 5]


@pytest.mark.parametrize("step", [0, 1, 3, 4, 5, 8, 10])
def test_going_on_at_a_step(rng, step):
    """The stream without its first batches, over the border of an epoch too."""
    corpus = make_corpus([(2, 3), (4, 5), (4, 7), (3, 3), (7, 4), (2, 9), (5, 5), (3, 3)])
    epoch = len(list(token_batches(corpus, 16, seed=1, epochs=1)))
    assert epoch == 4
    stream = lists(islice(token_batches(corpus, 16, seed=1), 16))
    assert lists(islice(token_batches(corpus, 16, seed=1, step=step), 16 - step)) == stream[step:]
    assert lists(token_batches(corpus, 16, seed=1, epochs=3, step=step)) == stream[step : 3 * epoch]
    assert stream[:4] != stream[4:8] and lists(islice(token_batches(corpus, 16, seed=2), 4)) != stream[:4]


def test_workers_share_one_sequence():
    """Of batches 0, 1, 2, ..., two workers of 2 replicas take 0 1, 4 5, ... and 2 3, 6 7, ...; an epoch has 4, so the
    border of an epoch is in the middle of a turn once 5 are left out."""
    corpus = make_corpus([(2, 3), (4, 5), (4, 7), (3, 3), (7, 4), (2, 9), (5, 5), (3, 3)])
    stream = lists(islice(token_batches(corpus, 16, seed=1), 16))
    for step in (0, 1, 5):
        taken = [
            lists(token_batches(corpus, 16, 1, epochs=4, step=step, worker=worker, workers=2, replicas=2))
            for worker in (0, 1)
        ]
        assert taken[0] == [stream[i] for i in (0, 1, 4, 5, 8, 9, 12, 13) if i >= step]
        assert taken[1] == [stream[i] for i in (2, 3, 6, 7, 10, 11, 14, 15) if i >= step]
        endless = token_batches(corpus, 16, seed=1, step=step, worker=1, workers=2, replicas=2)
        assert lists(islice(endless, 5)) == taken[1][:5]


LETTERS = [("abc", "123"), ("bca", "231"), ("cab", "312"), ("ab", "12"), ("c", "3"), ("aabb", "1122")]


def test_fit_gets_source_and_shifted_target():
    """D12, https://github.com/keras-team/keras-io/pull/1997: ((inp, tar_inp), tar_real), with letters for the encoder
    and digits for the decoder, shifted by one."""
    tokenizers = train_tokenizers(LETTERS, 30, joint=False)
    corpus = encode_pairs(LETTERS, tokenizers, 16, 16, "train")
    found = []
    for (inp, tar_inp), tar_real in token_batches(corpus, 24, seed=1, epochs=1).map(teacher_forcing):
        assert tar_inp.shape == tar_real.shape and inp.shape[0] == tar_real.shape[0]
        np.testing.assert_array_equal(tar_inp[:, 1:], tar_real[:, :-1])
        assert np.all(tar_inp[:, 0] == START) and not np.any(tar_real == START)
        assert np.all(np.sum(tar_real == END, axis=1) == 1)
        source, target = tokenizers.source.decode(inp).numpy(), tokenizers.target.decode(tar_real).numpy()
        found += [(a.decode(), b.decode()) for a, b in zip(source, target, strict=True)]
    assert sorted(found) == sorted(LETTERS)


def test_targets_are_whole_or_left_out(caplog):
    """D7, https://github.com/tensorflow/text/issues/1132: with a limit of 8, 5 tokens end with the end id and 20 are
    left out, which the log counts; none is cut. 7 tokens and the end id are just 8."""
    # The four ids, the space and three letters: the tokens of a text are its letters and the space before them.
    tokenizers = train_tokenizers([("a b c", "a b c")], 8, joint=True)
    assert tokenizers.target.encode(["abca"]).row_lengths() == 5 + 1
    pairs = [("a", text) for text in ("abca", "abcabcabcabcabcabca", "abcabc", "abcabca")]
    with caplog.at_level(logging.INFO, "keras_transformer"):
        corpus = encode_pairs(pairs, tokenizers, 8, 8, "train")
    assert corpus.target.lengths.tolist() == [7, 9]
    assert caplog.messages == [
        "train: 2 pairs, 6 source and 16 target tokens; left out: 0 with a blank side, 2 too long"
    ]
    (_, tar_inp), tar_real = teacher_forcing(*map(tf.constant, corpus.batch(np.arange(2))))
    assert tar_inp.shape == tar_real.shape == (2, 8)
    assert tar_real[0, 5] == END == tar_real[1, 7]


def test_left_out_pairs_are_counted(caplog):
    """Blank is a side of spaces of any kind; a pair too long on either side is left out whole."""
    pairs = [("ab", "a"), ("", "a"), ("a", "\u00a0\u3000 \t"), ("\r", ""), ("ab" * 9, "a"), ("b", "ab" * 9), ("b", "b")]
    tokenizers = train_tokenizers(LETTERS, 30, joint=True)
    with caplog.at_level(logging.INFO, "keras_transformer"):
        corpus = encode_pairs(pairs, tokenizers, 8, 8, "dev")
    assert corpus.size == 2
    inp, tar = corpus.batch(np.arange(2))
    assert tokenizers.source.decode(tf.constant(inp)).numpy().tolist() == [b"ab", b"b"]
    assert tokenizers.target.decode(tf.constant(tar)).numpy().tolist() == [b"a", b"b"]
    assert caplog.messages[0].startswith("dev: 2 pairs, ")
    assert caplog.messages[0].endswith("; left out: 3 with a blank side, 2 too long")


def test_no_pair_left():
    tokenizers = train_tokenizers(LETTERS, 30, joint=True)
    with pytest.raises(DataError, match="^dev: none of the 2 pairs is left: 2 with a blank side, 0 too long "):
        encode_pairs([("a", " "), ("", "b")], tokenizers, 8, 8, "dev")
    message = r"1 with a blank side, 1 too long \(the position tables hold 3 and 8 tokens\)$"
    with pytest.raises(DataError, match=f"^dev: none of the 2 pairs is left: {message}"):
        encode_pairs([("abcabcabc", "b"), ("", "a")], tokenizers, 3, 8, "dev")
    with pytest.raises(DataError, match="^dev: none of the 0 pairs is left"):
        encode_pairs([], tokenizers, 3, 8, "dev")


@pytest.mark.parametrize("rate", [0.0, 0.5, 1.0])
def test_subword_dropout(rate):
    """The pieces differ from time to time, never the text; markers stay where they are.

    "abcabc abcabc" is two pieces and an end id as usual. With a table of 9, its 14 signs do not fit: a text drawn
    longer than 8 pieces is the usual one, which with the probability 1 is each. "c" is always a space and a letter.
    """
    text = "abcabc abcabc"
    tokenizers = train_tokenizers([(text, text)] * 9, 60, joint=True)
    corpus = encode_pairs([(text, text), ("c", "a")] * 50, tokenizers, 9, 9, "train")
    texts = rows_of([text.encode(), b"c"] * 50, np.uint8), rows_of([text.encode(), b"a"] * 50, np.uint8)
    corpus = Corpus(corpus.source, corpus.target, SubwordDropout(*texts, tokenizers, rate, 9, 9))
    usual = corpus.source[0].tolist()
    assert len(usual) == 3
    seen = set()
    for inp, tar in token_batches(corpus, 10000, seed=1, epochs=3):
        assert inp.dtype == tar.dtype == tf.int32 and inp.shape[0] == tar.shape[0] == 100
        assert inp.shape[1] <= 9 and tar.shape[1] <= 10
        assert np.all(tar[:, 0] == START) and np.all(np.sum(inp == END, 1) == 1) and np.all(np.sum(tar == END, 1) == 1)
        pairs = zip(tokenizers.source.decode(inp).numpy(), tokenizers.target.decode(tar).numpy(), strict=True)
        assert sorted(pairs) == sorted([(text.encode(), text.encode()), (b"c", b"a")] * 50)
        seen |= {tuple(row[row != PAD].tolist()) for row in inp.numpy()}
    assert tuple(usual) in seen
    assert len(seen) > 20 if rate == 0.5 else len(seen) == 2
    for inp, tar in token_batches(corpus, 30, seed=1, epochs=1):  # whatever was drawn, it is in the budget
        assert np.size(inp) <= 30 and np.size(tar[:, 1:]) <= 30


def test_many_shapes_are_traced_once(tiny, rng):
    """T6, https://github.com/tensorflow/tensorflow/issues/29075, https://github.com/tensorflow/tensorflow/issues/31842:
    30 shapes, and the batches of an epoch with its small last one."""
    model = tiny(num_layers=1)
    train_step = make_train_step(model, keras.optimizers.Adam(1e-3))
    shapes = {tuple(shape) for shape in rng.integers(1, 9, (40, 3))}
    assert len(shapes) >= 30
    for size, inp_len, tar_len in shapes:
        inp, tar = rng.integers(1, 40, (size, inp_len)), rng.integers(1, 40, (size, tar_len + 1))
        assert np.isfinite(train_step(tf.constant(inp, tf.int32), tf.constant(tar, tf.int32)))
    lengths = np.stack([rng.integers(2, 9, 23), rng.integers(3, 9, 23)], axis=1)
    corpus = make_corpus(lengths)
    corpus = Corpus(*(Rows(rows.values % 40, rows.offsets) for rows in (corpus.source, corpus.target)))
    sizes = set()
    for inp, tar in token_batches(corpus, 40, seed=1, epochs=1):
        train_step(inp, tar)
        sizes.add(len(inp))
    assert len(sizes) > 1
    assert train_step.experimental_get_tracing_count() <= 2
