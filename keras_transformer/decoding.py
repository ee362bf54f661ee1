"""Decoding over a step function: greedy search, beam search and sampling. Nothing here knows a model.

A step function takes the newest tokens (batch, beam_size), the slots of the hypotheses that they go on from (batch,
beam_size), both int32, and its state; it gives the logits of the next tokens (batch, beam_size, vocab_size), float32,
and its new state. A state is any nest of tensors that have the batch first, so that rows can leave the batch.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from keras_transformer.ids import END, PAD, START

Step = Callable[[tf.Tensor, tf.Tensor, Any], tuple[tf.Tensor, Any]]
CHUNK = 32  # tokens of the vocabulary that are looked at together, or up to twice as many that divide it evenly
UNFINISHED = -1e30  # ranks a hypothesis that came to the limit after all that ended


@dataclasses.dataclass(frozen=True)
class Limits:
    """What an output may be, whatever its probability. Padding and start are never emitted.

    Attributes:
        max_lengths: the most tokens of each row, the end token counted, (batch,).
        min_lengths: the fewest, (batch,); None for no minimum.
        prefix: ids that each row must begin with, (batch, prefix_len), padding after them; None for none.
        forbidden: ids that are never emitted.
        no_repeat_ngram: the length of the n-grams that no output has twice; 0 for any.
    """

    max_lengths: tf.Tensor
    min_lengths: tf.Tensor | None = None
    prefix: tf.Tensor | None = None
    forbidden: Sequence[int] = ()
    no_repeat_ngram: int = 0


class Hypotheses(NamedTuple):
    """Outputs, the best first.

    Attributes:
        ids: (batch, n, longest), without the start id; padding after a hypothesis's end.
        log_probs: the sum over its tokens, the end token included, (batch, n) float32; -inf where there is none, which
            is only so if fewer than n outputs exist.
    """

    ids: tf.Tensor
    log_probs: tf.Tensor


class Search(NamedTuple):
    """Where a search stands; every tensor has the batch first.

    Attributes:
        row: the row's number in the batch that was given, (batch,).
        done: whether the row needs no more tokens, (batch,).
        ids: of the hypotheses that go on, (batch, beam_size, 1 + length), beginning with the start id.
        log_probs: their sums, (batch, beam_size).
        parents: the slot that each came from, (batch, beam_size).
        finished: those that ended, the best first, with ids as above.
        scores: what they are ranked by, (batch, n).
        ended: how many have ended, (batch,).
        limits: min_lengths, max_lengths and prefix of the rows.
        state: the step function's.
    """

    row: tf.Tensor
    done: tf.Tensor
    ids: tf.Tensor
    log_probs: tf.Tensor
    parents: tf.Tensor
    finished: Hypotheses
    scores: tf.Tensor
    ended: tf.Tensor
    limits: tuple[tf.Tensor, tf.Tensor, tf.Tensor]
    state: Any


def length_norm(kind: str, alpha: float | tf.Tensor) -> Callable[[tf.Tensor], tf.Tensor]:
    """From a length, the end token counted, to what a log-probability is divided by.

    Args:
        kind: "gnmt", ((5 + n) / 6)^alpha (Wu et al. 2016, equation 14), or "average", n^alpha.
        alpha: 0 divides by 1.
    """
    if kind not in ("gnmt", "average"):
        raise ValueError(f"the length norm is gnmt or average, got {kind!r}")
    if not tf.is_tensor(alpha) and alpha < 0:
        raise ValueError(f"the length penalty must be at least 0, got {alpha}")

    def norm(length):
        length = tf.cast(length, tf.float32)
        return tf.pow((5.0 + length) / 6.0 if kind == "gnmt" else length, alpha)

    return norm


UNNORMALIZED = length_norm("gnmt", 0.0)


def sizes(x: tf.Tensor) -> list[int | tf.Tensor]:
    """Of each axis: a number where it is known when the graph is made, which spares the graph the asking."""
    asked = tf.shape(x)
    return [asked[axis] if size is None else size for axis, size in enumerate(x.shape)]


def best_tokens(logits: tf.Tensor, count: int | tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """`tf.math.top_k` of each row of (rows, vocab_size), or all there are: (values, ids), the highest first.

    The `count` best are in the `count` chunks with the highest maxima: the others are not looked at again.
    """
    rows, vocab = sizes(logits)
    known = logits.shape[1] or 1
    chunk = next((size for size in range(CHUNK, 2 * CHUNK) if known % size == 0), CHUNK)
    if known % chunk:  # then the logits are copied
        logits = tf.pad(logits, [[0, 0], [0, -vocab % chunk]], constant_values=logits.dtype.min)
    chunks = tf.reshape(logits, (rows, -(-vocab // chunk), chunk))
    _, best = tf.math.top_k(tf.reduce_max(chunks, -1), tf.minimum(count, sizes(chunks)[1]))
    candidates = tf.reshape(tf.gather(chunks, best, batch_dims=1), (rows, sizes(best)[1] * chunk))
    values, places = tf.math.top_k(candidates, tf.minimum(count, vocab))
    return values, tf.gather(best, places // chunk, batch_dims=1) * chunk + places % chunk


def propose(logits: tf.Tensor, x: Search, count: int | tf.Tensor, limits: Limits) -> tuple[tf.Tensor, tf.Tensor]:
    """At least the `count` best next tokens of each hypothesis that the limits allow.

    Returns:
        tokens and their log-probabilities, (batch, beam_size, at least count); -inf for one that is not allowed.
        What is not allowed keeps its share of the probability.
    """
    batch, beam, vocab = sizes(logits)
    length = sizes(x.ids)[2]  # of the output with this token
    min_lengths, _, prefix = x.limits
    never = [PAD, START, *limits.forbidden]
    # Of this many, `count` are allowed at least: the end token may be too early, and each n-gram bars one token.
    enough = count + len(never) + 1 + (length if limits.no_repeat_ngram else 0)
    values, tokens = best_tokens(tf.reshape(logits, (batch * beam, vocab)), enough)
    values, tokens = (tf.reshape(y, (batch, beam, sizes(values)[1])) for y in (values, tokens))
    highest = values[:, :, :1]
    log_total = highest + tf.math.log(tf.reduce_sum(tf.exp(logits - highest), -1, keepdims=True))
    barred = tf.reduce_any(tokens[..., None] == never, -1)
    if limits.min_lengths is not None:
        barred |= (tokens == END) & (length < min_lengths)[:, None, None]
    if limits.no_repeat_ngram:
        again = repeating(x.ids[:, :, 1:], limits.no_repeat_ngram)
        rows = tf.broadcast_to(tf.reshape(tf.range(batch * beam), (batch, beam, 1)), tf.shape(again))
        places = tf.reshape(tf.stack([rows, again], -1), (-1, 2))
        times = tf.scatter_nd(places, tf.ones(tf.shape(places)[:1], tf.int32), (batch * beam, vocab))
        barred |= tf.gather(tf.reshape(times, (batch, beam, vocab)), tokens, batch_dims=2) > 0
    log_probs = tf.where(barred, -float("inf"), values - log_total)
    if limits.prefix is not None:
        forced = tf.pad(prefix, [[0, 0], [0, length]], constant_values=PAD)[:, length - 1]
        forced = tf.broadcast_to(forced[:, None, None], (batch, beam, 1))
        alone = tf.pad(
            tf.gather(logits, forced, batch_dims=2) - log_total,
            [[0, 0], [0, 0], [0, sizes(tokens)[2] - 1]],
            constant_values=-float("inf"),
        )
        tokens, log_probs = tf.where(forced == PAD, tokens, forced), tf.where(forced == PAD, log_probs, alone)
    return tokens, log_probs


def repeating(ids: tf.Tensor, n: int) -> tf.Tensor:
    """The tokens that would complete an n-gram that ids (batch, beam_size, length) have already; padding for others."""
    length = tf.shape(ids)[2]
    count = tf.maximum(length - n + 1, 0)  # n-grams so far
    same = tf.ones(tf.concat([tf.shape(ids)[:2], [count]], 0), tf.bool)
    for i in range(n - 1):
        newest = ids[:, :, tf.maximum(length - n + 1 + i, 0) :][:, :, :1]
        same &= ids[:, :, i : i + count] == newest
    return tf.where(same, ids[:, :, n - 1 : n - 1 + count], PAD)


def begin(state: Any, limits: Limits, beam_size: int, n_best: int) -> Search:
    """A search before its first token: one hypothesis in the first slot."""
    batch = sizes(limits.max_lengths)[0]
    nothing = tf.zeros((batch, 0), tf.int32)
    return Search(
        row=tf.range(batch),
        done=limits.max_lengths < 1,
        ids=tf.fill((batch, beam_size, 1), START),
        log_probs=tf.where(
            (tf.range(beam_size) == 0) & (limits.max_lengths > 0)[:, None], 0.0, -float("inf")
        ),  # in a row that may have no token, nothing goes on
        parents=tf.zeros((batch, beam_size), tf.int32),
        finished=Hypotheses(tf.fill((batch, n_best, 1), START), tf.fill((batch, n_best), -float("inf"))),
        scores=tf.fill((batch, n_best), -float("inf")),
        ended=tf.zeros((batch,), tf.int32),
        limits=(
            tf.zeros_like(limits.max_lengths) if limits.min_lengths is None else limits.min_lengths,
            limits.max_lengths,
            nothing if limits.prefix is None else limits.prefix,
        ),
        state=state,
    )


def search(advance: Callable[[Search], Search], x: Search) -> Hypotheses:
    """Advance all rows by a token, again and again, until each is done.

    When a quarter of the rows are done they leave, so that the batch does not run on for its longest row at full width.
    """
    longest = tf.reduce_max(tf.concat([x.limits[1], [0]], 0))
    ids = tf.zeros(tf.concat([tf.shape(x.scores), [1 + longest]], 0), tf.int32)

    def few_done(x):
        return 4 * tf.math.count_nonzero(x.done, dtype=tf.int32) < tf.size(x.done)

    def stage(x, results):
        (x,) = tf.while_loop(few_done, lambda x: (advance(x),), (x,), (loop_shapes(x, None),))
        left, rest = tf.where(x.done)[:, 0], tf.where(~x.done)[:, 0]
        ended = tf.nest.map_structure(lambda y: tf.gather(y, left), x.finished)
        ended_ids = tf.pad(ended.ids, [[0, 0], [0, 0], [0, 1 + longest - tf.shape(ended.ids)[2]]])
        # A row that may have no token has one output, the empty one, whatever the model says.
        log_probs = tf.where(tf.gather(x.limits[1], left)[:, None] < 1, 0.0, ended.log_probs)
        place = tf.gather(x.row, left)[:, None]
        results = Hypotheses(
            tf.tensor_scatter_nd_update(results.ids, place, ended_ids),
            tf.tensor_scatter_nd_update(results.log_probs, place, log_probs),
        )
        return tf.nest.map_structure(lambda y: tf.gather(y, rest), x), results

    if x.done.shape[0] == 1:
        # One row alone: it never leaves, and with its sizes known a step is a third fewer operations.
        (x,) = tf.while_loop(lambda x: ~x.done[0], lambda x: (advance(x),), (x,), (loop_shapes(x, 1),))
        results = x.finished._replace(log_probs=tf.where(x.limits[1][:, None] < 1, 0.0, x.finished.log_probs))
    else:
        _, results = tf.while_loop(
            lambda x, _: tf.size(x.done) > 0,
            stage,
            (x, Hypotheses(ids, tf.zeros_like(x.scores))),
            (loop_shapes(x, None), Hypotheses(*(tf.TensorShape([None] * n) for n in (3, 2)))),
        )
    ids = results.ids[:, :, 1:]
    used = tf.reduce_any(ids != PAD, [0, 1])
    return results._replace(ids=ids[:, :, : tf.math.count_nonzero(used, dtype=tf.int32)])


def loop_shapes(x: Search, batch: int | None) -> Search:
    """What stays of the shapes from token to token: all but an unknown batch, and axes that begin empty."""

    def shape(y):
        return tf.TensorShape([batch, *(size or None for size in y.shape[1:])])

    ids, finished_ids = (tf.TensorShape([batch, y.shape[1], None]) for y in (x.ids, x.finished.ids))
    shapes = tf.nest.map_structure(shape, x)
    return shapes._replace(ids=ids, finished=shapes.finished._replace(ids=finished_ids))


def one_by_one(step: Step, state: Any, limits: Limits, count: int | None, choose) -> Hypotheses:
    """One hypothesis for each row: `choose` gives the place, (batch,), of its next token among `count` proposed."""

    def advance(x):
        logits, state = step(x.ids[:, :, -1], x.parents, x.state)
        tokens, log_probs = propose(logits, x, sizes(logits)[-1] if count is None else count, limits)
        done = x.done | tf.reduce_all(tf.math.is_inf(log_probs), [1, 2])  # or nothing is allowed
        place = choose(log_probs[:, 0], x)[:, None]
        token = tf.where(done[:, None], PAD, tf.gather(tokens[:, 0], place, batch_dims=1))
        gain = tf.where(done[:, None], 0.0, tf.gather(log_probs[:, 0], place, batch_dims=1))
        ids, log_probs = tf.concat([x.ids, token[..., None]], 2), x.log_probs + gain
        done |= (token[:, 0] == END) | (sizes(x.ids)[2] >= x.limits[1])
        return x._replace(done=done, ids=ids, log_probs=log_probs, finished=Hypotheses(ids, log_probs), state=state)

    return search(advance, begin(state, limits, 1, 1))


def greedy(step: Step, state: Any, limits: Limits) -> Hypotheses:
    """The most probable next token, again and again, until every row has ended."""
    return one_by_one(step, state, limits, 1, lambda log_probs, x: tf.argmax(log_probs, -1, tf.int32))


def greedy_alone(step: Callable, state: Any, limits: Limits, room: int | tf.Tensor) -> Hypotheses:
    """`greedy` of one row in tensors that keep their shapes, as XLA wants them.

    Args:
        step: a step function with one more argument, how many tokens were before, whose states keep their shapes, too.
        limits: without prefix and no_repeat_ngram.
        room: the length of the ids that come out, at least the row's maximum.
    """

    def advance(length, token, ids, log_prob, state):
        logits, state = step(token[None, None], tf.zeros((1, 1), tf.int32), state, length)
        logits = logits[0, 0]
        vocabulary = tf.range(logits.shape[0])
        barred = tf.reduce_any(vocabulary[:, None] == [PAD, START, *limits.forbidden], -1)
        if limits.min_lengths is not None:
            barred |= (vocabulary == END) & (length + 1 < limits.min_lengths[0])
        allowed = tf.where(barred, -float("inf"), logits)
        highest, nothing = tf.reduce_max(allowed), tf.reduce_all(barred)
        # The first of the highest: tf.argmax is several times slower in XLA.
        token = tf.where(nothing, PAD, tf.reduce_min(tf.where(allowed == highest, vocabulary, logits.shape[0])))
        gain = tf.where(nothing, 0.0, highest - tf.reduce_logsumexp(logits))
        return length + 1, token, tf.where(tf.range(room) == length, token, ids), log_prob + gain, state

    _, _, ids, log_prob, _ = tf.while_loop(
        lambda length, token, *_: (length < limits.max_lengths[0]) & (token != END) & (token != PAD),
        advance,
        (0, tf.constant(START), tf.zeros((room,), tf.int32), 0.0, state),
    )
    return Hypotheses(ids[None, None], log_prob[None, None])


def sample(
    step: Step,
    state: Any,
    limits: Limits,
    seeds: tf.Tensor,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float = 1.0,
) -> Hypotheses:
    """The next token drawn by its probability, again and again, until every row has ended.

    Args:
        seeds: two numbers for each row, (batch, 2) int32: what a row draws depends on them alone.
        temperature: the logits are divided by it; below 1 the probable tokens become more so.
        top_k: draw from this many most probable tokens; None for all.
        top_p: draw from the most probable tokens that have this much of the probability together.

    Returns:
        One hypothesis for each row; its log-probability is the model's, at temperature 1 and over all tokens.
    """
    longest = tf.reduce_max(tf.concat([limits.max_lengths, [1]], 0))
    seeds = tf.concat([seeds, [[0, 0]]], 0)  # map_fn takes no empty batch
    numbers = tf.map_fn(
        lambda seed: tf.random.stateless_uniform((longest,), seed), seeds, fn_output_signature=tf.float32
    )

    def choose(log_probs, x):
        log_probs, order = tf.math.top_k(log_probs, sizes(log_probs)[-1])
        if top_k is not None:
            log_probs = log_probs[:, :top_k]
        probabilities = tf.nn.softmax(log_probs / temperature)
        before = tf.cumsum(probabilities, -1, exclusive=True)
        kept = tf.where(before < top_p, probabilities, 0.0)
        up_to = tf.cumsum(kept, -1)
        number = tf.gather(numbers, x.row)[:, sizes(x.ids)[2] - 1, None] * up_to[:, -1:]
        place = tf.math.count_nonzero(up_to <= number, -1, keepdims=True, dtype=tf.int32)
        return tf.gather(order, tf.minimum(place, sizes(order)[1] - 1), batch_dims=1)[:, 0]

    return one_by_one(step, state, limits, top_k, choose)


def beam_search(
    step: Step,
    state: Any,
    limits: Limits,
    beam_size: int,
    n_best: int = 1,
    norm: Callable[[tf.Tensor], tf.Tensor] = UNNORMALIZED,
    patience: float | None = None,
) -> Hypotheses:
    """The `n_best` outputs of highest log-probability divided by `norm` of their length, among those that are seen.

    At each length, those of the `beam_size` most probable continuations of all hypotheses that end go to the finished
    ones, and the `beam_size` most probable that do not end go on, as in fairseq, Hugging Face and CTranslate2. A beam
    of one is done when its most probable token is the end: that is greedy search. A row is done when none that goes on
    can still come among its n best: a sum of log-probabilities can only fall, and is divided by `norm` of the maximum
    length at most. So a beam as wide as there are outputs is an exact search. Hypotheses that come to the maximum
    length without an end rank after all that ended.

    Args:
        patience: a row is done, too, when this many times `beam_size` have ended (Kasai et al. 2022; 1 is what most
            toolkits do). Under a length norm that is much sooner, and the n best may be others; None never to.
    """
    if not 1 <= n_best <= beam_size:
        raise ValueError(f"n_best must be from 1 to beam_size, got n_best={n_best} and beam_size={beam_size}")

    candidates = 2 * beam_size if beam_size > 1 else 1

    def advance(x):
        logits, state = step(x.ids[:, :, -1], x.parents, x.state)
        tokens, log_probs = propose(logits, x, beam_size + 1, limits)
        batch, _, proposed = sizes(tokens)
        sums = tf.reshape(x.log_probs[..., None] + log_probs, (batch, beam_size * proposed))
        sums, places = tf.math.top_k(sums, candidates)  # each hypothesis can end but once: beam_size of them do not
        parents = places // proposed
        token = tf.gather(tf.reshape(tokens, (batch, beam_size * proposed)), places, batch_dims=1)
        ids = tf.concat([tf.gather(x.ids, parents, batch_dims=1), token[..., None]], 2)
        length = sizes(x.ids)[2]
        limit = length >= x.limits[1]
        real = sums > -float("inf")
        ends = token == END
        ended = ends & real & (tf.range(candidates) < beam_size)
        ranks = tf.where(ended, sums / norm(length), tf.where(limit[:, None] & real & ~ends, UNFINISHED, -float("inf")))
        scores, best = tf.math.top_k(tf.concat([x.scores, ranks], 1), n_best)
        all_ids = tf.concat([tf.pad(x.finished.ids, [[0, 0], [0, 0], [0, 1]]), ids], 1)
        finished = Hypotheses(
            tf.gather(all_ids, best, batch_dims=1),
            tf.gather(tf.concat([x.finished.log_probs, sums], 1), best, batch_dims=1),
        )
        sums, going_on = tf.math.top_k(tf.where(ends, -float("inf"), sums), beam_size)
        ids, parents = tf.gather(ids, going_on, batch_dims=1), tf.gather(parents, going_on, batch_dims=1)
        attainable = tf.reduce_max(sums, 1) / norm(x.limits[1])
        done = x.done | limit | (attainable <= scores[:, -1])
        count = x.ended + tf.math.count_nonzero(ended, 1, dtype=tf.int32)
        if patience is not None:
            done |= tf.cast(count, tf.float32) >= max(patience * beam_size, n_best)
        sums = tf.where(done[:, None], -float("inf"), sums)  # until the row leaves, nothing more ends in it
        return x._replace(
            done=done,
            ids=ids,
            log_probs=sums,
            parents=parents,
            finished=finished,
            scores=scores,
            ended=count,
            state=state,
        )

    return search(advance, begin(state, limits, beam_size, n_best))
