"""Text in, text out, on a small untrained model: what matters here is lines, lengths, batches and files."""

import logging

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_transformer.data.tokenizer import Tokenizer, Tokenizers, train_sentencepiece
from keras_transformer.errors import DataError
from keras_transformer.masks import create_masks
from keras_transformer.model import Transformer
from keras_transformer.translator import Translator, TranslatorModule, length_batches

LINES = ["a small cat", "two dogs run", "the cat sees the dogs", "dogs and cats", "a dog", "cats run and dogs run"]


def make_module(pe=20, vocabulary=0):
    tokenizer = Tokenizer(train_sentencepiece(LINES, 40))
    keras.utils.set_random_seed(3)
    tokenizer = Tokenizer(tokenizer.model)  # seeding destroyed the first one's resource
    size = vocabulary or tokenizer.vocab_size
    model = Transformer(2, 16, 2, 32, size, size, pe, pe, rate=0.1)
    model.build((None, None), (None, None))
    return TranslatorModule(model, Tokenizers(tokenizer, tokenizer)), model, tokenizer


@pytest.fixture(scope="module")
def parts():
    return make_module()


@pytest.fixture
def translator(parts):
    return Translator(parts[0])


def test_is_the_greedy_search_of_the_whole_model(parts, translator):
    """Against a plain loop that runs the whole model anew for each token, one sentence alone."""
    _, model, tokenizer = parts
    inp = tokenizer.encode(tf.constant(LINES[2:3])).to_tensor()
    tar, score = [2], 0.0
    while tar[-1] != 3 and len(tar) - 1 < min(20, inp.shape[1] + 50):
        tar_inp = tf.constant([tar])
        logits, _ = model(inp, tar_inp, False, *create_masks(inp, tar_inp))
        log_probs = tf.nn.log_softmax(logits[0, -1]).numpy()
        log_probs[[0, 2]] = -np.inf
        tar.append(int(log_probs.argmax()))
        score += log_probs[tar[-1]]
    text = tokenizer.decode(tf.constant([tar]))[0].numpy().decode()
    [(got, got_score)] = translator.translate_with_scores(LINES[2:3])
    assert got == text
    np.testing.assert_allclose(got_score, score, atol=1e-3)


def test_the_batch_does_not_matter(translator):
    """B3, https://github.com/OpenNMT/OpenNMT-py/issues/137: alone, together and in any order, the same."""
    together = translator.translate_with_scores(LINES)
    alone = [translator.translate_with_scores([line])[0] for line in LINES]
    backwards = translator.translate_with_scores(LINES[::-1])[::-1]
    for other in (alone, backwards):
        assert [text for text, _ in other] == [text for text, _ in together]
        np.testing.assert_allclose([s for _, s in other], [s for _, s in together], atol=1e-4)


def test_a_blank_line_gives_an_empty_line(translator):
    """C2, https://github.com/joeynmt/joeynmt/issues/183, every kind of blank that Python knows included."""
    blanks = ["", " ", "\t", "\u00a0", "\u3000 \u2009", "\x85", "\x1c", "\r"]
    results = translator.translate_with_scores(["a dog", *blanks, "two dogs run"])
    assert results[1:-1] == [("", 0.0)] * len(blanks)
    assert results[0][0] and results[-1][0]
    assert all(blank.isspace() or not blank for blank in blanks)


def test_only_blank_lines(translator):
    assert translator.translate(["", " "]) == ["", ""]
    assert translator.translate([]) == []


def test_a_long_line_is_cut_with_a_warning(translator, caplog):
    """C3, https://github.com/marian-nmt/marian-dev/issues/365: five lines, the third of 5,000 words, five lines out."""
    lines = [*LINES[:2], "dogs " * 5000, *LINES[3:5]]
    with caplog.at_level(logging.WARNING, "keras_transformer"):
        output = translator.translate(lines)
    assert len(output) == 5
    assert output[:2] + output[3:] == translator.translate(lines[:2] + lines[3:])
    [record] = caplog.records
    assert "line 3:" in record.getMessage() and "cut to the 20" in record.getMessage()


def test_special_pieces_in_the_text_are_text(translator, parts):
    """D11, https://github.com/huggingface/transformers/pull/172: no marker's id comes from what a user typed."""
    ids = parts[2].encode(tf.constant(["a </s> cat <pad> <s>"]))[0].numpy().tolist()
    assert ids.count(3) == 1 and ids[-1] == 3 and 0 not in ids and 2 not in ids
    output = translator.translate(["a </s> cat <pad> <s>"])
    assert len(output) == 1 and "<" not in output[0]


def test_progress_counts_every_line(translator):
    counts = []
    translator.translate(LINES, counts.append)
    assert sum(counts) == len(LINES)


def test_one_trace_for_all_lengths(parts):
    """T6, https://github.com/tensorflow/tensorflow/issues/29075: sources of every length, one graph."""
    module = parts[0]
    for length in range(1, 20):
        module.translate_ids(tf.fill([2, length], 3))
    assert module.translate_ids.experimental_get_tracing_count() == 1


def test_a_vocabulary_of_another_size_is_refused():
    """D13, https://github.com/tensorflow/tensorflow/issues/27033: the tokenizer's ids must have rows in the model."""
    with pytest.raises(DataError, match="the model 41 and 41"):
        make_module(vocabulary=41)


def test_length_batches_by_hand(monkeypatch):
    """Longest first, at most 12 positions together."""
    monkeypatch.setattr("keras_transformer.translator.TOKENS_PER_BATCH", 12)
    batches = length_batches(np.array([2, 6, 5, 1, 20]))
    assert [batch.tolist() for batch in batches] == [[4], [1, 2], [0, 3]]
