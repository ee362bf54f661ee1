"""A model and its tokenizers as graph functions, from strings to strings."""

import keras
import tensorflow as tf

from keras_transformer.config import DecodingSettings
from keras_transformer.data.tokenizer import Tokenizers
from keras_transformer.decoding import Hypotheses, Limits, beam_search, greedy, greedy_alone, length_norm, sample
from keras_transformer.errors import DataError, UsageError
from keras_transformer.ids import PAD, START
from keras_transformer.masks import create_masks, create_padding_mask
from keras_transformer.model import Transformer

RESULTS = ("text", "log_prob", "score")  # of a served text
SHORTEST = 16  # pieces: a source that goes alone is compiled at this length, at twice this, and so on
BLANK = r"[\s\p{Z}\x{85}\x{1c}-\x{1f}]*"  # what Python's str.isspace calls blank


class TranslatorModule(tf.Module):
    """A model and its tokenizers as graph functions, which `tf.saved_model.save` takes along.

    Attributes:
        encode, encode_target: texts (batch,) to source or target ids (batch, None), the end id last, cut to the
            position table, and their numbers before the cut.
        decode: source ids (batch, inp_len), 0 = padding; ids that each output must begin with (batch, None), 0 after
            them; numbers of the rows, by which sampling draws (batch,). To {"text", strings; "ids"; "log_prob", the sum
            over the tokens, the end token included; "score", that divided by the length norm}, each (batch, n_best),
            the best first. A blank source gives "" and 0.
        score: source ids and target ids to the log-probability of each target id (batch, tar_len), 0 for padding.
        attention: the same to the attention to the source, (batch, num_layers, num_heads, tar_len, inp_len).
        pieces: to the target's subword pieces, strings (target_vocab_size,).
        serve: encode and decode: `text`, strings (batch,), to the best {"text", "log_prob", "score"}, (batch,) each.
        serve_n_best: the same to the n best, (batch, n) each: `n_best` of the settings, or all that a beam has.
        serve_options: as `serve`, with a length_penalty, max_length and min_length; by default the settings'.
        serve_alone: as `serve`, of one text, (1,), by a CompiledSearch; only if `compiled`.
        update: no graph function; takes over the weights that the model has now, of which some lie here in another
            layout or precision.
    """

    def __init__(self, model: Transformer, tokenizers: Tokenizers, decoding: DecodingSettings, compiled: bool = False):
        super().__init__()
        sizes = len(tokenizers.source.pieces), len(tokenizers.target.pieces)
        if sizes != (model.input_vocab_size, model.target_vocab_size):
            raise DataError(
                f"the tokenizers have {sizes[0]} and {sizes[1]} pieces, "
                f"the model {model.input_vocab_size} and {model.target_vocab_size}"
            )
        if decoding.precision == "int8":
            raise UsageError("decoding.precision int8: `export --format ctranslate2` makes such weights of a run")
        if compiled and (decoding.method != "beam" or decoding.beam_size > 1 or decoding.no_repeat_ngram):
            raise UsageError(
                "a compiled search is greedy: method beam, beam_size 1, no_repeat_ngram 0; "
                f"got {decoding.method}, {decoding.beam_size}, {decoding.no_repeat_ngram}"
            )
        forbidden = forbidden_ids(decoding, tokenizers)
        original, model = model, model if decoding.precision == "float32" else cast_model(model, decoding.precision)
        step_weights = tf.nest.map_structure(tf.Variable, model.step_weights())
        if compiled:
            self.compiled_search = CompiledSearch(model, decoding, forbidden, step_weights)

        def encode(text):
            text = tf.where(tf.strings.regex_full_match(text, BLANK), "", text)
            return cut(tokenizers.source.encode(text), model.pe_input)

        def encode_target(text):
            return cut(tokenizers.target.encode(text), model.pe_target)

        def find(inp, prefix, rows, most, fewest, length_penalty, n_best=decoding.n_best):
            forced = None if prefix.shape[1] == 0 else prefix
            limits = Limits(most, fewest, forced, forbidden, decoding.no_repeat_ngram)
            norm = length_norm(decoding.length_norm, length_penalty)
            step, state = begin_decoding(model, inp, decoding.hypotheses, step_weights)
            if decoding.method == "sample":
                seeds = tf.stack([tf.fill(tf.shape(rows), decoding.seed), rows], 1)
                found = sample(step, state, limits, seeds, decoding.temperature, decoding.top_k, decoding.top_p)
            elif decoding.beam_size == 1:
                found = greedy(step, state, limits)
            else:
                found = beam_search(step, state, limits, decoding.beam_size, n_best, norm, decoding.patience)
            return describe(found, norm)

        def describe(found, norm):
            ids, log_prob = found
            batch, n, longest = tf.unstack(tf.shape(ids))
            text = tf.reshape(tokenizers.target.decode(tf.reshape(ids, (batch * n, longest))), (batch, n))
            count = tf.maximum(tf.math.count_nonzero(ids, -1), 1)
            return {"text": text, "ids": ids, "log_prob": log_prob, "score": log_prob / norm(count)}

        def decode(inp, prefix, rows):
            limits = length_limits(inp, decoding, model.pe_target)
            return self.search(inp, prefix, rows, *limits, decoding.length_penalty)

        def teacher_force(inp, tar):
            tar_inp = tf.concat([tf.fill([tf.shape(tar)[0], 1], START), tar[:, :-1]], 1)
            return model(inp, tar_inp, False, *create_masks(inp, tar_inp))

        def score(inp, tar):
            logits, _ = teacher_force(inp, tar)
            log_probs = -tf.nn.sparse_softmax_cross_entropy_with_logits(tar, logits)
            return tf.where(tar == PAD, 0.0, log_probs)

        def attention(inp, tar):
            _, weights = teacher_force(inp, tar)
            layers = [weights[f"decoder_layer{i + 1}_block2"] for i in range(model.num_layers)]
            return tf.cast(tf.stack(layers, 1), tf.float32)

        def pieces():
            return tf.constant(tokenizers.target.pieces)

        def unforced(inp):
            """Prefixes that force nothing, and numbers of the rows."""
            batch = inp.shape[0] or tf.shape(inp)[0]
            return tf.zeros([batch, 0], tf.int32), tf.range(batch)

        def best(found):
            return {name: found[name][:, 0] for name in RESULTS}

        def serve(text):
            inp = self.encode(text)[0].to_tensor()

            def one():
                # Not ensure_shape, from which TensorFlow's optimizer infers that it is so in the other branch as well.
                alone = tf.reshape(inp, (1, -1))
                most, fewest = length_limits(alone, decoding, model.pe_target)
                fewest = fewest if has_minimum(decoding) else None
                return best(find(alone, *unforced(alone), most, fewest, decoding.length_penalty))

            return tf.cond(tf.shape(inp)[0] == 1, one, lambda: best(self.decode(inp, *unforced(inp))))

        def serve_alone(text):
            # Of any number, and checked here: a loaded signature takes two for (1,), and makes one text of them.
            count = tf.size(text)
            with tf.control_dependencies([tf.debugging.Assert(count == 1, ["alone takes one text, got", count])]):
                inp = self.encode(tf.identity(text))[0].to_tensor()
            found = self.compiled_search(tf.reshape(inp, (1, -1)))
            return best(describe(found, length_norm(decoding.length_norm, decoding.length_penalty)))

        def serve_n_best(text):
            inp = self.encode(text)[0].to_tensor()
            if decoding.n_best > 1 or decoding.hypotheses == 1:
                found = self.decode(inp, *unforced(inp))
            else:
                limits = length_limits(inp, decoding, model.pe_target)
                found = find(inp, *unforced(inp), *limits, decoding.length_penalty, decoding.beam_size)
            return {name: found[name] for name in RESULTS}

        # The defaults of a SavedModel's signature must be tensors.
        own_penalty, own_minimum = tf.constant(decoding.length_penalty), tf.constant(decoding.min_length)
        own_maximum = tf.constant(decoding.max_length or model.pe_target)

        def serve_options(text, length_penalty=own_penalty, max_length=own_maximum, min_length=own_minimum):
            alpha = the_one(length_penalty, "length_penalty")
            longest, shortest = the_one(max_length, "max_length", 1), the_one(min_length, "min_length")
            told = ["min_length must be at most max_length", shortest, longest]
            with tf.control_dependencies([tf.debugging.Assert(shortest <= longest, told)]):
                longest = tf.identity(longest)
            inp = self.encode(text)[0].to_tensor()
            limits = length_limits(inp, decoding, model.pe_target, longest, shortest)
            return best(self.search(inp, *unforced(inp), *limits, alpha))

        def update():
            if model is not original:
                copy_variables(original, model)
            tf.nest.map_structure(lambda old, new: old.assign(new), step_weights, model.step_weights())
            if compiled:
                self.compiled_search.update()

        self.tokenizers = list(tokenizers)
        # SavedModel does not look into Keras's lists.
        self.weights = [variable.value for variable in model.variables] + tf.nest.flatten(step_weights)
        strings, rows = tf.TensorSpec((None,), tf.string, "text"), tf.TensorSpec((None,), tf.int32, "rows")
        inp, tar, prefix = (tf.TensorSpec((None, None), tf.int32, name) for name in ("inp", "tar", "prefix"))
        self.encode = graph(encode, strings)
        self.encode_target = graph(encode_target, strings)
        most, fewest = (tf.TensorSpec((None,), tf.int32, name) for name in ("most", "fewest"))
        self.search = graph(find, inp, prefix, rows, most, fewest, tf.TensorSpec((), tf.float32, "length_penalty"))
        self.decode = graph(decode, inp, prefix, rows)
        self.score = graph(score, inp, tar)
        self.attention = graph(attention, inp, tar)
        self.pieces = graph(pieces)
        self.serve = graph(serve, strings)
        self.serve_n_best = graph(serve_n_best, strings)
        if compiled:
            self.serve_alone = graph(serve_alone, strings)
        # Of any rank: TensorFlow Serving's row format has a value for each text, its column format one for all.
        options = tf.TensorSpec(None, tf.float32), tf.TensorSpec(None, tf.int32), tf.TensorSpec(None, tf.int32)
        self.serve_options = graph(serve_options, strings, *options)
        self.update = update


