"""One update of the weights: gradients of the loss over a batch, their sum over devices, and the optimizer."""

import functools
import itertools
from typing import NamedTuple

import keras
import tensorflow as tf

from keras_transformer.data.pipeline import teacher_forcing
from keras_transformer.ids import PAD
from keras_transformer.losses import loss_function
from keras_transformer.masks import create_masks
from keras_transformer.precision import cores

IDS = tf.TensorSpec((None, None), tf.int32)
CHUNKS = 8


def count_tokens(tar_real):
    return tf.math.count_nonzero(tar_real != PAD, dtype=tf.float32)


def projected_loss(x, kernel, bias, real, label_smoothing=0.0):
    """Smoothed cross-entropy of the logits x kernel + bias, in nats, summed over the real tokens.

    `loss_function` of the same logits, times the number of tokens; but they are never all there at once. Projection,
    softmax and both products of the gradient are made chunk by chunk, while a chunk is in the processor's cache: with a
    small model, reading and writing numbers of (batch, tar_len, vocab_size) takes longer than its matrix products. What
    label smoothing adds to the gradient is the same for the whole vocabulary, and needs no pass over it.

    Args:
        x: vectors (tokens, d_model).
        kernel: (d_model, vocab_size).
        bias: (vocab_size,), or None.
        real: ids (tokens,), 0 = padding.
        label_smoothing: as in `loss_function`.

    Returns:
        A float32 scalar. A token counts at most 87 nats, where float32's softmax ends, and what smoothing adds.
    """
    vocab_size = kernel.shape[1]
    variables = (x, kernel) if bias is None else (x, kernel, bias)

    @tf.custom_gradient
    def total(x, kernel, *bias):
        dtype = x.dtype  # the products' type; sums are float32's, and the loss's float64's
        products = tf.cast(kernel, dtype)
        mask = (real != PAD)[:, None]
        x = tf.where(mask, x, 0)  # whatever is at padding, NaN included
        size = tf.shape(x)[0]
        rights, x_gradients, kernel_gradients, bias_gradients = [], [], [], []
        for i in range(CHUNKS):
            rows = slice(size * i // CHUNKS, size * (i + 1) // CHUNKS)
            logits = tf.cast(tf.matmul(x[rows], products), tf.float32)
            probabilities = tf.nn.softmax(logits + bias[0] if bias else logits)
            rights.append(tf.gather(probabilities, real[rows], batch_dims=1))
            # Before it is rounded to 16 bits: of a token that is all but certain, the difference is what counts.
            places = tf.stack([tf.range(tf.shape(logits)[0]), real[rows]], 1)
            off = tf.tensor_scatter_nd_sub(probabilities, places, tf.fill(tf.shape(places)[:1], 1 - label_smoothing))
            off = tf.cast(off, dtype)
            x_gradients.append(tf.cast(tf.matmul(off, products, transpose_b=True), tf.float32))
            kernel_gradients.append(tf.cast(tf.matmul(x[rows], off, transpose_a=True), tf.float32))
            if bias:
                bias_gradients.append(tf.reduce_sum(tf.where(mask[rows], tf.cast(off, tf.float32), 0), 0))
        rights = tf.maximum(tf.cast(tf.concat(rights, 0), tf.float64), 1.2e-38)
        # Smoothing takes away from each token's loss what its logit is above the mean logit.
        mean = tf.reduce_mean(kernel, 1)
        surplus = tf.reduce_sum(tf.cast(x, tf.float32) * (tf.gather(tf.transpose(kernel), real) - mean), 1)
        if bias:
            surplus += tf.gather(bias[0], real) - tf.reduce_mean(bias[0])
        losses = label_smoothing * tf.cast(surplus, tf.float64) - tf.math.log(rights)
        loss = tf.reduce_sum(tf.where(mask[:, 0], losses, 0.0))

        def gradient(upstream):
            even = label_smoothing / vocab_size
            x_gradient = tf.where(mask, tf.concat(x_gradients, 0) - label_smoothing * mean, 0) * upstream
            total_x = tf.reduce_sum(tf.cast(x, tf.float32), 0)
            kernel_gradient = (tf.add_n(kernel_gradients) - even * total_x[:, None]) * upstream
            gradients = [tf.cast(x_gradient, dtype), tf.cast(kernel_gradient, kernel.dtype)]
            if bias:
                gradients.append((tf.add_n(bias_gradients) - even * count_tokens(real)) * upstream)
            return gradients

        return tf.cast(loss, tf.float32), gradient

    return total(*map(tf.convert_to_tensor, variables))


class Sums(NamedTuple):
    """Over the tokens of one or more batches: of the loss, of their number, and of the loss's gradients."""

    loss: tf.Tensor
    tokens: tf.Tensor
    gradients: list[tf.Tensor]


def parts_of(tokens_per_batch: int) -> int:
    """Into how many parts to cut batches of this size: on a CPU one for each core, up to 4.

    More of them, or smaller ones, would make the graph larger than they make the step faster.
    """
    on_gpu = bool(tf.config.list_physical_devices("GPU"))
    return 1 if on_gpu else max(1, min(4, cores(), tokens_per_batch // 512))


def threads_of(tokens_per_batch: int) -> int:
    """On how many cores to compute an operation, for TensorFlow's intra-op threads, so that all parts have some."""
    return max(1, cores() // parts_of(tokens_per_batch))


def build(model, optimizer):
    """Make the variables that are still to be made: inside a tf.function, they would have it traced twice."""
    if optimizer.loss_scale_factor is not None:
        raise ValueError("an optimizer with loss_scale_factor is not supported: wrap it in a LossScaleOptimizer")
    if not model.built:
        model.build((None, None), (None, None))
    if not optimizer.built:
        optimizer.build(model.trainable_variables)


def add_sums(one: Sums, other: Sums) -> Sums:
    gradients = [a + b for a, b in zip(one.gradients, other.gradients, strict=True)]
    return Sums(one.loss + other.loss, one.tokens + other.tokens, gradients)


def make_gradient_step(model, optimizer, label_smoothing=0.0, train_accuracy=None, parts=1):
    """A function of a batch (inp, tar), or of one for each replica of the strategy in whose scope it is made, to Sums.

    Args:
        parts: the batch is cut into so many, by rows, each with a graph of its own. As many as cores, with TensorFlow's
            intra-op threads at 1, keep every core at work all the time.
    """
    strategy = tf.distribute.get_strategy()
    variables = model.trainable_variables

    def part_sums(inp, tar):
        (inp, tar_inp), tar_real = teacher_forcing(inp, tar)
        enc_padding_mask, look_ahead_mask, dec_padding_mask = create_masks(inp, tar_inp)
        with tf.GradientTape() as tape:
            enc_output = model.encode(inp, True, enc_padding_mask)
            x, _ = model.decode(tar_inp, enc_output, True, look_ahead_mask, dec_padding_mask)
            rows = tf.reshape(x, (-1, x.shape[-1]))
            loss = projected_loss(rows, *model.projection(), tf.reshape(tar_real, (-1,)), label_smoothing)
            scaled_loss = optimizer.scale_loss(loss)
        gradients = [tf.convert_to_tensor(gradient) for gradient in tape.gradient(scaled_loss, variables)]
        if train_accuracy is not None:
            train_accuracy.update_state(tar_real, model.project(x))
        return Sums(loss, count_tokens(tar_real), gradients)

    def replica_sums(inp, tar):
        size = tf.shape(inp)[0]
        bounds = [size * i // parts for i in range(parts + 1)]
        sums = [part_sums(inp[a:b], tar[a:b]) for a, b in itertools.pairwise(bounds)]
        gradients = [tf.add_n(part) for part in zip(*(part.gradients for part in sums), strict=True)]
        return Sums(tf.add_n([part.loss for part in sums]), tf.add_n([part.tokens for part in sums]), gradients)

    def gradient_step(inp, tar):
        sums = strategy.run(replica_sums, (inp, tar))
        if strategy.num_replicas_in_sync == 1:
            return sums
        return tf.nest.map_structure(lambda value: strategy.reduce(tf.distribute.ReduceOp.SUM, value, None), sums)

    return gradient_step


def make_update(model, optimizer, clip_norm=None, train_loss=None, gradient_norm=None, skipped=None):
    """A function that gives the optimizer the mean gradient of Sums over their tokens, and returns the mean loss.

    Where loss or gradient is infinite or not a number, nothing is changed, and a LossScaleOptimizer's scale is halved.

    Args:
        clip_norm: a longer gradient, over all weights, is made as long as this.
        train_loss: a Mean metric to update with the loss, weighted by the tokens.
        gradient_norm: a Mean metric to update with the gradient's length before it is clipped.
        skipped: an int variable (2,) that counts the updates at which nothing was changed, in all and in a row.
    """
    variables = model.trainable_variables
    scaled = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)

    def update(sums):
        tokens = tf.maximum(sums.tokens, 1.0)
        scale = tf.convert_to_tensor(optimizer.dynamic_scale) if scaled else 1.0
        loss = sums.loss / tokens
        gradients = [gradient / (tokens * scale) for gradient in sums.gradients]
        norm = tf.linalg.global_norm(gradients)
        if clip_norm is not None:
            gradients, _ = tf.clip_by_global_norm(gradients, clip_norm, norm)
        finite = tf.math.is_finite(loss) & tf.math.is_finite(norm)

        # What LossScaleOptimizer.apply does, which neither takes unscaled gradients nor a sum over replicas.
        def set_scale(good_steps, factor):
            if scaled:
                optimizer.step_counter.assign(good_steps)
                optimizer.dynamic_scale.assign(scale * factor)

        def change():
            (optimizer.inner_optimizer if scaled else optimizer).apply(gradients, variables)
            if scaled:
                good = tf.convert_to_tensor(optimizer.step_counter) + 1
                grown = good >= optimizer.dynamic_growth_steps
                set_scale(tf.where(grown, tf.zeros_like(good), good), tf.where(grown, 2.0, 1.0))
            if train_loss is not None:
                train_loss.update_state(loss, sample_weight=sums.tokens)
            if gradient_norm is not None:
                gradient_norm.update_state(norm)
            if skipped is not None:
                skipped.assign(skipped * [1, 0])
            return loss

        def skip():
            set_scale(0, 0.5)
            if skipped is not None:
                skipped.assign_add([1, 1])
            return loss

        return tf.cond(finite, change, skip)

    return update


def make_train_step(
    model, optimizer, label_smoothing=0.0, train_loss=None, train_accuracy=None, clip_norm=None, gradient_norm=None,
    skipped=None, parts=1, signature=(IDS, IDS),
):  # fmt: skip
    """One update as a `tf.function`, traced once whatever the batch's shape.

    Args:
        model: a Transformer.
        optimizer: a Keras optimizer; a LossScaleOptimizer scales the loss.
        label_smoothing: as in `loss_function`.
        train_loss: a Mean metric to update with the loss, weighted by the batch's real target tokens.
        train_accuracy: a metric to update with (tar_real, logits), such as TokenAccuracy. It costs a projection onto
            the vocabulary, and more memory.
        clip_norm, gradient_norm, skipped: as in `make_update`.
        parts: as in `make_gradient_step`.
        signature: of inp and tar, if a strategy distributes them.

    Returns:
        train_step(inp, tar): takes int32 source ids (batch, inp_len) and target ids (batch, tar_len), gives the loss. A
        step whose loss or gradient is not finite changes no weight, and of the metrics only train_accuracy.
    """
    build(model, optimizer)
    gradient_step = make_gradient_step(model, optimizer, label_smoothing, train_accuracy, parts)
    update = make_update(model, optimizer, clip_norm, train_loss, gradient_norm, skipped)

    @tf.function(input_signature=signature, autograph=False)
    def train_step(inp, tar):
        return update(gradient_step(inp, tar))

    return train_step


def make_accumulated_step(
    model, optimizer, label_smoothing=0.0, train_loss=None, clip_norm=None, gradient_norm=None, skipped=None, parts=1,
    signature=(IDS, IDS),
):  # fmt: skip
    """As `make_train_step`, one update from several batches: the loss is the mean over the tokens of all of them.

    Returns:
        accumulated_step(batches): takes pairs (inp, tar), gives the loss.
    """
    build(model, optimizer)
    gradient_step = make_gradient_step(model, optimizer, label_smoothing, None, parts)
    gradient_step = tf.function(gradient_step, input_signature=signature, autograph=False)
    add = tf.function(add_sums, autograph=False)
    update = tf.function(make_update(model, optimizer, clip_norm, train_loss, gradient_norm, skipped), autograph=False)

    def accumulated_step(batches):
        return update(functools.reduce(add, (gradient_step(inp, tar) for inp, tar in batches)))

    return accumulated_step


def make_evaluate_step(model, dev_loss, dev_accuracy):
    """As `make_train_step`, without an update, dropout or smoothing: the loss is the text's own, in nats a token."""

    @tf.function(input_signature=[IDS, IDS], autograph=False)
    def evaluate_step(inp, tar):
        (inp, tar_inp), tar_real = teacher_forcing(inp, tar)
        logits, _ = model(inp, tar_inp, False)
        dev_loss.update_state(loss_function(tar_real, logits), sample_weight=count_tokens(tar_real))
        dev_accuracy.update_state(tar_real, logits)

    return evaluate_step
