"""Checkpoints: one .npz file each, whole or not there, with every variable and the state of the run."""

import contextlib
import itertools
import json
import logging
import re
import shutil
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from keras_transformer.errors import DataError
from keras_transformer.files import whole

log = logging.getLogger(__name__)
STATE = "state.json"
# What reading a damaged file raises; RuntimeError where a bit says that it is encrypted, or of a later format.
DAMAGED = (OSError, ValueError, KeyError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error)


def checkpoint_files(folder: Path) -> list[Path]:
    """The checkpoints of a folder, oldest first."""
    return sorted(folder.glob("step-*.npz"))


def checkpoint_path(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08d}.npz"


def without_numbers(path: str) -> str:
    """A variable's path without the numbers that Keras gives to namesakes within a process."""
    return re.sub(r"_[0-9]+(?=[/_]|$)", "", path)


def named(variables: list) -> dict:
    """The variables by place and path."""
    paths = [without_numbers(variable.path) for variable in variables]
    return {f"{i:04d} {path}": variable for i, (path, variable) in enumerate(zip(paths, variables, strict=True))}


def save_checkpoint(folder: Path, variables: list, state: dict, keep: int, instead_of: int | None = None) -> None:
    """Write the variables and `state` (plain values, with its "step"), then delete all but the `keep` newest up to it.

    Newer ones are damaged, or the run would not be at this step: they do not count. That of step `instead_of` goes
    before the others are counted, once the new one is there.

    `variables` is an explicit list: `tf.train.Checkpoint(model=...)` does not look into Keras's lists of layers.
    """
    path = checkpoint_path(folder, state["step"])
    for left in folder.glob(".step-*.unfinished-*"):  # of a step that may never be written again
        shutil.rmtree(left, ignore_errors=True)
    with whole(path) as beside:
        arrays = {name: np.asarray(variable) for name, variable in named(variables).items()}
        np.savez(beside, **arrays, **{STATE: json.dumps(state)})
    if instead_of not in (None, state["step"]):
        checkpoint_path(folder, instead_of).unlink(missing_ok=True)
    for old in [file for file in checkpoint_files(folder) if file <= path][:-keep]:
        old.unlink()


def read_checkpoint(path: Path) -> tuple[dict[str, np.ndarray], dict]:
    """The arrays of a checkpoint by name, and its state.

    Raises:
        DAMAGED: it is, in as many ways.
    """
    with path.open("rb") as file, np.load(file, allow_pickle=False) as stored:
        arrays = {name: stored[name] for name in stored.files}
    return arrays, json.loads(str(arrays.pop(STATE)))


def readable_checkpoints(folder: Path) -> Iterator[tuple[Path, dict[str, np.ndarray], dict]]:
    """Path, arrays and state of each checkpoint, newest first; a damaged one is passed over with a warning."""
    for path in reversed(checkpoint_files(folder)):
        try:
            arrays, state = read_checkpoint(path)
        except DAMAGED as error:
            log.warning("%s: damaged, passed over (%s)", path, error)
            continue
        yield path, arrays, state


def newest_state(folder: Path) -> dict | None:
    """The state of the newest checkpoint of which that can be read, its arrays left unread; None if there is none."""
    for path in reversed(checkpoint_files(folder)):
        with contextlib.suppress(*DAMAGED), path.open("rb") as file, np.load(file, allow_pickle=False) as stored:
            return json.loads(str(stored[STATE]))
    return None


def mean_of_checkpoints(folder: Path, last: int, variables: list) -> tuple[list[Path], list[np.ndarray]]:
    """The `last` newest readable checkpoints, oldest first, and the mean over them of each weight.

    The weights are the trainable among the first variables of a run, the model's. The states of dropout's random
    numbers, the number of updates and the optimizer's moments have no mean.

    Raises:
        DataError: there is no checkpoint, or one is another model's or holds NaN or infinity.
    """
    paths = []
    weights = {name: variable for name, variable in named(variables).items() if variable.trainable}
    sums = {name: np.zeros(tuple(weight.shape), "float64") for name, weight in weights.items()}
    for path, arrays, _ in itertools.islice(readable_checkpoints(folder), last):
        paths.append(path)
        for name, total in sums.items():
            if name not in arrays or arrays[name].shape != total.shape:
                got = arrays[name].shape if name in arrays else "missing"
                raise DataError(f"{path}: {name} is {got}, the model's is {total.shape}")
            if not np.isfinite(arrays[name]).all():
                raise DataError(f"{path}: {name} holds NaN or infinity")
            total += arrays[name]
    if not paths:
        raise DataError(f"{folder.parent}: no checkpoints")
    return paths[::-1], [total / len(paths) for total in sums.values()]


def restore_newest(folder: Path, variables: list) -> dict | None:
    """Assign the newest readable checkpoint to `variables`.

    Returns:
        Its state, or None if there is no checkpoint.

    Raises:
        DataError: a checkpoint's variables are not these, by name or shape.
    """
    for path, arrays, state in readable_checkpoints(folder):
        wanted = named(variables)
        if wanted.keys() != arrays.keys():
            other = sorted(wanted.keys() ^ arrays.keys())[0]
            raise DataError(f"{path}: {len(arrays)} variables, the model has {len(wanted)}; they differ in '{other}'")
        for name, variable in wanted.items():
            if arrays[name].shape != tuple(variable.shape):
                raise DataError(f"{path}: {name} is {arrays[name].shape}, the model's is {tuple(variable.shape)}")
        for name, variable in wanted.items():
            variable.assign(arrays[name])
        return state
    return None
