"""One update: the fused loss against the plain one, parts, accumulation and replicas against one whole batch."""

import random

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_transformer import CustomSchedule, MaskedCrossEntropy, TokenAccuracy, Transformer, loss_function
from keras_transformer.data.pipeline import teacher_forcing
from keras_transformer.step import IDS, make_accumulated_step, make_train_step, projected_loss


def random_batch(seed, rows=4):
    rng = np.random.default_rng(seed)
    inp = rng.integers(4, 40, (rows, 7)).astype(np.int32)
    tar = rng.integers(4, 40, (rows, 6)).astype(np.int32)
    tar[:, 0], inp[0, 5:], tar[1, 4:] = 2, 0, 0
    return tf.constant(inp), tf.constant(tar)


def make_model():
    random.seed(0)  # Keras draws its seeds from here
    model = Transformer(2, 16, 2, 32, 40, 40, 60, 60, rate=0.0)
    model.build((None, None), (None, None))
    return model


def test_fit_and_train_step_give_the_same_losses():
    """Ten steps of each, with label smoothing, on batches of different shapes: equal to 1e-5, and so is accuracy."""
    by_step, by_fit = make_model(), make_model()
    by_fit.set_weights(by_step.get_weights())
    batches = [random_batch(seed, rows=3 + seed % 3) for seed in range(10)]
    accuracy = TokenAccuracy()
    step = make_train_step(by_step, keras.optimizers.SGD(0.1), 0.1, None, accuracy)
    step_losses = [float(step(inp, tar)) for inp, tar in batches]

    class Losses(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs):
            losses.append(logs["loss"])

    losses: list[float] = []
    by_fit.compile(keras.optimizers.SGD(0.1), MaskedCrossEntropy(0.1), metrics=[TokenAccuracy()])
    dataset = tf.data.Dataset.from_generator(lambda: iter(batches), output_signature=(IDS, IDS))
    dataset = dataset.apply(tf.data.experimental.assert_cardinality(10))
    history = by_fit.fit(dataset.map(teacher_forcing), epochs=1, shuffle=False, verbose=0, callbacks=[Losses()])
    # Keras reports the mean over the rows so far.
    rows = np.cumsum([len(inp) for inp, _ in batches])
    sums = np.array(losses) * rows
    fit_losses = np.diff(sums, prepend=0) / np.diff(rows, prepend=0)
    np.testing.assert_allclose(fit_losses, step_losses, atol=1e-5)
    np.testing.assert_allclose(history.history["token_accuracy"][-1], float(accuracy.result()), atol=1e-6)
    for one, other in zip(by_step.get_weights(), by_fit.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


def test_one_trace_for_all_shapes():
    """T6, https://github.com/tensorflow/tensorflow/issues/29075: 30 shapes, the last partial batch among them."""
    model = make_model()
    step = make_train_step(model, keras.optimizers.SGD(0.1))
    for i in range(30):
        step(tf.fill([1 + i % 7, 3 + i], 5), tf.fill([1 + i % 7, 2 + i // 2], 6))
    assert step.experimental_get_tracing_count() == 1


def test_under_float16_the_step_changes_the_weights_as_under_float32():
    """X2, https://github.com/keras-team/keras/issues/20894: the loss is scaled and the gradient unscaled, once."""
    inp, tar = random_batch(1)
    changes = []
    first = make_model().get_weights()
    for policy in ("float32", "mixed_float16"):
        model = Transformer(2, 16, 2, 32, 40, 40, 60, 60, rate=0.0, dtype=policy)
        model.build((None, None), (None, None))
        model.set_weights(first)
        optimizer = keras.optimizers.SGD(0.1)
        if policy == "mixed_float16":
            optimizer = keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=1024.0)
        make_train_step(model, optimizer)(inp, tar)
        changes.append(np.concatenate([(w - f).ravel() for w, f in zip(model.get_weights(), first, strict=True)]))
    assert np.linalg.norm(changes[1] - changes[0]) < 0.02 * np.linalg.norm(changes[0])


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_projected_loss_is_loss_function_of_the_logits(rng, with_bias, label_smoothing):
    """Its sum and every gradient equal automatic differentiation of the plain loss, padding included."""
    x, kernel, bias = (tf.constant(rng.normal(size=size), tf.float32) for size in ((50, 16), (16, 40), (40,)))
    variables = (x, kernel, bias) if with_bias else (x, kernel)
    real = rng.integers(1, 40, 50).astype("int32")
    real[[3, 4, 49]] = 0
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(variables)
        fused = 3 * projected_loss(x, kernel, bias if with_bias else None, real, label_smoothing)
        logits = x @ kernel + bias if with_bias else x @ kernel
        plain = 3 * 47 * loss_function(real[None], logits[None], label_smoothing)
    np.testing.assert_allclose(fused, plain, rtol=1e-6)
    for one, other in zip(tape.gradient(fused, variables), tape.gradient(plain, variables), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


@pytest.mark.parametrize(("dtype", "most"), [("bfloat16", 0.04), ("float16", 0.01)])
def test_the_gradient_of_a_token_that_is_all_but_certain_survives_16_bits(rng, dtype, most):
    """Probabilities of 0.99: the 0.01 that is left is taken before it is rounded; the error is that of the products."""
    kernel = rng.normal(size=(64, 500)).astype("float32")
    real = rng.integers(1, 500, 40).astype("int32")
    direction = kernel[:, real].T / np.linalg.norm(kernel[:, real].T, axis=1, keepdims=True) ** 2

    def certain(scale):
        return np.mean(tf.nn.softmax(scale * direction @ kernel).numpy()[np.arange(40), real])

    scale = next(scale for scale in np.arange(5, 30, 0.25) if certain(scale) > 0.99)
    x = tf.cast(scale * direction, dtype)
    gradients = []
    for vectors in (tf.cast(x, tf.float32), x):
        with tf.GradientTape() as tape:
            variables = (vectors, tf.constant(kernel))
            tape.watch(variables)
            loss = projected_loss(*variables, None, real)
        gradients.append([tf.cast(gradient, tf.float32).numpy() for gradient in tape.gradient(loss, variables)])
    for exact, rounded in zip(*gradients, strict=True):
        assert np.linalg.norm(rounded - exact) < most * np.linalg.norm(exact)


def test_padding_has_no_part_in_the_projected_loss():
    """L1, https://github.com/tensorflow/docs/pull/1460: of 8 ids, all alike, two tokens and two paddings give 2 ln 8.

    L5, https://github.com/keras-team/keras/pull/18829: what is at padding may be NaN.
    """
    x = tf.constant([[1.0, 2.0], [3.0, 4.0], [np.nan, 1.0], [np.inf, 1.0]])
    kernel = tf.zeros((2, 8))
    with tf.GradientTape() as tape:
        tape.watch((x, kernel))
        loss = projected_loss(x, kernel, None, tf.constant([3, 5, 0, 0]))
    np.testing.assert_allclose(loss, 2 * np.log(8), rtol=1e-6)
    by_x, by_kernel = tape.gradient(loss, (x, kernel))
    np.testing.assert_array_equal(by_x, np.zeros((4, 2)))
    hot = np.eye(8)[[3, 5]]
    np.testing.assert_allclose(by_kernel, np.array([[1.0, 3.0], [2.0, 4.0]]) @ (1 / 8 - hot), rtol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "mixed_float16"])
def test_a_batch_of_padding_alone_does_no_harm(dtype):
    """L2, https://github.com/keras-team/keras/pull/21908: its loss is 0, and the next batch is trained on as usual.

    L6, https://github.com/huggingface/transformers/issues/7546: with smoothing, a batch doubled has the same loss.
    """
    random.seed(0)
    model = Transformer(1, 16, 2, 32, 40, 40, 60, 60, rate=0.0, dtype=dtype)
    step = make_train_step(model, keras.optimizers.Adam(1e-3), 0.1)
    inp, tar = random_batch(0)
    before = model.get_weights()
    assert float(step(inp, tf.zeros_like(tar))) == 0
    for one, other in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)
    losses = [float(step(inp, tar)) for _ in range(20)]
    assert np.isfinite(losses).all() and losses[-1] < losses[0]
    still = make_train_step(model, keras.optimizers.SGD(0.0), 0.1)
    twice = float(still(*(tf.concat([ids, ids], 0) for ids in (inp, tar))))
    np.testing.assert_allclose(twice, float(still(inp, tar)), rtol=1e-5 if dtype == "float32" else 1e-3)


def test_loss_and_accuracy_count_the_same_tokens():
    """L4, https://github.com/tensorflow/tensorflow/issues/34158: means over all tokens, whatever the batches.

    The logits are the bias: id 5 always wins. Of 1 token in the first batch 1 is right, of 9 in the second none.
    """
    model, accuracy, loss = make_model(), TokenAccuracy(), keras.metrics.Mean()
    bias = np.zeros(40, "float32")
    bias[5] = 2.0
    model.final_layer.kernel.assign(np.zeros((16, 40)))
    model.final_layer.bias.assign(bias)
    step = make_train_step(model, keras.optimizers.SGD(0.0), 0.0, loss, accuracy)
    step(tf.constant([[6, 3]]), tf.constant([[2, 5, 0, 0]]))
    step(tf.constant([[6, 3]]), tf.constant([[2, *[7] * 9]]))
    np.testing.assert_allclose(accuracy.result(), 0.1)
    log_sum = np.log(39 + np.exp(2.0))
    np.testing.assert_allclose(loss.result(), ((log_sum - 2.0) + 9 * log_sum) / 10, rtol=1e-6)


def test_projected_loss_of_a_hopeless_token_is_finite():
    """Logits 0 and 200, the first right: 200 nats, counted as 87; the gradient is that of 200."""
    x, kernel = tf.constant([[1.0]]), tf.constant([[0.0, 0.0, 200.0]])
    with tf.GradientTape() as tape:
        tape.watch(kernel)
        loss = projected_loss(x, kernel, None, tf.constant([1]), 0.0)
    np.testing.assert_allclose(loss, 87.3, atol=0.1)
    np.testing.assert_allclose(tape.gradient(loss, kernel), [[0.0, -1.0, 1.0]], atol=1e-6)


@pytest.mark.parametrize("share_embeddings", [True, False])
def test_parts_of_a_batch_give_the_gradient_of_the_whole(share_embeddings):
    """Four rows cut into three parts, of unlike numbers of tokens: the same loss and weights to 1e-6."""
    results = []
    for parts in (1, 3):
        random.seed(0)
        model = Transformer(1, 16, 2, 32, 40, 40, 60, 60, rate=0.0, share_embeddings=share_embeddings)
        step = make_train_step(model, keras.optimizers.SGD(0.1), 0.1, parts=parts)
        losses = [step(*random_batch(seed)) for seed in range(3)]
        results.append((losses, model.get_weights()))
    np.testing.assert_allclose(results[0][0], results[1][0], atol=1e-6)
    for one, other in zip(results[0][1], results[1][1], strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)


def test_a_step_that_is_not_finite_changes_nothing():
    """A weight that is infinite makes the loss NaN: weights, moments and the count of updates stay as they were."""
    model = make_model()
    optimizer = keras.optimizers.Adam(0.1)
    train_loss = keras.metrics.Mean()
    step = make_train_step(model, optimizer, train_loss=train_loss)
    step(*random_batch(0))
    good = float(train_loss.result())
    model.final_layer.bias.assign(np.full(40, np.inf))
    before = [np.array(variable) for variable in [*model.variables, *optimizer.variables]]
    assert not np.isfinite(step(*random_batch(1)))
    for one, other in zip(before, [*model.variables, *optimizer.variables], strict=True):
        np.testing.assert_array_equal(one, other)
    assert int(optimizer.iterations) == 1
    assert float(train_loss.result()) == good


def test_the_gradient_is_clipped_by_its_length_over_all_weights():
    """With SGD of rate 1 the weights move by the gradient: by clip_norm if it is longer, which gradient_norm tells."""
    inp, tar = random_batch(1)
    moved = []
    for clip_norm in (None, 0.5):
        model, norm = make_model(), keras.metrics.Mean()
        first = model.get_weights()
        make_train_step(model, keras.optimizers.SGD(1.0), clip_norm=clip_norm, gradient_norm=norm)(inp, tar)
        change = np.concatenate([(w - f).ravel() for w, f in zip(model.get_weights(), first, strict=True)])
        moved.append((np.linalg.norm(change), float(norm.result())))
    assert moved[0][0] > 0.5
    np.testing.assert_allclose(moved[0][0], moved[0][1], rtol=1e-5)
    np.testing.assert_allclose(moved[1], [0.5, moved[0][1]], rtol=1e-5)


def test_an_optimizer_that_scales_by_itself_is_refused():
    """Its gradients are divided by the factor only after they were clipped."""
    with pytest.raises(ValueError, match="loss_scale_factor is not supported"):
        make_train_step(make_model(), keras.optimizers.SGD(0.1, loss_scale_factor=1024.0))


def test_a_loss_scale_is_halved_where_the_step_overflows_and_grows_after_good_ones():
    """X2: from 2**40 (float16 ends at 65,504) down until a step is taken; after two more it doubles."""
    random.seed(0)
    model = Transformer(1, 16, 2, 32, 40, 40, 60, 60, rate=0.0, dtype="mixed_float16")
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), 2.0**40, dynamic_growth_steps=2)
    step = make_train_step(model, optimizer)
    scales = []
    while int(optimizer.iterations) < 3:
        step(*random_batch(1))
        scales.append(float(optimizer.dynamic_scale))
    halved = scales.index(min(scales)) + 1
    assert halved > 10
    np.testing.assert_array_equal(scales[:halved], 2.0 ** (39 - np.arange(halved)))
    assert scales[halved:] == [scales[halved - 1], 2 * scales[halved - 1], 2 * scales[halved - 1]]


