"""The same numbers as others give: Keras's attention, Keras's `fit`, and the paper's equations in NumPy."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_transformer import MultiHeadAttention, Transformer, loss_function

BATCH, HEADS, QUERIES, KEYS = 2, 3, 4, 5


@pytest.mark.parametrize(
    "shape",
    [None, (BATCH, 1, 1, KEYS), (BATCH, 1, QUERIES, KEYS), (QUERIES, KEYS), (BATCH, HEADS, QUERIES, KEYS)],
    ids=["no mask", "keys", "queries and keys", "shared", "heads"],
)
def test_attention_is_kerass(shape, rng):
    """On the same weights keras.layers.MultiHeadAttention gives the same outputs and the same weights; its mask says
    where to attend, ours where not."""
    d_model, depth = 12, 4
    ours = MultiHeadAttention(d_model, HEADS)
    theirs = keras.layers.MultiHeadAttention(HEADS, depth)
    q = rng.normal(size=(BATCH, QUERIES, d_model)).astype("float32")
    k, v = rng.normal(size=(2, BATCH, KEYS, d_model)).astype("float32")
    mask = attend = None
    if shape is not None:
        mask = (rng.random(shape) < 0.5).astype("float32")
        mask[..., 0] = 0  # each query keeps a key
        heads_left_out = (
            np.broadcast_to(mask, (BATCH, 1, QUERIES, KEYS))[:, 0] if mask.ndim < 4 or shape[1] == 1 else mask
        )
        attend = heads_left_out == 0
    ours(v, k, q), theirs(q, v, k)
    kernels = [rng.normal(scale=0.5, size=(d_model, d_model)) for _ in range(4)]
    biases = [rng.normal(size=d_model) for _ in range(4)]
    ours.set_weights([w for pair in zip(kernels, biases, strict=True) for w in pair])  # query, key, value, output
    inner = [w for kernel, bias in zip(kernels[:3], biases[:3], strict=True)
             for w in (kernel.reshape(d_model, HEADS, depth), bias.reshape(HEADS, depth))]  # fmt: skip
    theirs.set_weights([*inner, kernels[3].reshape(HEADS, depth, d_model), biases[3]])
    output, attention_weights = ours(v, k, q, mask)
    wanted, scores = theirs(q, v, k, attention_mask=attend, return_attention_scores=True)
    np.testing.assert_allclose(output, wanted, atol=1e-5)
    np.testing.assert_allclose(attention_weights, scores, atol=1e-5)


class EachBatch(keras.callbacks.Callback):
    """The loss of each batch by itself: Keras's logs are means since the last reset."""

    def __init__(self):
        super().__init__()
        self.losses = []

    def on_train_batch_begin(self, batch, logs=None):
        self.model.reset_metrics()

    def on_train_batch_end(self, batch, logs=None):
        self.losses.append(float(logs["loss"]))


def test_fit_and_a_tape_train_alike(tiny, rng):
    """Ten steps of plain gradient descent from the same weights over the same batches: the same losses, and the same
    weights after them."""
    inp, tar = rng.integers(4, 40, (40, 6)), rng.integers(4, 40, (40, 6))
    inp[::3, 4:], tar[::4, 3:] = 0, 0
    tar_inp, tar_real = tar[:, :-1], tar[:, 1:]
    fitted, taped = tiny(num_layers=1), tiny(num_layers=1)

    fitted.compile(keras.optimizers.SGD(0.5), loss=loss_function)
    each_batch = EachBatch()
    fitted.fit((inp, tar_inp), tar_real, batch_size=4, shuffle=False, callbacks=[each_batch], verbose=0)

    optimizer = keras.optimizers.SGD(0.5)
    losses = []
    for i in range(0, 40, 4):
        rows = slice(i, i + 4)
        with tf.GradientTape() as tape:
            logits, _ = taped(inp[rows], tar_inp[rows], True)
            loss = loss_function(tar_real[rows], logits)
        gradients = tape.gradient(loss, taped.trainable_variables)
        optimizer.apply_gradients(zip(gradients, taped.trainable_variables, strict=True))
        losses.append(float(loss))
    assert len(losses) == 10 and np.ptp(losses) > 0.05
    np.testing.assert_allclose(each_batch.losses, losses, atol=1e-5)
    for one, other in zip(fitted.get_weights(), taped.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-4)


