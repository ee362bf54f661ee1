"""A run as a SavedModel: strings in, strings out, with all it needs inside."""

from pathlib import Path

import tensorflow as tf

from keras_transformer.config import DecodingSettings, run_settings, settings_yaml
from keras_transformer.files import whole
from keras_transformer.translator import TranslatorModule, load_run


def export_saved_model(run_dir: Path, out: Path, decoding: DecodingSettings | None = None) -> None:
    """Write the best model of a run and its tokenizers to the folder `out`, whole or not at all.

    The signature serving_default is TranslatorModule.serve. The settings lie in assets.extra, which TensorFlow leaves
    alone.

    Args:
        decoding: how it is to search; None for the run's own settings.

    Raises:
        DataError: `run_dir` is no run folder, or has no model yet.
    """
    settings = run_settings(run_dir)
    settings = settings.model_copy(update={"decoding": decoding or settings.decoding})
    module = TranslatorModule(*load_run(run_dir), settings.decoding)
    with whole(out) as beside:
        tf.saved_model.save(module, beside, signatures={"serving_default": module.serve})
        (beside / "assets.extra").mkdir()
        (beside / "assets.extra" / "settings.yaml").write_text(settings_yaml(settings), encoding="utf-8")
