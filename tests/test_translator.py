"""Text in, text out, on a small untrained model: what matters here is lines, lengths, batches and files."""

import logging
import random

import numpy as np
import pytest
import tensorflow as tf

from keras_transformer.config import DecodingSettings
from keras_transformer.data.tokenizer import Tokenizer, Tokenizers, train_sentencepiece
from keras_transformer.masks import create_masks
from keras_transformer.model import Transformer
from keras_transformer.translator import Translator, length_batches
from keras_transformer.translator_module import TranslatorModule

LINES = ["a small cat", "two dogs run", "the cat sees the dogs", "dogs and cats", "a dog", "cats run and dogs run"]


GREEDY = DecodingSettings(beam_size=1)
BEAM = DecodingSettings(beam_size=3, n_best=2, patience=None)


def make_module(pe=20, vocabulary=0, decoding=GREEDY):
    tokenizer = Tokenizer(train_sentencepiece(LINES, 40))
    random.seed(3)  # Keras's seeds come from here; `keras.utils.set_random_seed` destroys the tokenizers of other tests
    size = vocabulary or len(tokenizer.pieces)
    model = Transformer(2, 16, 2, 32, size, size, pe, pe, rate=0.1)
    model.build((None, None), (None, None))
    return TranslatorModule(model, Tokenizers(tokenizer, tokenizer), decoding), model, tokenizer


@pytest.fixture(scope="module")
def parts():
    return make_module()


@pytest.fixture
def translator(parts):
    return Translator(parts[0], GREEDY)


@pytest.fixture(scope="module")
def beam():
    """Two translations of each text by a beam of three."""
    return Translator(make_module(decoding=BEAM)[0], BEAM)


def texts_and_log_probs(translator, lines):
    """All translations of each line, and their log-probabilities, (lines, n_best)."""
    found = list(translator.stream(lines))
    return [[one.text for one in n_best] for n_best in found], np.array([[one.log_prob for one in n] for n in found])


@pytest.mark.parametrize("kind", ["translator", "beam"])
def test_the_batch_does_not_matter(kind, request):
    """B3, https://github.com/OpenNMT/OpenNMT-py/issues/137: alone, by threes, together and in any order, the same."""
    translator = request.getfixturevalue(kind)
    lines = [*LINES, *(" ".join(["dogs"] * n) for n in range(1, 16, 2))]
    texts, log_probs = texts_and_log_probs(translator, lines)
    order = np.random.default_rng(0).permutation(len(lines))
    shuffled_texts, shuffled = texts_and_log_probs(translator, [lines[i] for i in order])
    assert shuffled_texts == [texts[i] for i in order]
    np.testing.assert_allclose(shuffled, log_probs[order], atol=1e-4)
    for size in (1, 3):
        for i in range(0, len(lines), size):
            few_texts, few = texts_and_log_probs(translator, lines[i : i + size])
            assert few_texts == texts[i : i + size]
            np.testing.assert_allclose(few, log_probs[i : i + size], atol=1e-4)


@pytest.mark.parametrize("kind", ["translator", "beam"])
def test_each_log_probability_is_the_teacher_forced_one(kind, request):
    """B6, https://github.com/tensorflow/tensorflow/issues/13536: against the whole model on the ids that are reported,
    and against `score`, which goes another way."""
    translator = request.getfixturevalue(kind)
    for text, n_best in zip(LINES, translator.stream(LINES), strict=True):
        for found in n_best:
            inp = translator.module.encode(tf.constant([text]))[0].to_tensor()
            log_probs = translator.module.score(inp, tf.constant([found.ids], tf.int32)).numpy()
            np.testing.assert_allclose(found.log_prob, log_probs.sum(), atol=1e-4)
            np.testing.assert_allclose(found.score, log_probs.sum() / len(found.ids), atol=1e-4)


def test_n_best_are_different_and_the_best_comes_first(beam):
    """C7, https://github.com/OpenNMT/OpenNMT-tf/issues/880: fields were printed as b'...'."""
    for n_best in beam.stream(LINES):
        assert len(n_best) == 2 and n_best[0].ids != n_best[1].ids
        first, second = ((one.ids[-1] == 3, one.score) for one in n_best)  # those that ended before those that did not
        assert first >= second
        assert all(isinstance(one.text, str) and "b'" not in one.text for one in n_best)


def test_translations_are_streamed_by_windows(translator):
    """Windows of four: the first comes before the fifth line was read; every line once, with its own number."""
    read = []

    def lines():
        for number in range(10):
            read.append(number)
            yield LINES[number % len(LINES)]

    stream = translator.stream(lines(), window=4)
    first = next(stream)
    assert len(read) == 4
    rest = [n_best[0].text for n_best in stream]
    assert [first[0].text, *rest] == translator.translate([LINES[number % len(LINES)] for number in range(10)])


