"""The SavedModel: strings in, strings out, in a process that has TensorFlow and tensorflow-text alone."""

import json
import shutil
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf
from test_translator import LINES, make_module

from keras_transformer.config import DecodingSettings, Settings, run_settings, settings_yaml
from keras_transformer.errors import UsageError
from keras_transformer.export.saved_model import export_saved_model
from keras_transformer.translator import Translator

BARE = """
import json, sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("keras_transformer", "sentencepiece", "babel", "pydantic", "sacrebleu"):
            raise ImportError(name)
sys.meta_path.insert(0, Refuse())
import tensorflow as tf
import tensorflow_text
serve = tf.saved_model.load(sys.argv[1]).signatures["serving_default"]
results = serve(text=tf.constant(json.load(sys.stdin)))
print(json.dumps([[text.decode() for text in results["text"].numpy()], results["score"].numpy().tolist()]))
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run folder with an untrained model."""
    folder = tmp_path_factory.mktemp("run")
    module, model, tokenizer = make_module()
    (folder / "settings.yaml").write_text(settings_yaml(Settings()), encoding="utf-8")
    (folder / "tokenizer").mkdir()
    (folder / "tokenizer" / "joint.model").write_bytes(tokenizer.files[".model"])
    model.save(folder / "best.keras")
    return folder


@pytest.fixture
def saved_model(run, tmp_path):
    export_saved_model(run, tmp_path / "saved")
    return tmp_path / "saved"


def test_gives_the_same_texts_and_scores_in_a_bare_process(run, saved_model, tmp_path):
    """S3, https://github.com/keras-team/keras-hub/issues/2015: moved, without the run, and without this package.

    S6, https://github.com/OpenNMT/OpenNMT-tf/issues/501: what the run translates, the export translates.
    """
    lines = [*LINES, "", " \t", "dogs " * 100, "a\u00a0cat", *(f"{line} and {line}" for line in LINES), *LINES[:4]]
    expected = [n_best[0] for n_best in Translator.load(run).stream(lines)]
    moved = shutil.move(saved_model, tmp_path / "moved")
    result = subprocess.run(
        [sys.executable, "-c", BARE, moved], input=json.dumps(lines), capture_output=True, text=True, check=True
    )
    texts, scores = json.loads(result.stdout.splitlines()[-1])
    assert texts == [found.text for found in expected]
    np.testing.assert_allclose(scores, [found.score for found in expected], atol=1e-4)


def test_takes_any_number_of_texts(saved_model):
    """S4, https://github.com/tensorflow/tensorflow/issues/69307: named input and outputs, one, three or no texts."""
    serve = tf.saved_model.load(saved_model).signatures["serving_default"]
    assert [spec.name for spec in serve.structured_input_signature[1].values()] == ["text"]
    assert set(serve.structured_outputs) == {"text", "log_prob", "score"}
    for count in (1, 3):
        results = serve(text=tf.constant(LINES[:count]))
        assert results["text"].shape == results["score"].shape == (count,)
    assert serve(text=tf.constant([], tf.string))["text"].shape == (0,)


def test_invalid_bytes_are_read_as_the_replacement_character(saved_model):
    serve = tf.saved_model.load(saved_model).signatures["serving_default"]
    texts = serve(text=tf.constant([b"a \xff dog", "a \ufffd dog"]))["text"].numpy()
    assert texts[0] == texts[1]


def test_translator_loads_it_with_the_runs_settings(run, saved_model):
    assert Translator.load(saved_model).translate(LINES) == Translator.load(run).translate(LINES)
    assert run_settings(saved_model) == run_settings(run)


def test_decodes_as_it_was_exported(run, tmp_path):
    """Two translations of each text by a beam of three; other settings are refused, for they are in the graph."""
    decoding = DecodingSettings(beam_size=3, n_best=2)
    export_saved_model(run, tmp_path / "beam", decoding)
    expected = list(Translator.load(run, decoding).stream(LINES))
    exported = list(Translator.load(tmp_path / "beam").stream(LINES))
    assert [[one.ids for one in n_best] for n_best in exported] == [[one.ids for one in n_best] for n_best in expected]
    assert [len(n_best) for n_best in exported] == [2] * len(LINES)
    with pytest.raises(UsageError, match="decodes as it was exported"):
        Translator.load(tmp_path / "beam", DecodingSettings(beam_size=5))
