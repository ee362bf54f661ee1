"""The calls that the second document makes, in the forms it makes them, on a task that can be learnt in seconds.

Where Keras 3 has another name, the name is Keras 3's: `metric.reset_state()` is one.
"""

import numpy as np
import tensorflow as tf

from keras_transformer import (
    CustomSchedule,
    DecoderLayer,
    EncoderLayer,
    MultiHeadAttention,
    Transformer,
    create_look_ahead_mask,
    create_masks,
    create_padding_mask,
    loss_function,
    point_wise_feed_forward_network,
    scaled_dot_product_attention,
)

SYMBOLS = 10  # ids 4 to 13; 2 begins a sentence, 3 ends it
num_layers, d_model, dff, num_heads, dropout_rate = 2, 128, 512, 8, 0.1  # half its layers: half the wait
input_vocab_size = target_vocab_size = 60


def copying_batches(count, batch_size=16, longest=6):
    """Pairs of ids whose target is the source itself, of lengths 3 to `longest`, padded with 0."""
    rng = np.random.default_rng(0)
    for _ in range(count):
        pairs = np.zeros((batch_size, longest + 2), "int32")
        for row, length in zip(pairs, rng.integers(3, longest + 1, batch_size), strict=True):
            row[: length + 2] = [2, *rng.integers(4, 4 + SYMBOLS, length), 3]
        yield tf.constant(pairs), tf.constant(pairs)


def test_attention_gives_two_results():
    q, k, v = (tf.random.normal((2, length, 16)) for length in (3, 5, 5))
    output, attn_weights = scaled_dot_product_attention(q, k, v)
    assert output.shape == (2, 3, 16) and attn_weights.shape == (2, 3, 5)
    np.testing.assert_allclose(tf.reduce_sum(attn_weights, -1), tf.ones((2, 3)), atol=1e-5)
    mha = MultiHeadAttention(d_model=d_model, num_heads=num_heads)
    x = tf.random.normal((2, 5, d_model))
    output, attn_weights = mha(x, x, x, mask=None)
    assert output.shape == (2, 5, d_model) and attn_weights.shape == (2, 8, 5, 5)


def test_layers_take_training_between_their_tensors():
    x, enc_output = tf.random.normal((2, 4, 32)), tf.random.normal((2, 6, 32))
    inp, tar = tf.constant([[5, 6, 7, 8, 0, 0]] * 2), tf.constant([[2, 5, 6, 0]] * 2)
    assert point_wise_feed_forward_network(32, 64)(x).shape == (2, 4, 32)
    encoder_layer = EncoderLayer(32, 4, 64, 0.1)
    assert encoder_layer(enc_output, True, create_padding_mask(inp)).shape == (2, 6, 32)
    look_ahead_mask = tf.maximum(create_padding_mask(tar), create_look_ahead_mask(tf.shape(tar)[1]))
    decoder_layer = DecoderLayer(32, 4, 64, 0.1)
    out, block1, block2 = decoder_layer(x, enc_output, True, look_ahead_mask, create_padding_mask(inp))
    assert (out.shape, block1.shape, block2.shape) == ((2, 4, 32), (2, 4, 4, 4), (2, 4, 4, 6))
    np.testing.assert_array_equal(block2.numpy()[..., 4:], np.zeros((2, 4, 4, 2)))


def test_the_training_loop_learns():
    """20 steps of the document's own step function take at least 1 nat off the loss."""
    tf.keras.utils.set_random_seed(0)
    transformer = Transformer(
        num_layers,
        d_model,
        num_heads,
        dff,
        input_vocab_size,
        target_vocab_size,
        pe_input=1000,
        pe_target=1000,
        rate=dropout_rate,
    )
    learning_rate = CustomSchedule(d_model, warmup_steps=100)
    optimizer = tf.keras.optimizers.Adam(learning_rate, beta_1=0.9, beta_2=0.98, epsilon=1e-9)
    train_loss = tf.keras.metrics.Mean(name="train_loss")
    train_accuracy = tf.keras.metrics.SparseCategoricalAccuracy(name="train_accuracy")

    @tf.function
    def train_step(inp, tar):
        tar_inp, tar_real = tar[:, :-1], tar[:, 1:]
        enc_padding_mask, combined_mask, dec_padding_mask = create_masks(inp, tar_inp)
        with tf.GradientTape() as tape:
            predictions, attention = transformer(inp, tar_inp, True, enc_padding_mask, combined_mask, dec_padding_mask)
            loss = loss_function(tar_real, predictions)
        gradients = tape.gradient(loss, transformer.trainable_variables)
        optimizer.apply_gradients(zip(gradients, transformer.trainable_variables, strict=True))
        train_loss(loss)
        train_accuracy(tar_real, predictions)
        return attention

    losses, accuracies = [], []
    for inp, tar in copying_batches(20):
        train_loss.reset_state()
        train_accuracy.reset_state()
        attention = train_step(inp, tar)
        losses.append(float(train_loss.result()))
        accuracies.append(float(train_accuracy.result()))
    assert losses[0] > 3.5  # ln 60 = 4.1 knows nothing
    assert losses[-1] < losses[0] - 1
    assert max(accuracies[-5:]) > accuracies[0]
    assert set(attention) == {f"decoder_layer{i}_block{j}" for i in (1, 2) for j in (1, 2)}
    assert attention["decoder_layer2_block2"].shape == (16, 8, 7, 8)
    assert int(optimizer.iterations) == 20