def test_lines_are_numbered_across_windows(translator, caplog):
    with caplog.at_level(logging.WARNING, "keras_transformer"):
        list(translator.stream(["a dog"] * 5 + ["dogs " * 50], window=4))
    assert "line 6: source" in caplog.text


def test_the_score_of_pairs_by_hand(translator, parts):
    """Each piece's log-probability by a whole model on the line alone; the end token's is the last."""
    _, model, tokenizer = parts
    pairs = [("a small cat", "two dogs run"), ("dogs", ""), ("the cat sees the dogs", "a dog")]
    for (source, target), scored in zip(pairs, translator.score(pairs, window=2), strict=True):
        inp, tar = (tokenizer.encode(tf.constant([text])).to_tensor() for text in (source, target))
        tar_inp = tf.concat([[[2]], tar[:, :-1]], 1)
        logits, _ = model(inp, tar_inp, False, *create_masks(inp, tar_inp))
        expected = tf.gather(tf.nn.log_softmax(logits[0]), tar[0], batch_dims=1)
        np.testing.assert_allclose([log_prob for _, log_prob in scored], expected, atol=1e-5)
        assert [piece for piece, _ in scored] == [tokenizer.pieces[i] for i in tar[0].numpy()]


def test_the_attention_of_a_translation(beam):
    """To every real piece of the source, from every token of the translation; each row sums to 1."""
    [n_best] = beam.stream(["two dogs run"])
    attention = beam.attention("two dogs run", n_best[1])
    pieces = beam.module.encode(tf.constant(["two dogs run"]))[0].row_lengths().numpy()[0]
    assert attention.shape == (2, 2, len(n_best[1].ids), pieces)
    np.testing.assert_allclose(attention.sum(-1), 1, atol=1e-5)
    assert (attention > 0).all()


def test_a_prefix_begins_the_translation(translator, beam):
    """In whole pieces, each line its own; the rest is searched for."""
    for one in (translator, beam):
        prefixes = ["the cat", "", "dogs and"]
        for prefix, n_best in zip(prefixes, one.stream(LINES[:3], prefixes), strict=True):
            assert all(found.text.startswith(prefix) for found in n_best)
    with pytest.raises(ValueError, match="shorter"):
        list(translator.stream(LINES, ["a"]))


def test_the_longest_output_changes_nothing_before_it():
    """P4, https://github.com/huggingface/transformers/issues/17935: translations got worse as the maximum grew; a
    cache of fixed size held wrong positions. At most 5, 10 and 20 tokens: each begins the next."""
    texts = {}
    for limit in (5, 10, 20):
        decoding = DecodingSettings(beam_size=1, max_length=limit)
        found = Translator(make_module(decoding=decoding)[0], decoding).stream(LINES)
        texts[limit] = [n_best[0].ids for n_best in found]
    for shorter, longer in ((5, 10), (10, 20)):
        assert all(long[:shorter] == short for short, long in zip(texts[shorter], texts[longer], strict=True))


def test_a_blank_line_gives_an_empty_line(translator, beam):
    """C2, https://github.com/joeynmt/joeynmt/issues/183, every kind of blank that Python knows included."""
    blanks = ["", " ", "\t", "\u00a0", "\u3000 \u2009", "\x85", "\x1c", "\r"]
    results = [n_best[0] for n_best in translator.stream(["a dog", *blanks, "two dogs run"])]
    assert results[1:-1] == [("", [], 0.0, 0.0)] * len(blanks)
    assert results[0].text and results[-1].text
    among_many = list(beam.stream(["", *LINES]))
    assert among_many[0] == [("", [], 0.0, 0.0)] * 2
    assert beam.attention("", among_many[0][0]).shape == (2, 2, 0, 1)
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
    assert "line 3: source" in record.getMessage() and "cut to the 20" in record.getMessage()


def test_special_pieces_in_the_text_are_text(translator, parts):
    """D11, https://github.com/huggingface/transformers/pull/172: no marker's id comes from what a user typed."""
    ids = parts[2].encode(tf.constant(["a </s> cat <pad> <s>"]))[0].numpy().tolist()
    assert ids.count(3) == 1 and ids[-1] == 3 and 0 not in ids and 2 not in ids
    output = translator.translate(["a </s> cat <pad> <s>"])
    assert len(output) == 1 and "<" not in output[0]


def test_progress_counts_every_line(translator):
    counts = []
    translator.translate(LINES, lambda texts, tokens: counts.append((texts, tokens)))
    tokens = sum(len(n_best[0].ids) for n_best in translator.stream(LINES))
    assert [sum(column) for column in zip(*counts, strict=True)] == [len(LINES), tokens]


def test_length_batches_by_hand():
    """Longest first, at most 12 positions and 3 rows together."""
    batches = length_batches(np.array([2, 6, 5, 1, 20, 1, 1]), 12, 3)
    assert [batch.tolist() for batch in batches] == [[4], [1, 2], [0, 3, 5], [6]]
