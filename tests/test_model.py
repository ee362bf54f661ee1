"""The model: what each position may see, its two doors, its numbers."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import ops

from keras_transformer import Decoder, Encoder, Transformer, create_masks, create_padding_mask, loss_function

CROSS = ("decoder_layer1_block2", "decoder_layer2_block2")
SHORT, PADDED = np.array([[5, 6, 7]], "int32"), np.array([[5, 6, 7, 0, 0]], "int32")
TAR = np.array([[2, 8, 9, 5, 6]], "int32")


def finite(tree):
    leaves = (tf.cast(tf.convert_to_tensor(leaf), "float32") for leaf in keras.tree.flatten(tree))
    return all(np.isfinite(leaf).all() for leaf in leaves)


def test_source_and_target_of_different_lengths(tiny, rng):
    """M1, https://github.com/keras-team/keras-io/pull/1046, https://github.com/keras-team/keras-io/issues/1964: the
    source's own padding blocks the decoder's attention to it, and nothing of the target does."""
    model = tiny()
    assert model((rng.integers(4, 40, (2, 7)), rng.integers(4, 40, (2, 5)))).shape == (2, 5, 40)
    np.testing.assert_allclose(model((PADDED, TAR)), model((SHORT, TAR)), atol=1e-5)
    _, attention_weights = model(PADDED, TAR)
    for name in CROSS:
        weights = attention_weights[name].numpy()
        assert weights.shape == (1, 2, 5, 5)
        assert (weights[..., 3:] == 0).all() and (weights[..., :3] > 0).all()
    tail = np.array([[2, 8, 9, 0, 0]], "int32")
    np.testing.assert_allclose(model((PADDED, tail))[:, :3], model((PADDED, TAR))[:, :3], atol=1e-5)


@pytest.mark.parametrize(("num_layers", "norm"), [(1, "post"), (2, "pre"), (3, "post")])
def test_no_position_sees_a_later_one(tiny, rng, num_layers, norm):
    """M4, https://github.com/jadore801120/attention-is-all-you-need-pytorch/issues/19,
    https://github.com/lsdefine/attention-is-all-you-need-keras/issues/6,
    https://github.com/tensorflow/tensor2tensor/issues/1309: the logits of a position do not change with the target
    after it, in training or not, and have no gradient to it."""
    model = tiny(num_layers=num_layers, norm=norm)
    for training in (True, False):
        logits = model((PADDED, TAR), training=training)
        # The same source with five targets, of which the j-th keeps the ids up to j.
        changed = np.where(np.arange(5) <= np.arange(5)[:, None], TAR, rng.integers(20, 40, (5, 5)))
        for j, other in enumerate(model((np.repeat(PADDED, 5, 0), changed), training=training)):
            np.testing.assert_allclose(other[: j + 1], logits[0, : j + 1], atol=1e-6)
            assert j == 4 or np.abs(other[j + 1 :] - logits[0, j + 1 :]).max() > 1e-3
    # All ids differ, so that the embedding's row of an id is the input of its position alone.
    for j in range(5):
        with tf.GradientTape() as tape:
            total = tf.reduce_sum(model((PADDED, TAR), training=True)[:, j] ** 2)
        gradient = tf.convert_to_tensor(tape.gradient(total, model.decoder.embedding.embeddings)).numpy()[TAR[0]]
        assert (gradient[j + 1 :] == 0).all()
        assert (np.abs(gradient[: j + 1]).max(-1) > 0).all()


def test_masks_depend_on_ids_alone(tiny, rng):
    """M5, https://github.com/Kyubyong/transformer/issues/33 (and /3, /66): an id whose vector is all zeros is
    attended to, padding whose vector is not zero is not."""
    model = tiny()
    model((PADDED, TAR))
    table = model.encoder.embedding.embeddings.numpy()
    table[6], table[0] = 0, rng.normal(size=16)
    model.encoder.embedding.set_weights([table])
    _, attention_weights = model(PADDED, TAR)
    for name in CROSS:
        assert (attention_weights[name].numpy()[..., 1] > 0).all()
        assert (attention_weights[name].numpy()[..., 3:] == 0).all()
    logits = model((PADDED, TAR))
    table[0] = rng.normal(size=16)
    model.encoder.embedding.set_weights([table])
    np.testing.assert_array_equal(model((PADDED, TAR)), logits)


def test_padding_is_blocked_whichever_way_the_model_is_called(tiny):
    """M6, https://github.com/keras-team/keras/issues/18416, https://github.com/keras-team/keras-hub/issues/2220: the
    outputs for [5, 6, 7, 0, 0] are those for [5, 6, 7], at 0..2 of the target as of the source, with no warning."""
    model = tiny(num_layers=1)
    inputs = (keras.Input((None,), dtype="int32"), keras.Input((None,), dtype="int32"))
    functional = keras.Model(inputs, model(inputs))
    tar_short, tar_padded = TAR[:, :3], np.array([[2, 8, 9, 0, 0]], "int32")
    wanted = model((SHORT, tar_short)).numpy()
    in_a_graph = tf.function(lambda inp, tar: model((inp, tar)))
    for call in (lambda *pair: model(pair), in_a_graph, lambda *pair: functional(pair)):
        np.testing.assert_allclose(call(PADDED, tar_padded)[:, :3], wanted, atol=1e-5)
    np.testing.assert_allclose(model.predict((PADDED, tar_padded), verbose=0)[:, :3], wanted, atol=1e-5)
    np.testing.assert_allclose(model.encoder(PADDED, None, create_masks(PADDED, TAR)[0])[:, :3],
                               model.encoder(SHORT), atol=1e-5)  # fmt: skip

    model.compile(keras.optimizers.SGD(0.0), loss=loss_function)
    real_short, real_padded = np.array([[8, 9, 3]]), np.array([[8, 9, 3, 0, 0]])
    loss = float(loss_function(real_short, wanted))
    assert model.evaluate((PADDED, tar_padded), real_padded, verbose=0) == pytest.approx(loss, abs=1e-5)
    history = model.fit((PADDED, tar_padded), real_padded, verbose=0).history
    assert history["loss"][0] == pytest.approx(loss, abs=1e-5)


@pytest.mark.parametrize(
    ("policy", "tolerance"), [("float32", 1e-5), ("mixed_float16", 1e-2), ("mixed_bfloat16", 1e-1)]
)
@pytest.mark.parametrize("blocked", ["source", "target"])
def test_a_row_of_padding_is_finite_and_harms_no_other(tiny, policy, tolerance, blocked):
    """M7, https://github.com/tracel-ai/burn/pull/4697: row 0's source is all padding, or its target begins with
    padding, so that look-ahead and padding together block its first position whole; row 1 is as if alone."""
    model = tiny(dtype=policy)
    inp = np.array([[0, 0, 0, 0], [5, 6, 7, 0]], "int32") if blocked == "source" else np.full((2, 4), 5, "int32")
    tar = np.array([[2, 8, 9], [2, 6, 7]] if blocked == "source" else [[0, 8, 9], [2, 6, 7]], "int32")
    real = np.array([[8, 9, 3], [6, 7, 3]])
    model((inp, tar))
    with tf.GradientTape() as tape:
        logits, attention_weights = model(inp, tar, True)
        loss = loss_function(real, logits)
    gradients = tape.gradient(loss, model.trainable_variables)
    assert finite((logits, attention_weights, gradients))
    alone, alone_weights = model(inp[1:], tar[1:], True)
    np.testing.assert_allclose(logits[1:], alone, atol=tolerance)
    for name, weights in attention_weights.items():
        np.testing.assert_allclose(
            tf.cast(weights[1:], "float32"), tf.cast(alone_weights[name], "float32"), atol=tolerance
        )


@pytest.mark.parametrize(("norm", "share_embeddings"), [("post", False), ("pre", True)])
@pytest.mark.parametrize(("policy", "tolerance"), [("mixed_float16", 0.03), ("mixed_bfloat16", 0.2)])
def test_mixed_precision_is_close_to_float32(tiny, policy, tolerance, norm, share_embeddings):
    """X1, https://github.com/athena-team/athena/issues/77: finite with padding and without, logits in float32."""
    half = tiny(dtype=policy, norm=norm, share_embeddings=share_embeddings)
    full = tiny(norm=norm, share_embeddings=share_embeddings)
    for pair in ((PADDED, TAR), (SHORT, TAR), (SHORT, np.array([[2, 8, 0]], "int32"))):
        wanted, logits = full(pair), half(pair)
        assert logits.dtype == "float32"
        assert all(v.dtype == "float32" for v in half.trainable_variables)
        np.testing.assert_allclose(logits, wanted, atol=tolerance)