@pytest.mark.parametrize("name", ["sgd", "adam"])
def test_four_accumulated_batches_are_one_of_four_times_the_tokens(name):
    """Of 3, 4, 5 and 6 rows with unlike padding, 20 updates: losses to 1e-5, and the weights too with SGD.

    O5, https://github.com/huggingface/accelerate/issues/963: the schedule counts updates. After 10 of 4 batches
    each the rate is that of update 10, by hand 16^-0.5 * 10 * 4000^-1.5, not of 40.
    """
    results = []
    for accumulated in (True, False):
        model, schedule = make_model(), CustomSchedule(16, 4000)
        adam = keras.optimizers.Adam(schedule, 0.9, 0.98, 1e-9)
        optimizer = keras.optimizers.SGD(0.1) if name == "sgd" else adam
        make_step = make_accumulated_step if accumulated else make_train_step
        step = make_step(model, optimizer, 0.1, clip_norm=1.0)
        losses = []
        for i in range(20):
            batches = [random_batch(4 * i + j, rows=3 + j) for j in range(4)]
            if accumulated:
                losses.append(float(step(batches)))
            else:
                losses.append(float(step(*map(np.concatenate, zip(*batches, strict=True)))))
            if i == 9 and name == "adam":
                np.testing.assert_allclose(optimizer.learning_rate, 16**-0.5 * 10 * 4000**-1.5, rtol=1e-5)
        results.append((losses, model.get_weights()))
    np.testing.assert_allclose(results[0][0], results[1][0], atol=1e-5)
    for one, other in zip(results[0][1], results[1][1], strict=True):
        if name == "sgd":
            np.testing.assert_allclose(one, other, atol=1e-5)


def test_skipped_updates_are_counted_in_all_and_in_a_row():
    model, skipped = make_model(), tf.Variable([0, 0])
    step = make_train_step(model, keras.optimizers.SGD(0.1), skipped=skipped)
    bias = np.array(model.final_layer.bias)
    counts = []
    for bad in (0, 1, 1, 0, 1):
        model.final_layer.bias.assign(np.full(40, np.nan) if bad else bias)
        step(*random_batch(0))
        counts.append(skipped.numpy().tolist())
    assert counts == [[0, 0], [1, 1], [2, 2], [2, 0], [3, 1]]
