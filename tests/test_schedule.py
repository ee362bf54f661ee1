"""The learning rate: 0 at step 0, highest at warmup_steps, then falling with the square root."""

import json

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_transformer import CustomSchedule, TokenAccuracy, loss_function


@pytest.mark.parametrize(
    "step",
    [
        4000,
        np.int64(4000),
        tf.constant(4000),
        tf.constant(4000, "int64"),
        tf.constant(4000.0),
        tf.Variable(4000, dtype="int64"),
        tf.range(4000, 4001),
    ],
    ids=["int", "numpy", "int32", "int64", "float32", "variable", "range"],
)
def test_a_step_of_any_type(step):
    """O1, https://github.com/TensorSpeech/TensorFlowASR/issues/142,
    https://github.com/tensorflow/tensorflow/issues/60649, https://github.com/Kyubyong/transformer/issues/87: integers
    have no inverse square root, and the rate is scaled by d_model."""
    assert CustomSchedule(128)(step).numpy() == pytest.approx(1.39754e-3, rel=1e-5)
    assert CustomSchedule(512)(step).numpy() == pytest.approx(6.98771e-4, rel=1e-5)


def test_the_rate_by_its_formula():
    """Halfway up, at the top, and at four times the top, where it is half of the highest."""
    schedule = CustomSchedule(16, warmup_steps=100)
    top = 16**-0.5 * 100**-0.5
    assert top == 0.025
    rates = schedule(tf.range(0, 1000)).numpy()
    np.testing.assert_allclose(rates[[0, 50, 100, 400]], [0, top / 2, top, top / 2], rtol=1e-5)
    assert rates.argmax() == 100
    steps = np.arange(1, 1000)
    np.testing.assert_allclose(rates[1:], 0.25 * np.minimum(steps**-0.5, steps * 100**-1.5), rtol=1e-5)


@pytest.mark.parametrize("jit_compile", [False, True])
def test_step_0_is_finite(jit_compile):
    """O2, https://github.com/CUNY-CL/yoyodyne/pull/300, https://github.com/facebookresearch/fairseq/issues/1341,
    https://github.com/karpathy/nanoGPT/pull/578: 0 ** -0.5 is nowhere, and step 0 has the formula's own rate, 0."""
    schedule = CustomSchedule(128)
    assert float(schedule(0)) == 0.0
    assert float(schedule(1)) == pytest.approx(3.49386e-7, rel=1e-5)
    rates = tf.function(schedule, jit_compile=jit_compile)(tf.range(0, 11)).numpy()
    assert rates[0] == 0.0
    np.testing.assert_allclose(rates, 3.49386e-7 * np.arange(11), rtol=1e-5)


@pytest.mark.parametrize("warmup_steps", [0, -1])
def test_no_warm_up_is_refused(warmup_steps):
    """O2, https://github.com/CUNY-CL/yoyodyne/pull/300, https://github.com/facebookresearch/fairseq/issues/1341,
    https://github.com/karpathy/nanoGPT/pull/578."""
    with pytest.raises(ValueError, match=f"warmup_steps must be at least 1, got {warmup_steps}"):
        CustomSchedule(128, warmup_steps)


def test_a_warm_up_of_one_step_is_pure_decay():
    np.testing.assert_allclose(
        CustomSchedule(4, 1)(tf.range(0, 5)), [0, 0.5, 0.5 / 2**0.5, 0.5 / 3**0.5, 0.25], rtol=1e-6
    )


def test_the_config_is_plain():
    """O3, https://github.com/bryanlimy/tf2-transformer-chatbot/issues/12, https://github.com/ncbi/AIONER/issues/5:
    numbers that JSON holds, and the same rate from them; in a saved optimizer too."""
    schedule = CustomSchedule(d_model=128, warmup_steps=30)
    config = schedule.get_config()
    assert config == {"d_model": 128, "warmup_steps": 30, "peak": None}
    assert all(value is None or type(value) is int for value in config.values())
    again = CustomSchedule.from_config(json.loads(json.dumps(config)))
    assert float(again(10)) == float(schedule(10)) == pytest.approx(128**-0.5 * 10 * 30**-1.5, rel=1e-6)
    optimizer = keras.optimizers.Adam(schedule, beta_2=0.98)
    saved = json.loads(json.dumps(keras.optimizers.serialize(optimizer)))
    rate = keras.optimizers.deserialize(saved)._learning_rate
    assert isinstance(rate, CustomSchedule) and float(rate(10)) == float(schedule(10))


def test_an_optimizer_follows_it(tiny, tmp_path):
    """O1, https://github.com/TensorSpeech/TensorFlowASR/issues/142,
    https://github.com/tensorflow/tensorflow/issues/60649, https://github.com/Kyubyong/transformer/issues/87: the
    TensorBoard callback asks for the rate at the end of an epoch, with an integer step."""
    model = tiny(num_layers=1)
    rng = np.random.default_rng(0)
    inp, tar = rng.integers(4, 40, (8, 5)), rng.integers(4, 40, (8, 5))
    schedule = CustomSchedule(16, 100)
    model.compile(keras.optimizers.Adam(schedule), loss=loss_function, metrics=[TokenAccuracy()])
    callback = keras.callbacks.TensorBoard(tmp_path)
    history = model.fit((inp, tar[:, :-1]), tar[:, 1:], batch_size=4, epochs=2, callbacks=[callback], verbose=0).history
    assert np.isfinite(history["loss"]).all() and len(history["loss"]) == 2
    assert list(tmp_path.glob("train/events*"))
    assert int(model.optimizer.iterations) == 4
    assert float(model.optimizer.learning_rate) == pytest.approx(float(schedule(4)), rel=1e-6)


def test_a_peak_of_ones_own():
    """The same curve at another height; with the equation's own peak, the equation."""
    rates = CustomSchedule(16, 100, peak=0.005)(tf.range(0, 1000)).numpy()
    np.testing.assert_allclose(rates[[0, 50, 100, 400]], [0, 0.0025, 0.005, 0.0025], rtol=1e-5)
    own = CustomSchedule(16, 100, peak=(16 * 100) ** -0.5)(tf.range(0, 1000)).numpy()
    np.testing.assert_allclose(own, CustomSchedule(16, 100)(tf.range(0, 1000)).numpy(), rtol=1e-6)
    config = CustomSchedule(16, 100, peak=0.005).get_config()
    assert CustomSchedule.from_config(config).peak == 0.005
