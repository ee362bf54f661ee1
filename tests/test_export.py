"""The SavedModel: strings in, strings out, in a process that has TensorFlow and tensorflow-text alone."""

import json
import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.core.protobuf import saved_model_pb2
from tensorflow_serving.apis import prediction_log_pb2
from test_translator import LINES, make_module

from keras_transformer.config import DecodingSettings, Settings, run_settings
from keras_transformer.data.tokenizer import Tokenizers
from keras_transformer.errors import UsageError
from keras_transformer.export.saved_model import export_saved_model
from keras_transformer.runs import save_run
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
    folder = tmp_path_factory.mktemp("untrained") / "run"
    _, model, tokenizer = make_module()
    save_run(folder, Settings(), Tokenizers(tokenizer, tokenizer), model)
    return folder


@pytest.fixture(scope="module")
def saved_model(run, tmp_path_factory):
    folder = tmp_path_factory.mktemp("exports") / "saved"
    export_saved_model(run, folder)
    return folder


def test_gives_the_same_texts_and_scores_in_a_bare_process(run, saved_model, tmp_path):
    """S3, https://github.com/keras-team/keras-hub/issues/2015: moved, without the run, and without this package.

    S6, https://github.com/OpenNMT/OpenNMT-tf/issues/501: what the run translates, the export translates.
    """
    lines = [*LINES, "", " \t", "dogs " * 100, "a\u00a0cat", *(f"{line} and {line}" for line in LINES), *LINES[:4]]
    expected = [n_best[0] for n_best in Translator.load(run).stream(lines)]
    moved = shutil.copytree(saved_model, tmp_path / "moved")
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


@pytest.mark.parametrize("decoding", [DecodingSettings(beam_size=1, min_length=4), DecodingSettings(beam_size=3)])
def test_a_text_alone_is_translated_as_among_others(run, tmp_path, decoding):
    """It has a graph of its own; a blank one too."""
    export_saved_model(run, tmp_path / "out", decoding)
    serve = load(tmp_path / "out").signatures["serving_default"]
    lines = [*LINES, " \t", "dogs " * 100]
    together = serve(text=tf.constant(lines))
    for row, line in enumerate(lines):
        alone = serve(text=tf.constant([line]))
        assert alone["text"][0] == together["text"][row]
        np.testing.assert_allclose(alone["score"][0], together["score"][row], atol=1e-5)


def test_a_compiled_signature_takes_one_text(run, tmp_path):
    """In a bare process, as the search that is not compiled; the card says which texts it is compiled for."""
    decoding = DecodingSettings(beam_size=1)
    export_saved_model(run, tmp_path / "out", decoding, compiled=True)
    expected = Translator.load(run, decoding).translate(LINES[:2])
    code = BARE.replace("serving_default", "alone")
    for line, text in zip(LINES, expected, strict=False):
        command = [sys.executable, "-c", code, tmp_path / "out"]
        result = subprocess.run(command, input=json.dumps([line]), capture_output=True, text=True, check=True)
        assert json.loads(result.stdout.splitlines()[-1])[0] == [text]
    alone = load(tmp_path / "out").signatures["alone"]
    for count in (0, 2):
        with pytest.raises(tf.errors.InvalidArgumentError, match=f"alone takes one text, got.*{count}"):
            alone(text=tf.constant(LINES[:count], tf.string))
    saved = saved_model_pb2.SavedModel.FromString((tmp_path / "out" / "saved_model.pb").read_bytes())
    functions = saved.meta_graphs[0].graph_def.library.function
    compiled = {function.signature.name for function in functions if function.attr["_XlaMustCompile"].b}
    assert compiled and all(re.match("__inference_find_\\d+$", name) for name in compiled)  # and no other signature's
    assert "of up to 16, 20\npieces" in (tmp_path / "out" / "MODEL_CARD.md").read_text()
    assert Translator.load(tmp_path / "out").translate(LINES[:2]) == expected


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


@pytest.fixture(scope="module")
def beam_model(run, tmp_path_factory):
    folder = tmp_path_factory.mktemp("exports") / "beam"
    export_saved_model(run, folder, DecodingSettings(beam_size=3, length_penalty=0.6, length_norm="gnmt"))
    return folder


