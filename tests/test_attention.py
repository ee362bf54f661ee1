"""Attention: by hand, by brute force, and with masks of every shape and type."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_transformer import MultiHeadAttention, scaled_dot_product_attention

# Two queries, three keys, values that show which key was read. q k^T / sqrt(4) = [[ln 2, 0, 0], [0, ln 3, 0]].
LN2, LN3 = np.log(2.0), np.log(3.0)
Q = np.array([[2 * LN2, 0, 0, 0], [0, 2 * LN3, 0, 0]], "float32")
K = np.array([[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0]], "float32")
V = np.array([[100.0], [10.0], [1.0]], "float32")


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def test_by_hand():
    """Weights 2:1:1 and 1:3:1 of the values 100, 10 and 1."""
    output, weights = scaled_dot_product_attention(Q, K, V)
    np.testing.assert_allclose(weights, [[0.5, 0.25, 0.25], [0.2, 0.6, 0.2]], atol=1e-6)
    np.testing.assert_allclose(output, [[52.75], [26.2]], rtol=1e-6)


def test_a_blocked_key_leaves_the_rest_to_the_others():
    """Without the last key: 2:1 and 1:3."""
    output, weights = scaled_dot_product_attention(Q, K, V, np.array([0, 0, 1.0]))
    np.testing.assert_allclose(weights, [[2 / 3, 1 / 3, 0], [0.25, 0.75, 0]], atol=1e-6)
    np.testing.assert_allclose(output, [[70.0], [32.5]], rtol=1e-6)


@pytest.mark.parametrize("shape", [(3, 1, 1, 3), (3, 1, 3, 3), (3, 3), (3, 3, 3, 3)])
def test_a_masked_key_is_read_by_no_query(shape, rng):
    """M2, https://github.com/lsdefine/attention-is-all-you-need-keras/issues/16,
    https://github.com/keras-team/keras-io/pull/1254: batch, heads, queries and keys are all 3, so that a mask laid
    along the wrong axis does not raise; it blocks key 2."""
    q, k, v = rng.normal(size=(3, 3, 3, 3, 4)).astype("float32")
    mask = np.zeros(shape, "float32")
    mask[..., 2] = 1
    output, weights = scaled_dot_product_attention(q, k, v, mask)
    wanted = softmax((q @ np.swapaxes(k, -1, -2) / 2)[..., :2])
    np.testing.assert_array_equal(weights[..., 2], np.zeros((3, 3, 3)))
    np.testing.assert_allclose(np.sum(weights, -1), np.ones((3, 3, 3)), atol=1e-6)
    np.testing.assert_allclose(weights[..., :2], wanted, atol=1e-6)
    np.testing.assert_allclose(output, wanted @ v[..., :2, :], atol=1e-5)


@pytest.mark.parametrize("dtype", ["bool", "int32", "int64", "float16", "bfloat16", "float32"])
@pytest.mark.parametrize("inputs", ["float16", "bfloat16", "float32"])
def test_a_mask_means_the_same_in_every_type(dtype, inputs, rng):
    """M3, https://github.com/tensorflow/text/pull/894, and X1, https://github.com/athena-team/athena/issues/77: bool to
    float32 masks, over float32 and half-precision inputs."""
    x = tf.cast(rng.normal(size=(2, 2, 3, 4)), inputs)
    mask = tf.cast([[[[0, 0, 1]]], [[[0, 1, 1]]]], dtype)
    output, weights = scaled_dot_product_attention(x, x, x, mask)
    assert output.dtype == weights.dtype == inputs
    weights, output = tf.cast(weights, "float32").numpy(), tf.cast(output, "float32").numpy()
    np.testing.assert_array_equal(weights[0, :, :, 2], np.zeros((2, 3)))
    np.testing.assert_array_equal(weights[1], np.broadcast_to([1, 0, 0], (2, 3, 3)))  # one key is left
    assert (weights[0, :, :, :2] > 0).all() and np.isfinite(output).all()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_a_row_blocked_whole_is_finite(dtype, rng):
    """M7, https://github.com/tracel-ai/burn/pull/4697: every key of query 0 is blocked, which leaves it all of them
    alike; query 1 reads as if alone."""
    q, k, v = (tf.cast(x, dtype) for x in rng.normal(size=(3, 1, 1, 2, 4)))
    mask = np.array([[1, 1], [0, 1]], "float32")
    with tf.GradientTape() as tape:
        tape.watch([q, k, v])
        output, weights = scaled_dot_product_attention(q, k, v, mask)
        total = tf.reduce_sum(tf.cast(output, "float32") ** 2)
    np.testing.assert_array_equal(tf.cast(weights, "float32"), [[[[0.5, 0.5], [1, 0]]]])
    for gradient in tape.gradient(total, [q, k, v]):
        assert np.isfinite(tf.cast(gradient, "float32")).all()
    alone, _ = scaled_dot_product_attention(q[:, :, 1:], k, v, mask[1:])
    np.testing.assert_array_equal(tf.cast(output[:, :, 1:], "float32"), tf.cast(alone, "float32"))


def test_large_products_do_not_overflow_float16():
    """q . k = 64 * 40 * 40 = 102400 does not fit in float16 (65504); divided by sqrt(64) first, it does."""
    x = np.full((1, 1, 2, 64), 40, "float16")
    output, weights = scaled_dot_product_attention(x, x, x)
    np.testing.assert_array_equal(weights, np.full((1, 1, 2, 2), 0.5))
    np.testing.assert_array_equal(output, x)


def test_a_single_key_gets_all_the_weight_without_a_warning():
    """A source or a target of one token, as at the first step of decoding."""
    output, weights = scaled_dot_product_attention(Q[None, None, :1], K[None, None, :1], V[None, None, :1])
    assert weights.numpy().tolist() == [[[[1.0]]]] and output.numpy().tolist() == [[[[100.0]]]]


def test_dropout_meets_the_values_not_the_weights_returned():
    output, weights = scaled_dot_product_attention(Q, K, V, dropout=lambda w: w * np.array([0, 0, 2.0], "float32"))
    np.testing.assert_allclose(output, [[0.5], [0.4]], rtol=1e-6)
    np.testing.assert_allclose(weights, [[0.5, 0.25, 0.25], [0.2, 0.6, 0.2]], atol=1e-6)


def test_heads_are_slices_of_the_vector():
    x = np.arange(24, dtype="float32").reshape(1, 3, 8)
    heads = MultiHeadAttention(8, 2).split_heads(x, 1)
    assert heads.shape == (1, 2, 3, 4)
    np.testing.assert_array_equal(heads[0, 0], x[0, :, :4])
    np.testing.assert_array_equal(heads[0, 1], x[0, :, 4:])


def test_each_head_attends_by_itself(rng):
    """With identity projections the output is the two halves' attentions side by side."""
    mha = MultiHeadAttention(8, 2)
    v, k = rng.normal(size=(2, 2, 5, 8)).astype("float32")
    q = rng.normal(size=(2, 3, 8)).astype("float32")
    output, weights = mha(v, k, q)
    assert output.shape == (2, 3, 8) and weights.shape == (2, 2, 3, 5)
    mha.set_weights([np.eye(8), np.zeros(8)] * 4)
    output, weights = mha(v, k, q)
    for head, part in enumerate((slice(0, 4), slice(4, 8))):
        wanted = softmax(q[..., part] @ np.swapaxes(k[..., part], 1, 2) / 2)
        np.testing.assert_allclose(weights[:, head], wanted, atol=1e-6)
        np.testing.assert_allclose(output[..., part], wanted @ v[..., part], atol=1e-5)


