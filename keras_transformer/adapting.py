"""A new model from a trained one: weights that carry over, vocabulary rows by piece, parts that stay as they are."""

import difflib

import numpy as np

from keras_transformer.checkpoints import without_numbers
from keras_transformer.data.tokenizer import Tokenizers
from keras_transformer.errors import UsageError
from keras_transformer.model import Transformer

# The axis of the vocabulary in the variables that have one, by the end of their paths.
VOCABULARY_AXES = {"embedding/embeddings": 0, "final_layer/kernel": 1, "final_layer/bias": 0, "final_bias": 0}
# What no shape of a weight tells, and their meaning goes by.
ALIKE = ("num_heads", "activation", "norm_epsilon", "scale_embeddings")


def carry_over(base: Transformer, base_tokenizers: Tokenizers, model: Transformer, tokenizers: Tokenizers) -> int:
    """Give `model` the weights of `base`; what a vocabulary has a row of, piece by piece.

    Returns:
        How many pieces of `model` had none in `base` and keep the rows that they were made with.

    Raises:
        UsageError: they are models of different sizes, or compute otherwise.
    """
    for name in ALIKE:
        here, there = getattr(model, name), getattr(base, name)
        if here != there:
            raise UsageError(
                f"training.init_from: model.{name} is {here}, the other run's is {there}: "
                "give it that run's model settings"
            )
    variables, others = ({without_numbers(v.path): v for v in m.weights} for m in (model, base))
    if variables.keys() != others.keys():
        name = sorted(variables.keys() ^ others.keys())[0]
        raise UsageError(
            f"training.init_from: only one of the two models has {name!r}: give it that run's model settings"
        )
    new = 0
    for name, variable in variables.items():
        value, other = np.array(variable.numpy()), others[name].numpy()
        axis = next((axis for end, axis in VOCABULARY_AXES.items() if name.endswith(end)), None)
        sizes, other_sizes = (np.delete(array.shape, [] if axis is None else axis) for array in (value, other))
        if sizes.tolist() != other_sizes.tolist():
            raise UsageError(
                f"training.init_from: {name} is {value.shape}, the other run's is {other.shape}: "
                "give it that run's model settings"
            )
        if axis is None:
            value = other
        else:
            side = "source" if "/encoder/" in name else "target"
            row_of = {piece: row for row, piece in enumerate(getattr(base_tokenizers, side).pieces)}
            rows = np.array([row_of.get(piece, -1) for piece in getattr(tokenizers, side).pieces])
            known = rows >= 0
            value = np.moveaxis(value, axis, 0)
            value[known] = np.moveaxis(other, axis, 0)[rows[known]]
            value = np.moveaxis(value, 0, axis)
            new = max(new, int((~known).sum()))
        variable.assign(value)
    return new


def freeze(model: Transformer, parts: tuple[str, ...]) -> None:
    """Leave the parts of a model as they are: of each, the beginning of a path such as encoder/enc_layer1.

    An embedding matrix that the decoder shares is frozen under its own name alone, encoder/embedding.

    Raises:
        UsageError: no weight is in such a part, or none is left to train.
    """
    paths = {variable.path.removeprefix(f"{model.name}/"): variable for variable in model.trainable_variables}
    for part in parts:
        inside = [path for path in paths if f"{path}/".startswith(f"{part.rstrip('/')}/")]
        if model.share_embeddings and part.rstrip("/") == "encoder":
            inside.remove("encoder/embedding/embeddings")
        if not inside:
            groups = sorted({"/".join(path.split("/")[:depth]) for path in paths for depth in (1, 2)})
            near = difflib.get_close_matches(part, groups, n=1, cutoff=0.3)
            raise UsageError(f"training.frozen: no part is called {part!r}; did you mean {(near or groups)[0]!r}?")
        for path in inside:
            paths[path].trainable = False
    if not model.trainable_variables:
        raise UsageError("training.frozen: nothing is left to train")
