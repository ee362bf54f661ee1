"""The graph functions around a model, through `Translator`: the whole model's outputs, and the settings' rules."""

import io
import random

import keras
import numpy as np
import pytest
import sentencepiece
import tensorflow as tf
from test_translator import BEAM, GREEDY, LINES, make_module

from keras_transformer.config import DecodingSettings
from keras_transformer.data.tokenizer import Tokenizer, Tokenizers, train_sentencepiece
from keras_transformer.errors import DataError, UsageError
from keras_transformer.ids import END
from keras_transformer.masks import create_masks
from keras_transformer.model import Transformer
from keras_transformer.translator import Translator
from keras_transformer.translator_module import TranslatorModule, compiled_lengths


def test_is_the_greedy_search_of_the_whole_model():
    """Against a plain loop that runs the whole model anew for each token, one sentence alone."""
    module, model, tokenizer = make_module()
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
    [[got]] = Translator(module, GREEDY).stream(LINES[2:3])
    assert (got.text, got.ids) == (text, tar[1:])
    np.testing.assert_allclose([got.log_prob, got.score], [score, score / len(got.ids)], atol=1e-3)


def lengths_under(**settings):
    decoding = DecodingSettings(beam_size=2, **settings)
    translator = Translator(make_module(decoding=decoding)[0], decoding)
    return [len(n_best[0].ids) for n_best in translator.stream(["a dog", "the cat sees the dogs"])], translator


def test_lengths_absolute_and_relative_to_the_source():
    """The two sources have 3 and 6 tokens or so: the limits are computed from their true numbers."""
    lengths, translator = lengths_under(max_length_factor=2.0, max_length_extra=0)
    sources = translator.module.encode(tf.constant(["a dog", "the cat sees the dogs"]))[1].numpy()
    assert all(length <= 2 * source for length, source in zip(lengths, sources, strict=True))
    lengths, _ = lengths_under(min_length_factor=1.5, max_length_factor=1.5, max_length_extra=1)
    assert all(1.5 * source <= length <= 1.5 * source + 1 for length, source in zip(lengths, sources, strict=True))
    assert lengths_under(max_length=1)[0] == [1, 1]
    assert lengths_under(min_length=7, max_length=7)[0] == [7, 7]
    assert min(lengths_under(max_length_factor=0.01, max_length_extra=0)[0]) == 1  # none but a blank line is empty
    assert lengths_under(max_length_factor=1e9, min_length_factor=1e9)[0] == [20, 20]  # the position table


def test_forbidden_pieces_and_sampling():
    decoding = DecodingSettings(method="sample", forbidden=("▁dogs", "s"), seed=5)
    translator = Translator(make_module(decoding=decoding)[0], decoding)
    outputs = translator.translate(LINES)
    assert outputs == translator.translate(LINES) and "dogs" not in " ".join(outputs)
    other = DecodingSettings(method="sample", seed=6)
    assert outputs != Translator(make_module(decoding=other)[0], other).translate(LINES)
    with pytest.raises(UsageError, match="no piece 'zebra'"):
        make_module(decoding=DecodingSettings(forbidden=("zebra",)))


def test_bfloat16_is_close_to_float32():
    """Weights and products in bfloat16: the log-probability of the same output within a hundredth a token."""
    whole = make_module(decoding=BEAM)[0]
    half = BEAM.model_copy(update={"precision": "bfloat16"})
    translator = Translator(make_module(decoding=half)[0], half)
    assert all(weight.dtype == tf.bfloat16 for weight in translator.module.weights if weight.dtype.is_floating)
    for text, [found, _] in zip(LINES, translator.stream(LINES), strict=True):
        inp = whole.encode(tf.constant([text]))[0].to_tensor()
        exact = whole.score(inp, tf.constant([found.ids], tf.int32)).numpy().sum()
        assert abs(found.log_prob - exact) < 0.01 * len(found.ids)


def test_update_takes_over_new_weights():
    """The weights that lie in the module in another layout or precision follow the model's."""
    for decoding in (GREEDY, GREEDY.model_copy(update={"precision": "bfloat16"})):
        _, model, tokenizer = make_module(decoding=decoding)
        module = TranslatorModule(model, Tokenizers(tokenizer, tokenizer), decoding, compiled=True)
        translator = Translator(module, decoding)
        before = translator.translate(LINES)
        for variable in model.trainable_variables:
            variable.assign(keras.random.normal(variable.shape, seed=9) * 0.3)
        module.update()
        after = translator.translate(LINES)
        made_anew = TranslatorModule(model, Tokenizers(*module.tokenizers), decoding)
        assert after != before and after == Translator(made_anew, decoding).translate(LINES)
        assert [module.serve_alone(tf.constant([line]))["text"][0].numpy().decode() for line in LINES] == after


