"""A model that an earlier version stored still loads, translates the same and goes on learning.

`python tests/test_stored.py` made tests/fixtures/keras with version 0.1.0; it is not to be made anew when it fails.
"""

import json
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

FIXTURE = Path(__file__).parent / "fixtures" / "keras"
NUMBERS = dict(zip("one two three four five six".split(), "eins zwei drei vier fünf sechs".split(), strict=True))
THINGS = dict(zip("dogs cats cows birds".split(), "Hunde Katzen Kühe Vögel".split(), strict=True))
PAIRS = [(f"{n} {t} and {m} {u}", f"{NUMBERS[n]} {THINGS[t]} und {NUMBERS[m]} {THINGS[u]}")
         for n in NUMBERS for t in THINGS for m in NUMBERS for u in THINGS]  # fmt: skip
LOAD = """
import json, sys
from pathlib import Path
import keras
import keras_transformer
from keras_transformer.config import DecodingSettings
from keras_transformer.data.tokenizer import load_tokenizers
from keras_transformer.translator import Translator
from keras_transformer.translator_module import TranslatorModule

folder, texts = Path(sys.argv[1]), json.load(sys.stdin)
model = keras.models.load_model(folder / "model.keras")
decoding = DecodingSettings(beam_size=3)
translator = Translator(TranslatorModule(model, load_tokenizers(folder / "tokenizer"), decoding), decoding)
state = {"iterations": int(model.optimizer.iterations), "learning_rate": float(model.optimizer.learning_rate)}
print(json.dumps([translator.translate(texts), state]))
"""


def batch(tokenizers, pairs):
    from keras_transformer.data.pipeline import encode_pairs, teacher_forcing

    corpus = encode_pairs(pairs, tokenizers, 32, 32, "stored")
    return teacher_forcing(*corpus.batch(np.arange(len(pairs))))


@pytest.fixture(scope="module")
def expected():
    return json.loads((FIXTURE / "expected.json").read_text(encoding="utf-8"))


def test_translates_as_it_did_in_a_new_process(expected):
    """S2, https://github.com/keras-team/keras-hub/issues/219: after `import keras_transformer`, without a warning that
    weights were not loaded; the optimizer is where it was."""
    texts = list(expected["texts"])
    command = [sys.executable, "-W", "error::UserWarning", "-c", LOAD, FIXTURE]
    result = subprocess.run(command, input=json.dumps(texts), capture_output=True, text=True, check=True)
    translations, state = json.loads(result.stdout.splitlines()[-1])
    assert translations == list(expected["texts"].values())
    assert len(set(translations)) > 20
    assert state["iterations"] == expected["iterations"]
    np.testing.assert_allclose(state["learning_rate"], expected["learning_rate"], rtol=1e-5)


def test_gives_the_logits_it_gave_and_goes_on_learning(expected):
    import keras

    from keras_transformer.data.tokenizer import load_tokenizers

    model = keras.models.load_model(FIXTURE / "model.keras")
    inputs, targets = batch(load_tokenizers(FIXTURE / "tokenizer"), PAIRS[:4])
    np.testing.assert_allclose(model(inputs)[:, :2, :5], expected["logits"], atol=1e-4)
    losses = model.fit(inputs, targets, epochs=10, verbose=0).history["loss"]
    assert losses[0] < expected["loss"] + 1 and losses[-1] < losses[0]


def make() -> None:
    import keras

    from keras_transformer import CustomSchedule, MaskedCrossEntropy, TokenAccuracy, Transformer
    from keras_transformer.config import DecodingSettings
    from keras_transformer.data.tokenizer import train_tokenizers
    from keras_transformer.translator import Translator
    from keras_transformer.translator_module import TranslatorModule

    shuffled = random.Random(0).sample(PAIRS, len(PAIRS))
    train, test = shuffled[:-60], shuffled[-60:]
    keras.utils.set_random_seed(1)
    tokenizers = train_tokenizers(train, 60, True)
    size = len(tokenizers.source.pieces)
    model = Transformer(2, 24, 2, 48, size, size, 32, 32, 0.0, norm="pre", share_embeddings=True)
    optimizer = keras.optimizers.Adam(CustomSchedule(24, 200, 0.005), beta_1=0.9, beta_2=0.98, epsilon=1e-9)
    model.compile(optimizer, loss=MaskedCrossEntropy(label_smoothing=0.1), metrics=[TokenAccuracy()], jit_compile=False)
    history = model.fit(*batch(tokenizers, train), batch_size=64, epochs=60, verbose=2).history
    FIXTURE.mkdir(parents=True)
    model.save(FIXTURE / "model.keras")
    tokenizers.save(FIXTURE / "tokenizer")
    decoding = DecodingSettings(beam_size=3)
    texts = [source for source, _ in test]
    translations = Translator(TranslatorModule(model, tokenizers, decoding), decoding).translate(texts)
    print(sum(one == other for one, (_, other) in zip(translations, test, strict=True)), "of", len(test), "are right")
    inputs, _ = batch(tokenizers, PAIRS[:4])
    expected = {
        "texts": dict(zip(texts, translations, strict=True)),
        "logits": model(inputs)[:, :2, :5].numpy().round(5).tolist(),
        "iterations": int(model.optimizer.iterations),
        "learning_rate": float(model.optimizer.learning_rate),
        "loss": history["loss"][-1],
    }
    text = json.dumps(expected, ensure_ascii=False, indent=0) + "\n"
    (FIXTURE / "expected.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    make()