def forbidden_ids(decoding: DecodingSettings, tokenizers: Tokenizers) -> list[int]:
    """The target's ids of the pieces that are never emitted.

    Raises:
        UsageError: it has no such piece.
    """
    id_of = {piece: number for number, piece in enumerate(tokenizers.target.pieces)}
    unknown = [piece for piece in decoding.forbidden if piece not in id_of]
    if unknown:
        raise UsageError(f"decoding.forbidden: the target vocabulary has no piece {unknown[0]!r}")
    return [id_of[piece] for piece in decoding.forbidden]


def begin_decoding(model: Transformer, inp: tf.Tensor, beam_size: int, step_weights, room=None):
    """The step function and its first state, as `decoding` takes them, for source ids (batch, inp_len).

    Args:
        step_weights: variables or tensors as `Transformer.step_weights` gives them.
        room: of `Transformer.init_state`.
    """
    padding_mask = create_padding_mask(inp)
    state = model.init_state(model.encode(inp, False, padding_mask), padding_mask, beam_size, room)
    weights = tf.nest.map_structure(tf.convert_to_tensor, step_weights)  # read once, not at each token

    def step(tokens, parents, state, place=None):
        return model.step(tokens, parents, state, weights, place)

    return step, state


class CompiledSearch(tf.Module):
    """Greedy search of one source, which XLA compiles for each length that sources are padded to.

    Args:
        forbidden: target ids that are never emitted.
        step_weights: of `begin_decoding`.

    Attributes:
        lengths: what sources are padded to, in pieces: powers of two, and the longest that the model takes.
        update: takes over the model's weights; step_weights are the caller's.
    """

    def __init__(self, model: Transformer, decoding: DecodingSettings, forbidden: list[int], step_weights):
        super().__init__()
        vectors = [variable for variable in model.variables if len(variable.shape) == 1 and "float" in variable.dtype]
        # Each variable costs time at each call, and most are vectors: they lie here as one, but for dropout's seeds.
        self.packed = tf.Variable(concatenated(vectors))
        self.lengths = compiled_lengths(model.pe_input)

        def find(inp):
            most, fewest = length_limits(inp, decoding, model.pe_target)
            limits = Limits(most, fewest if has_minimum(decoding) else None, None, forbidden)
            # Of the shape alone: of what is in a shape in any other way, XLA makes a constant, and compiles for each.
            room, _ = length_bounds(tf.shape(inp)[1], decoding, model.pe_target)
            parts = tf.split(self.packed, [vector.shape[0] for vector in vectors])
            with keras.StatelessScope(list(zip(vectors, parts, strict=True))):
                step, state = begin_decoding(model, inp, 1, step_weights, room)
                return greedy_alone(step, state, limits, room)

        signature = [tf.TensorSpec((1, None), tf.int32, "inp")]
        self.find = tf.function(find, signature, autograph=False, jit_compile=True)
        self.update = lambda: self.packed.assign(concatenated(vectors))

    def __call__(self, inp: tf.Tensor) -> Hypotheses:
        """Source ids (1, inp_len) to one hypothesis."""
        length, lengths = tf.shape(inp)[1], tf.constant(self.lengths)
        padding = tf.reduce_min(tf.where(lengths < length, lengths[-1], lengths)) - length
        return self.find(tf.pad(inp, [[0, 0], [0, padding]]))


