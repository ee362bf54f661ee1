"""A trained run's folder: what is written is read again; what is missing is named. (Damage: test_cli.py.)"""

import numpy as np
import pytest
import tensorflow as tf
from test_translator import LINES, make_module

from keras_transformer.config import Settings, run_settings, settings_yaml
from keras_transformer.data.tokenizer import Tokenizers
from keras_transformer.errors import DataError
from keras_transformer.runs import load_run, save_run


def test_what_is_written_is_read_again(tmp_path):
    """The settings, each weight, the ids of each text; nothing but the folder itself is left."""
    _, model, tokenizer = make_module()
    settings = Settings(model={"num_layers": 2})
    save_run(tmp_path / "run", settings, Tokenizers(tokenizer, tokenizer), model)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    (tmp_path / "run" / "MODEL_CARD.md").touch()  # a card of one's own
    again, tokenizers = load_run(tmp_path / "run")
    assert run_settings(tmp_path / "run") == settings
    for variable, other in zip(model.weights, again.weights, strict=True):
        np.testing.assert_array_equal(variable, other)
    assert tokenizers.source is tokenizers.target
    texts = tf.constant(LINES)
    assert tokenizers.source.encode(texts).to_list() == tokenizer.encode(texts).to_list()


def test_a_run_without_a_model_yet(tmp_path):
    with pytest.raises(DataError, match=f"^{tmp_path}: no model yet"):
        load_run(tmp_path)
    (tmp_path / "MODEL_CARD.md").touch()
    with pytest.raises(DataError, match=f"^{tmp_path}: damaged export"):
        load_run(tmp_path)


@pytest.mark.parametrize(("kept", "missing"), [("", "model"), ("decoding:", "decoding"), ("# The updates", "training")])
def test_settings_that_were_cut_off_are_not_filled_with_the_defaults(tmp_path, kept, missing):
    """Kept is the text before the words. A SavedModel's settings lie in assets.extra."""
    text = settings_yaml(Settings(decoding={"beam_size": 7}))
    for folder in (tmp_path, tmp_path / "assets.extra"):
        folder.mkdir(exist_ok=True)
        (folder / "settings.yaml").write_text(text[: text.index(kept)])
        with pytest.raises(DataError, match=f"{folder / 'settings.yaml'}: damaged .it has no {missing}"):
            run_settings(tmp_path)
        (tmp_path / "saved_model.pb").touch()
