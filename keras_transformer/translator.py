"""Text in, text out: streams of any length through a TranslatorModule, in order."""

import itertools
import logging
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from keras_transformer.config import DecodingSettings, run_settings
from keras_transformer.errors import DataError, UsageError, first_line
from keras_transformer.export.ctranslate2 import CTranslate2Module
from keras_transformer.ids import END
from keras_transformer.precision import cores
from keras_transformer.quiet import quiet_stderr
from keras_transformer.runs import load_run
from keras_transformer.translator_module import TranslatorModule

POSITIONS = 4096  # source positions, times the beam's size, that are worked on together
ROWS = 256  # hypotheses that are decoded together
WINDOW = 4096  # texts that are sorted by length together, after the first, for which nobody is to wait so long
FIRST_WINDOW = 128
log = logging.getLogger(__name__)


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