def test_a_compiled_search_gives_what_the_other_gives():
    """Greedy, one text, at each of the lengths it is padded to; short outputs, the longest, and a blank line."""
    for changes in ({"forbidden": ("▁dogs",)}, {"max_length_factor": 0.5, "max_length_extra": 1}):
        decoding = GREEDY.model_copy(update=changes)
        _, model, tokenizer = make_module(decoding=decoding)
        module = TranslatorModule(model, Tokenizers(tokenizer, tokenizer), decoding, compiled=True)
        assert module.compiled_search.lengths == [16, 20]
        for line in [*LINES, " ", "the cat sees the dogs and the cat sees", "dogs " * 100]:
            found, expected = module.serve_alone(tf.constant([line])), module.serve(tf.constant([line]))
            assert found["text"] == expected["text"]
            for name in ("log_prob", "score"):
                np.testing.assert_allclose(found[name], expected[name], atol=1e-4)
    assert compiled_lengths(256) == [16, 32, 64, 128, 256] and compiled_lengths(10) == [10]


def test_a_compiled_search_of_a_model_with_one_embedding():
    """Its projection is made once, outside; it has a bias, by which outputs would end at once but for their minimum."""
    decoding = GREEDY.model_copy(update={"min_length": 4})
    _, plain, tokenizer = make_module()
    changes = {"share_embeddings": True, "output_bias": True, "norm": "pre", "pe_input": 16}
    model = Transformer.from_config({**plain.get_config(), **changes})
    model.build((None, None), (None, None))
    model.final_bias.assign(
        keras.random.normal(model.final_bias.shape, seed=4) + 20 * tf.one_hot(END, plain.target_vocab_size)
    )
    module = TranslatorModule(model, Tokenizers(tokenizer, tokenizer), decoding, compiled=True)
    for line in [*LINES, "dogs " * 100]:
        found, expected = module.serve_alone(tf.constant([line])), module.serve(tf.constant([line]))
        assert found["text"] == expected["text"]
        np.testing.assert_allclose(found["log_prob"], expected["log_prob"], atol=1e-4)


def test_xla_compiles_once_for_all_texts_of_a_length():
    """What XLA takes for a constant, such as a maximum computed from the text, it would compile for each text."""
    _, model, tokenizer = make_module(decoding=GREEDY)
    search = TranslatorModule(model, Tokenizers(tokenizer, tokenizer), GREEDY, compiled=True).compiled_search
    programs = {
        search.find.experimental_get_compiler_ir(tf.constant([[length] * length + [3] + [0] * (15 - length)]))(
            stage="hlo"
        )
        for length in (1, 4, 9)
    }
    assert len(programs) == 1 and "s32[1,16]{1,0} parameter(0)" in programs.pop()


def test_only_greedy_search_is_compiled():
    for changes in ({"beam_size": 4}, {"method": "sample"}, {"no_repeat_ngram": 3}):
        decoding = GREEDY.model_copy(update=changes)
        _, model, tokenizer = make_module(decoding=decoding)
        with pytest.raises(UsageError, match="a compiled search is greedy"):
            TranslatorModule(model, Tokenizers(tokenizer, tokenizer), decoding, compiled=True)


def test_one_trace_for_all_lengths():
    """T6, https://github.com/tensorflow/tensorflow/issues/29075: sources of every length, one graph."""
    module = make_module()[0]
    for length in range(1, 20):
        module.decode(tf.fill([2, length], 3), tf.zeros([2, length // 4], tf.int32), tf.range(2))
    assert module.decode.experimental_get_tracing_count() == 1


def test_a_vocabulary_of_another_size_is_refused():
    """D13, https://github.com/tensorflow/tensorflow/issues/27033: the tokenizer's ids must have rows in the model."""
    with pytest.raises(DataError, match="the model 41 and 41"):
        make_module(vocabulary=41)


def test_two_vocabularies():
    """B13, https://github.com/mila-iqia/blocks-examples/issues/95: the source's end id was looked for in the target.

    Here padding, unknown, start and end have one id each, in every vocabulary: a SentencePiece model with others is
    refused when it is loaded. With vocabularies of different sizes, ids become text by the target's pieces alone.
    """
    source = Tokenizer(train_sentencepiece(LINES, 40))
    target = Tokenizer(train_sentencepiece(["ein Hund", "zwei Hunde laufen", "die Katze sieht den Hund"], 60))
    random.seed(5)
    model = Transformer(2, 16, 2, 32, len(source.pieces), len(target.pieces), 20, 20, rate=0.0)
    model.build((None, None), (None, None))
    assert len(source.pieces) != len(target.pieces)
    translator = Translator(TranslatorModule(model, Tokenizers(source, target), BEAM), BEAM)
    for n_best in translator.stream(LINES):
        for found in n_best:
            pieces = [target.pieces[i] for i in found.ids]
            assert found.text == "".join(piece for piece in pieces if piece != "</s>").replace("▁", " ").removeprefix(
                " "
            )
            assert "</s>" not in pieces[:-1] and not {"<pad>", "<s>"} & set(pieces)
    other = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(LINES), model_writer=other, vocab_size=40, model_type="bpe", hard_vocab_limit=False,
        pad_id=0, unk_id=1, bos_id=2, eos_id=7, normalization_rule_name="identity", minloglevel=2,
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"must be ids \(0, 1, 2, 3\), got \(0, 1, 2, 7\)"):
        Tokenizer(other.getvalue())
