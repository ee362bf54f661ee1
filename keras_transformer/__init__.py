"""The Transformer of "Attention Is All You Need" for translation, on TensorFlow and Keras 3.

Importing the package registers its layers with Keras, so that `keras.models.load_model` finds them. The names that need
TensorFlow load on first use.
"""

import importlib
import sys
from pathlib import Path

_MODULES = {
    "masks": ("create_padding_mask", "create_look_ahead_mask", "create_length_mask", "create_masks"),
    "positions": ("positional_encoding", "PositionalEncoding"),
    "attention": ("scaled_dot_product_attention", "MultiHeadAttention"),
    "layers": ("point_wise_feed_forward_network", "EncoderLayer", "DecoderLayer"),
    "model": ("Encoder", "Decoder", "Transformer"),
    "losses": ("loss_function", "MaskedCrossEntropy", "TokenAccuracy"),
    "schedule": ("CustomSchedule",),
    "step": ("make_train_step",),
    "config": ("DecodingSettings",),
    "translator": ("Translator",),
}
_PURE = ("masks", "positions", "attention", "layers", "model", "losses", "schedule")
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [name for module in _PURE for name in _MODULES[module]]


def __getattr__(name):
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)


# The command answers --help and usage errors before Keras, whose import takes seconds, is loaded; there the names above
# come on first use.
_command = Path((sys.argv or [""])[0]).name == "keras-transformer" or sys.orig_argv[1:3] == ["-m", "keras_transformer"]
if not _command:
    for _module in _PURE:
        importlib.import_module(f"{__name__}.{_module}")
