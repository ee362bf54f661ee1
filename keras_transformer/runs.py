"""A trained run's folder: what is written there and read."""

from pathlib import Path

import keras

from keras_transformer.config import Settings, settings_yaml
from keras_transformer.data.tokenizer import Tokenizers, load_tokenizers
from keras_transformer.errors import DataError, first_line
from keras_transformer.files import whole
from keras_transformer.model import Transformer


def load_run(folder: Path) -> tuple[Transformer, Tokenizers]:
    """The best model of a run folder, and its tokenizers.

    Raises:
        DataError: it has no model yet, or is damaged.
    """
    if not (folder / "best.keras").exists():
        raise DataError(f"{folder}: no model yet (no best.keras); train the run until its first measure on dev")
    tokenizers = load_tokenizers(folder / "tokenizer")
    try:
        model = keras.models.load_model(folder / "best.keras", compile=False)
    except Exception as error:  # zipfile, h5py and Keras each have their own for a damaged file
        raise DataError(f"{folder / 'best.keras'}: damaged ({first_line(error)})") from error
    return model, tokenizers


def save_run(folder: Path, settings: Settings, tokenizers: Tokenizers, model: Transformer) -> None:
    """Write a run folder of a trained model, which `load_run` reads; whole or not at all."""
    with whole(folder) as beside:
        beside.mkdir()
        (beside / "settings.yaml").write_text(settings_yaml(settings), encoding="utf-8")
        tokenizers.save(beside / "tokenizer")
        model.save(beside / "best.keras")
