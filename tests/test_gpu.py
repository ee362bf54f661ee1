"""On a GPU: TensorFlow places by itself, nothing here names a device."""

import numpy as np
import pytest
import tensorflow as tf
from test_training import figures, files, small  # noqa: F401

from keras_transformer import training
from keras_transformer.translator import Translator

GPUS = tf.config.list_physical_devices("GPU")


@pytest.mark.gpu
@pytest.mark.skipif(not GPUS, reason="no GPU: tf.config.list_physical_devices('GPU') is empty")
def test_trains_and_translates_on_a_gpu(tmp_path, files):  # noqa: F811
    """The matrix products run there, the losses are the CPU's to 1e-3, and a bad id is an error there too."""
    settings = small(files, precision="float32")
    training.train(settings, tmp_path / "gpu")
    assert any("GPU" in tf.matmul(a, a).device for a in [tf.ones((2, 2))])
    with tf.device("CPU"):
        training.train(settings, tmp_path / "cpu")
    np.testing.assert_allclose(
        list(figures(tmp_path / "gpu").values()), list(figures(tmp_path / "cpu").values()), rtol=1e-3
    )
    assert len(Translator.load(tmp_path / "gpu").translate(["a b c", "", "d e"])) == 3
    model = Translator.load(tmp_path / "gpu").module
    with pytest.raises(tf.errors.InvalidArgumentError, match="ids must be from 0 to"):
        model.decode(tf.constant([[10**6, 3]]), tf.zeros([1, 0], tf.int32), tf.range(1))
