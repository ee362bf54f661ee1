"""The prepared corpus: what is left out, when it is used again, when it is made anew."""

import json
import logging
import os
import signal
import subprocess
import sys

import numpy as np
import pytest

from keras_transformer.config import DataSettings
from keras_transformer.data import shards
from keras_transformer.data.pipeline import encode_pairs, token_batches
from keras_transformer.data.shards import first_of_each, prepare_corpus
from keras_transformer.data.sources import tsv_pairs
from keras_transformer.data.tokenizer import train_tokenizers
from keras_transformer.errors import DataError
from keras_transformer.ids import END, START

PAIRS = [("a", "ab"), ("ab", "abc"), (" ", "a"), ("a", "ab"), ("abcabc", "abcabca"), ("a", "abcabc"), ("b", "c")]


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.tsv"
    write(path, PAIRS)
    return path


def write(path, pairs):
    path.write_text("".join(f"{source}\t{target}\n" for source, target in pairs), encoding="utf-8")


def letters(pieces=8):
    """The four ids, the space and three letters: the tokens of a text are its letters and the space before them."""
    return train_tokenizers([("a b c", "a b c")], pieces, joint=True)


def prepare(text, pe_input=20, pe_target=20, pieces=8, **settings):
    folder, settings = text.parent / "corpus", DataSettings(**settings)
    return prepare_corpus(tsv_pairs(text), letters(pieces), pe_input, pe_target, "train", folder, settings)


def texts(corpus):
    """The pairs of a corpus, from its ids."""
    pieces = letters().source.pieces
    sides = [
        ["".join(pieces[i] for i in rows[row] if i not in (START, END)) for row in range(corpus.size)]
        for rows in (corpus.source, corpus.target)
    ]
    return [(source.removeprefix("▁"), target.removeprefix("▁")) for source, target in zip(*sides, strict=True)]


@pytest.fixture
def builds(monkeypatch):
    """Counts how often a corpus is made."""
    made = []
    original = shards.write_corpus
    monkeypatch.setattr(shards, "write_corpus", lambda *given: made.append(1) or original(*given))
    return made


def test_as_encoded_in_memory(text, monkeypatch):
    """In chunks of 2, the last of 1: the same ids, and the same batches."""
    monkeypatch.setattr("keras_transformer.data.pipeline.LINES_AT_ONCE", 2)
    prepared, encoded = prepare(text), encode_pairs(PAIRS, letters(), 20, 20, "train")
    assert prepared.source.values.dtype == np.uint16
    for side in ("source", "target"):
        ours, theirs = getattr(prepared, side), getattr(encoded, side)
        assert ours.values.tolist() == theirs.values.tolist() and ours.offsets.tolist() == theirs.offsets.tolist()
    batches = [list(token_batches(corpus, 16, seed=1, epochs=2)) for corpus in (prepared, encoded)]
    for one, other in zip(*batches, strict=True):
        np.testing.assert_array_equal(one[0], other[0])
        np.testing.assert_array_equal(one[1], other[1])


@pytest.mark.parametrize(
    ("settings", "kept", "left_out"),
    [
        ({}, [0, 1, 3, 4, 5, 6], {}),
        ({"pe_input": 7}, [0, 1, 3, 5, 6], {"too long": 1}),  # abcabc: the space, 6 letters and the end are 8
        ({"max_length": 5}, [0, 1, 3, 6], {"over max_length": 2}),
        ({"max_length": 4}, [0, 3, 6], {"over max_length": 3}),
        ({"max_ratio": 2.7}, [0, 1, 3, 4, 5, 6], {"over max_ratio": 0}),
        ({"max_ratio": 2.6}, [0, 1, 3, 4, 6], {"over max_ratio": 1}),  # a, abcabc: 3 and 8 tokens with the end
        ({"drop_duplicates": True}, [0, 1, 4, 5, 6], {"seen before": 1}),
        (
            {"max_length": 8, "max_ratio": 1, "drop_duplicates": True},
            [6],
            {"seen before": 1, "over max_length": 1, "over max_ratio": 3},
        ),
    ],
)
def test_filters(text, caplog, settings, kept, left_out):
    """Tokens with the space before and the end: 3 and 4, 4 and 5, blank, 3 and 4 again, 8 and 9, 3 and 8, 3 and 3."""
    with caplog.at_level(logging.INFO, "keras_transformer"):
        corpus = prepare(text, **settings)
    assert texts(corpus) == [PAIRS[i] for i in kept]
    meta = json.loads((text.parent / "corpus/meta.json").read_text())
    assert meta["pairs"] == len(kept)
    assert meta["left_out"] == {"with a blank side": 1, "too long": 0, **left_out}
    for reason, count in meta["left_out"].items():
        assert f"{count} {reason}" in caplog.messages[-1]


def test_used_again(text, builds, caplog):
    """And logged as when it was made."""
    with caplog.at_level(logging.INFO, "keras_transformer"):
        first, second = prepare(text), prepare(text)
    assert builds == [1] and texts(first) == texts(second)
    assert len(caplog.messages) == 2 and caplog.messages[0] == caplog.messages[1]


