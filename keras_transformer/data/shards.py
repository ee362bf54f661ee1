"""A training corpus tokenised once, into a folder of files that are mapped into memory: it need not fit there."""

import contextlib
import hashlib
import itertools
import json
import logging
import shutil
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from keras_transformer.config import DataSettings
from keras_transformer.data.pipeline import (
    Corpus,
    Pair,
    Rows,
    SubwordDropout,
    chunks,
    encode_chunk,
    log_corpus,
    nothing_left,
    offsets_of,
)
from keras_transformer.data.sources import Pairs
from keras_transformer.data.tokenizer import Tokenizer, Tokenizers
from keras_transformer.errors import DataError, first_line
from keras_transformer.files import whole
from keras_transformer.progress import Progress

FORMAT = 1  # of the folder; one of another number is made anew
PARTS = ("source.ids", "target.ids", "source.text", "target.text")  # the texts for subword dropout alone
log = logging.getLogger(__name__)


def prepare_corpus(
    pairs: Pairs,
    tokenizers: Tokenizers,
    pe_input: int,
    pe_target: int,
    name: str,
    folder: Path,
    settings: DataSettings,
) -> Corpus:
    """The pairs that can be trained on, encoded, filtered as the settings say and kept in a folder.

    The folder is there whole or not at all. It is used again if it is of the same text, tokenizers, filters and
    position tables, and made anew otherwise, or if it is damaged.

    Raises:
        DataError: no pair is left, or the folder holds something else.
    """
    made_of = {
        "format": FORMAT,
        "text": pairs.fingerprint,
        "tokenizers": [digest(tokenizer) for tokenizer in tokenizers],
        "position_tables": [pe_input, pe_target],
        "filters": settings.model_dump(include={"max_length", "max_ratio", "drop_duplicates"}),
        "keeps_text": settings.subword_dropout > 0,
    }
    types = {"source.ids": id_type(tokenizers.source), "target.ids": id_type(tokenizers.target)}
    if made_of["keeps_text"]:
        types |= {"source.text": np.uint8, "target.text": np.uint8}
    meta = stored(folder)
    if meta is None or meta["made_of"] != made_of:
        with whole(folder) as beside:
            beside.mkdir()
            left_out = write_corpus(beside, types, pairs, tokenizers, pe_input, pe_target, name, settings)
            sizes = {path.name: path.stat().st_size for path in sorted(beside.iterdir())}
            size = sizes[offsets_file("source.ids")] // 8 - 1
            meta = {"made_of": made_of, "pairs": size, "left_out": left_out, "bytes": sizes}
            (beside / "meta.json").write_text(json.dumps(meta, indent=2) + "\n", encoding="utf-8")
            if folder.exists():
                shutil.rmtree(folder)
    rows = {part: map_rows(folder / part, number_type) for part, number_type in types.items()}
    subwords = None
    if made_of["keeps_text"]:
        texts = rows["source.text"], rows["target.text"]
        subwords = SubwordDropout(*texts, tokenizers, settings.subword_dropout, pe_input, pe_target)
    corpus = Corpus(rows["source.ids"], rows["target.ids"], subwords)
    log_corpus(name, corpus, Counter(meta["left_out"]))
    return corpus


def offsets_file(part: str) -> str:
    return f"{part}.offsets"


def digest(tokenizer: Tokenizer) -> str:
    return hashlib.sha256(b"".join(tokenizer.files.values())).hexdigest()


def id_type(tokenizer: Tokenizer) -> type:
    return np.uint16 if len(tokenizer.pieces) <= 2**16 else np.int32


def stored(folder: Path) -> dict | None:
    """What meta.json says of a folder; None if there is no folder, or a damaged one, which is logged.

    Raises:
        DataError: it holds files that no corpus has, which would be lost.
    """
    if not folder.exists():
        return None
    others = {path.name for path in folder.iterdir()} - {"meta.json", *PARTS, *map(offsets_file, PARTS)}
    if others:
        raise DataError(f"{folder} is for the tokenised text, and holds something else: {min(others)}")
    try:
        meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
        for file, size in meta["bytes"].items():
            if (folder / file).stat().st_size != size:
                raise ValueError(f"{file} is not {size} bytes long")
        return meta
    except (OSError, ValueError, KeyError) as error:
        log.warning("%s is damaged (%s) and is made anew", folder, first_line(error))
        return None


def map_rows(path: Path, number_type: type) -> Rows:
    """Rows that are read from their files where they are needed."""
    offsets = path.with_name(offsets_file(path.name))
    return Rows(*(np.asarray(np.memmap(*file, mode="r")) for file in ((path, number_type), (offsets, np.int64))))


def write_corpus(
    folder: Path,
    types: dict[str, type],
    pairs: Pairs,
    tokenizers: Tokenizers,
    pe_input: int,
    pe_target: int,
    name: str,
    settings: DataSettings,
) -> Counter:
    """Write a file for each of `types`, and one of its rows' offsets; returns what was left out, by reason."""
    left_out: Counter = Counter()
    wanted: Iterable[Pair] = pairs
    if settings.drop_duplicates:
        first = first_of_each(pairs)
        left_out["seen before"] = int(np.count_nonzero(~first))
        wanted = itertools.compress(pairs, first)
    lengths: dict[str, list[np.ndarray]] = {part: [] for part in types}
    with contextlib.ExitStack() as stack:
        files = {part: stack.enter_context((folder / part).open("wb")) for part in types}
        progress = stack.enter_context(Progress(f"tokenise {name}", len(pairs), left_out.total(), unit="pairs"))
        for chunk in chunks(wanted):
            kept, source, target = encode_chunk(
                chunk, tokenizers, pe_input, pe_target, left_out, settings.max_length, settings.max_ratio
            )
            rows = {"source.ids": source, "target.ids": target}
            if "source.text" in types:
                rows["source.text"] = text_rows(source for source, _ in kept)
                rows["target.text"] = text_rows(target for _, target in kept)
            for part, of_chunk in rows.items():
                files[part].write(of_chunk.values.astype(types[part]).tobytes())
                lengths[part].append(of_chunk.lengths)
            progress.advance(len(chunk))
    if not any(map(len, lengths["source.ids"])):
        raise nothing_left(name, left_out, pe_input, pe_target)
    for part, of_chunks in lengths.items():
        offsets_of(of_chunks).tofile(folder / offsets_file(part))
    return left_out


def text_rows(lines: Iterable[str]) -> Rows:
    """The UTF-8 bytes of each line."""
    encoded = [line.encode() for line in lines]
    return Rows(np.frombuffer(b"".join(encoded), np.uint8), offsets_of([np.array([len(line) for line in encoded])]))


def first_of_each(pairs: Pairs) -> np.ndarray:
    """Which pairs (size,) are not the same as one before: by 64 bits of a hash, of which few would fill a memory."""
    hashes = np.fromiter((hash_of(pair) for pair in pairs), np.uint64, len(pairs))
    first = np.zeros(len(hashes), bool)
    first[np.unique(hashes, return_index=True)[1]] = True
    return first


def hash_of(pair: Pair) -> int:
    data = f"{pair[0]}\n{pair[1]}".encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")
