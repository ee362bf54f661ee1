"""Decoding over hand-made step functions, against hand-computed numbers and brute force."""

import itertools

import numpy as np
import pytest
import tensorflow as tf

from keras_transformer.decoding import (
    Limits,
    beam_search,
    best_tokens,
    greedy,
    greedy_alone,
    length_norm,
    repeating,
    sample,
)
from keras_transformer.ids import END, PAD, START, UNK

A = 4  # the first id that is a piece


def constant(probabilities, vocab=6):
    """A step function with the same next-token distribution whatever came before."""
    logits = np.full(vocab, -1e4, np.float32)
    for token, probability in probabilities.items():
        logits[token] = np.log(probability)
    return lambda tokens, parents, state: (tf.tile(logits[None, None], [*tf.unstack(tf.shape(tokens)), 1]), state)


def random_step(rng, vocab=5, longest=4):
    """A step function whose logits depend on the whole prefix, and the log-probabilities it stands for.

    Its state is the prefix as a number in base `vocab`, so it must be reordered by the parents to be right.
    """
    table = rng.normal(size=(vocab ** (longest + 1), vocab)).astype(np.float32) * 2

    def step(tokens, parents, number):
        number = tf.gather(number, parents, batch_dims=1) * vocab + tokens
        return tf.gather(table, number), number

    return step, tf.nn.log_softmax(table).numpy()


def log_prob(log_probs, ids, begin=0, vocab=5):
    """Of an output, by hand: the sum over its tokens, after a state of `begin`."""
    number, total = begin * vocab + START, 0.0
    for token in ids:
        total += log_probs[number, token]
        number = number * vocab + token
    return total


def brute_force(log_probs, norm, longest=4, vocab=5):
    """Every output that ends within `longest` tokens, the best first: (score, log-probability, ids)."""
    outputs = []
    for length in range(1, longest + 1):
        for body in itertools.product((UNK, A), repeat=length - 1):
            ids = (*body, END)
            outputs.append((log_prob(log_probs, ids) / float(norm(length)), log_prob(log_probs, ids), ids))
    return sorted(outputs, reverse=True)


def ids_of(hypotheses, row=0):
    return [[int(token) for token in ids if token != PAD] for ids in hypotheses.ids[row].numpy()]


def limit(*lengths, **options):
    return Limits(tf.constant(lengths, tf.int32), **options)


# Greedy search


def test_greedy_ends_with_the_end_token_and_sums_the_log_probabilities():
    """First 5 with 0.6, then the end with 0.9: ln 0.6 + ln 0.9."""

    def step(tokens, parents, state):
        first = tf.math.log([1e-9, 1e-9, 1e-9, 0.4, 1e-9, 0.6])
        then = tf.math.log([1e-9, 1e-9, 1e-9, 0.9, 1e-9, 0.1])
        return tf.where(tokens[..., None] == START, first, then), state

    hypotheses = greedy(step, (), limit(10))
    assert hypotheses.ids.numpy().tolist() == [[[5, END]]]
    np.testing.assert_allclose(hypotheses.log_probs, [[np.log(0.6) + np.log(0.9)]], rtol=1e-5)


def test_a_model_that_never_ends_stops_at_each_rows_own_maximum():
    """B8, https://github.com/CyberZHG/keras-transformer/issues/3: an undertrained model ran on for ever."""
    for search in (greedy, lambda *arguments: beam_search(*arguments, 2)):
        hypotheses = search(constant({A: 1.0}), (), limit(3, 1, 0))
        assert hypotheses.ids[:, 0].numpy().tolist() == [[A, A, A], [A, PAD, PAD], [PAD, PAD, PAD]]
        np.testing.assert_allclose(hypotheses.log_probs, np.zeros((3, 1)), atol=1e-6)


