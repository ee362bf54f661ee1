"""Shared by all tests: TensorFlow told to be quiet, and the model most tests use."""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import pytest

from keras_transformer import Transformer

TINY = {
    "num_layers": 2,
    "d_model": 16,
    "num_heads": 2,
    "dff": 32,
    "input_vocab_size": 40,
    "target_vocab_size": 40,
    "pe_input": 60,
    "pe_target": 60,
    "rate": 0.0,
}


def pytest_configure(config):
    # Keras turns tf.Variable into NumPy with np.array when it saves; tf.Variable's __array__ has no `copy`.
    config.addinivalue_line(
        "filterwarnings", "ignore:__array__ implementation doesn't accept a copy:DeprecationWarning"
    )


@pytest.fixture
def tiny():
    """Makes a Transformer of 2 layers, d_model 16, 2 heads, dff 32, 40 ids and no dropout, the same weights each
    time."""

    def make(**changes):
        keras.utils.set_random_seed(0)
        return Transformer(**{**TINY, **changes})

    return make


@pytest.fixture
def rng():
    return np.random.default_rng(0)
