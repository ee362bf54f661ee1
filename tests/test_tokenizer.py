"""Subwords: text in is text out, whatever the text; a model file is the same everywhere, or refused."""

import io
import os
import subprocess
import sys
import unicodedata
from functools import cache

import numpy as np
import pytest
import sentencepiece
import tensorflow as tf

from keras_transformer.data.sources import text_pairs
from keras_transformer.data.tokenizer import (
    Tokenizer,
    Tokenizers,
    load_tokenizer,
    load_tokenizers,
    train_sentencepiece,
    train_tokenizers,
)
from keras_transformer.errors import DataError, UsageError
from keras_transformer.ids import END, PAD, START, UNK

ODD = [
    "3:05\u202fPM",
    "12,00\u00a0€",
    "你好\u3000世界，再见",
    "½ cup, ﬁne Ⅳ",
    "two  spaces,   three",
    " one space first",
    "   three spaces first",
    "spaces last  ",
    "a\tb\t",
    "a\rb",
    "zero\u200bwidth",
    "\u00a0\u3000\u2009",
    " ",
    "",
    "Ação, É, ñ, ß",
    "hello 👋🏽",
]
PLAIN = [
    "The quick brown fox jumps over the lazy dog.",
    "Does 1 < 2 > 0 or [a] / {b}?",
    "hacia, hacía: Ação, É, ñ, ß",
    "SEND STARTUP PADDLE",
    "ภาษาไทยเป็นภาษาที่ใช้ในประเทศไทย",
    "https://example.com/?q=1&r=2_3-4#x",
]


@cache
def plain_model():
    return train_sentencepiece(PLAIN * 4, 400)


@pytest.fixture
def tokenizer():
    return Tokenizer(plain_model())


def there_and_back(tokenizer, texts):
    ids = tokenizer.encode(tf.constant(texts))
    ragged, padded = tokenizer.decode(ids), tokenizer.decode(ids.to_tensor())
    assert ragged.numpy().tolist() == padded.numpy().tolist()
    return [text.decode() for text in padded.numpy()]


@pytest.mark.parametrize("joint", [True, False])
def test_text_in_is_text_out(joint):
    """D1, D8, https://github.com/OpenNMT/OpenNMT-tf/issues/108, https://github.com/tensorflow/nmt/issues/268,
    https://github.com/huggingface/tokenizers/issues/408, https://github.com/tensorflow/text/issues/722: spaces of any
    kind and number, fullwidth signs and fractions come back; nothing of the corpus is unknown."""
    tokenizers = train_tokenizers([(text, text[::-1]) for text in ODD], 300, joint)
    assert (tokenizers.source is tokenizers.target) == joint
    for tokenizer, texts in zip(tokenizers, (ODD, [text[::-1] for text in ODD]), strict=True):
        texts = [unicodedata.normalize("NFC", text) for text in texts]
        assert there_and_back(tokenizer, texts) == texts
        assert UNK not in tokenizer.encode(tf.constant(texts)).flat_values


def test_what_ids_are(tokenizer):
    """The four of every vocabulary; a text's end with one end id, and there is no start id."""
    assert (PAD, UNK, START, END) == (0, 1, 2, 3)
    assert tokenizer.pieces[:4] == ["<pad>", "<unk>", "<s>", "</s>"]
    assert len(tokenizer.pieces) <= 400
    ids = tokenizer.encode(tf.constant(["The fox", ""])).to_list()
    assert ids[1] == [END]
    assert "".join(tokenizer.pieces[i] for i in ids[0]) == "▁The▁fox</s>"


def test_markers_have_no_text(tokenizer):
    ids = tokenizer.encode(tf.constant(["The fox"])).to_list()[0]
    padded = tf.constant([[START, *ids, PAD, PAD], [END] + [PAD] * (len(ids) + 2)])
    assert tokenizer.decode(padded).numpy().tolist() == [b"The fox", b""]
    assert tokenizer.decode(tf.zeros((2, 0), tf.int32)).numpy().tolist() == [b"", b""]


@pytest.mark.parametrize("line", [*PLAIN, *ODD])
def test_saved_and_loaded_again(tmp_path, line):
    """D1, https://github.com/tensorflow/nmt/issues/268: same size and ids, with separators among the pieces."""
    saved = train_tokenizers([(text, text) for text in ODD + PLAIN], 400, True)
    saved.save(tmp_path / "tokenizer")
    loaded = load_tokenizers(tmp_path / "tokenizer")
    assert loaded.source.pieces == saved.source.pieces
    line = tf.constant([line])
    assert loaded.target.encode(line).to_list() == saved.target.encode(line).to_list()


def test_files_of_joint_and_separate(tmp_path):
    pairs = [("abc", "xyz"), ("ab", "yz")]
    for joint, files in ((True, ["joint.model"]), (False, ["source.model", "target.model"])):
        folder = tmp_path / f"{joint}"
        train_tokenizers(pairs, 20, joint).save(folder)
        assert sorted(path.name for path in folder.iterdir()) == files
        source, target = load_tokenizers(folder)
        assert (source is target) == joint
        assert there_and_back(source, ["abc"]) == ["abc"] and there_and_back(target, ["xyz"]) == ["xyz"]
        assert (UNK in target.encode(tf.constant(["abc"])).flat_values) == (not joint)


