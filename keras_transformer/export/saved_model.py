"""A run as a SavedModel: strings in, strings out, with all it needs inside."""

import logging
from pathlib import Path

import tensorflow as tf

from keras_transformer.config import DecodingSettings, run_settings, settings_yaml
from keras_transformer.export.card import CARD, make_card
from keras_transformer.files import whole
from keras_transformer.runs import load_run
from keras_transformer.translator_module import TranslatorModule

USAGE = """
```python
import tensorflow as tf
import tensorflow_text  # registers the tokenizer's operations

model = tf.saved_model.load("FOLDER")
model.signatures["serving_default"](text=tf.constant(["..."]))  # text, log_prob, score of each
model.signatures["n_best"](text=tf.constant(["..."]))  # the same of several, the best first
model.serve_options(tf.constant(["..."]), length_penalty=0.6, max_length=50)
```

TensorFlow Serving answers at `/v1/models/NAME:predict`, text by text or all together:

```json
{"instances": ["...", "..."]}
{"inputs": ["...", "..."]}
{"signature_name": "options", "inputs": {"text": ["..."], "length_penalty": 0.6, "max_length": 50, "min_length": 0}}
```
"""
WARM_UP = (1, 8)  # texts in a request
ALONE = """
`alone` takes one text, and answers sooner. XLA compiles it, some seconds each time, for the first text of up to {}
pieces; TensorFlow Serving does so with `--xla_cpu_compilation_enabled=true`.

```python
model.signatures["alone"](text=tf.constant(["..."]))
```
"""
log = logging.getLogger(__name__)


def export_saved_model(
    run_dir: Path, out: Path, decoding: DecodingSettings | None = None, compiled: bool = False
) -> None:
    """Write the best model of a run and its tokenizers to the folder `out`, whole or not at all.

    Its signatures are TranslatorModule's serve (serving_default), serve_n_best (n_best), serve_options (options) and,
    if it is to be compiled, serve_alone (alone).
    The settings lie in assets.extra, which TensorFlow leaves alone, and where tensorflow-serving-api is installed, the
    requests with which TensorFlow Serving warms up.

    Args:
        decoding: how it is to search; None for the run's own settings.
        compiled: whether to have a search of one text, too, that XLA compiles; `decoding` must be greedy.

    Raises:
        DataError: `run_dir` is no run folder, or has no model yet.
        UsageError: `decoding` does not go with the model, or is not greedy and to be compiled.
    """
    settings = run_settings(run_dir)
    settings = settings.model_copy(update={"decoding": decoding or settings.decoding})
    model, tokenizers = load_run(run_dir)
    module = TranslatorModule(model, tokenizers, settings.decoding, compiled)
    signatures = {"serving_default": module.serve, "n_best": module.serve_n_best, "options": module.serve_options}
    usage = USAGE
    if compiled:
        signatures["alone"] = module.serve_alone
        usage += ALONE.format(", ".join(map(str, module.compiled_search.lengths)))
    card = make_card(run_dir, settings, usage)
    with whole(out) as beside:
        tf.saved_model.save(module, beside, signatures=signatures)
        (beside / "assets.extra").mkdir()
        (beside / "assets.extra" / "settings.yaml").write_text(settings_yaml(settings), encoding="utf-8")
        text = "".join(tokenizers.source.pieces[4:24]).replace("▁", " ")
        write_warm_up(beside / "assets.extra" / "tf_serving_warmup_requests", text)
        (beside / CARD).write_text(card, encoding="utf-8")


def write_warm_up(path: Path, text: str) -> None:
    """Write requests to translate `text`, which TensorFlow Serving answers before any others.

    Their format comes with tensorflow-serving-api; where it is not installed, none are written.
    """
    try:
        from tensorflow_serving.apis import predict_pb2, prediction_log_pb2
    except ImportError:
        log.info("no warm-up requests for TensorFlow Serving: pip install tensorflow-serving-api for them")
        return
    with tf.io.TFRecordWriter(str(path)) as writer:
        for count in WARM_UP:
            request = predict_pb2.PredictRequest()
            request.model_spec.signature_name = "serving_default"
            request.inputs["text"].CopyFrom(tf.make_tensor_proto([text] * count))
            predict_log = prediction_log_pb2.PredictLog(request=request)
            writer.write(prediction_log_pb2.PredictionLog(predict_log=predict_log).SerializeToString())
