"""Subwords: SentencePiece models, trained by `sentencepiece` and run inside the graph by tensorflow-text."""

import io
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import sentencepiece
import tensorflow as tf
import tensorflow_text as tf_text

from keras_transformer.data.sources import Pairs
from keras_transformer.errors import DataError, UsageError
from keras_transformer.files import whole
from keras_transformer.ids import END, PAD, START, UNK
from keras_transformer.quiet import quiet_stderr

MOST_LINES = 1_000_000  # that a model is trained on: some hundred bytes of memory each


def train_sentencepiece(lines: Iterable[str], vocab_size: int) -> bytes:
    """A BPE model of at most `vocab_size` pieces in which every character of `lines` has a piece.

    Of more than `MOST_LINES` lines it sees a random sample, of that many and the same each time.

    The text is left as it is (`identity`): SentencePiece's other normalisers turn U+00A0 and U+202F into spaces, "½"
    into "1/2" and "，" into ",". The ids are 0 padding, 1 unknown, 2 start, 3 end.
    """
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines),
            model_writer=model,
            model_type="bpe",
            vocab_size=vocab_size,
            hard_vocab_limit=False,
            character_coverage=1.0,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            max_sentence_length=2**30,
            input_sentence_size=MOST_LINES,
            shuffle_input_sentence=True,  # the sample; by SentencePiece's own fixed seed
            pad_id=PAD,
            unk_id=UNK,
            bos_id=START,
            eos_id=END,
            minloglevel=2,
        )
    except RuntimeError as error:
        raise UsageError(f"data.vocab_size: {vocab_size}: {str(error).strip().splitlines()[-1]}") from error
    return model.getvalue()


class Tokenizer(tf.Module):
    """Text to ids and back, in the graph.

    `keras.utils.set_random_seed` (as `tf.random.set_seed`) destroys tensorflow-text's resource: seed first.

    Args:
        model: a SentencePiece model, as `train_sentencepiece` gives it.
        dropout: the probability with which `encode` leaves out a merge, at random each time (BPE-dropout, Provilkov et
            al. 2020).
    """

    def __init__(self, model: bytes, dropout: float = 0.0):
        super().__init__()
        processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        ids = (processor.pad_id(), processor.unk_id(), processor.bos_id(), processor.eos_id())
        if ids != (PAD, UNK, START, END):
            raise ValueError(f"padding, unknown, start and end must be ids {(PAD, UNK, START, END)}, got {ids}")
        # A file cut between two pieces loads as a smaller model, without the normaliser's settings at its end.
        if processor.normalize("  ½") != "▁▁▁½":
            raise ValueError("it does not leave text as it is")
        self.model = model
        self.vocab_size = processor.vocab_size()
        self.pieces = [processor.id_to_piece(i) for i in range(self.vocab_size)]
        with quiet_stderr():
            # Any nbest_size but 0 and 1 has it draw; of a BPE model, alpha is the probability.
            self.sentencepiece = tf_text.SentencepieceTokenizer(model, nbest_size=-1 if dropout else 0, alpha=dropout)

    def encode(self, text: tf.Tensor) -> tf.RaggedTensor:
        """Texts (batch,), UTF-8, to ids (batch, None) with the end id last; invalid bytes count as U+FFFD."""
        text = tf.strings.unicode_transcode(text, "UTF-8", "UTF-8", errors="replace")
        ids = self.sentencepiece.tokenize(tf_text.normalize_utf8(text, "NFC"))
        return tf.concat([ids, tf.fill([tf.shape(text)[0], 1], END)], axis=1)

    def decode(self, ids: tf.Tensor | tf.RaggedTensor) -> tf.Tensor:
        """Ids (batch, seq_len) to texts (batch,); padding, start and end have none."""
        # tensorflow-text drops every space before the first text, so one goes before: the unknown piece's own, " ⁇ ".
        ids = tf.concat([tf.fill([tf.shape(ids)[0], 1], UNK), ids], axis=1)
        return tf.strings.regex_replace(self.sentencepiece.detokenize(ids), "^ ⁇  ?", "")


class Tokenizers(NamedTuple):
    """The source's and the target's; one and the same with a joint vocabulary."""

    source: Tokenizer
    target: Tokenizer

    def save(self, folder: Path) -> None:
        """Write joint.model, or source.model and target.model."""
        with whole(folder) as beside:
            beside.mkdir()
            if self.source is self.target:
                (beside / "joint.model").write_bytes(self.source.model)
            else:
                (beside / "source.model").write_bytes(self.source.model)
                (beside / "target.model").write_bytes(self.target.model)


def train_tokenizers(pairs: Pairs | list[tuple[str, str]], vocab_size: int, joint: bool) -> Tokenizers:
    """One model on both sides' text, or one for each.

    Raises:
        DataError: a side has no text.
    """
    for side, name in enumerate(("source", "target")):
        if not any(pair[side].strip() for pair in pairs):
            raise DataError(f"the {name} side of the {len(pairs)} training pairs is blank")
    if joint:
        tokenizer = Tokenizer(train_sentencepiece((text for pair in pairs for text in pair), vocab_size))
        return Tokenizers(tokenizer, tokenizer)
    sides = ((pair[side] for pair in pairs) for side in (0, 1))
    return Tokenizers(*(Tokenizer(train_sentencepiece(lines, vocab_size)) for lines in sides))


def load_tokenizer(path: Path) -> Tokenizer:
    try:
        return Tokenizer(path.read_bytes())
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from error
    except (RuntimeError, ValueError) as error:
        raise DataError(f"{path}: damaged, or no SentencePiece model of this project ({error})") from error


def load_tokenizers(folder: Path) -> Tokenizers:
    """What `Tokenizers.save` wrote.

    Raises:
        DataError: a file is missing or damaged.
    """
    if (folder / "joint.model").exists():
        tokenizer = load_tokenizer(folder / "joint.model")
        return Tokenizers(tokenizer, tokenizer)
    return Tokenizers(load_tokenizer(folder / "source.model"), load_tokenizer(folder / "target.model"))
