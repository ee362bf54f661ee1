"""Text in, text out: tokenise, decode, detokenise, inside the graph."""

import itertools
import logging
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import keras
import numpy as np
import tensorflow as tf

from keras_transformer.config import DecodingSettings, Settings, run_settings, settings_yaml
from keras_transformer.data.tokenizer import Tokenizers, load_tokenizers
from keras_transformer.decoding import Limits, beam_search, greedy, length_norm, sample
from keras_transformer.errors import DataError, UsageError, first_line
from keras_transformer.files import whole
from keras_transformer.ids import END, PAD, START
from keras_transformer.masks import create_masks, create_padding_mask
from keras_transformer.model import Transformer
from keras_transformer.precision import cores
from keras_transformer.quiet import quiet_stderr

POSITIONS = 4096  # source positions, times the beam's size, that are worked on together
ROWS = 256  # hypotheses that are decoded together
WINDOW = 4096  # texts that are sorted by length together, after the first, for which nobody is to wait so long
FIRST_WINDOW = 128
RESULTS = ("text", "log_prob", "score")  # of a served text
BLANK = r"[\s\p{Z}\x{85}\x{1c}-\x{1f}]*"  # what Python's str.isspace calls blank
log = logging.getLogger(__name__)


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
        update: no graph function; takes over the weights that the model has now, of which some lie here in another
            layout or precision.
    """

    def __init__(self, model: Transformer, tokenizers: Tokenizers, decoding: DecodingSettings):
        super().__init__()
        sizes = len(tokenizers.source.pieces), len(tokenizers.target.pieces)
        if sizes != (model.input_vocab_size, model.target_vocab_size):
            raise DataError(
                f"the tokenizers have {sizes[0]} and {sizes[1]} pieces, "
                f"the model {model.input_vocab_size} and {model.target_vocab_size}"
            )
        if decoding.precision == "int8":
            raise UsageError("decoding.precision int8: `export --format ctranslate2` makes such weights of a run")
        unknown = [piece for piece in decoding.forbidden if piece not in tokenizers.target.pieces]
        if unknown:
            raise UsageError(f"decoding.forbidden: the target vocabulary has no piece {unknown[0]!r}")
        forbidden = [tokenizers.target.pieces.index(piece) for piece in decoding.forbidden]
        original, model = model, model if decoding.precision == "float32" else cast_model(model, decoding.precision)
        step_weights = tf.nest.map_structure(tf.Variable, model.step_weights())

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
                fewest = fewest if decoding.min_length or decoding.min_length_factor else None
                return best(find(alone, *unforced(alone), most, fewest, decoding.length_penalty))

            return tf.cond(tf.shape(inp)[0] == 1, one, lambda: best(self.decode(inp, *unforced(inp))))

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
            alpha, longest, shortest = map(the_one, (length_penalty, max_length, min_length))
            inp = self.encode(text)[0].to_tensor()
            limits = length_limits(inp, decoding, model.pe_target, longest, shortest)
            return best(self.search(inp, *unforced(inp), *limits, alpha))

        def update():
            if model is not original:
                copy_variables(original, model)
            tf.nest.map_structure(lambda old, new: old.assign(new), step_weights, model.step_weights())

        self.tokenizers = list(tokenizers)
        # SavedModel does not look into Keras's lists.
        self.weights = [variable.value for variable in model.variables] + tf.nest.flatten(step_weights)
        strings, rows = tf.TensorSpec((None,), tf.string, "text"), tf.TensorSpec((None,), tf.int32, "rows")
        inp, tar, prefix = (tf.TensorSpec((None, None), tf.int32, name) for name in ("inp", "tar", "prefix"))
        self.encode = graph(encode, strings)
        self.encode_target = graph(encode_target, strings)
        lengths, number = (
            (tf.TensorSpec((None,), tf.int32, name) for name in ("most", "fewest")),
            tf.TensorSpec((), tf.float32),
        )
        self.search = graph(find, inp, prefix, rows, *lengths, number)
        self.decode = graph(decode, inp, prefix, rows)
        self.score = graph(score, inp, tar)
        self.attention = graph(attention, inp, tar)
        self.pieces = graph(pieces)
        self.serve = graph(serve, strings)
        self.serve_n_best = graph(serve_n_best, strings)
        # Of any rank: TensorFlow Serving's row format has a value for each text, its column format one for all.
        options = tf.TensorSpec(None, tf.float32), tf.TensorSpec(None, tf.int32), tf.TensorSpec(None, tf.int32)
        self.serve_options = graph(serve_options, strings, *options)
        self.update = update


def begin_decoding(model: Transformer, inp: tf.Tensor, beam_size: int, step_weights):
    """The step function and its first state, as `decoding` takes them, for source ids (batch, inp_len).

    Args:
        step_weights: variables or tensors as `Transformer.step_weights` gives them.
    """
    padding_mask = create_padding_mask(inp)
    state = model.init_state(model.encode(inp, False, padding_mask), padding_mask, beam_size)
    weights = tf.nest.map_structure(tf.convert_to_tensor, step_weights)  # read once, not at each token
    return lambda tokens, parents, state: model.step(tokens, parents, state, weights), state


def the_one(value: tf.Tensor) -> tf.Tensor:
    """The number that an option is, given once or once for each text, and then the same."""
    value = tf.reshape(value, [-1])
    same = tf.debugging.Assert(tf.reduce_all(value == value[0]), ["an option must be the same for all texts", value])
    valid = tf.debugging.Assert(value[0] >= 0, ["an option must be at least 0", value])
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
    source = tf.cast(lengths, tf.float32)
    longest = decoding.max_length if longest is None else longest
    shortest = decoding.min_length if shortest is None else shortest
    limit = tf.cast(table if longest is None else tf.minimum(table, longest), tf.float32)
    most = tf.clip_by_value(source * decoding.max_length_factor + decoding.max_length_extra, 1.0, limit)
    fewest = tf.clip_by_value(tf.math.ceil(source * decoding.min_length_factor), tf.cast(shortest, tf.float32), limit)
    # A source of the end token alone is a blank line.
    return tf.where(lengths > 1, tf.cast(most, tf.int32), 0), tf.cast(fewest, tf.int32)


class Translation(NamedTuple):
    """One translation of a text.

    Attributes:
        text: the translation.
        ids: the target ids it was decoded as, the end id included.
        log_prob: the sum of their log-probabilities.
        score: that divided by the length norm, by which beam search ranks.
    """

    text: str
    ids: list[int]
    log_prob: float
    score: float


class Translator:
    """Translates and scores texts.

    On several cores at once if TensorFlow computes each operation on one, which is the faster way; the command does so.
    In Python, before TensorFlow's first operation: `tf.config.threading.set_intra_op_parallelism_threads(1)`.

    Args:
        module: a TranslatorModule, or what `tf.saved_model.load` made of one.
        decoding: the settings that the module was made with.

    Attributes:
        pieces: the target's subword piece of each id.
    """

    def __init__(self, module: TranslatorModule, decoding: DecodingSettings):
        self.module, self.decoding = module, decoding
        self.pieces = [piece.decode("utf-8", "replace") for piece in module.pieces().numpy()]

    @classmethod
    def load(cls, folder: str | Path, decoding: DecodingSettings | None = None) -> "Translator":
        """The translator of a run folder or of an exported SavedModel.

        Args:
            decoding: how to search; None for the run's own settings. A SavedModel takes no others.

        Raises:
            DataError: the folder is neither, or damaged.
            UsageError: other settings for a SavedModel, or settings that do not go with the model.
        """
        folder = Path(folder)
        own = run_settings(folder).decoding
        if (folder / "model.bin").exists():
            from keras_transformer.export.ctranslate2 import CTranslate2Module  # which imports this module

            return cls(CTranslate2Module(folder, decoding or own), decoding or own)
        if not (folder / "saved_model.pb").exists():
            return cls(TranslatorModule(*load_run(folder), decoding or own), decoding or own)
        if decoding not in (None, own):
            raise UsageError(f"{folder}: a SavedModel decodes as it was exported; give these options to `export`")
        try:
            with quiet_stderr():
                module = tf.saved_model.load(folder)
        except Exception as error:  # TensorFlow has many kinds for a damaged one
            raise DataError(f"{folder}: damaged SavedModel ({first_line(error)})") from error
        if not all(hasattr(module, name) for name in ("encode", "decode", "score", "pieces")):
            raise DataError(f"{folder}: a SavedModel, but none that this version's `keras-transformer export` wrote")
        return cls(module, own)

    def translate(
        self, texts: list[str], progress: Callable[[int, int], None] = lambda texts, tokens: None
    ) -> list[str]:
        """The best translation of each text, in order; `progress` as in `stream`."""
        return [translations[0].text for translations in self.stream(texts, progress=progress)]

    def stream(
        self,
        texts: Iterable[str],
        prefixes: str | Iterable[str] = "",
        progress: Callable[[int, int], None] = lambda texts, tokens: None,
        window: int = WINDOW,
    ) -> Iterator[list[Translation]]:
        """The n best translations of each text, in order, whatever their number: no more than a window is in memory.

        The texts of a window are decoded by length. A text longer than the position table is cut to it, with a warning
        by line number in the log. What becomes of a text does not depend on the others.

        Args:
            texts: the source lines.
            prefixes: what each translation must begin with, in whole pieces: one for all texts, or as many as texts.
            progress: called with the numbers of texts and of tokens finished since the last call.
            window: how many texts are taken together at most.
        """
        if isinstance(texts, str):
            raise TypeError("texts must be a list or another iterable of texts, got one text")
        one = isinstance(prefixes, str)
        pairs = ((text, prefixes) for text in texts) if one else zip(texts, prefixes, strict=True)
        beam_size = self.decoding.hypotheses

        def begin(sources, prefixes, first):
            inp = self.encode(sources, self.module.encode, first, "source")
            begins = self.encode(prefixes, self.module.encode_target, first, "prefix")[:, :-1]

            def decode(rows):
                ids, begin = tf.gather(inp, rows).to_tensor(), tf.gather(begins, rows).to_tensor()
                found = self.module.decode(ids, begin, tf.constant(first + rows, tf.int32))
                return self.translations(*(found[name].numpy() for name in ("text", "ids", "log_prob", "score")))

            return inp.row_lengths().numpy(), decode

        def advance(translations):
            progress(len(translations), sum(len(n_best[0].ids) for n_best in translations))

        return in_windows(pairs, begin, POSITIONS // beam_size, ROWS // beam_size, window, advance)

    def encode(self, texts, encode, first: int, side: str) -> tf.RaggedTensor:
        """The ids of texts, of which the first is line `first`, counted from 0."""
        ids, lengths = encode(tf.constant(texts))
        kept = ids.row_lengths().numpy()
        for line in np.flatnonzero(kept < lengths.numpy()):
            log.warning(
                "line %d: %s of %d tokens, cut to the %d that fit", first + line + 1, side, lengths[line], kept[line]
            )
        return ids

    def translations(self, texts, ids, log_probs, scores) -> list[list[Translation]]:
        lengths = np.count_nonzero(ids, -1).tolist()
        rows = zip(texts.tolist(), ids.tolist(), lengths, log_probs.tolist(), scores.tolist(), strict=True)
        return [
            [
                Translation(text.decode("utf-8", "replace").replace("\n", " "), ids[:length], log_prob, score)
                for text, ids, length, log_prob, score in zip(*row, strict=True)
            ]
            for row in rows
        ]

    def score(
        self,
        pairs: Iterable[tuple[str, str]],
        progress: Callable[[int, int], None] = lambda texts, tokens: None,
        window: int = WINDOW,
    ) -> Iterator[list[tuple[str, float]]]:
        """Each target's pieces and their log-probabilities given its source, the end token's last, in order.

        Args:
            pairs: sources and targets.
            progress, window: as in `stream`.
        """

        def begin(sources, targets, first):
            inp = self.encode(sources, self.module.encode, first, "source")
            tar = self.encode(targets, self.module.encode_target, first, "target")

            def score(rows):
                ids = tf.gather(tar, rows)
                log_probs = self.module.score(tf.gather(inp, rows).to_tensor(), ids.to_tensor()).numpy().tolist()
                return [
                    [(self.pieces[i], log_prob) for i, log_prob in zip(row, values[: len(row)], strict=True)]
                    for row, values in zip(ids.to_list(), log_probs, strict=True)
                ]

            return np.maximum(inp.row_lengths().numpy(), tar.row_lengths().numpy()), score

        def advance(scored):
            progress(len(scored), sum(map(len, scored)))

        return in_windows(pairs, begin, POSITIONS, POSITIONS, window, advance)

    def attention(self, text: str, translation: Translation) -> np.ndarray:
        """How much each token of a translation attended to each piece of its text.

        Returns:
            (num_layers, num_heads, len(translation.ids), number of the text's pieces, the end token included).
        """
        inp = self.encode([text], self.module.encode, 0, "source").to_tensor()
        return self.module.attention(inp, tf.constant([translation.ids or [END]], tf.int32))[0].numpy()[
            :, :, : len(translation.ids)
        ]


def in_windows(pairs, begin, positions: int, rows: int, window: int, advance) -> Iterator:
    """What becomes of each pair, in order, with no more than `window` of them in memory.

    Args:
        begin: takes the first and the second of the pairs of a window and its first line's number; gives the lengths of
            the lines and a function from numbers of some, counted from the window's first, to what becomes of them.
        positions, rows: the most that are worked on together.
        advance: called with results as they come, in any order.
    """
    pairs, first, size = iter(pairs), 0, min(window, FIRST_WINDOW)
    with ThreadPoolExecutor(workers()) as pool:
        while chunk := list(itertools.islice(pairs, size)):
            lengths, work = begin(*map(list, zip(*chunk, strict=True)), first)
            batches = length_batches(lengths, positions, rows)
            futures = [pool.submit(work, batch) for batch in batches]
            results: list = [None] * len(chunk)
            try:
                for batch, future in zip(batches, futures, strict=True):
                    advance(future.result())
                    for row, result in zip(batch, future.result(), strict=True):
                        results[row] = result
            finally:
                for future in futures:
                    future.cancel()
            yield from results
            first, size = first + len(chunk), min(window, 2 * size)


def workers() -> int:
    """One for each core, if TensorFlow leaves the others free while it computes an operation."""
    if tf.config.threading.get_intra_op_parallelism_threads() != 1:
        return 1
    return cores()


def length_batches(lengths: np.ndarray, positions: int, rows: int) -> list[np.ndarray]:
    """Row numbers by length, longest first, at most `positions` and `rows` together, but at least one row."""
    order = np.argsort(-lengths, kind="stable")
    batches, start = [], 0
    while start < len(order):
        count = max(1, min(rows, positions // int(lengths[order[start]])))
        batches.append(order[start : start + count])
        start += count
    return batches


def load_run(folder: Path) -> tuple[Transformer, Tokenizers]:
    """The best model of a run folder, and its tokenizers.

    Raises:
        DataError: it has no model yet, or is damaged.
    """
    if not (folder / "best.keras").exists():
        raise DataError(f"{folder}: no model yet (no best.keras); train the run until its first measure on dev")
    tokenizers = load_tokenizers(folder / "tokenizer")
    try:
        model = keras.models.load_model(folder / "best.keras", compile=False)
    except Exception as error:  # zipfile, h5py and Keras each have their own for a damaged file
        raise DataError(f"{folder / 'best.keras'}: damaged ({first_line(error)})") from error
    return model, tokenizers


def save_run(folder: Path, settings: Settings, tokenizers: Tokenizers, model: Transformer) -> None:
    """Write a run folder of a trained model, which `load_run` reads; whole or not at all."""
    with whole(folder) as beside:
        beside.mkdir()
        (beside / "settings.yaml").write_text(settings_yaml(settings), encoding="utf-8")
        tokenizers.save(beside / "tokenizer")
        model.save(beside / "best.keras")
