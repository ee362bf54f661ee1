"""Sentence pairs from text files, TSV and TensorFlow Datasets; what is wrong with them is found at once and named."""

import gzip
import os
import re
import threading
import unicodedata

import pytest
import tensorflow as tf

from keras_transformer.config import DataSettings
from keras_transformer.data.phrasebook import phrasebook
from keras_transformer.data.sources import read_pairs, text_pairs, tfds_pairs, tsv_pairs
from keras_transformer.errors import DataError, UsageError

PAIRS = [("Olá, mundo!", "Hello, world!"), ("", "nothing"), ("Ação\u00a0É", "½ cup"), ("世界", " мир ")]


@pytest.fixture
def write(tmp_path):
    """Writes a file of lines, or of bytes as they are, and gives its path."""

    def write(name, lines):
        data = lines if isinstance(lines, bytes) else "".join(f"{line}\n" for line in lines).encode()
        path = tmp_path / name
        path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
        return path

    return write


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_text_pairs(write, suffix):
    """Blank lines stay where they are: line n translates line n."""
    paths = [write(f"{side}{suffix}", [pair[side] for pair in PAIRS]) for side in (0, 1)]
    assert list(text_pairs(*paths)) == PAIRS
    assert list(read_pairs(tuple(map(str, paths)), "train", DataSettings())) == PAIRS


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_tsv_pairs(write, suffix):
    path = write(f"all.tsv{suffix}", ["\t".join(pair) for pair in PAIRS])
    assert list(tsv_pairs(path)) == PAIRS
    assert list(tsv_pairs(path, (2, 1))) == [pair[::-1] for pair in PAIRS]
    assert list(read_pairs(str(path), "dev", DataSettings())) == PAIRS


def test_pairs_are_read_anew(write):
    """Each time from the first; the fingerprint is that of the text, not of the files it is in."""
    path = write("all.tsv", ["a\tb", "c\td"])
    pairs = tsv_pairs(path)
    assert list(pairs) == list(pairs) == [("a", "b"), ("c", "d")] and len(pairs) == 2
    assert next(iter(pairs)) == ("a", "b")
    same = text_pairs(write("source.gz", ["a", "c"]), write("target", b"b\r\nd"))
    assert same.fingerprint == pairs.fingerprint
    assert len({tsv_pairs(path, columns).fingerprint for columns in ((1, 2), (2, 1))} | {pairs.fingerprint}) == 2
    path.write_text("a\tb\nc\te\n")
    assert list(pairs)[1] == ("c", "e") and tsv_pairs(path).fingerprint != pairs.fingerprint


def test_pairs_of_pipes(tmp_path, write):
    """`evaluate RUN <(zcat a.gz) <(zcat b.gz)`: a pipe is read once and kept."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_bytes, args=(b"a\nc\n",))
    writer.start()
    pairs = text_pairs(pipe, write("target", ["b", "d"]))
    writer.join()
    assert list(pairs) == list(pairs) == [("a", "b"), ("c", "d")]


def test_tsv_columns(write):
    """Any two of them, in any order; more than these may be there, here and there."""
    path = write("all.tsv", ["17\tolá\t\thello\textra", "18\tsim\t\tyes"])
    assert list(tsv_pairs(path, (2, 4))) == [("olá", "hello"), ("sim", "yes")]
    assert list(read_pairs(str(path), "train", DataSettings(columns=(4, 1)))) == [("hello", "17"), ("yes", "18")]


@pytest.mark.parametrize(
    ("columns", "line", "found"), [((1, 2), "only one", 1), ((3, 1), "a\tb", 2), ((1, 2), "", 1), ((1, 2), "a  b", 1)]
)
def test_too_few_columns(write, columns, line, found):
    path = write("all.tsv", ["a\tb\tc", line, "a\tb\tc"])
    message = f"^{re.escape(str(path))}, line 2: {found} columns, wanted at least {max(columns)}$"
    with pytest.raises(DataError, match=message):
        tsv_pairs(path, columns)


def test_sides_of_different_length(write):
    """D4, https://github.com/modernmt/modernmt/issues/245, https://github.com/MicrosoftTranslator/NTREX/issues/3: 5
    lines against 4 is refused, whichever side is short, even if blank lines made it so."""
    five, four = write("a.pt", ["a", "", "b", "c", "d"]), write("a.en", ["a", "b", "c", "d"])
    message = f"the two sides differ in length: {five} has 5 lines, {four} has 4"
    with pytest.raises(DataError, match=f"^{re.escape(message)}$"):
        text_pairs(five, four)
    with pytest.raises(DataError, match=re.escape(f"{four} has 4 lines, {five} has 5")):
        text_pairs(four, five)


def test_carriage_returns_keep_the_sides_together(write):
    """C5, https://github.com/tensorflow/tensor2tensor/issues/1395: a stray "\\r" on one side, "\\r\\n" on the other."""
    assert list(text_pairs(write("a", b"a\rb\nc\n"), write("b", b"A B\r\nC\r\n"))) == [("a\rb", "A B"), ("c", "C")]


