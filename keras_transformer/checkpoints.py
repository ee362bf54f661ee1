"""Checkpoints: one .npz file each, whole or not there, with every variable and the state of the run."""

import json
import logging
import re
import zipfile
from pathlib import Path

import numpy as np

from keras_transformer.errors import DataError
from keras_transformer.files import whole

log = logging.getLogger(__name__)
STATE = "state.json"


def checkpoint_files(folder: Path) -> list[Path]:
    """The checkpoints of a folder, oldest first."""
    return sorted(folder.glob("step-*.npz"))


def named(variables: list) -> dict:
    """The variables by place and path, without the numbers that Keras gives to namesakes within a process."""
    paths = [re.sub(r"_[0-9]+(?=[/_]|$)", "", variable.path) for variable in variables]
    return {f"{i:04d} {path}": variable for i, (path, variable) in enumerate(zip(paths, variables, strict=True))}


def save_checkpoint(folder: Path, variables: list, state: dict, keep: int) -> None:
    """Write the variables and `state` (plain values, with its "step"), then delete all but the `keep` newest.

    `variables` is an explicit list: `tf.train.Checkpoint(model=...)` does not look into Keras's lists of layers.
    """
    with whole(folder / f"step-{state['step']:08d}.npz") as beside:
        arrays = {name: np.asarray(variable) for name, variable in named(variables).items()}
        np.savez(beside, **arrays, **{STATE: json.dumps(state)})
    for old in checkpoint_files(folder)[:-keep]:
        old.unlink()


def restore_newest(folder: Path, variables: list) -> dict | None:
    """Assign the newest readable checkpoint to `variables`; a damaged one is passed over with a warning.

    Returns:
        Its state, or None if there is no checkpoint.

    Raises:
        DataError: a checkpoint's variables are not these, by name or shape.
    """
    for path in reversed(checkpoint_files(folder)):
        try:
            with path.open("rb") as file, np.load(file, allow_pickle=False) as stored:
                arrays = {name: stored[name] for name in stored.files}
            state = json.loads(str(arrays.pop(STATE)))
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
            log.warning("%s: damaged, passed over (%s)", path, error)
            continue
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