def test_same_bytes_each_time():
    assert train_sentencepiece(PLAIN * 4, 400) == plain_model()


def test_large_text_is_sampled(monkeypatch):
    """Of 1,000 lines, 200: the same each time, from all over the text, and so fewer letters than all have."""
    lines = [f"word {chr(0x4E00 + number)}" for number in range(1000)]
    monkeypatch.setattr("keras_transformer.data.tokenizer.MOST_LINES", 200)
    model = train_sentencepiece(lines, 2000)
    assert train_sentencepiece(lines, 2000) == model
    letters = [ord(piece) - 0x4E00 for piece in Tokenizer(model).pieces if len(piece) == 1 and ord(piece) >= 0x4E00]
    assert len(letters) == 200 and min(letters) < 200 and max(letters) >= 800


def test_dropout(tokenizer):
    """With the probability 1 no letters are merged; with 0.5, it is another split each time, of the same text."""
    usual, letters = tokenizer.encode(tf.constant(["The fox"])), Tokenizer(plain_model(), 1.0)
    ids = letters.encode(tf.constant(["The fox"]))
    assert [tokenizer.pieces[i] for i in ids.to_list()[0]] == [*"▁The▁fox", "</s>"]
    half = Tokenizer(plain_model(), 0.5).encode(tf.constant(["The fox"] * 50))
    assert set(tokenizer.decode(half).numpy()) == {b"The fox"} and len({tuple(row) for row in half.to_list()}) > 5
    assert usual.row_lengths() < np.mean(half.row_lengths()) < 9


def test_letter_seen_only_at_the_beginning_of_words():
    """D8, https://github.com/huggingface/tokenizers/issues/408: it can be written inside a word too, and the other way
    round."""
    tokenizer = Tokenizer(train_sentencepiece(["xa xb xaz xbz"] * 5, 40))
    for text in ("axa", "bx", "za zb", "x z"):
        assert UNK not in tokenizer.encode(tf.constant([text])).flat_values
        assert there_and_back(tokenizer, [text]) == [text]


def test_unknown_emoji_leaves_its_word(tokenizer):
    """D9, https://github.com/tensorflow/text/pull/73: one unknown sign is one unknown id."""
    ids = tokenizer.encode(tf.constant(["quick😀 brown"])).to_list()[0]
    assert ids.count(UNK) == 1
    assert there_and_back(tokenizer, ["quick😀 brown"]) == ["quick ⁇  brown"]


@pytest.mark.parametrize("text", ["ภาษาไทย" * 9, "https://example.com/" + "1x2-3_4?" * 40], ids=["Thai", "URL"])
def test_long_words_are_split(tokenizer, text):
    """D9, https://github.com/tensorflow/text/pull/344: over 60 Thai letters, or 300 signs, without a space."""
    ids = tokenizer.encode(tf.constant([text])).to_list()[0]
    assert len(text) > 60 and len(ids) > 9 and UNK not in ids
    assert there_and_back(tokenizer, [text]) == [text]


def test_accents_stay(tokenizer):
    """D10, https://github.com/huggingface/transformers/issues/2742."""
    assert there_and_back(tokenizer, ["Ação, É, ñ, ß"]) == ["Ação, É, ñ, ß"]
    hacia, accented, decomposed = tokenizer.encode(
        tf.constant(["hacia", "hacía", unicodedata.normalize("NFD", "hacía")])
    ).to_list()
    assert hacia != accented == decomposed


@pytest.mark.parametrize(
    "text", ["a <s> b </s> c <pad> d <unk> e", "<pad>", "</s>", "<s>The fox</s>", "a [END] b [PAD] [START]"]
)
def test_markers_in_the_text_are_text(tokenizer, text):
    """D11, https://github.com/huggingface/transformers/pull/172,
    https://github.com/keras-team/keras-hub/issues/1395: one end id, the last; no other marker; all of the text back."""
    ids = tokenizer.encode(tf.constant([text])).to_list()[0]
    assert ids[-1] == END
    assert not {PAD, UNK, START, END} & set(ids[:-1])
    assert there_and_back(tokenizer, [text]) == [text]


def test_markers_in_the_corpus_are_no_pieces():
    tokenizer = Tokenizer(train_sentencepiece(["a </s> b < / s >", "<pad> <s> p a d"] * 50, 60))
    text = "a </s> b <pad> <s>"
    assert not {PAD, UNK, START, END} & set(tokenizer.encode(tf.constant([text])).to_list()[0][:-1])
    assert there_and_back(tokenizer, [text]) == [text]


def test_bytes_that_are_no_utf8(tokenizer):
    """They count as U+FFFD, unknown here; the rest of the text stays."""
    ids = tokenizer.encode(tf.constant([b"The \xff fox"]))
    assert ids.to_list()[0].count(UNK) == 1
    assert tokenizer.decode(ids).numpy()[0].decode() == "The  ⁇  fox"