def test_a_signature_gives_several_translations(run, beam_model):
    """As many as the beam has, where the settings do not say how many; of the same search."""
    n_best = load(beam_model).signatures["n_best"](text=tf.constant([*LINES, ""]))
    decoding = DecodingSettings(beam_size=3, n_best=3, length_penalty=0.6, length_norm="gnmt")
    expected = list(Translator.load(run, decoding).stream([*LINES, ""]))
    assert n_best["text"].numpy().astype(str).tolist() == [[one.text for one in found] for found in expected]
    for name in ("score", "log_prob"):
        wanted = [[getattr(one, name) for one in found] for found in expected]
        np.testing.assert_allclose(n_best[name], wanted, atol=1e-4)


def test_options_can_change_with_each_request(run, beam_model):
    """The length penalty and the limits of the outputs, as TensorFlow Serving fills them in where they are left out."""
    model = load(beam_model)
    serve, text = model.signatures["options"], tf.constant(LINES)
    for penalty, longest, shortest in [(0.6, 20, 0), (0.0, 20, 0), (2.0, 12, 0), (0.6, 5, 5)]:
        decoding = DecodingSettings(
            beam_size=3, length_norm="gnmt", length_penalty=penalty, max_length=longest, min_length=shortest
        )
        expected = [found[0] for found in Translator.load(run, decoding).stream(LINES)]
        options = {"length_penalty": penalty, "max_length": longest, "min_length": shortest}
        for given in (options, {name: [value] * len(LINES) for name, value in options.items()}):
            results = serve(text=text, **{name: tf.constant(value) for name, value in given.items()})
            assert results["text"].numpy().astype(str).tolist() == [found.text for found in expected]
            np.testing.assert_allclose(results["score"], [found.score for found in expected], atol=1e-4)
    own = model.signatures["serving_default"](text=text)["score"]
    np.testing.assert_allclose(model.serve_options(text)["score"], own)
    [graph] = saved_model_pb2.SavedModel.FromString((beam_model / "saved_model.pb").read_bytes()).meta_graphs
    defaults = {name: tf.make_ndarray(value) for name, value in graph.signature_def["options"].defaults.items()}
    assert {name: value.item() for name, value in defaults.items()} == {
        "length_penalty": pytest.approx(0.6),
        "max_length": 20,
        "min_length": 0,
    }


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"length_penalty": -1.0}, "length_penalty must be at least 0"),
        ({"max_length": 0}, "max_length must be at least 1"),
        ({"max_length": [3, 4]}, "max_length must be the same for all texts"),
        ({"max_length": 5, "min_length": 10}, "min_length must be at most max_length"),
    ],
)
def test_an_option_that_is_none_is_refused(beam_model, options, message):
    model = load(beam_model)
    with pytest.raises(tf.errors.InvalidArgumentError, match=message):
        model.serve_options(tf.constant(LINES[:2]), **{name: tf.constant(value) for name, value in options.items()})


@cache
def load(folder):
    return tf.saved_model.load(folder)


def answer(folder, body):
    """What TensorFlow Serving makes of the JSON body of a :predict request, by its documented rules
    (https://www.tensorflow.org/tfx/serving/api_rest#predict_api): `instances` has a value, or an object with one of
    each input, for each row, and is answered by `predictions`; `inputs` has whole tensors and is answered by `outputs`.
    Either leaves the names out where there is but one.
    """
    body = json.loads(body)
    serve = load(folder).signatures[body.get("signature_name", "serving_default")]
    specs = serve.structured_input_signature[1]
    rows = "instances" in body
    given = body["instances" if rows else "inputs"]
    if rows and isinstance(given[0], dict):
        assert all(row.keys() == specs.keys() for row in given)
        given = {name: [row[name] for row in given] for name in given[0]}
    if not isinstance(given, dict):
        [name] = specs
        given = {name: given}
    assert given.keys() == specs.keys()
    results = serve(**{name: tf.constant(value, specs[name].dtype) for name, value in given.items()})
    results = {name: value.numpy().tolist() for name, value in results.items()}
    if not rows:
        return {"outputs": results}
    return {"predictions": [dict(zip(results, values, strict=True)) for values in zip(*results.values(), strict=True)]}


