"""Text in, text out: tokenise, decode, detokenise, inside the graph."""

import logging
from collections.abc import Callable
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

from keras_transformer.config import Settings, load_settings
from keras_transformer.data.tokenizer import Tokenizers, load_tokenizers
from keras_transformer.decoding import greedy
from keras_transformer.errors import DataError, first_line
from keras_transformer.masks import create_look_ahead_mask, create_padding_mask
from keras_transformer.model import Transformer
from keras_transformer.quiet import quiet_stderr

EXTRA_LENGTH = 50  # section 6.1: the most tokens that an output is longer than its source
TOKENS_PER_BATCH = 4096
BLANK = r"[\s\p{Z}\x{85}\x{1c}-\x{1f}]*"  # what Python's str.isspace calls blank
log = logging.getLogger(__name__)


class TranslatorModule(tf.Module):
    """A model and its tokenizers as three graph functions, which `tf.saved_model.save` takes along.

    Attributes:
        encode: texts (batch,) to ids (batch, None), cut to the position table, and their numbers before the cut.
        translate_ids: source ids (batch, inp_len), 0 = padding, to texts (batch,) and scores (batch,).
        serve: one after the other: `text`, strings (batch,), to {"text": strings (batch,), "score": float32 (batch,)}.
    A score is the log-probability of the output, its end token included. A blank text gives "" and 0.
    """

    def __init__(self, model: Transformer, tokenizers: Tokenizers):
        super().__init__()
        if (len(tokenizers.source.pieces), len(tokenizers.target.pieces)) != (
            model.input_vocab_size,
            model.target_vocab_size,
        ):
            raise DataError(
                f"the tokenizers have {tokenizers.source.vocab_size} and {tokenizers.target.vocab_size} pieces, "
                f"the model {model.input_vocab_size} and {model.target_vocab_size}"
            )

        def encode(text):
            text = tf.where(tf.strings.regex_full_match(text, BLANK), "", text)
            ids = tokenizers.source.encode(text)
            cut = tf.concat([ids[:, :-1][:, : model.pe_input - 1], ids[:, -1:]], axis=1)
            return cut, ids.row_lengths()

        def translate_ids(inp):
            lengths = tf.math.count_nonzero(inp, axis=1, dtype=tf.int32)
            # A source of the end token alone is a blank line.
            max_lengths = tf.where(lengths > 1, tf.minimum(lengths + EXTRA_LENGTH, model.pe_target), 0)
            padding_mask = create_padding_mask(inp)
            enc_output = model.encode(inp, False, padding_mask)

            def next_logits(ids):
                look_ahead_mask = create_look_ahead_mask(tf.shape(ids)[1])
                x, _ = model.decode(ids, enc_output, False, look_ahead_mask, padding_mask)
                return model.project(x[:, -1])

            ids, scores = greedy(next_logits, max_lengths)
            return tokenizers.target.decode(ids), scores

        def serve(text):
            ids, _ = self.encode(text)
            text, score = self.translate_ids(ids.to_tensor())
            return {"text": text, "score": score}

        self.tokenizers = list(tokenizers)
        self.weights = [variable.value for variable in model.variables]  # SavedModel does not look into Keras's lists
        strings = tf.TensorSpec((None,), tf.string, "text")
        self.encode = tf.function(encode, input_signature=[strings], autograph=False)
        ids = tf.TensorSpec((None, None), tf.int32, "ids")
        self.translate_ids = tf.function(translate_ids, input_signature=[ids], autograph=False)
        self.serve = tf.function(serve, input_signature=[strings], autograph=False)


class Translator:
    """Translates lists of texts.

    Args:
        module: a TranslatorModule, or what `tf.saved_model.load` made of one.
    """

    def __init__(self, module: TranslatorModule):
        self.module = module

    @classmethod
    def load(cls, folder: str | Path) -> "Translator":
        """The translator of a run folder or of an exported SavedModel.

        Raises:
            DataError: the folder is neither, or damaged.
        """
        folder = Path(folder)
        if (folder / "saved_model.pb").exists():
            try:
                with quiet_stderr():
                    module = tf.saved_model.load(folder)
            except Exception as error:  # TensorFlow has many kinds for a damaged one
                raise DataError(f"{folder}: damaged SavedModel ({first_line(error)})") from error
            if not (hasattr(module, "encode") and hasattr(module, "translate_ids")):
                raise DataError(f"{folder}: a SavedModel, but none that `keras-transformer export` wrote")
            return cls(module)
        return cls(TranslatorModule(*load_run(folder)))

    def translate(self, texts: list[str], progress: Callable[[int], None] = lambda count: None) -> list[str]:
        """Translations, one for each text, in order.

        Texts of like length are decoded together; a text longer than the position table is cut to it, with a warning
        by line number in the log.

        Args:
            texts: the source lines.
            progress: called with the number of texts finished since the last call.
        """
        return [text for text, _ in self.translate_with_scores(texts, progress)]

    def translate_with_scores(
        self, texts: list[str], progress: Callable[[int], None] = lambda count: None
    ) -> list[tuple[str, float]]:
        """As `translate`; each with its log-probability."""
        if isinstance(texts, str):
            raise TypeError("translate takes a list of texts, got one text")
        if not texts:
            return []
        ids, lengths = self.module.encode(tf.constant(texts))
        kept = ids.row_lengths().numpy()
        for line in np.flatnonzero(kept < lengths.numpy()):
            log.warning("line %d: %d tokens, cut to the %d that fit", line + 1, lengths[line], kept[line])
        results: list[tuple[str, float]] = [("", 0.0)] * len(texts)
        for rows in length_batches(kept):
            output, scores = self.module.translate_ids(tf.gather(ids, rows).to_tensor())
            for row, text, score in zip(rows, output.numpy(), scores.numpy(), strict=True):
                results[row] = (text.decode("utf-8", "replace").replace("\n", " "), float(score))
            progress(len(rows))
        return results


def length_batches(lengths: np.ndarray) -> list[np.ndarray]:
    """Row numbers by length, longest first, at most TOKENS_PER_BATCH positions together."""
    order = np.argsort(-lengths, kind="stable")
    batches, start = [], 0
    while start < len(order):
        rows = max(1, TOKENS_PER_BATCH // int(lengths[order[start]]))
        batches.append(order[start : start + rows])
        start += rows
    return batches


def run_settings(folder: Path) -> Settings:
    """The settings of a run folder, or of the run that a SavedModel was exported from."""
    saved_model = (folder / "saved_model.pb").exists()
    return load_settings(folder / "assets.extra" / "settings.yaml" if saved_model else folder / "settings.yaml")


def load_run(folder: Path) -> tuple[Transformer, Tokenizers]:
    """The best model of a run folder, and its tokenizers.

    Raises:
        DataError: the folder is no run folder, has no model yet, or is damaged.
    """
    if not (folder / "settings.yaml").exists():
        raise DataError(f"{folder}: no run folder (it has no settings.yaml)")
    if not (folder / "best.keras").exists():
        raise DataError(f"{folder}: no model yet (no best.keras); train the run until its first measure on dev")
    tokenizers = load_tokenizers(folder / "tokenizer")
    try:
        model = keras.models.load_model(folder / "best.keras", compile=False)
    except Exception as error:  # zipfile, h5py and Keras each have their own for a damaged file
        raise DataError(f"{folder / 'best.keras'}: damaged ({first_line(error)})") from error
    return model, tokenizers
