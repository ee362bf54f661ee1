"""Where sentence pairs come from. Each function gives `Pairs` of (source, target), in Unicode NFC."""

import hashlib
import itertools
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from keras_transformer.data.phrasebook import phrasebook
from keras_transformer.errors import DataError, UsageError, first_line
from keras_transformer.files import read_lines


class Pairs:
    """Sentence pairs (source, target) that need not fit in memory: each loop over them reads them anew.

    They are gone through once here, so that bad text is found before any work begins.

    Args:
        read: gives the pairs from the first on.

    Attributes:
        fingerprint: the SHA-256 of the text, whatever files it is in.
    """

    def __init__(self, read: Callable[[], Iterable[tuple[str, str]]]):
        self.read, self.size = read, 0
        digest = hashlib.sha256()
        for source, target in self:
            digest.update(f"{source}\n{target}\n".encode("utf-8", "surrogatepass"))
            self.size += 1
        self.fingerprint = digest.hexdigest()

    def __iter__(self) -> Iterator[tuple[str, str]]:
        return iter(self.read())

    def __len__(self) -> int:
        return self.size


def line_reader(path: str | Path) -> Callable[[], Iterable[str]]:
    """A function that gives the lines of a file from the first on; those of a pipe, read but once, are kept."""
    if Path(path).exists() and not Path(path).is_file():
        lines = list(read_lines(path))
        return lambda: lines
    return lambda: read_lines(path)


def text_pairs(source: str | Path, target: str | Path) -> Pairs:
    """Two files with a sentence a line, plain or .gz; line n of one translates line n of the other."""
    sides = line_reader(source), line_reader(target)

    def read():
        for pair in itertools.zip_longest(*(side() for side in sides)):
            if None in pair:
                lines = [sum(1 for _ in side()) for side in sides]
                raise DataError(
                    f"the two sides differ in length: {source} has {lines[0]} lines, {target} has {lines[1]}"
                )
            yield pair

    return Pairs(read)


def tsv_pairs(path: str | Path, columns: Sequence[int] = (1, 2)) -> Pairs:
    """A file of tab-separated columns, plain or .gz; `columns` are the source's and the target's, counted from 1."""
    lines = line_reader(path)

    def read():
        for number, line in enumerate(lines(), 1):
            fields = line.split("\t")
            if len(fields) < max(columns):
                raise DataError(f"{path}, line {number}: {len(fields)} columns, wanted at least {max(columns)}")
            yield fields[columns[0] - 1], fields[columns[1] - 1]

    return Pairs(read)


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
    except Exception as error:  # TFDS raises some twenty kinds for "there is no such data set, split or network"
        raise DataError(f"tfds:{name}, split {split}: {first_line(error)}") from error
    for language in (source_language, target_language):
        if language not in info.features:
            raise DataError(f"tfds:{name} has no language {language!r}, it has {', '.join(sorted(info.features))}")

    def read():
        try:
            for example in tfds.as_numpy(data):
                yield as_record(example[source_language]), as_record(example[target_language])
        except Exception as error:
            raise DataError(f"tfds:{name}, split {split}: {first_line(error)}") from error

    return Pairs(read)


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
            phrases = phrasebook(*languages)[part]
        except ValueError as error:
            raise UsageError(f"data.{part}: {source}: {error}") from error
        return Pairs(lambda: phrases)
    if kind == "tfds":
        split = {"train": "train", "dev": "validation"}[part]
        return tfds_pairs(name, split, settings.source_language, settings.target_language, settings.data_dir)
    return tsv_pairs(source, settings.columns)
