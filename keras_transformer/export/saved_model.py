"""A run as a SavedModel: strings in, strings out, with all it needs inside."""

import shutil
from pathlib import Path

import tensorflow as tf

from keras_transformer.files import whole
from keras_transformer.translator import TranslatorModule, load_run


def export_saved_model(run_dir: Path, out: Path) -> None:
    """Write the best model of a run and its tokenizers to the folder `out`, whole or not at all.

    The signature serving_default is TranslatorModule.serve. The run's settings lie in assets.extra, which TensorFlow
    leaves alone.

    Raises:
        DataError: `run_dir` is no run folder, or has no model yet.
    """
    module = TranslatorModule(*load_run(run_dir))
    with whole(out) as beside:
        tf.saved_model.save(module, beside, signatures={"serving_default": module.serve})
        (beside / "assets.extra").mkdir()
        shutil.copyfile(run_dir / "settings.yaml", beside / "assets.extra" / "settings.yaml")
