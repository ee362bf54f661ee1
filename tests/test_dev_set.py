"""What a model is worth on dev: each figure as by hand, pair by pair."""

import random

import numpy as np
import pytest
import tensorflow as tf

from keras_transformer.config import settings_from
from keras_transformer.data.pipeline import encode_pairs
from keras_transformer.data.tokenizer import train_tokenizers
from keras_transformer.dev_set import DevSet
from keras_transformer.ids import START
from keras_transformer.runs import make_model
from keras_transformer.translator import Translator
from keras_transformer.translator_module import TranslatorModule

PAIRS = [("a b", "1 2"), ("c a b", "3 1 2"), ("b", "2"), ("c c a b a", "3 3 1 2 1"), ("b c", "2 3")]
SIZES = {"num_layers": 1, "d_model": 16, "num_heads": 2, "dff": 32, "rate": 0.5}


def test_loss_and_accuracy_are_those_of_all_tokens_of_all_pairs():
    """In nats a token, ends counted, padding not; no smoothing, no dropout, and float32 for a model in bfloat16.

    They are those of the weights that the model has by then, and so are the translations.
    """
    training = {"tokens_per_batch": 16, "label_smoothing": 0.1}
    settings = settings_from({"model": SIZES, "training": training, "decoding": {"beam_size": 1}}, "test")
    tokenizers = train_tokenizers(PAIRS, vocab_size=20, joint=True)
    random.seed(1)
    model = make_model(settings.model, tokenizers, "mixed_bfloat16")
    dev = DevSet(model, tokenizers, PAIRS, encode_pairs(PAIRS, tokenizers, 256, 256, "dev"), settings)
    plain, losses, outputs = make_model(settings.model, tokenizers), [], []
    for _ in range(2):
        figures, scores, examples = dev.measure()
        plain.set_weights([variable.numpy() for variable in model.weights])
        costs, right = [], []
        for source, target in PAIRS:
            inp, tar = tokenizers.source.encode([source]).to_tensor(), tokenizers.target.encode([target])[0].numpy()
            logits = plain(inp, tf.constant([[START, *tar[:-1]]]), False)[0].numpy()[0].astype("float64")
            probabilities = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
            costs += [-np.log(probabilities[place, piece]) for place, piece in enumerate(tar)]
            right += [probabilities[place].argmax() == piece for place, piece in enumerate(tar)]
        assert figures["dev_loss"] == pytest.approx(np.mean(costs), rel=1e-5)
        assert figures["dev_accuracy"] == pytest.approx(np.mean(right))
        translator = Translator(TranslatorModule(plain, tokenizers, settings.decoding), settings.decoding)
        outputs.append(translator.translate([source for source, _ in PAIRS]))
        assert [(source, reference) for source, _, reference in examples] == PAIRS
        assert [translation for _, translation, _ in examples] == outputs[-1]
        losses.append(figures["dev_loss"])
        for variable in model.trainable_variables:
            variable.assign(-variable)
    assert abs(losses[0] - losses[1]) > 0.01 and outputs[0] != outputs[1]


def test_translations_are_scored_against_the_references(monkeypatch):
    """Two of five as they should be: exact match 0.4, and the BLEU of sacreBLEU on these lines."""
    settings = settings_from({"model": SIZES}, "test")
    tokenizers = train_tokenizers(PAIRS, vocab_size=20, joint=True)
    dev = DevSet(
        make_model(settings.model, tokenizers), tokenizers, PAIRS, encode_pairs(PAIRS, tokenizers, 256, 256, "dev"),
        settings,
    )  # fmt: skip
    translations = {"a b": "1 2", "c a b": "3 1", "b": "1", "c c a b a": "3 3 1 2 1", "b c": ""}
    monkeypatch.setattr(dev.translator, "translate", lambda sources: [translations[source] for source in sources])
    figures, scores, examples = dev.measure()
    assert figures["dev_exact_match"] == 0.4
    assert figures["dev_bleu"] == scores.bleu
    # 10 tokens against 13, 9 of them right, and so are all 6, 3 and 2 of the longer n-grams.
    assert figures["dev_bleu"] == pytest.approx(100 * 0.9**0.25 * np.exp(1 - 13 / 10), rel=1e-6)
    assert examples[1] == ("c a b", "3 1", "3 1 2")