def numpy_transformer(model, inp, tar):
    """Logits and the last layer's attention to the source, by the paper's equations, from the model's weights alone."""
    d_model, num_heads = model.d_model, model.num_heads

    def dense(layer, x):
        kernel, bias = layer.get_weights()
        return x @ kernel + bias

    def softmax(x):
        exponentials = np.exp(x - x.max(-1, keepdims=True))
        return exponentials / exponentials.sum(-1, keepdims=True)

    def norm(layer, x):
        gain, offset = layer.get_weights()
        return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-6) * gain + offset

    def attention(mha, source, x, allowed):
        q, k, v = dense(mha.wq, x), dense(mha.wk, source), dense(mha.wv, source)
        heads, all_weights = [], []
        for channels in np.split(np.arange(d_model), num_heads):
            scores = q[..., channels] @ k[..., channels].transpose(0, 2, 1) / np.sqrt(d_model / num_heads)
            weights = softmax(np.where(allowed, scores, -np.inf))
            heads.append(weights @ v[..., channels])
            all_weights.append(weights)
        return dense(mha.dense, np.concatenate(heads, -1)), np.stack(all_weights, 1)

    def feed_forward(layer, x):
        inner, outer = layer.ffn.layers
        return dense(outer, np.maximum(0, dense(inner, x)))

    def embed(stack, ids):
        position, channel = np.mgrid[: ids.shape[1], :d_model]
        angle = position / 10000 ** (channel // 2 * 2 / d_model)
        return stack.embedding.get_weights()[0][ids] * np.sqrt(d_model) + np.where(
            channel % 2, np.cos(angle), np.sin(angle)
        )

    from_source = (inp != 0)[:, None, :]
    from_target = (tar != 0)[:, None, :] & np.tri(tar.shape[1], dtype=bool)
    x = embed(model.encoder, inp)
    for layer in model.encoder.enc_layers:
        x = norm(layer.layernorm1, x + attention(layer.mha, x, x, from_source)[0])
        x = norm(layer.layernorm2, x + feed_forward(layer, x))
    y = embed(model.decoder, tar)
    for layer in model.decoder.dec_layers:
        y = norm(layer.layernorm1, y + attention(layer.mha1, y, y, from_target)[0])
        read, weights = attention(layer.mha2, x, y, from_source)
        y = norm(layer.layernorm2, y + read)
        y = norm(layer.layernorm3, y + feed_forward(layer, y))
    return dense(model.final_layer, y), weights


def test_the_model_is_the_papers(rng):
    """3 layers, 4 heads, vocabularies of 30 and 50, random weights everywhere, gains and offsets too, padded source and
    target: the logits and the attention to the source."""
    keras.utils.set_random_seed(0)
    model = Transformer(3, 16, 4, 24, 30, 50, 20, 15, 0.0)
    inp = np.array([[5, 6, 7, 8, 9, 29, 0], [4, 5, 0, 0, 0, 0, 0], [6, 6, 6, 6, 6, 6, 6]])
    tar = np.array([[2, 45, 46, 47, 0], [2, 5, 6, 7, 8], [2, 49, 0, 0, 0]])
    model((inp, tar))
    for variable in model.trainable_variables:
        variable.assign(variable + rng.normal(scale=0.1, size=variable.shape))
    logits, attention_weights = model(inp, tar)
    wanted, wanted_weights = numpy_transformer(model, inp, tar)
    np.testing.assert_allclose(logits, wanted, atol=1e-4)
    np.testing.assert_allclose(attention_weights["decoder_layer3_block2"], wanted_weights, atol=1e-5)
