"""Where sentence pairs come from. Each function gives a list of (source, target), in Unicode NFC."""

import unicodedata
from collections.abc import Sequence
from pathlib import Path

from keras_transformer.data.phrasebook import phrasebook
from keras_transformer.errors import DataError, UsageError, first_line
from keras_transformer.files import read_lines

Pairs = list[tuple[str, str]]


def text_pairs(source: str | Path, target: str | Path) -> Pairs:
    """Two files with a sentence a line, plain or .gz; line n of one translates line n of the other."""
    source_lines, target_lines = read_lines(source), read_lines(target)
    if len(source_lines) != len(target_lines):
        raise DataError(
            f"the two sides differ in length: {source} has {len(source_lines)} lines, {target} has {len(target_lines)}"
        )
    return list(zip(source_lines, target_lines, strict=True))


def tsv_pairs(path: str | Path, columns: Sequence[int] = (1, 2)) -> Pairs:
    """A file of tab-separated columns, plain or .gz; `columns` are the source's and the target's, counted from 1."""
    pairs = []
    for number, line in enumerate(read_lines(path), 1):
        fields = line.split("\t")
        if len(fields) < max(columns):
            raise DataError(f"{path}, line {number}: {len(fields)} columns, wanted at least {max(columns)}")
        pairs.append((fields[columns[0] - 1], fields[columns[1] - 1]))
    return pairs


def tfds_pairs(
    name: str, split: str, source_language: str, target_language: str, data_dir: str | None = None, download=True
) -> Pairs:
    """A translation data set of TensorFlow Datasets; needs network the first time.

    Args:
        name: as `tfds.load` takes it, such as "ted_hrlr_translate/pt_to_en".
        split: such as "train" or "validation".
        source_language, target_language: the features' names, such as "pt" and "en".
        data_dir: where the data set is kept; TFDS's own default if None.
        download: whether it may be fetched if it is not there.
    """
    import tensorflow_datasets as tfds

    try:
        data, info = tfds.load(name, split=split, data_dir=data_dir, download=download, with_info=True)
        examples = list(tfds.as_numpy(data))
    except Exception as error:  # TFDS raises some twenty kinds for "there is no such data set, split or network"
        raise DataError(f"tfds:{name}, split {split}: {first_line(error)}") from error
    for language in (source_language, target_language):
        if language not in info.features:
            raise DataError(f"tfds:{name} has no language {language!r}, it has {', '.join(sorted(info.features))}")
    return [(as_record(example[source_language]), as_record(example[target_language])) for example in examples]


def as_record(text: bytes) -> str:
    """A text of a data set as one line."""
    return unicodedata.normalize("NFC", text.decode("utf-8", "replace").replace("\n", " "))


def read_pairs(source: str | Sequence[str], part: str, settings) -> Pairs:
    """The pairs of a setting `data.train` or `data.dev`; `settings` are the data's.

    `part` is "train" or "dev"; the phrasebook also has "test".

    Raises:
        UsageError: `source` is of no known form.
        DataError: what it names cannot be read.
    """
    if not isinstance(source, str):
        return text_pairs(*source)
    kind, _, name = source.partition(":")
    if kind == "phrasebook":
        languages = name.split("-", 1)
        if len(languages) != 2:
            raise UsageError(f"data.{part}: {source}: wanted two languages, such as phrasebook:en-de")
        try:
            return phrasebook(*languages)[part]
        except ValueError as error:
            raise UsageError(f"data.{part}: {source}: {error}") from error
    if kind == "tfds":
        split = {"train": "train", "dev": "validation"}[part]
        return tfds_pairs(name, split, settings.source_language, settings.target_language, settings.data_dir)
    return tsv_pairs(source, settings.columns)