@pytest.mark.parametrize(
    "change",
    [
        {"pe_input": 7},
        {"pe_target": 7},
        {"max_length": 5},
        {"max_ratio": 2.0},
        {"drop_duplicates": True},
        {"subword_dropout": 0.1},
        {"pieces": 9},
    ],
    ids=lambda change: next(iter(change)),
)
def test_made_anew_for_other_settings(text, builds, change):
    prepare(text)
    prepare(text, **change)
    assert builds == [1, 1]
    prepare(text, **change)
    assert builds == [1, 1]


def test_made_anew_for_other_text(text, builds):
    """D6, https://github.com/tensorflow/tensorflow/issues/122752: even if it has the same length and time."""
    old = prepare(text)
    before = os.stat(text)
    write(text, [*PAIRS[:-1], ("c", "b")])
    os.utime(text, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert texts(prepare(text))[-1] == ("c", "b") and builds == [1, 1]
    assert texts(old)[-1] == ("b", "c")  # whoever has the old one mapped keeps it


def test_an_epoch_that_was_broken_off(text, builds):
    """D6, https://github.com/tensorflow/tensorflow/issues/122752: after 2 of its batches, the next run has each pair
    once, and no file is left of the first."""
    for _ in zip(range(2), token_batches(prepare(text), 16, seed=1), strict=False):
        pass
    files = sorted(path.name for path in text.parent.rglob("*"))
    corpus = prepare(text)
    rows = [row for inp, _ in token_batches(corpus, 16, seed=1, epochs=1) for row in inp.numpy().tolist()]
    assert len(rows) == 6 and builds == [1]
    assert sorted(path.name for path in text.parent.rglob("*")) == files
    assert files == ["corpus", "meta.json"] + [
        f"{side}.ids{kind}" for side in ("source", "target") for kind in ("", ".offsets")
    ] + ["text.tsv"]  # fmt: skip


def cut(path):
    path.write_bytes(path.read_bytes()[:-2])


@pytest.mark.parametrize("damage", [os.unlink, cut, lambda path: path.write_bytes(b"")])
@pytest.mark.parametrize("file", ["meta.json", "source.ids", "target.ids.offsets"])
def test_damaged(text, builds, caplog, file, damage):
    expected = texts(prepare(text))
    damage(text.parent / "corpus" / file)
    assert texts(prepare(text)) == expected and builds == [1, 1]
    [warning] = [record for record in caplog.records if record.levelname == "WARNING"]
    assert "corpus is damaged (" in warning.message
    prepare(text)
    assert builds == [1, 1]


def test_killed_while_it_is_made(text):
    """D6: nothing that is there afterwards is taken for a corpus, and the next run clears it away."""
    program = (
        "import sys, time\n"
        "sys.path.insert(0, 'tests')\n"
        "from pathlib import Path\n"
        "from keras_transformer.data import shards\n"
        "def slow(*given): print('here', flush=True); time.sleep(600)\n"
        "shards.nothing_left = shards.offsets_of = slow\n"
        "import test_shards\n"
        "test_shards.prepare(Path(sys.argv[1]))\n"
    )
    process = subprocess.Popen([sys.executable, "-c", program, text], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert process.stdout.readline() == b"here\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    [left] = [path.name for path in text.parent.iterdir() if path != text]
    assert left.startswith(".corpus.unfinished-")
    assert len(texts(prepare(text))) == 6
    assert sorted(path.name for path in text.parent.iterdir()) == ["corpus", "text.tsv"]


def test_nothing_is_left_of_no_corpus(tmp_path):
    write(tmp_path / "text.tsv", [("a", " "), ("abc", "a"), ("abc", "a")])
    pairs, folder = tsv_pairs(tmp_path / "text.tsv"), tmp_path / "run" / "corpus"
    with pytest.raises(DataError, match="none of the 3 pairs is left: 1 seen before, 1 with a blank side, 1 too long"):
        prepare_corpus(pairs, letters(), 3, 3, "train", folder, DataSettings(drop_duplicates=True))
    assert os.listdir(tmp_path) == ["text.tsv"]


def test_files_of_others_are_left_alone(text):
    (text.parent / "corpus").mkdir()
    (text.parent / "corpus" / "source.en").write_text("years of work")
    with pytest.raises(DataError, match="corpus is for the tokenised text, and holds something else: source.en$"):
        prepare(text)
    assert os.listdir(text.parent / "corpus") == ["source.en"]


def test_text_is_kept_for_subword_dropout(text):
    """The text of each row of ids, and batches whose pieces are the text's, however they are split."""
    corpus = prepare(text, subword_dropout=0.9)
    sides = corpus.subwords.texts(np.arange(corpus.size))
    kept = [(source.decode(), target.decode()) for source, target in zip(*sides, strict=True)]
    assert kept == texts(corpus) and len(kept) == 6
    [(inp, _)] = token_batches(corpus, 1000, seed=1, epochs=1)
    found = [text.decode() for text in letters().source.decode(inp).numpy()]
    assert sorted(found) == sorted(source for source, _ in kept)


def test_first_of_each():
    """Only the same on both sides, each where it was, is the same."""
    pairs = [("a", "b"), ("b", "a"), ("a", "b"), ("a", "c"), ("ab", ""), ("b", "a")]
    assert first_of_each(pairs).tolist() == [True, True, False, True, True, False]
