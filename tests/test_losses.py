"""Loss and accuracy: padding counts nowhere."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_transformer import MaskedCrossEntropy, TokenAccuracy, loss_function

NAN, INF = float("nan"), float("inf")


def logits_for(ids, vocab_size=8):
    """Logits whose highest is at the given ids."""
    return np.eye(vocab_size, dtype="float32")[np.array(ids)] * 5


def test_even_logits_cost_the_logarithm_of_the_vocabulary():
    """L1, https://github.com/tensorflow/docs/pull/1460, https://github.com/d2l-ai/d2l-en/issues/2076: over the two real
    tokens, not over the four positions."""
    for real in ([[3, 5, 0, 0]], [[3, 5] + [0] * 12], [[3, 5]], [[3, 5, 0, 0], [0, 0, 0, 0]]):
        real = np.array(real)
        loss = loss_function(real, np.zeros((*real.shape, 8), "float32"))
        assert loss.shape == () and loss.dtype == "float32"
        assert float(loss) == pytest.approx(2.07944, abs=1e-5)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_loss_by_brute_force(smoothing, rng):
    real = rng.integers(0, 8, (3, 5))
    real[0, 2:] = 0
    pred = rng.normal(size=(3, 5, 8)).astype("float32")
    total, tokens = 0.0, 0
    for row in range(3):
        for position in range(5):
            if real[row, position] == 0:
                continue
            log_probs = pred[row, position] - np.log(np.exp(pred[row, position]).sum())
            target = np.full(8, smoothing / 8)
            target[real[row, position]] += 1 - smoothing
            total, tokens = total - (target * log_probs).sum(), tokens + 1
    assert float(loss_function(real, pred, smoothing)) == pytest.approx(total / tokens, abs=1e-5)
    assert float(MaskedCrossEntropy(smoothing)(real, pred)) == pytest.approx(total / tokens, abs=1e-5)


@pytest.mark.parametrize("dtype", ["int32", "int64", "float32"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_ids_may_come_as_keras_hands_them_on(dtype, smoothing):
    """`fit` gives a loss its labels as float32."""
    real, pred = np.array([[3, 5, 0]]), logits_for([[3, 4, 1]])
    wanted = float(loss_function(real, pred, smoothing))
    assert float(loss_function(tf.cast(real, dtype), pred, smoothing)) == pytest.approx(wanted, abs=1e-6)


@pytest.mark.parametrize("policy", ["float32", "mixed_float16"])
def test_a_batch_without_real_tokens_changes_nothing(tiny, policy):
    """L2, https://github.com/keras-team/keras/pull/21908, https://github.com/NVIDIA-NeMo/Automodel/issues/3796: loss
    exactly 0, gradients 0, finite parameters after Adam, and the next batch trains."""
    model = tiny(dtype=policy)
    optimizer = keras.optimizers.Adam(1e-2)
    if policy == "mixed_float16":
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer)
    inp = np.array([[5, 6, 7], [8, 9, 0]], "int32")
    tar_inp = np.array([[2, 6], [2, 5]], "int32")
    model((inp, tar_inp))
    optimizer.build(model.trainable_variables)

    def gradients_of(tar_real):
        with tf.GradientTape() as tape:
            loss = loss_function(tar_real, model((inp, tar_inp), training=True))
            scaled = optimizer.scale_loss(loss)
        return loss, tape.gradient(scaled, model.trainable_variables)

    before = model.get_weights()
    loss, gradients = gradients_of(np.zeros((2, 2), "int32"))
    assert float(loss) == 0.0
    for gradient in gradients:
        np.testing.assert_array_equal(tf.convert_to_tensor(gradient), np.zeros(gradient.shape))
    optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    for old, new in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(new, old)
    real = np.array([[6, 3], [5, 3]], "int32")
    losses = []
    for _ in range(6):
        loss, gradients = gradients_of(real)
        losses.append(float(loss))
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    assert np.isfinite(losses).all() and losses[-1] < losses[0] - 0.5
    assert all(np.isfinite(weight).all() for weight in model.get_weights())


def test_accuracy_over_the_real_tokens():
    """L4, https://github.com/tensorflow/tensorflow/issues/34158, https://github.com/keras-team/keras/issues/15323: pads
    count neither as right nor as wrong, and the mean is over tokens, not over batches."""
    accuracy = TokenAccuracy()
    accuracy.update_state(np.array([[3, 5, 0, 0]]), logits_for([[3, 5, 1, 1]]))
    assert float(accuracy.result()) == 1.0
    accuracy.reset_state()
    accuracy.update_state(np.array([[3, 5, 0, 0]]), logits_for([[3, 4, 0, 0]]))
    assert float(accuracy.result()) == 0.5
    accuracy.reset_state()
    accuracy.update_state(np.array([[3]]), logits_for([[3]]))  # 1 of 1
    accuracy.update_state(np.full((1, 9), 3), logits_for([[4] * 9]))  # 0 of 9
    assert float(accuracy.result()) == pytest.approx(0.1)


def test_accuracy_takes_weights_and_half_precision():
    accuracy = TokenAccuracy()
    weights = np.array([[3.0, 1.0, 9.0]])
    accuracy.update_state(np.array([[3, 5, 0]]), tf.cast(logits_for([[3, 4, 0]]), "float16"), sample_weight=weights)
    assert float(accuracy.result()) == 0.75
    accuracy.reset_state()
    accuracy.update_state(np.zeros((1, 2)), logits_for([[3, 4]]))  # no real token
    assert float(accuracy.result()) == 0.0


@pytest.mark.parametrize("weights", [[3.0, 1.0], [[3.0], [1.0]], [[3.0, 3.0], [1.0, 1.0]]])
def test_a_row_may_have_a_weight(weights):
    """Row 0, weight 3, is right twice, row 1, weight 1, never: 6 of 8. As many rows as tokens: weights laid along the
    wrong axis would not raise, and would give .5."""
    accuracy = TokenAccuracy()
    accuracy.update_state(np.array([[3, 5], [3, 5]]), logits_for([[3, 5], [4, 4]]), sample_weight=np.array(weights))
    assert float(accuracy.result()) == 0.75


def test_fit_and_a_loop_report_the_same(tiny):
    """L4, https://github.com/tensorflow/tensorflow/issues/34158, https://github.com/keras-team/keras/issues/15323: over
    two batches of different token counts, with a rate of 0 so that both see the same model."""
    model = tiny(num_layers=1)
    rng = np.random.default_rng(3)
    inp, tar = rng.integers(4, 40, (8, 6)), rng.integers(4, 40, (8, 7))
    tar[:4, 3:] = 0
    tar_inp = tar[:, :-1]
    # Half of the labels are what the model says anyway, so that the accuracy is neither 0 nor 1.
    tar_real = np.where(rng.random((8, 6)) < 0.5, np.argmax(model((inp, tar_inp)), -1), tar[:, 1:])
    tar_real[:4, 2:] = 0
    metric, total, tokens, right = TokenAccuracy(), 0.0, 0, 0
    losses = []
    for rows in (slice(0, 4), slice(4, 8)):
        logits = np.array(model((inp[rows], tar_inp[rows])))
        metric.update_state(tar_real[rows], logits)
        losses.append(float(loss_function(tar_real[rows], logits)))
        real = tar_real[rows] != 0
        tokens, right = tokens + real.sum(), right + (real & (logits.argmax(-1) == tar_real[rows])).sum()
        total += losses[-1] * real.sum()
    model.compile(keras.optimizers.SGD(0.0), loss=loss_function, metrics=[TokenAccuracy()])
    history = model.fit((inp, tar_inp), tar_real, batch_size=4, shuffle=False, verbose=0).history
    assert 0 < right < tokens
    assert history["token_accuracy"][0] == pytest.approx(right / tokens, abs=1e-6)
    assert float(metric.result()) == pytest.approx(right / tokens, abs=1e-6)
    assert history["loss"][0] == pytest.approx(np.mean(losses), abs=1e-5)  # Keras averages over equal batches
    evaluated = model.evaluate((inp, tar_inp), tar_real, batch_size=4, verbose=0, return_dict=True)
    assert evaluated["token_accuracy"] == pytest.approx(right / tokens, abs=1e-6)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_what_stands_at_padding_does_not_matter(smoothing, bad):
    """L5, https://github.com/keras-team/keras/pull/18829: NaN times a mask of 0 is NaN; and so is its gradient."""
    real = np.array([[3, 5, 0], [0, 4, 0]])
    clean = np.random.default_rng(0).normal(size=(2, 3, 8)).astype("float32")
    pred = tf.constant(np.where((real == 0)[..., None], bad, clean), "float32")
    with tf.GradientTape() as tape:
        tape.watch(pred)
        loss = loss_function(real, pred, smoothing)
    gradient = tape.gradient(loss, pred).numpy()
    assert float(loss) == pytest.approx(float(loss_function(real, clean, smoothing)), abs=1e-6)
    np.testing.assert_array_equal(gradient[real == 0], np.zeros((3, 8)))
    # Elsewhere: (softmax - target) / tokens.
    softmax = np.exp(clean) / np.exp(clean).sum(-1, keepdims=True)
    target = np.eye(8)[real] * (1 - smoothing) + smoothing / 8
    np.testing.assert_allclose(gradient[real != 0], ((softmax - target) / 3)[real != 0], atol=1e-6)