def test_a_constant_next_token_can_be_made_by_hand(tiny):
    """With a projection of kernel 0 and bias log p the distribution is p at every step."""
    model = tiny()
    model((SHORT, TAR))
    bias = np.full(40, -1e4)
    bias[[6, 3]] = np.log([0.9, 0.1])
    model.final_layer.set_weights([np.zeros((16, 40)), bias])
    probabilities = tf.nn.softmax(model((PADDED, TAR))).numpy()
    np.testing.assert_allclose(probabilities[..., [6, 3]], np.broadcast_to([0.9, 0.1], (1, 5, 2)), rtol=1e-5)


def test_both_doors_lead_to_the_same_logits(tiny):
    """Masks left out are made from the ids; given, they are used."""
    model = tiny()
    masks = create_masks(PADDED, TAR)
    logits, attention_weights = model(PADDED, TAR, False, *masks)
    np.testing.assert_array_equal(model((PADDED, TAR)), logits)
    np.testing.assert_array_equal(model([PADDED, TAR]), logits)
    np.testing.assert_array_equal(model(PADDED, TAR)[0], logits)
    np.testing.assert_array_equal(model(PADDED, tar=TAR, training=False, dec_padding_mask=masks[2])[0], logits)
    assert list(attention_weights) == [f"decoder_layer{i}_block{j}" for i in (1, 2) for j in (1, 2)]
    # Block the first source position too: it is no longer attended to.
    first = np.array([1, 0, 0, 1, 1], "float32").reshape(1, 1, 1, 5)
    _, blocked = model(PADDED, TAR, False, first, masks[1], first)
    assert (blocked[CROSS[1]].numpy()[..., 0] == 0).all() and (blocked[CROSS[1]].numpy()[..., 1:3] > 0).all()