def compiled_lengths(longest: int) -> list[int]:
    """Powers of two from SHORTEST on, while they are less than the longest, and that."""
    lengths = [SHORTEST]
    while lengths[-1] < longest:
        lengths.append(2 * lengths[-1])
    return [*lengths[:-1], longest]


def concatenated(vectors) -> tf.Tensor:
    return tf.concat([vector.value for vector in vectors], 0)


def has_minimum(decoding: DecodingSettings) -> bool:
    return decoding.min_length > 0 or decoding.min_length_factor > 0


def the_one(value: tf.Tensor, name: str, least: int = 0) -> tf.Tensor:
    """The number that an option is, `least` or more, given once or once for each text, and then the same."""
    value = tf.reshape(value, [-1])
    same = tf.debugging.Assert(tf.reduce_all(value == value[0]), [f"{name} must be the same for all texts", value])
    valid = tf.debugging.Assert(value[0] >= least, [f"{name} must be at least {least}", value])
    with tf.control_dependencies([same, valid]):
        return tf.identity(value[0])


def graph(function, *signature):
    return tf.function(function, input_signature=signature, autograph=False)


def cut(ids: tf.RaggedTensor, table: int) -> tuple[tf.RaggedTensor, tf.Tensor]:
    """Rows of ids of at most `table`, the end id kept, and their numbers before."""
    return tf.concat([ids[:, :-1][:, : table - 1], ids[:, -1:]], axis=1), ids.row_lengths()