def test_smoothing_is_per_token(rng):
    """L6, https://github.com/huggingface/transformers/issues/7546,
    https://github.com/harvardnlp/annotated-transformer/issues/39: a batch twice as large or padded costs the same, no
    smoothing is the plain loss, and a padding label is no logarithm of 0."""
    real = np.array([[3, 5, 0, 0], [1, 7, 2, 0]])
    pred = rng.normal(size=(2, 4, 8)).astype("float32")
    smoothed = float(loss_function(real, pred, 0.1))
    twice = loss_function(np.concatenate([real, real]), np.concatenate([pred, pred]), 0.1)
    padded = loss_function(np.pad(real, [(0, 0), (0, 10)]), np.pad(pred, [(0, 0), (0, 10), (0, 0)]), 0.1)
    assert float(twice) == pytest.approx(smoothed, abs=1e-6)
    assert float(padded) == pytest.approx(smoothed, abs=1e-6)
    assert float(loss_function(real, pred, 0.0)) == pytest.approx(float(loss_function(real, pred)), abs=1e-7)
    assert abs(smoothed - float(loss_function(real, pred))) > 1e-3
    assert float(loss_function(np.zeros((2, 4), "int32"), pred, 0.1)) == 0.0


def test_even_logits_cost_the_same_with_smoothing():
    assert float(loss_function([[3, 5, 0]], np.zeros((1, 3, 8), "float32"), 0.3)) == pytest.approx(np.log(8), abs=1e-5)


def test_half_precision_logits_are_summed_in_float32():
    """300 tokens of ln 2000 = 7.6009 make 2280: float16 would round each addition."""
    real = np.full((3, 100), 7)
    loss = loss_function(real, tf.zeros((3, 100, 2000), "float16"))
    assert loss.dtype == "float32" and float(loss) == pytest.approx(np.log(2000), abs=1e-4)


def test_the_smoothing_is_kept_in_the_config():
    loss = MaskedCrossEntropy(0.2)
    again = keras.losses.deserialize(keras.losses.serialize(loss))
    real, pred = [[3, 5, 0]], logits_for([[3, 4, 1]])
    assert isinstance(again, MaskedCrossEntropy) and again.label_smoothing == 0.2
    assert float(again(real, pred)) == float(loss(real, pred)) == pytest.approx(float(loss_function(real, pred, 0.2)))