def test_works_inside_a_graph(tokenizer):
    decode = tf.function(
        lambda text: tokenizer.decode(tokenizer.encode(text).to_tensor()),
        input_signature=[tf.TensorSpec((None,), tf.string)],
        autograph=False,
    )
    assert decode(tf.constant(["The fox", "", "  a"])).numpy().tolist() == [b"The fox", b"", b"  a"]
    assert decode(tf.constant([], tf.string)).shape == (0,)


@pytest.mark.parametrize(("size", "message"), [(5, "Vocabulary size is smaller"), (3, "")])
def test_vocabulary_too_small(size, message):
    """Fewer pieces than the text has characters."""
    with pytest.raises(UsageError, match=f"^data.vocab_size: {size}: .*{message}") as error:
        train_sentencepiece(PLAIN, size)
    assert len(str(error.value).splitlines()) == 1


def test_vocabulary_larger_than_the_text_gives():
    assert len(Tokenizer(train_sentencepiece(["ab ba"] * 3, 8000)).pieces) < 20


def test_missing_model(tmp_path):
    with pytest.raises(DataError, match=r"source\.model: No such file"):
        load_tokenizers(tmp_path)
    Tokenizers(Tokenizer(plain_model()), Tokenizer(plain_model())).save(tmp_path / "two")
    (tmp_path / "two" / "target.model").unlink()
    with pytest.raises(DataError, match=r"target\.model: No such file"):
        load_tokenizers(tmp_path / "two")


@pytest.mark.parametrize("data", [b"", b"no model", b"\x00" * 100])
def test_damaged_model(tmp_path, data):
    """D1, https://github.com/OpenNMT/OpenNMT-tf/issues/108: one error that names the file."""
    (tmp_path / "joint.model").write_bytes(data)
    with pytest.raises(DataError, match=r"joint\.model: damaged"):
        load_tokenizers(tmp_path)


def test_cut_model(tmp_path):
    """Wherever it is cut, between two of its pieces too."""
    model, path = train_sentencepiece(["ab ba"] * 3, 12), tmp_path / "cut.model"
    for size in range(len(model)):
        path.write_bytes(model[:size])
        with pytest.raises(DataError, match=r"cut\.model: damaged"):
            load_tokenizer(path)
    path.write_bytes(model)
    assert load_tokenizer(path).model == model


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, r"padding, unknown, start and end must be ids \(0, 1, 2, 3\), got \(-1, 0, 1, 2\)"),
        ({"pad_id": 0, "unk_id": 1, "bos_id": 2, "eos_id": 3}, "does not leave text as it is"),
    ],
    ids=["ids", "normaliser"],
)
def test_model_of_others(tmp_path, options, message):
    """SentencePiece's own defaults have other ids, and turn "½" into "1/2"."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(PLAIN), model_writer=model, model_type="bpe", vocab_size=120, minloglevel=2, **options
    )
    (tmp_path / "joint.model").write_bytes(model.getvalue())
    with pytest.raises(DataError, match=f"joint.model: .*{message}"):
        load_tokenizers(tmp_path)


def test_same_in_a_locale_that_is_not_utf8(tmp_path):
    """D3, https://github.com/OpenNMT/OpenNMT-tf/issues/886, https://github.com/OpenNMT/OpenNMT-tf/issues/35: files are
    read, and settings and models written, as in any other."""
    pairs = [("Não há pão", "Хлеба нет"), ("你好，世界", "日本語 ½\u202fcup")] * 3
    for side in (0, 1):
        (tmp_path / f"{side}.txt").write_text("".join(pair[side] + "\n" for pair in pairs), encoding="utf-8")
    (tmp_path / "my.yaml").write_text("data: {train: ação.tsv, dev: dev.tsv}\n", encoding="utf-8")
    code = """
import locale, sys
from pathlib import Path
from keras_transformer.config import load_settings, settings_yaml
from keras_transformer.data.sources import text_pairs
from keras_transformer.data.tokenizer import train_tokenizers
folder = Path(sys.argv[1])
train_tokenizers(text_pairs(folder / "0.txt", folder / "1.txt"), 100, True).save(folder / "tokenizer")
lines = settings_yaml(load_settings(folder / "my.yaml")).splitlines()
print(locale.getencoding(), ascii(next(line for line in lines if line.startswith("  train:"))))
"""
    environment = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    environment.pop("PYTHONIOENCODING", None)
    printed = subprocess.check_output([sys.executable, "-c", code, str(tmp_path)], env=environment, text=True)
    encoding, settings = printed.strip().split(" ", 1)
    assert encoding == "ANSI_X3.4-1968" or encoding.lower() in ("ascii", "us-ascii")
    assert settings.startswith(ascii("  train: ação.tsv")[:-1])
    assert list(text_pairs(tmp_path / "0.txt", tmp_path / "1.txt")) == pairs
    here = train_tokenizers(pairs, 100, True)
    assert (tmp_path / "tokenizer" / "joint.model").read_bytes() == here.source.model
    texts = [text for pair in pairs for text in pair]
    assert there_and_back(load_tokenizers(tmp_path / "tokenizer").source, texts) == texts
