"""Weights from another run, vocabulary rows by piece, and parts that stay."""

import random

import numpy as np
import pytest

from keras_transformer import Transformer
from keras_transformer.adapting import carry_over, freeze
from keras_transformer.data.tokenizer import Tokenizers
from keras_transformer.errors import UsageError


class Pieces:
    """As much of a tokenizer as is looked at."""

    def __init__(self, pieces):
        self.pieces = pieces


def make(size, seed, num_heads=2, **changes):
    random.seed(seed)
    model = Transformer(1, 8, num_heads, 16, size, size, 10, 10, **changes)
    model.build((None, None), (None, None))
    return model


@pytest.mark.parametrize("share_embeddings", [True, False])
def test_rows_carry_over_by_piece(share_embeddings):
    """From a, b, c to c, d, a: rows 2 and 0 come from 0 and 2, and d, which is new, keeps its own."""
    base, model = make(3, 0, share_embeddings=share_embeddings), make(3, 1, share_embeddings=share_embeddings)
    base_pieces, pieces = Pieces(["a", "b", "c"]), Pieces(["c", "d", "a"])
    own = model.encoder.embedding.embeddings.numpy()
    assert carry_over(base, Tokenizers(base_pieces, base_pieces), model, Tokenizers(pieces, pieces)) == 1
    rows = base.encoder.embedding.embeddings.numpy()
    np.testing.assert_array_equal(model.encoder.embedding.embeddings, [rows[2], own[1], rows[0]])
    if not share_embeddings:
        kernel, new = base.final_layer.kernel.numpy(), model.final_layer.kernel.numpy()
        np.testing.assert_array_equal(new[:, [0, 2]], kernel[:, [2, 0]])
    wq = model.decoder.dec_layers[0].mha2.wq
    np.testing.assert_array_equal(wq.kernel, base.decoder.dec_layers[0].mha2.wq.kernel)


def test_source_and_target_have_rows_of_their_own():
    base, model = make(2, 0), make(2, 1)
    one, other = Pieces(["a", "b"]), Pieces(["b", "a"])
    carry_over(base, Tokenizers(one, one), model, Tokenizers(one, other))
    before, after = base.encoder.embedding.embeddings.numpy(), model.encoder.embedding.embeddings.numpy()
    np.testing.assert_array_equal(after, before)
    before, after = base.decoder.embedding.embeddings.numpy(), model.decoder.embedding.embeddings.numpy()
    np.testing.assert_array_equal(after, before[::-1])


@pytest.mark.parametrize(
    "change", [{"activation": "gelu"}, {"norm_epsilon": 1e-5}, {"scale_embeddings": False}, {"num_heads": 4}]
)
def test_the_same_shapes_in_another_model_are_refused(change):
    """The weights would fit, and mean something else."""
    [(name, value)] = change.items()
    base, model = make(3, 0), make(3, 1, **change)
    pieces = Tokenizers(Pieces(list("abc")), Pieces(list("abc")))
    with pytest.raises(UsageError, match=f"model.{name} is {value}, the other run's is {getattr(base, name)}: give"):
        carry_over(base, pieces, model, pieces)


def test_another_vocabulary_size():
    base, model = make(3, 0, share_embeddings=True), make(5, 1, share_embeddings=True)
    both = [Tokenizers(pieces, pieces) for pieces in (Pieces(list("abc")), Pieces(list("abcde")))]
    assert carry_over(base, both[0], model, both[1]) == 2
    np.testing.assert_array_equal(model.encoder.embedding.embeddings[:3], base.encoder.embedding.embeddings)


def test_another_size_is_refused_by_name():
    pieces = Tokenizers(Pieces(list("abc")), Pieces(list("abc")))
    wider, deeper = Transformer(1, 8, 2, 24, 3, 3, 10, 10), Transformer(2, 8, 2, 16, 3, 3, 10, 10)
    for other in (wider, deeper):
        other.build((None, None), (None, None))
    with pytest.raises(UsageError, match=r"ffn/inner/kernel is \(8, 16\), the other run's is \(8, 24\)"):
        carry_over(wider, pieces, make(3, 0), pieces)
    with pytest.raises(UsageError, match="only one of the two models has 'transformer/decoder/dec_layer2/"):
        carry_over(deeper, pieces, make(3, 0), pieces)


def test_frozen_parts_are_no_longer_trained():
    model = make(3, 0)
    freeze(model, ("encoder", "decoder/dec_layer1/ffn"))
    left = [variable.path for variable in model.trainable_variables]
    assert left and not [path for path in left if "encoder/" in path or "/ffn/" in path]
    with pytest.raises(UsageError, match="no part is called 'decodr'; did you mean 'decoder'"):
        freeze(make(3, 0), ("decodr",))
    with pytest.raises(UsageError, match="nothing is left to train"):
        freeze(make(3, 0), ("encoder", "decoder", "final_layer"))