@pytest.mark.parametrize("name", ["a.tsv", "a.tsv.gz"])
@pytest.mark.parametrize(
    ("data", "message"),
    [
        (None, ": No such file or directory"),
        (b"", ": the file is empty"),
        (b"a\tb\nc\td\n\xff\te\n", ", line 3: not UTF-8 (byte 0xff)"),
    ],
)
def test_unreadable_files(tmp_path, write, name, data, message):
    path = tmp_path / name if data is None else write(name, data)
    good = write("good", ["a\tb"])
    for read in (
        lambda: tsv_pairs(path),
        lambda: text_pairs(path, good),
        lambda: text_pairs(good, path),
        lambda: read_pairs(str(path), "train", DataSettings()),
    ):
        with pytest.raises(DataError, match=f"^{re.escape(f'{path}{message}')}$"):
            read()


def test_phrasebook_as_a_source():
    """The parts are the corpus's own, and a language may have a hyphen."""
    assert list(read_pairs("phrasebook:de-pt-BR", "dev", DataSettings())) == phrasebook("de", "pt-BR")["dev"]


@pytest.mark.parametrize("source", ["phrasebook:en-klingon", "phrasebook:en", "phrasebook", "phrasebook:de-de"])
def test_unknown_phrasebook(source):
    with pytest.raises(UsageError, match=f"^data.dev: {source}: "):
        read_pairs(source, "dev", DataSettings())


EXAMPLES = [
    {"pt": "Ação, É", "en": "Action,\nhere"},
    {"pt": unicodedata.normalize("NFD", "pão"), "en": "bread"},
    {"pt": "", "en": "nothing"},
]


@pytest.fixture
def data_dir(tmp_path):
    """A folder with data sets as TFDS leaves them: one that it knows by name and one that it does not."""
    import tensorflow_datasets as tfds

    text = tfds.features.Text
    lay_out(tmp_path, "ted_hrlr_translate/pt_to_en/1.0.0", tfds.features.Translation(languages=("en", "pt")))
    lay_out(tmp_path, "our_letters/pt_en/2.3.4", tfds.features.FeaturesDict({"pt": text(), "en": text()}))
    return str(tmp_path)


def lay_out(root, name, features):
    import tensorflow_datasets as tfds

    folder, dataset = root / name, name.split("/")[0]
    folder.mkdir(parents=True)
    infos = []
    for split, examples in (("train", EXAMPLES), ("validation", EXAMPLES[1:2])):
        path = folder / f"{dataset}-{split}.tfrecord-00000-of-00001"
        with tf.io.TFRecordWriter(str(path)) as writer:
            for example in examples:
                writer.write(features.serialize_example(features.encode_example(example)))
        template = tfds.core.ShardedFileTemplate(
            data_dir=folder, dataset_name=dataset, split=split, filetype_suffix="tfrecord"
        )
        infos.append(
            tfds.core.SplitInfo(
                name=split,
                shard_lengths=[len(examples)],
                num_bytes=path.stat().st_size,
                filename_template=template,
            )
        )
    tfds.folder_dataset.write_metadata(data_dir=folder, features=features, split_infos=infos, check_data=False)


@pytest.mark.parametrize("name", ["ted_hrlr_translate/pt_to_en", "our_letters/pt_en"])
def test_tfds_pairs(data_dir, name):
    """In NFC, a line each: a newline inside a text is a space."""
    pairs = [("Ação, É", "Action, here"), ("pão", "bread"), ("", "nothing")]
    assert list(tfds_pairs(name, "train", "pt", "en", data_dir, download=False)) == pairs
    assert list(tfds_pairs(name, "validation", "en", "pt", data_dir, download=False)) == [("bread", "pão")]
    assert list(tfds_pairs(name, "train[1:2]", "pt", "en", data_dir, download=False)) == pairs[1:2]


def test_tfds_as_a_source(data_dir):
    """Dev is the data set's "validation"."""
    settings = DataSettings(source_language="pt", target_language="en", data_dir=data_dir)
    assert len(read_pairs("tfds:our_letters/pt_en", "train", settings)) == 3
    assert list(read_pairs("tfds:ted_hrlr_translate/pt_to_en", "dev", settings)) == [("pão", "bread")]


@pytest.mark.parametrize(
    ("name", "split", "language", "message"),
    [
        ("our_letters/pt_en", "train", "fr", "tfds:our_letters/pt_en has no language 'fr', it has en, pt"),
        ("our_letters/pt_en", "test", "en", "tfds:our_letters/pt_en, split test: Unknown split 'test'"),
        ("ted_hrlr_translate/ru_to_en", "train", "en", "tfds:ted_hrlr_translate/ru_to_en, split train: .*"),
        ("no_such_thing", "train", "en", "tfds:no_such_thing, split train: .*not found"),
    ],
)
def test_missing_tfds_data(data_dir, name, split, language, message):
    with pytest.raises(DataError, match=f"^{message}") as error:
        tfds_pairs(name, split, "pt", language, data_dir, download=False)
    assert len(str(error.value).splitlines()) == 1


def test_tfds_error_without_a_message(monkeypatch):
    import tensorflow_datasets as tfds

    def load(*arguments, **keywords):
        raise NotImplementedError

    monkeypatch.setattr(tfds, "load", load)
    with pytest.raises(DataError, match=r"^tfds:some, split train: NotImplementedError\(\)$"):
        tfds_pairs("some", "train", "pt", "en")