def test_padding_and_start_are_never_chosen_and_leave_the_rest_as_it_was():
    """They are the most probable here; the third, with 0.1, is taken, and counts as ln 0.1.

    B12, https://github.com/joeynmt/joeynmt/issues/95: padding was printed; an output of the end token alone divided by
    zero.
    """
    step = constant({PAD: 0.5, START: 0.4, END: 0.1})
    for hypotheses in (greedy(step, (), limit(5)), beam_search(step, (), limit(5), 3, norm=length_norm("average", 1))):
        assert ids_of(hypotheses) == [[END]]
        np.testing.assert_allclose(hypotheses.log_probs, [[np.log(0.1)]], rtol=1e-5)


def test_a_finished_row_is_all_padding_and_the_loop_ends_with_the_last_row():
    """Rows of 2, 4 and 4 tokens: nothing is decoded after the fourth, and the first row leaves after the second.

    B7, https://github.com/tensorflow/tensorflow/issues/21920: junk after the end, and a loop that runs to the limit.
    """
    widths = []

    def step(tokens, parents, state):
        count, ends_at = state
        widths.append(int(tf.shape(tokens)[0]))
        ends = ends_at == count + 1
        return tf.one_hot(tf.where(ends, END, A), 6, on_value=0.0, off_value=-1e4), (count + 1, ends_at)

    state = (tf.zeros((3, 1), tf.int32), tf.constant([[2], [4], [4]]))
    hypotheses = greedy(step, state, limit(50, 50, 50))
    assert hypotheses.ids[:, 0].numpy().tolist() == [[A, END, PAD, PAD], [A, A, A, END], [A, A, A, END]]
    assert widths == [3, 3, 2, 2]


def test_an_empty_batch_gives_nothing():
    limits = Limits(tf.zeros([0], tf.int32))
    step = constant({END: 1.0})
    nothing = (
        greedy(step, (), limits),
        beam_search(step, (), limits, 2, 2),
        sample(step, (), limits, tf.zeros((0, 2), tf.int32)),
    )
    for hypotheses in nothing:
        assert hypotheses.ids.shape[0] == 0 and hypotheses.log_probs.shape[0] == 0


@pytest.mark.parametrize("jit_compile", [False, True])
@pytest.mark.parametrize(
    "limits",
    [limit(4), limit(2), limit(0), limit(4, min_lengths=tf.constant([3])), limit(4, forbidden=[A])]
    + [limit(4, min_lengths=tf.constant([3]), forbidden=[UNK, A])],
    ids=["long", "short", "none", "minimum", "forbidden", "nothing allowed"],
)
def test_greedy_of_one_row_in_tensors_that_keep_their_shapes(rng, jit_compile, limits):
    """Against `greedy`, for twenty models."""
    for _ in range(20):
        step, _ = random_step(rng)
        state = tf.constant([[0]])
        expected = greedy(step, state, limits)

        def alone(step=step, state=state):
            return greedy_alone(lambda tokens, parents, state, place: step(tokens, parents, state), state, limits, 6)

        ids, log_probs = tf.function(alone, jit_compile=jit_compile)()
        assert ids.shape == (1, 1, 6)
        np.testing.assert_array_equal(ids[:, :, : expected.ids.shape[2]], expected.ids)
        np.testing.assert_array_equal(ids[:, :, expected.ids.shape[2] :], PAD)
        np.testing.assert_allclose(log_probs, expected.log_probs, atol=1e-5)


# Beam search