def cast_model(model: Transformer, dtype: str) -> Transformer:
    """The same model with its weights in another precision."""
    other = Transformer.from_config({**model.get_config(), "dtype": dtype})
    other.build((None, None), (None, None))
    copy_variables(model, other)
    return other


def copy_variables(model: Transformer, other: Transformer) -> None:
    for variable, copy in zip(model.variables, other.variables, strict=True):
        copy.assign(variable)


def length_limits(inp: tf.Tensor, decoding: DecodingSettings, table: int, longest=None, shortest=None):
    """The most and the fewest tokens of each output, (batch,) each, from the sources' lengths.

    Args:
        inp: source ids (batch, inp_len).
        table: the most that there can be.
        longest, shortest: what stands for the settings' max_length and min_length; None for these themselves.
    """
    lengths = tf.math.count_nonzero(inp, axis=1, dtype=tf.int32)
    most, fewest = length_bounds(lengths, decoding, table, longest, shortest)
    # A source of the end token alone is a blank line.
    return tf.where(lengths > 1, most, 0), fewest


def length_bounds(lengths: tf.Tensor, decoding: DecodingSettings, table: int, longest=None, shortest=None):
    """As `length_limits`, from the sources' numbers of tokens, of any shape; a blank one is as any other."""
    source = tf.cast(lengths, tf.float32)
    longest = decoding.max_length if longest is None else longest
    shortest = decoding.min_length if shortest is None else shortest
    limit = tf.cast(table if longest is None else tf.minimum(table, longest), tf.float32)
    most = tf.clip_by_value(source * decoding.max_length_factor + decoding.max_length_extra, 1.0, limit)
    fewest = tf.clip_by_value(tf.math.ceil(source * decoding.min_length_factor), tf.cast(shortest, tf.float32), limit)
    return tf.cast(most, tf.int32), tf.cast(tf.minimum(fewest, most), tf.int32)
