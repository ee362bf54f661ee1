"""Reading lines, the same in every locale, and writing files that are whole or not there."""

import errno
import gzip
import os
import re
import unicodedata

import pytest
import tensorflow as tf

from keras_transformer.errors import DataError
from keras_transformer.files import read_lines, whole

NAMES = ["text.txt", "text.txt.gz"]


def write(path, data):
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("data", "lines"),
    [
        (b"a\nb\n", ["a", "b"]),
        (b"a\nb", ["a", "b"]),
        (b"a\nb\n\n", ["a", "b", ""]),
        (b"\n", [""]),
        (b"\n\na\n", ["", "", "a"]),
        (b" a \t\n", [" a \t"]),
    ],
)
def test_a_line_ends_at_its_newline(tmp_path, name, data, lines):
    """C1, https://github.com/tensorflow/tensor2tensor/issues/376: no line too many after the last newline, and blank
    lines at the end count."""
    assert list(read_lines(write(tmp_path / name, data))) == lines


@pytest.mark.parametrize(
    ("data", "lines"),
    [
        (b"a\rb\n", ["a\rb"]),
        (b"a\r\nb\r\n", ["a", "b"]),
        (b"a\r\nb\r", ["a", "b"]),
        (b"a\r\r\n", ["a\r"]),
        ("a\u2028b\x0bc\x0cd\x85e\n".encode(), ["a\u2028b\x0bc\x0cd\x85e"]),
    ],
)
def test_carriage_returns_do_not_shift_lines(tmp_path, data, lines):
    """C5, https://github.com/mjpost/sacrebleu/pull/24, https://github.com/tensorflow/tensor2tensor/issues/1395: only
    "\\n" and "\\r\\n" end a line, not what `str.splitlines` takes for an end."""
    assert list(read_lines(write(tmp_path / "text", data))) == lines


def test_windows_file_gives_the_same_lines(tmp_path):
    """C5: with byte order mark and "\\r\\n", as a Windows editor saves it."""
    unix = write(tmp_path / "unix", "Ação\n\n世界 \n".encode())
    windows = write(tmp_path / "windows", "\ufeffAção\r\n\r\n世界 \r\n".encode())
    assert list(read_lines(windows)) == list(read_lines(unix)) == ["Ação", "", "世界 "]


def test_lines_are_composed(tmp_path):
    """D10, https://github.com/huggingface/transformers/issues/2742: both spellings of "á" read the same, and no accent
    is lost."""
    text = "hacía Ação É ñ ß"
    path = write(tmp_path / "text", f"{text}\n{unicodedata.normalize('NFD', text)}\n".encode())
    assert list(read_lines(path)) == [text, text]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("data", [b"", b"\xef\xbb\xbf"])
def test_empty_file(tmp_path, name, data):
    path = write(tmp_path / name, data)
    with pytest.raises(DataError, match=f"^{re.escape(str(path))}: the file is empty$"):
        list(read_lines(path))


@pytest.mark.parametrize("name", NAMES)
def test_missing_file(tmp_path, name):
    with pytest.raises(DataError, match=f"^{re.escape(str(tmp_path / name))}: No such file or directory$"):
        list(read_lines(tmp_path / name))


@pytest.mark.parametrize("name", NAMES)
def test_bad_utf8_names_line_and_byte(tmp_path, name):
    path = write(tmp_path / name, b"a\nb\nc\xe9 d\ne\n")
    with pytest.raises(DataError, match=f"^{re.escape(str(path))}, line 3: not UTF-8 \\(byte 0xe9\\)$"):
        list(read_lines(path))


@pytest.mark.parametrize(
    "damage", [lambda data: data[:-9], lambda data: b"a\nb\n", lambda data: data[:12] + b"\xff" * 8 + data[20:]]
)
def test_damaged_gz(tmp_path, damage):
    """Cut short, no gzip at all, or with other bytes in the middle."""
    path = tmp_path / "text.gz"
    path.write_bytes(damage(gzip.compress(b"some text\n" * 100)))
    with pytest.raises(DataError, match=re.escape(str(path))):
        list(read_lines(path))


def write_file(path, text):
    path.write_text(text, encoding="utf-8")


def write_folder(path, text):
    (path / "inner").mkdir(parents=True)
    (path / "inner" / "text").write_text(text, encoding="utf-8")


def read_back(path):
    return (path / "inner" / "text" if path.is_dir() else path).read_text(encoding="utf-8")


@pytest.mark.parametrize("write", [write_file, write_folder])
def test_whole_writes_a_file_or_a_folder(tmp_path, write):
    """Parents are made, the name beside keeps its suffix, and nothing is at the path before the block ends."""
    path = tmp_path / "new" / "model.keras"
    with whole(path) as beside:
        write(beside, "text")
        assert beside.suffix == ".keras" and not path.exists()
    assert read_back(path) == "text"
    assert os.listdir(path.parent) == ["model.keras"]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("write", [write_file, write_folder])
def test_whole_leaves_the_old_as_it_was_on_an_error(tmp_path, write, error):
    path = tmp_path / "a.txt"
    write(path, "old")
    with pytest.raises(error), whole(path) as beside:
        write(beside, "half of the n")
        raise error
    assert read_back(path) == "old"
    assert os.listdir(tmp_path) == ["a.txt"]


@pytest.mark.parametrize("others", [[], ["b"]])
def test_whole_leaves_no_folders_after_an_error(tmp_path, others):
    """Those that were made for it go too, unless somebody has written there."""
    with pytest.raises(ValueError), whole(tmp_path / "new" / "inner" / "a.txt") as beside:
        write_file(beside, "half of the n")
        for name in others:
            (tmp_path / "new" / name).touch()
        raise ValueError
    assert [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")] == (["new", "new/b"] if others else [])


def test_a_full_disk_is_one_error_whoever_writes(tmp_path):
    """TensorFlow and safetensors have errors of their own, with the system's words; others stay what they are."""
    words = os.strerror(errno.ENOSPC)
    for error in (tf.errors.ResourceExhaustedError(None, None, f"a.txt; {words}"), Exception(f"Error: {words}")):
        with pytest.raises(OSError, match="a.txt") as caught, whole(tmp_path / "a.txt"):
            raise error
        assert caught.value.errno == errno.ENOSPC and caught.value.__cause__ is error
    with pytest.raises(tf.errors.ResourceExhaustedError), whole(tmp_path / "a.txt"):
        raise tf.errors.ResourceExhaustedError(None, None, "out of memory")
    assert list(tmp_path.iterdir()) == []


def test_whole_replaces_the_old_file(tmp_path):
    path = tmp_path / "a.txt"
    write_file(path, "old")
    with whole(path) as beside:
        write_file(beside, "new")
    assert read_back(path) == "new" and os.listdir(tmp_path) == ["a.txt"]


def test_whole_clears_what_a_killed_process_left(tmp_path):
    path, left = tmp_path / "a.txt", tmp_path / ".a.txt.unfinished-h4lfd0ne"
    left.mkdir()
    write_file(left / "a.txt", "half of the n")
    write_file(tmp_path / "a.txt-notes", "of the user")
    with whole(path) as beside:
        write_file(beside, "new")
    assert sorted(os.listdir(tmp_path)) == ["a.txt", "a.txt-notes"]