@pytest.mark.parametrize("norm", ["post", "pre"])
def test_the_parts_make_the_whole(tiny, norm):
    """encode, decode and project, one after the other, are the call."""
    model = tiny(norm=norm)
    enc_mask, look_ahead_mask, dec_mask = create_masks(PADDED, TAR)
    logits, attention_weights = model(PADDED, TAR)
    x, weights = model.decode(TAR, model.encode(PADDED), False, look_ahead_mask, dec_mask)
    np.testing.assert_allclose(model.project(x), logits, atol=1e-6)
    np.testing.assert_allclose(weights[CROSS[1]], attention_weights[CROSS[1]], atol=1e-6)
    np.testing.assert_array_equal(model.encode(PADDED, False, enc_mask), model.encode(PADDED))
    # The last thing in either stack is a normalisation, whose gain is 1 and offset 0 at first.
    for output in (model.encode(PADDED), x):
        np.testing.assert_allclose(np.mean(output, -1), np.zeros((1, 5)), atol=1e-5)
        np.testing.assert_allclose(np.var(output, -1), np.ones((1, 5)), atol=1e-3)


@pytest.mark.parametrize("norm", ["post", "pre"])
def test_the_number_of_parameters(tiny, norm):
    """attention a = 4 (16 * 16 + 16) = 1088; feed-forward f = 16 * 32 + 32 + 32 * 16 + 16 = 1072; normalisation n = 32.

    Layers: 2 (a + f + 2n) = 4448 and 2 (2a + f + 3n) = 6688. Embeddings: 2 * 40 * 16 = 1280. Projection: 17 * 40 = 680.
    "pre" has one normalisation more in each stack.
    """
    pair = (PADDED, TAR)
    more = 64 if norm == "pre" else 0
    model, shared = tiny(norm=norm), tiny(norm=norm, share_embeddings=True)
    model(pair), shared(pair)
    assert model.count_params() == 4448 + 6688 + 1280 + 680 + more
    assert shared.count_params() == 4448 + 6688 + 640 + more


def test_what_other_toolkits_models_have(tiny, rng):
    """A bias on the logits of the shared embeddings; embeddings as they are; another epsilon: by hand, in NumPy."""
    model = tiny(share_embeddings=True, output_bias=True, scale_embeddings=False, norm_epsilon=0.5)
    model((PADDED, TAR))
    x, bias = rng.normal(size=(2, 16)), rng.normal(size=40)
    table = model.encoder.embedding.embeddings.numpy()
    without = model.project(x).numpy()
    model.final_bias.assign(bias)
    np.testing.assert_allclose(model.project(x), without + bias, atol=1e-6)
    embedded = model.encoder.embed(np.array([[7]]), False)
    np.testing.assert_allclose(embedded[0, 0], table[7] + model.encoder.pos_encoding.encoding[0, 0], atol=1e-6)
    layer = model.encoder.enc_layers[0].layernorm1
    expected = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 0.5)
    np.testing.assert_allclose(layer(x), expected, atol=1e-5)