@pytest.mark.parametrize("kind", ["gnmt", "average"])
@pytest.mark.parametrize("alpha", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("n_best", [1, 3, 15])
def test_a_beam_of_full_width_is_an_exact_search(rng, kind, alpha, n_best):
    """Vocabulary 5, at most 4 tokens: all 15 outputs in brute force's order; the beam is wider than the vocabulary.

    B9, https://github.com/facebookresearch/fairseq/pull/8: top-k failed on a beam wider than the vocabulary.
    """
    for _ in range(5):
        step, log_probs = random_step(rng)
        norm = length_norm(kind, alpha)
        hypotheses = beam_search(step, tf.zeros((1, 27), tf.int32), limit(4), 27, n_best, norm)
        expected = brute_force(log_probs, norm)[:n_best]
        assert ids_of(hypotheses) == [list(ids) for _, _, ids in expected]
        np.testing.assert_allclose(hypotheses.log_probs[0], [total for _, total, _ in expected], atol=1e-4)
        lengths = [len(ids) for ids in ids_of(hypotheses)]
        np.testing.assert_allclose(
            hypotheses.log_probs[0] / norm(lengths), [score for score, _, _ in expected], atol=1e-4
        )


def test_the_length_penalty_changes_the_ranking():
    """a with 0.9, end with 0.1, beam 2, at most 10: by hand, alpha 0 gives the empty output, alpha 1 nine a's.

    B1, https://github.com/OpenNMT/OpenNMT-tf/pull/457: all hypotheses were divided by the same number of steps.
    """
    step = constant({A: 0.9, END: 0.1})
    shortest = beam_search(step, (), limit(10), 2, norm=length_norm("gnmt", 0.0))
    assert ids_of(shortest) == [[END]]
    np.testing.assert_allclose(shortest.log_probs, [[-2.3026]], atol=1e-4)
    norm = length_norm("gnmt", 1.0)
    longest = beam_search(step, (), limit(10), 2, norm=norm)
    assert ids_of(longest) == [[A] * 9 + [END]]
    np.testing.assert_allclose(longest.log_probs / norm(10), [[-1.3003]], atol=1e-4)


def test_the_two_norms_by_hand():
    """((5 + 7) / 6)^1 = 2 and 4^0.5 = 2."""
    assert float(length_norm("gnmt", 1.0)(7)) == 2 and float(length_norm("average", 0.5)(4)) == 2
    assert float(length_norm("gnmt", 0.0)(7)) == float(length_norm("average", 0.0)(7)) == 1
    with pytest.raises(ValueError, match="gnmt or average, got 'wu'"):
        length_norm("wu", 1.0)
    with pytest.raises(ValueError, match="at least 0, got -1"):
        length_norm("gnmt", -1)


def test_a_beam_of_one_is_greedy_search(rng):
    """B10, https://github.com/facebookresearch/fairseq/pull/54: the end token was taken from outside the beam."""
    for alpha in (0.0, 1.0):
        for _ in range(50):
            step, _ = random_step(rng)
            one = beam_search(step, tf.zeros((1, 1), tf.int32), limit(4), 1, norm=length_norm("average", alpha))
            other = greedy(step, tf.zeros((1, 1), tf.int32), limit(4))
            assert ids_of(one) == ids_of(other)
            np.testing.assert_allclose(one.log_probs, other.log_probs, atol=1e-6)


@pytest.mark.parametrize("beam_size", [2, 3])
def test_a_hypothesis_that_ends_makes_room_for_another(rng, beam_size):
    """The same search in plain Python: of the first `beam_size` those that end are finished."""
    for _ in range(20):
        step, log_probs = random_step(rng, vocab=6, longest=5)
        running, finished = [(0.0, ())], []
        for _ in range(5):
            candidates = sorted(
                (
                    (log_prob(log_probs, (*ids, token), vocab=6), (*ids, token))
                    for _, ids in running
                    for token in (UNK, END, A, 5)
                ),
                reverse=True,
            )
            finished += [(total, ids) for total, ids in candidates[:beam_size] if ids[-1] == END]
            running = [(total, ids) for total, ids in candidates if ids[-1] != END][:beam_size]
        found = beam_search(step, tf.zeros((1, beam_size), tf.int32), limit(5), beam_size, beam_size)
        expected = sorted(finished, reverse=True)[:beam_size]
        assert [tuple(ids) for ids in ids_of(found)][: len(expected)] == [ids for _, ids in expected]
        np.testing.assert_allclose(found.log_probs[0, : len(expected)], [total for total, _ in expected], atol=1e-5)


@pytest.mark.parametrize("beam_size", [2, 3])
def test_each_log_probability_is_that_of_its_own_tokens(rng, beam_size):
    """B6, https://github.com/tensorflow/tensorflow/issues/13536: lengths were kept by slot, although hypotheses change
    slots. 20 rows of one batch, each with logits of its own (it begins from another state), of four lengths."""
    step, log_probs = random_step(rng, longest=6)
    states = tf.repeat(tf.range(20)[:, None], beam_size, 1)
    hypotheses = beam_search(step, states, limit(*[4, 3, 2, 1] * 5), beam_size, beam_size)
    for row in range(20):
        found = list(zip(ids_of(hypotheses, row), hypotheses.log_probs[row].numpy(), strict=True))
        assert any(np.isfinite(total) for _, total in found)
        for ids, total in found:
            if np.isfinite(total):
                np.testing.assert_allclose(total, log_prob(log_probs, ids, row), atol=1e-4)


def test_hypotheses_that_ended_come_before_those_at_the_limit():
    """0.9 against 0.1 and at most one token: the end, then the a that has no end; a third output does not exist."""
    hypotheses = beam_search(constant({A: 0.9, END: 0.1}, 5), (), limit(1), 3, 3)
    assert ids_of(hypotheses) == [[END], [A], [UNK]]
    np.testing.assert_allclose(hypotheses.log_probs[0, :2], np.log([0.1, 0.9]), rtol=1e-4)
    four = beam_search(constant({A: 0.9, END: 0.1}, 5), (), limit(1), 4, 4)
    assert np.isneginf(four.log_probs[0, 3]) and ids_of(four)[3] == []


def test_a_row_that_may_have_no_token_stays_empty_among_others():
    """One of six: it is not dropped before the first step, and no token comes into it."""
    for n_best in (1, 2):
        limits = limit(3, 3, 3, 3, 3, 0)
        hypotheses = beam_search(constant({A: 0.9, END: 0.1}), (), limits, 2, n_best)
        assert ids_of(hypotheses, 5) == [[]] * n_best and hypotheses.log_probs[5].numpy().tolist() == [0.0] * n_best
        assert ids_of(hypotheses, 0)[0] == [END]
    assert ids_of(greedy(constant({A: 0.9, END: 0.1}), (), limits), 5) == [[]]


def test_a_row_at_its_limit_takes_no_more_tokens_while_others_go_on():
    """One of six, with room for one token: the a without an end is not given one at the next length."""
    hypotheses = beam_search(constant({A: 0.9, END: 0.1}), (), limit(1, 6, 6, 6, 6, 6), 2, 2)
    assert ids_of(hypotheses) == [[END], [A]]
    np.testing.assert_allclose(hypotheses.log_probs[0], np.log([0.1, 0.9]), rtol=1e-4)


def test_patience(rng):
    """With 1, beam 2 is done when two have ended: the end, then a and the end, though longer ones score higher. However
    little patience, the n best are found."""
    step = constant({A: 0.9, END: 0.1})
    norm = length_norm("gnmt", 1.0)
    assert ids_of(beam_search(step, (), limit(10), 2, norm=norm, patience=1.0)) == [[A, END]]
    several = beam_search(constant({A: 0.2, 5: 0.2, END: 0.6}), (), limit(10), 4, 4, norm, 0.25)
    assert np.isfinite(several.log_probs).all() and len(set(map(tuple, ids_of(several)))) == 4


def test_a_row_in_which_nothing_is_allowed_any_more_ends():
    """Unknown is forbidden, the end too early, 4 and 5 used up: two tokens, and no barred one after them."""
    limits = limit(9, min_lengths=tf.constant([6]), forbidden=(UNK,), no_repeat_ngram=1)
    hypotheses = greedy(constant({A: 0.6, 5: 0.4}), (), limits)
    assert ids_of(hypotheses) == [[A, 5]]
    np.testing.assert_allclose(hypotheses.log_probs, [[np.log(0.6 * 0.4)]], rtol=1e-4)


def test_no_more_hypotheses_than_the_beam_has():
    with pytest.raises(ValueError, match="from 1 to beam_size, got n_best=3 and beam_size=2"):
        beam_search(constant({A: 1.0}), (), limit(5), 2, 3)


# Limits


def all_methods(step, state, limits):
    """The best output of each row by every method; `state` takes the beam's size."""
    seeds = tf.stack([tf.range(tf.size(limits.max_lengths)), tf.range(tf.size(limits.max_lengths))], 1)
    return (
        greedy(step, state(1), limits),
        beam_search(step, state(3), limits, 3, norm=length_norm("average", 1.0)),
        sample(step, state(1), limits, seeds),
    )


def test_minimum_length():
    """The end has 0.99, but two rows need 3 and 1 tokens: the end is the third, and the first."""
    limits = limit(5, 5, min_lengths=tf.constant([3, 1]))
    for hypotheses in all_methods(constant({A: 0.01, END: 0.99}, 5), lambda beam: (), limits)[:2]:
        assert ids_of(hypotheses, 0) == [[A, A, END]] and ids_of(hypotheses, 1) == [[END]]
        np.testing.assert_allclose(hypotheses.log_probs[0], [np.log(0.01 * 0.01 * 0.99)], rtol=1e-4)


def test_a_forced_prefix_is_in_the_output_and_in_its_log_probability(rng):
    """Rows with a prefix of two tokens, of one and of none: what follows is what brute force finds after it."""
    step, log_probs = random_step(rng)
    prefix = tf.constant([[UNK, A], [A, PAD], [PAD, PAD]])
    limits = limit(4, 4, 4, prefix=prefix)
    everything = beam_search(step, tf.zeros((3, 27), tf.int32), limits, 27, 1)
    for row, begin in enumerate(([UNK, A], [A], [])):
        best = next(found for found in brute_force(log_probs, lambda n: 1.0) if list(found[2][: len(begin)]) == begin)
        assert ids_of(everything, row) == [list(best[2])]
        np.testing.assert_allclose(everything.log_probs[row], [best[1]], atol=1e-4)
        for hypotheses in all_methods(step, lambda beam: tf.zeros((3, beam), tf.int32), limits):
            [ids] = ids_of(hypotheses, row)
            assert ids[: len(begin)] == begin
            np.testing.assert_allclose(hypotheses.log_probs[row], [log_prob(log_probs, ids)], atol=1e-4)


def test_forbidden_pieces_are_not_emitted_and_keep_their_probability():
    for hypotheses in all_methods(constant({A: 0.9, 5: 0.1}), lambda beam: (), limit(2, forbidden=(A, UNK, END))):
        assert ids_of(hypotheses) == [[5, 5]]
        np.testing.assert_allclose(hypotheses.log_probs, [[2 * np.log(0.1)]], rtol=1e-4)


def test_no_ngram_twice():
    """4 before 5 before 6 before 7: the most probable that makes a new bigram, by hand; and a new token."""
    step = constant({4: 0.5, 5: 0.3, 6: 0.15, 7: 0.05}, 8)
    for hypotheses in all_methods(step, lambda beam: (), limit(8, no_repeat_ngram=2)):
        [ids] = ids_of(hypotheses)
        bigrams = list(itertools.pairwise(ids))
        assert len(set(bigrams)) == len(bigrams) == 7
    assert ids_of(greedy(step, (), limit(8, no_repeat_ngram=2))) == [[4, 4, 5, 4, 6, 4, 7, 4]]
    assert ids_of(greedy(step, (), limit(4, no_repeat_ngram=1))) == [[4, 5, 6, 7]]


def test_repeating_by_hand():
    """After 4 5 4 5 4, a bigram may not go on with 5, nor a trigram."""
    ids = tf.constant([[[4, 5, 4, 5, 4]]])
    assert set(repeating(ids, 2).numpy().ravel()) == {5, PAD}
    assert set(repeating(ids, 3).numpy().ravel()) == {5, PAD}
    assert set(repeating(ids, 1).numpy().ravel()) == {4, 5}
    assert repeating(ids, 6).numpy().size == 0


# Sampling


def test_samples_come_with_the_models_probabilities():
    """2,000 rows of 0.5, 0.3 and 0.2: each share within four standard deviations."""
    step = constant({A: 0.5, 5: 0.3, END: 0.2})
    seeds = tf.stack([tf.fill([2000], 7), tf.range(2000)], 1)
    limits = Limits(tf.fill([2000], 1))
    draw = tf.function(lambda **options: sample(step, (), limits, seeds, **options))
    hypotheses = draw()
    tokens = hypotheses.ids.numpy().ravel()
    for token, share in ((A, 0.5), (5, 0.3), (END, 0.2)):
        assert abs((tokens == token).mean() - share) < 4 * np.sqrt(share * (1 - share) / 2000)
        np.testing.assert_allclose(hypotheses.log_probs.numpy().ravel()[tokens == token], np.log(share), rtol=1e-4)
    assert set(draw(top_k=2).ids.numpy().ravel()) == {A, 5}
    assert set(draw(top_p=0.6).ids.numpy().ravel()) == {A, 5}
    assert set(draw(top_p=0.5).ids.numpy().ravel()) == {A}
    cold = draw(temperature=0.5).ids.numpy().ravel()
    assert abs((cold == A).mean() - 0.25 / 0.38) < 4 * np.sqrt(0.25 / 2000)  # squares: 0.25, 0.09, 0.04


def test_a_row_draws_by_its_seeds_alone(rng):
    """The same seeds, in another order and beside rows of other lengths: the same outputs."""
    step, _ = random_step(rng)
    seeds, lengths = tf.constant([[1, 5], [1, 6], [1, 7], [2, 5]]), [4, 2, 3, 4]
    together = sample(step, tf.zeros((4, 1), tf.int32), limit(*lengths), seeds)
    backwards = sample(step, tf.zeros((4, 1), tf.int32), limit(*lengths[::-1]), seeds[::-1])
    for row, length in enumerate(lengths):
        alone = sample(step, tf.zeros((1, 1), tf.int32), limit(length), seeds[row : row + 1])
        assert ids_of(alone) == ids_of(together, row) == ids_of(backwards, 3 - row)
    outputs = {
        tuple(ids_of(sample(step, tf.zeros((1, 1), tf.int32), limit(4), tf.constant([[1, i]])))[0]) for i in range(20)
    }
    assert len(outputs) > 1


# In a graph


def test_a_graph_gives_what_eager_calls_give(rng):
    """One graph of unknown shapes for batches of every size and length."""
    step, _ = random_step(rng)

    @tf.function(input_signature=[tf.TensorSpec((None,), tf.int32)])
    def decode(max_lengths):
        batch = tf.size(max_lengths)
        limits = Limits(max_lengths)
        return (
            greedy(step, tf.zeros((batch, 1), tf.int32), limits),
            beam_search(step, tf.zeros((batch, 3), tf.int32), limits, 3, 2),
        )

    for lengths in ((4,), (1, 4, 2), (0, 0), (3, 4)):
        one, several = decode(tf.constant(lengths))
        state = tf.zeros((len(lengths), 1), tf.int32)
        assert one.ids.numpy().tolist() == greedy(step, state, limit(*lengths)).ids.numpy().tolist()
        eager = beam_search(step, tf.zeros((len(lengths), 3), tf.int32), limit(*lengths), 3, 2)
        assert several.ids.numpy().tolist() == eager.ids.numpy().tolist()
        np.testing.assert_allclose(several.log_probs, eager.log_probs, atol=1e-6)


@pytest.mark.parametrize("vocab", [5, 32, 100, 1024])
def test_best_tokens_is_top_k(rng, vocab):
    """Against TensorFlow's own, more than there are asked for included, in vocabularies that chunks divide or not."""
    logits = tf.constant(rng.normal(size=(7, vocab)).astype(np.float32))
    for count in (1, 3, 40, 2000):
        values, ids = best_tokens(logits, count)
        expected = tf.math.top_k(logits, min(count, vocab))
        np.testing.assert_array_equal(values, expected.values)
        np.testing.assert_array_equal(ids, expected.indices)
