"""What is computed in: the choice for a machine, and oneDNN's bfloat16 products only where they are asked for."""

import numpy as np
import pytest
import tensorflow as tf

from keras_transformer import precision


@pytest.mark.parametrize(
    ("flags", "capability", "expected"),
    [
        ({"avx2"}, None, "float32"),
        ({"avx2", "avx512_bf16"}, None, "onednn_bfloat16"),
        ({"amx_bf16"}, None, "onednn_bfloat16"),
        (set(), (9, 0), "mixed_bfloat16"),
        (set(), (7, 5), "mixed_float16"),
        ({"avx512_bf16"}, (6, 1), "float32"),
    ],
)
def test_fastest_precision(monkeypatch, flags, capability, expected):
    monkeypatch.setattr(precision, "cpu_flags", lambda: flags)
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind: ["GPU:0"] if capability else [])
    details = {"compute_capability": capability}
    monkeypatch.setattr(tf.config.experimental, "get_device_details", lambda device: details)
    assert precision.fastest_precision() == expected


def test_products_are_bfloat16_inside_the_block_alone():
    """1 + 2^-10 times 1: bfloat16 has 8 bits, and gives 1. Where the processor has no bfloat16, both are float32's."""
    ones = tf.eye(64)

    @tf.function(autograph=False)
    def product(x):
        return tf.matmul(tf.matmul(x, ones), ones)

    x = tf.fill((64, 64), 1 + 2.0**-10)
    before = product(x).numpy()
    with precision.products("onednn_bfloat16"):
        inside = product(x).numpy()
    with precision.products("float32"):
        after = product(x).numpy()
    np.testing.assert_array_equal(before, x)
    np.testing.assert_array_equal(after, x)
    if precision.cpu_flags() & {"avx512_bf16", "amx_bf16"}:
        np.testing.assert_array_equal(inside, 1)