def test_answers_tensorflow_servings_rest_requests(beam_model):
    rows = answer(beam_model, '{"instances": ["a small cat", "a dog"]}')["predictions"]
    columns = answer(beam_model, '{"inputs": ["a small cat", "a dog"]}')["outputs"]
    named = answer(beam_model, '{"instances": [{"text": "a small cat"}, {"text": "a dog"}]}')["predictions"]
    assert rows == named and [row["text"] for row in rows] == columns["text"]
    assert set(rows[0]) == {"text", "log_prob", "score"}
    n_best = answer(beam_model, '{"signature_name": "n_best", "inputs": {"text": ["a dog"]}}')["outputs"]
    assert n_best["text"][0][0] == columns["text"][1] and len(n_best["text"][0]) == 3
    options = '"length_penalty": 0.6, "max_length": 20, "min_length": 0'
    by_row = answer(beam_model, f'{{"signature_name": "options", "instances": [{{"text": "a dog", {options}}}]}}')
    by_column = answer(beam_model, f'{{"signature_name": "options", "inputs": {{"text": ["a dog"], {options}}}}}')
    assert by_row["predictions"][0]["text"] == by_column["outputs"]["text"][0] == columns["text"][1]


def test_saved_model_cli_shows_the_signatures(beam_model):
    command = [Path(sys.executable).with_name("saved_model_cli"), "show", "--dir", beam_model, "--tag_set", "serve"]
    shown = subprocess.run([*command, "--signature_def", "serving_default"], capture_output=True, text=True, check=True)
    for line in ("inputs['text'] tensor_info:", "outputs['text'] tensor_info:", "outputs['score'] tensor_info:"):
        assert line in shown.stdout
    names = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert {"serving_default", "n_best", "options"} <= set(re.findall('"(.*?)"', names))


def test_warm_up_requests_are_inside(beam_model):
    """Records of TensorFlow Serving's PredictionLog, which the model answers."""
    path = beam_model / "assets.extra" / "tf_serving_warmup_requests"
    records = [prediction_log_pb2.PredictionLog.FromString(x.numpy()) for x in tf.data.TFRecordDataset(str(path))]
    requests = [record.predict_log.request for record in records]
    assert [request.model_spec.signature_name for request in requests] == ["serving_default"] * 2
    texts = [tf.make_ndarray(request.inputs["text"]) for request in requests]
    assert [len(text) for text in texts] == [1, 8] and texts[0][0].strip()
    serve = load(beam_model).signatures["serving_default"]
    assert serve(text=tf.constant(texts[1]))["text"].shape == (8,)


def test_the_card_says_what_it_is_and_how_to_call_it(run, tmp_path):
    """The Python in it runs; figures on dev are those of the run's best measure, with sacreBLEU's signature."""
    measured = {"dev_accuracy": 0.5, "dev_exact_match": 0.1}
    lines = [{"step": step, "dev_loss": 2.0, "dev_bleu": bleu, **measured} for step, bleu in ((10, 30.5), (20, 30.25))]
    copy = shutil.copytree(run, tmp_path / "mine")
    (copy / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    export_saved_model(copy, tmp_path / "out", DecodingSettings(beam_size=2))
    card = (tmp_path / "out" / "MODEL_CARD.md").read_text(encoding="utf-8")
    assert card.startswith("# mine: en to de\n")
    assert "| 2.000 | 50.0 % | 30.50 | 10.0 % |" in card and "after 10 updates" in card
    assert "nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:" in card
    assert "| beam_size | `2` |" in card
    code = re.search("```python\n(.*?)```", card, re.DOTALL)[1].replace("FOLDER", str(tmp_path / "out"))
    exec(compile(code, "card", "exec"), {})
    bodies = re.search("```json\n(.*?)```", card, re.DOTALL)[1].splitlines()
    assert len(bodies) == 3 and all(answer(tmp_path / "out", body) for body in bodies)


@pytest.mark.parametrize("lines", ["", '{"step": 100, "loss": 3.5}\n'])
def test_the_card_of_a_run_without_a_measure(run, tmp_path, lines):
    """Killed between the first measure and its checkpoint, it has a best model and no figures of it."""
    copy = shutil.copytree(run, tmp_path / "mine")
    (copy / "metrics.jsonl").write_text(lines, encoding="utf-8")
    export_saved_model(copy, tmp_path / "out", DecodingSettings(beam_size=2))
    assert "It was not measured here" in (tmp_path / "out" / "MODEL_CARD.md").read_text(encoding="utf-8")


def test_bfloat16_weights_are_half_the_size(run, saved_model, tmp_path):
    export_saved_model(run, tmp_path / "half", DecodingSettings(beam_size=1, precision="bfloat16"))
    sizes = [
        sum(path.stat().st_size for path in (folder / "variables").iterdir())
        for folder in (tmp_path / "half", saved_model)
    ]
    assert sizes[0] < 0.7 * sizes[1]
