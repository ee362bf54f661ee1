"""A run's folder: its model, written and read; one process at a time; what a full disk there comes to."""

import contextlib
import fcntl
import logging
import os
import zipfile
from collections.abc import Iterator
from pathlib import Path

import keras
import tensorflow as tf

from keras_transformer.config import ModelSettings, Settings, settings_yaml
from keras_transformer.data.tokenizer import Tokenizers, load_tokenizers
from keras_transformer.errors import DataError, UsageError, first_line
from keras_transformer.files import disk_full, whole
from keras_transformer.model import Transformer

log = logging.getLogger(__name__)


def make_model(settings: ModelSettings, tokenizers: Tokenizers, dtype: str = "float32") -> Transformer:
    """A built Transformer of these settings for these vocabularies."""
    options = settings.model_dump()
    sizes = [options.pop(name) for name in ("num_layers", "d_model", "num_heads", "dff")]
    vocabularies = (len(tokenizers.source.pieces), len(tokenizers.target.pieces))
    model = Transformer(*sizes, *vocabularies, **options, dtype=dtype)
    model.build((None, None), (None, None))
    return model


def load_run(folder: Path) -> tuple[Transformer, Tokenizers]:
    """The best model of a run folder, and its tokenizers.

    Raises:
        DataError: it has no model yet, or is damaged.
    """
    if not (folder / "best.keras").exists():
        if (folder / "MODEL_CARD.md").exists():
            raise DataError(f"{folder}: damaged export (no saved_model.pb, no model.bin)")
        raise DataError(f"{folder}: no model yet (no best.keras); train the run until its first measure on dev")
    tokenizers = load_tokenizers(folder / "tokenizer")
    if not zipfile.is_zipfile(folder / "best.keras"):  # of which Keras would say that it is not there
        raise DataError(f"{folder / 'best.keras'}: damaged (not a whole zip file)")
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


@contextlib.contextmanager
def alone_in(run_dir: Path) -> Iterator[None]:
    """Inside the block, no other process trains into the run folder; it is made, and goes again if nothing is in it.

    Raises:
        UsageError: another process trains there.
    """
    made = [folder for folder in (run_dir, *run_dir.parents) if not folder.exists()]
    run_dir.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(run_dir, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # until it is closed, or the process ends
        except BlockingIOError:
            raise UsageError(f"{run_dir}: another process trains here; stop it, or give another --run-dir") from None
        except OSError as error:
            log.warning("%s: cannot be locked (%s): see that no other process trains here", run_dir, error.strerror)
        yield
    finally:
        os.close(descriptor)
        with contextlib.suppress(OSError):  # there is something in it
            for folder in made:
                folder.rmdir()


@contextlib.contextmanager
def space_left(run_dir: Path) -> Iterator[None]:
    """Inside the block, an error of a full disk becomes one line.

    Raises:
        DataError
    """
    try:
        yield
    except (OSError, tf.errors.OpError) as error:  # the latter from TensorBoard's writer
        if not disk_full(error):
            raise
        raise DataError(
            f"{run_dir}: no space left on the disk; the last checkpoint is whole: "
            "make room, then the same command goes on"
        ) from error
