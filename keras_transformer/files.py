"""Files: text that is UTF-8 with records ending at \\n whatever the locale, and writes that are whole or not there."""

import contextlib
import errno
import glob
import gzip
import os
import shutil
import tempfile
import unicodedata
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path

from keras_transformer.errors import DataError

BOM = b"\xef\xbb\xbf"  # the mark that some editors put before UTF-8 text


def open_lines(path: str | Path) -> Iterator[bytes]:
    """The lines of a file, plain or .gz, one after the other, however many.

    Raises:
        DataError: the file is missing or damaged.
    """
    path = Path(path)
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            yield from records(file)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path}: {getattr(error, 'strerror', None) or error}") from error


def records(file: Iterable[bytes]) -> Iterator[bytes]:
    """The lines of an open binary file, without a byte order mark and without their ends.

    An end is "\\n", or "\\r\\n" as Windows writes it. A lone "\\r" inside is text.
    """
    for number, line in enumerate(file):
        line = line if number else line.removeprefix(BOM)
        if number or line:  # a mark alone is no line
            yield line.removesuffix(b"\n").removesuffix(b"\r")


def read_lines(path: str | Path) -> Iterator[str]:
    """The lines of a UTF-8 file, plain or .gz, in Unicode NFC, one after the other, however many.

    Raises:
        DataError: the file is missing, empty, damaged, or a line of it is not UTF-8.
    """
    number = 0
    for number, line in enumerate(open_lines(path), 1):
        yield decode_line(line, path, number)
    if not number:
        raise DataError(f"{path}: the file is empty")


def decode_line(line: bytes, path: str | Path, number: int) -> str:
    try:
        return unicodedata.normalize("NFC", line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise DataError(f"{path}, line {number}: not UTF-8 (byte 0x{line[error.start]:02x})") from error


def sync(path: str | Path) -> None:
    """Have the file or folder on the disk, not only on its way there."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def disk_full(error: BaseException) -> bool:
    """Whether that is what an error says: the system's own, or one of TensorFlow or safetensors with its words."""
    return getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or os.strerror(errno.ENOSPC) in str(error)


@contextlib.contextmanager
def whole(path: str | Path) -> Iterator[Path]:
    """A path beside `path` to write a file or folder at; it takes the place of `path` when the block ends well.

    The name keeps the suffix (Keras goes by it). Left by an error, nothing of it stays, nor the folders made for it.

    Raises:
        OSError: the disk is full, whatever the library that writes there says of it.
    """
    path = Path(path)
    made = [parent for parent in path.parents if not parent.exists()]
    path.parent.mkdir(parents=True, exist_ok=True)
    prefix = f".{path.name}.unfinished-"
    for left in path.parent.glob(f"{glob.escape(prefix)}*"):  # by a process that was killed
        shutil.rmtree(left, ignore_errors=True)
    beside = Path(tempfile.mkdtemp(prefix=prefix, dir=path.parent))
    try:
        yield beside / path.name
        for written in sorted(beside.rglob("*"), reverse=True):
            sync(written)
        os.replace(beside / path.name, path)
        sync(path.parent)
    except BaseException as error:
        shutil.rmtree(beside, ignore_errors=True)
        with contextlib.suppress(OSError):  # others have written there
            for parent in made:
                parent.rmdir()
        if not isinstance(error, OSError) and disk_full(error):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path)) from error
        raise
    shutil.rmtree(beside, ignore_errors=True)
