"""Subwords: SentencePiece models, trained by `sentencepiece` and run inside the graph by tensorflow-text."""

import io
import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import sentencepiece
import tensorflow as tf
import tensorflow_text as tf_text
from sentencepiece import sentencepiece_model_pb2

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

    Attributes:
        pieces: the piece of each id.
        model: the SentencePiece model.
        files: what it is kept in, by the ends of the files' names.
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
        self.model, self.files = model, {".model": model}
        self.pieces = [processor.id_to_piece(i) for i in range(processor.vocab_size())]
        with quiet_stderr():
            # Any nbest_size but 0 and 1 has it draw; of a BPE model, alpha is the probability.
            self.sentencepiece = tf_text.SentencepieceTokenizer(model, nbest_size=-1 if dropout else 0, alpha=dropout)

    def with_dropout(self, rate: float) -> "Tokenizer":
        return Tokenizer(self.model, rate)

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


class MarianTokenizer(tf.Module):
    """Text to ids and back as Hugging Face's class of this name does it, in the graph, with the ids of this package.

    SentencePiece cuts the text, and a vocabulary gives the pieces their ids; one of other pieces than SentencePiece's
    own. A text may begin with the code of the language to translate into, `>>fra<<`, which is a piece by itself.

    Args:
        model: a SentencePiece model.
        pieces: the piece of each id, of which the first four are padding, unknown, start and end.

    Attributes:
        pieces, model, files: as a Tokenizer's.
    """

    def __init__(self, model: bytes, pieces: list[str]):
        super().__init__()
        processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        parts = sentencepiece_model_pb2.ModelProto.FromString(model)
        # Cut between two pieces, it loads as a smaller model that normalises nothing.
        if not (parts.HasField("trainer_spec") and parts.HasField("normalizer_spec")):
            raise ValueError("cut short")
        if any(processor.is_byte(i) for i in range(processor.vocab_size())):
            raise ValueError("its pieces of single bytes are not supported")
        self.model, self.pieces = model, pieces
        self.files = {".spm": model, ".vocab.json": json.dumps(pieces, ensure_ascii=False, indent=0).encode()}
        with quiet_stderr():
            self.sentencepiece = tf_text.SentencepieceTokenizer(model, out_type=tf.string)
        first = len((PAD, UNK, START, END))
        ids = tf.lookup.KeyValueTensorInitializer(pieces[first:], tf.range(first, len(pieces)))
        self.ids = tf.lookup.StaticHashTable(ids, UNK)  # an attribute, or a SavedModel does without it
        self.surfaces = tf.constant([""] * first + pieces[first:])

    def with_dropout(self, rate: float) -> "MarianTokenizer":
        raise UsageError("data.subword_dropout is for vocabularies that were made here, not for one that was imported")

    def encode(self, text: tf.Tensor) -> tf.RaggedTensor:
        """Texts (batch,), UTF-8, to ids (batch, None) with the end id last; invalid bytes count as U+FFFD."""
        text = tf.strings.unicode_transcode(text, "UTF-8", "UTF-8", errors="replace")
        code = tf.strings.regex_replace(text, "(?s)^(>>.*?<<)?.*$", r"\1")
        code = tf.RaggedTensor.from_tensor(code[:, None], padding="")
        pieces = self.sentencepiece.tokenize(tf.strings.regex_replace(text, "(?s)^>>.*?<<", ""))
        ids = tf.ragged.map_flat_values(self.ids.lookup, tf.concat([code, pieces], axis=1))
        return tf.concat([ids, tf.fill([tf.shape(text)[0], 1], END)], axis=1)

    def decode(self, ids: tf.Tensor) -> tf.Tensor:
        """Ids (batch, seq_len) to texts (batch,); padding, unknown, start and end have none."""
        text = tf.strings.reduce_join(tf.gather(self.surfaces, ids), axis=1)
        return tf.strings.strip(tf.strings.regex_replace(text, "▁", " "))


class Tokenizers(NamedTuple):
    """The source's and the target's; one and the same with a joint vocabulary."""

    source: Tokenizer | MarianTokenizer
    target: Tokenizer | MarianTokenizer

    def save(self, folder: Path) -> None:
        """Write the files of both in place of others; the names begin with "joint", or with "source" and "target"."""
        sides = {"joint": self.source} if self.source is self.target else self._asdict()
        with whole(folder) as beside:
            beside.mkdir()
            for side, tokenizer in sides.items():
                for end, content in tokenizer.files.items():
                    (beside / f"{side}{end}").write_bytes(content)
            if folder.exists():
                shutil.rmtree(folder)


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


def load_tokenizer(path: Path) -> Tokenizer | MarianTokenizer:
    """The tokenizer of a .model or .spm file."""
    try:
        if path.suffix == ".model":
            return Tokenizer(path.read_bytes())
        return MarianTokenizer(path.read_bytes(), json.loads(path.with_suffix(".vocab.json").read_bytes()))
    except OSError as error:
        raise DataError(f"{error.filename}: {error.strerror}") from error
    except (RuntimeError, ValueError) as error:
        raise DataError(f"{path}: damaged, or no SentencePiece model of this project ({error})") from error


def load_tokenizers(folder: Path) -> Tokenizers:
    """What `Tokenizers.save` wrote.

    Raises:
        DataError: a file is missing or damaged.
    """
    end = ".spm" if list(folder.glob("*.spm")) else ".model"
    if (folder / f"joint{end}").exists():
        tokenizer = load_tokenizer(folder / f"joint{end}")
        return Tokenizers(tokenizer, tokenizer)
    return Tokenizers(load_tokenizer(folder / f"source{end}"), load_tokenizer(folder / f"target{end}"))