def test_queries_keys_and_values_begin_as_one_glorot_matrix():
    """Uniform within sqrt(6 / (64 + 3 * 64)) = 0.1531, of which the mean of squares is a third of its square."""
    mha = MultiHeadAttention(64, 4)
    mha.build(*3 * [(None, None, 64)])
    kernels = np.concatenate([layer.kernel for layer in (mha.wq, mha.wk, mha.wv)], 1)
    assert 0.15 < np.abs(kernels).max() < 0.1531
    np.testing.assert_allclose(np.mean(kernels**2), 0.1531**2 / 3, rtol=0.05)
    assert len(np.unique(kernels)) > 12000  # 3 * 64 * 64: none is a copy of another


def test_heads_must_divide_the_size():
    with pytest.raises(ValueError, match="multiple of num_heads, got d_model=10 and num_heads=4"):
        MultiHeadAttention(10, 4)


def test_rate_drops_weights_in_training_alone(rng):
    """With rate 0.5 a kept weight doubles: against identity values the dropped weights can be read off the output."""
    keras.utils.set_random_seed(1)
    mha = MultiHeadAttention(4, 1, rate=0.5)
    x = np.eye(4, dtype="float32")[None]
    _, weights = mha(x, x, x)
    mha.wv.set_weights([np.eye(4), np.zeros(4)])
    mha.dense.set_weights([np.eye(4), np.zeros(4)])
    still, _ = mha(x, x, x, None, False)
    np.testing.assert_allclose(still, weights[:, 0], atol=1e-6)
    dropped, returned = mha(x, x, x, None, True)
    np.testing.assert_allclose(returned, weights, atol=1e-6)
    ratio = dropped / weights[:, 0]
    assert set(np.round(ratio.numpy(), 3).ravel()) == {0.0, 2.0}