def test_shared_embeddings_are_one_matrix(tiny):
    """Source ids, target ids and the projection read the same rows."""
    model = tiny(share_embeddings=True)
    model((PADDED, TAR))
    assert model.encoder.embedding is model.decoder.embedding
    table = model.encoder.embedding.embeddings.numpy()
    x = np.random.default_rng(0).normal(size=(1, 3, 16)).astype("float32")
    np.testing.assert_allclose(model.project(x), x @ table.T, atol=1e-5)
    assert [v.path for v in model.variables].count(model.encoder.embedding.embeddings.path) == 1


def test_shared_embeddings_need_one_vocabulary(tiny):
    with pytest.raises(ValueError, match="got input_vocab_size=40 and target_vocab_size=41"):
        tiny(share_embeddings=True, target_vocab_size=41)


def test_embeddings_stand_beside_the_positions():
    """Section 3.4: vectors are multiplied by sqrt(d_model), here sqrt(16) = 4, before the position is added."""
    encoder = Encoder(0, 16, 2, 32, 40, 60, 0.0)
    output = encoder(np.array([[7, 7]]))
    row = encoder.embedding.embeddings.numpy()[7]
    np.testing.assert_allclose(output[0, 0], 4 * row + np.array([0, 1] * 8), atol=1e-6)
    assert np.abs(output[0, 1] - output[0, 0]).max() > 0.1


def test_dropout_acts_in_training_alone(tiny):
    model = tiny(rate=0.5)
    still = model((PADDED, TAR)).numpy()
    np.testing.assert_array_equal(model((PADDED, TAR), training=False), still)
    np.testing.assert_array_equal(model(PADDED, TAR, False)[0], still)
    np.testing.assert_allclose(model.predict((PADDED, TAR), verbose=0), still, atol=1e-5)
    assert np.abs(model(PADDED, TAR, True)[0] - still).max() > 1e-2
    assert np.abs(model((PADDED, TAR), training=True) - still).max() > 1e-2


def test_stacks_take_the_documents_arguments():
    """Seven by position, the last with a default of 0.1, and as many layers as asked."""
    encoder = Encoder(2, 16, 4, 32, 50, 60)
    decoder = Decoder(3, 16, 4, 32, 50, 60)
    assert (encoder.rate, len(encoder.enc_layers), len(decoder.dec_layers)) == (0.1, 2, 3)
    enc_output = encoder(PADDED, False, None)
    x, attention_weights = decoder(TAR, enc_output, False, None, None)
    assert enc_output.shape == x.shape == (1, 5, 16)
    assert {name: w.shape for name, w in attention_weights.items()} == {
        f"decoder_layer{i}_block{j}": (1, 4, 5, 5) for i in (1, 2, 3) for j in (1, 2)
    }
    assert Transformer(1, 16, 4, 32, 50, 50, 60, 60).rate == 0.1


# Decoding a token at a time


def run_steps(model, inp, tokens, parents):
    """The logits of each step and the prefix of each hypothesis, from tokens and parents, (steps, batch, beam_size)."""
    padding_mask = create_padding_mask(inp)
    state = model.init_state(model.encode(inp, False, padding_mask), padding_mask, tokens.shape[2])
    prefixes, results = np.zeros((*tokens.shape[1:], 0), "int32"), []
    for newest, came_from in zip(tokens, parents, strict=True):
        prefixes = np.take_along_axis(prefixes, came_from[..., None], 1)
        prefixes = np.concatenate([prefixes, newest[..., None]], 2)
        logits, state = model.step(ops.convert_to_tensor(newest), ops.convert_to_tensor(came_from), state)
        results.append((ops.convert_to_numpy(logits), prefixes))
    return results


@pytest.mark.parametrize("beam_size", [1, 3])
@pytest.mark.parametrize(
    "changes",
    [{}, {"share_embeddings": True, "output_bias": True}, {"norm": "pre", "activation": "gelu"}],
    ids=["plain", "shared", "pre"],
)
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("mixed_float16", 1e-2)])
def test_a_step_is_the_last_row_of_the_whole(tiny, rng, beam_size, changes, dtype, tolerance):
    """At every step, for sources of three lengths, after hypotheses changed slots: the uncached path's logits.

    B11, https://github.com/lucidrains/x-transformers/issues/311: cached and uncached outputs drifted from step 2 on.
    """
    model = tiny(dtype=dtype, **changes)
    inp = np.array([[5, 6, 7, 8, 3], [9, 3, 0, 0, 0], [5, 6, 3, 0, 0]], "int32")
    tokens = rng.integers(4, 40, (8, 3, beam_size)).astype("int32")
    tokens[0] = 2
    parents = rng.integers(0, beam_size, tokens.shape).astype("int32")
    model((inp, tokens[:, :, 0].T))
    for logits, prefixes in run_steps(model, inp, tokens, parents):
        assert logits.shape == (3, beam_size, 40)
        for slot in range(beam_size):
            whole = ops.convert_to_numpy(model((inp, prefixes[:, slot])))[:, -1]
            np.testing.assert_allclose(logits[:, slot], whole, atol=tolerance)


@pytest.mark.parametrize("jit_compile", [False, True])
def test_a_state_with_room_keeps_its_shapes_and_gives_the_same(tiny, rng, jit_compile):
    """Against a state that grows: two sources, five tokens, room for nine."""
    model = tiny()
    inp = np.array([[5, 6, 7, 3], [9, 3, 0, 0]], "int32")
    tokens = rng.integers(4, 40, (5, 2, 1)).astype("int32")
    model((inp, tokens[:, :, 0].T))
    padding_mask = create_padding_mask(inp)
    state = model.init_state(model.encode(inp, False, padding_mask), padding_mask, room=9)
    shapes = [tensor.shape for tensor in tf.nest.flatten(state)]
    step = tf.function(model.step, jit_compile=jit_compile)
    for place, (newest, (expected, _)) in enumerate(
        zip(tokens, run_steps(model, inp, tokens, np.zeros_like(tokens)), strict=True)
    ):
        logits, state = step(tf.constant(newest), tf.zeros_like(newest), state, place=tf.constant(place))
        np.testing.assert_allclose(logits, expected, atol=1e-5)
        assert [tensor.shape for tensor in tf.nest.flatten(state)] == shapes


def test_the_beams_of_a_source_attend_to_that_source(tiny, rng):
    """Sources of 3 and 9 tokens, beam 3; swapped, the logits are swapped, and a source alone gives the same.

    B5, https://github.com/keras-team/keras-hub/issues/1047: the encoder's output was tiled where it must be repeated.
    """
    model = tiny()
    inp = np.zeros((2, 9), "int32")
    inp[0, :3], inp[1] = [5, 6, 3], [*range(10, 18), 3]
    tokens = np.concatenate([np.full((1, 2, 3), 2), rng.integers(4, 40, (3, 2, 3))]).astype("int32")
    parents = rng.integers(0, 3, tokens.shape).astype("int32")
    model((inp, tokens[:, :, 0].T))
    together = run_steps(model, inp, tokens, parents)
    swapped = run_steps(model, inp[::-1].copy(), tokens[:, ::-1].copy(), parents[:, ::-1].copy())
    alone = run_steps(model, inp[:1, :3], tokens[:, :1], parents[:, :1])
    for (logits, _), (other, _), (one, _) in zip(together, swapped, alone, strict=True):
        np.testing.assert_allclose(logits, other[::-1], atol=1e-6)
        np.testing.assert_allclose(logits[:1], one, atol=1e-5)


def test_step_weights_made_once_are_those_made_at_each_step(tiny):
    model = tiny(share_embeddings=True)
    inp, tokens = np.array([[5, 3]], "int32"), np.array([[2]], "int32")
    model((inp, tokens))
    padding_mask = create_padding_mask(inp)
    state = model.init_state(model.encode(inp, False, padding_mask), padding_mask)
    logits, after = model.step(tokens, 0 * tokens, state, model.step_weights())
    expected, _ = model.step(tokens, 0 * tokens, state)
    np.testing.assert_array_equal(logits, expected)
    assert tuple(after.layers[0].keys.shape) == (1, 2, 1, 8) and tuple(after.ancestors.shape) == (1, 1, 1)
