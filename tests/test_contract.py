"""What every layer and the model promise: one harness, each put through all of it."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_transformer import (
    CustomSchedule,
    Decoder,
    DecoderLayer,
    Encoder,
    EncoderLayer,
    MultiHeadAttention,
    PositionalEncoding,
    TokenAccuracy,
    Transformer,
    create_masks,
    loss_function,
)

INP = np.array([[5, 6, 7, 8, 0], [9, 4, 0, 0, 0]], "int32")
TAR = np.array([[2, 6, 7, 0], [2, 8, 9, 5]], "int32")
ENC_MASK, LOOK_AHEAD, DEC_MASK = (np.array(mask) for mask in create_masks(INP, TAR))
X, Y = (np.random.default_rng(0).normal(size=(2, length, 8)).astype("float32") for length in (5, 4))
TRAINING = object()  # where `training` stands among a call's arguments


@dataclass
class Case:
    """A layer class, its constructor's arguments, and the positional arguments of a call."""

    layer_class: type
    arguments: tuple
    call: tuple
    options: dict = field(default_factory=dict)

    def make(self, **more):
        keras.utils.set_random_seed(0)
        return self.layer_class(*self.arguments, **{**self.options, **more})

    @property
    def tensors(self):
        return [x for x in self.call if x is not TRAINING]

    def positional(self, tensors, training=False):
        """The call's arguments with these tensors in the places of its own."""
        tensors = iter(tensors)
        return [training if x is TRAINING else next(tensors) for x in self.call]

    @property
    def drops(self):
        """Whether anything is random in training."""
        return any(self.options.get(name) for name in ("rate", "attention_rate", "ffn_rate"))


LAYER, STACK, MODEL = (8, 2, 16), (2, 8, 2, 16, 40, 60), (2, 8, 2, 16, 40, 40, 60, 60)
STILL = {"rate": 0.0}
PRE = {"rate": 0.1, "norm": "pre", "activation": "gelu", "attention_rate": 0.2, "ffn_rate": 0.3, "norm_epsilon": 1e-5}
SHARED = {"share_embeddings": True, "output_bias": True, "scale_embeddings": False}
DOOR_1 = (INP, TAR, TRAINING, ENC_MASK, LOOK_AHEAD, DEC_MASK)
CASES = {
    "positions": Case(PositionalEncoding, (60, 8), (X,)),
    "attention": Case(MultiHeadAttention, (8, 2), (X, X, Y, DEC_MASK, TRAINING)),
    "attention with dropout": Case(MultiHeadAttention, (8, 2), (X, X, Y, DEC_MASK, TRAINING), {"rate": 0.2}),
    "encoder layer": Case(EncoderLayer, LAYER, (X, TRAINING, ENC_MASK), STILL),
    "encoder layer, pre": Case(EncoderLayer, LAYER, (X, TRAINING, ENC_MASK), PRE),
    "decoder layer": Case(DecoderLayer, LAYER, (Y, X, TRAINING, LOOK_AHEAD, DEC_MASK), STILL),
    "decoder layer, pre": Case(DecoderLayer, LAYER, (Y, X, TRAINING, LOOK_AHEAD, DEC_MASK), PRE),
    "encoder, pre": Case(Encoder, STACK, (INP, TRAINING, ENC_MASK), PRE),
    "decoder": Case(Decoder, STACK, (TAR, X, TRAINING, LOOK_AHEAD, DEC_MASK), STILL),
    "model": Case(Transformer, MODEL, DOOR_1, STILL),
    "model, pre, shared": Case(Transformer, MODEL, DOOR_1, {**PRE, **SHARED}),
}
every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def flat(outputs):
    return [keras.ops.convert_to_numpy(keras.ops.cast(x, "float32")) for x in keras.tree.flatten(outputs)]


def assert_same(outputs, wanted, tolerance=1e-5):
    for one, other in zip(flat(outputs), flat(wanted), strict=True):
        np.testing.assert_allclose(one, other, atol=tolerance)


def randomized(layer):
    """The layer with other weights than it was made with, so that weights lost on the way are noticed."""
    rng = np.random.default_rng(1)
    for weight in layer.trainable_variables:
        weight.assign(rng.normal(scale=0.3, size=weight.shape))
    return layer


def all_layers(layer):
    """The layer and all below it, once each, through lists and Sequential."""
    return list(dict.fromkeys(layer._flatten_layers()))


@every_case
def test_config_round_trip(case):
    """O3, https://github.com/bryanlimy/tf2-transformer-chatbot/issues/12, https://github.com/ncbi/AIONER/issues/5:
    through JSON and back, the same arguments and the same shapes; through Keras's own serialisation too."""
    layer = case.make()
    config = json.loads(json.dumps(layer.get_config()))
    for name, value in case.options.items():
        assert config[name] == value
    shapes = [x.shape for x in flat(layer(*case.positional(case.tensors)))]
    for again in (
        case.layer_class.from_config(config),
        keras.saving.deserialize_keras_object(json.loads(json.dumps(keras.saving.serialize_keras_object(layer)))),
    ):
        assert type(again) is case.layer_class and again.get_config() == layer.get_config()
        assert [x.shape for x in flat(again(*case.positional(case.tensors)))] == shapes
        assert [w.shape for w in again.weights] == [w.shape for w in layer.weights]


@every_case
def test_saved_and_loaded(case, tmp_path):
    """In a functional model, a .keras file brings back every weight, without a warning about one that was skipped; the
    layer is called symbolically on the way."""
    layer = case.make()
    inputs = [keras.Input(x.shape[1:], batch_size=x.shape[0], dtype=str(x.dtype)) for x in case.tensors]
    symbolic = layer(*case.positional(inputs))
    model = keras.Model(inputs, symbolic)
    randomized(layer)
    concrete = layer(*case.positional(case.tensors))
    assert [x.shape for x in keras.tree.flatten(symbolic)] == [x.shape for x in keras.tree.flatten(concrete)]
    assert {type(x) for x in keras.tree.flatten(symbolic)} == {keras.KerasTensor}
    path = tmp_path / "model.keras"
    model.save(path)
    loaded = keras.models.load_model(path)
    outputs = model(case.tensors)
    assert_same(outputs, concrete)
    assert_same(loaded(case.tensors), outputs, 0)
    for one, other in zip(loaded.weights, model.weights, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("model")])
def test_the_model_itself_saved_and_loaded(name, tmp_path):
    """The subclassed model, built by a call through either door."""
    case = CASES[name]
    for door, call in enumerate((lambda m: m((INP, TAR)), lambda m: m(*case.positional(case.tensors)))):
        model = case.make()
        call(model)
        randomized(model)
        model.save(tmp_path / f"{door}.keras")
        loaded = keras.models.load_model(tmp_path / f"{door}.keras")
        assert len(loaded.trainable_variables) == len(model.trainable_variables)
        assert_same(loaded((INP, TAR)), model((INP, TAR)), 0)
        model.save_weights(tmp_path / f"{door}.weights.h5")
        fresh = case.make()
        fresh.build((None, None), (None, None))
        fresh.load_weights(tmp_path / f"{door}.weights.h5")
        assert_same(fresh((INP, TAR)), model((INP, TAR)), 0)


@every_case
def test_eager_graph_and_compiled_agree(case):
    layer = case.make()
    tensors = [tf.constant(x) for x in case.tensors]
    layer(*case.positional(tensors))
    randomized(layer)
    eager = layer(*case.positional(tensors))
    for jit_compile in (False, True):
        compiled = tf.function(lambda *tensors: layer(*case.positional(tensors)), jit_compile=jit_compile)
        assert_same(compiled(*tensors), eager, 2e-5)


@every_case
@pytest.mark.parametrize("policy", ["float32", "mixed_float16", "mixed_bfloat16"])
def test_precisions(case, policy):
    """Finite, weights in float32, outputs in the policy's type, and logits in float32 whatever it is."""
    layer = case.make(dtype=policy)
    outputs = layer(*case.positional(case.tensors))
    computed = keras.DTypePolicy(policy).compute_dtype
    leaves = keras.tree.flatten(outputs)
    logits = 1 if case.layer_class is Transformer else 0
    assert all(leaf.dtype == "float32" for leaf in leaves[:logits])
    assert all(leaf.dtype == computed for leaf in leaves[logits:])
    assert all(np.isfinite(x).all() for x in flat(outputs))
    assert all(w.dtype == "float32" for w in layer.trainable_variables)
    wanted = case.make()(*case.positional(case.tensors))
    assert_same(outputs, wanted, {"float32": 1e-6, "mixed_float16": 0.02, "mixed_bfloat16": 0.15}[policy])


@every_case
@pytest.mark.parametrize("policy", ["mixed_bfloat16", "float64"])
def test_a_local_policy_reaches_every_layer(case, policy):
    """Down to the Dense layers inside the Sequential of the feed-forward network, which does not hand its own on."""
    layer = case.make(dtype=policy)
    layer(*case.positional(case.tensors))
    below = [inner for inner in all_layers(layer) if not isinstance(inner, keras.Sequential | keras.layers.InputLayer)]
    assert {type(inner) for inner in below} >= {case.layer_class}
    if case.layer_class is not PositionalEncoding:
        assert sum(isinstance(inner, keras.layers.Dense) for inner in below) >= 4
    assert {inner.dtype_policy.name for inner in below} == {policy}
    assert {w.dtype for w in layer.trainable_variables} <= {keras.DTypePolicy(policy).variable_dtype}
    assert keras.config.dtype_policy().name == "float32"


@pytest.mark.parametrize(
    "case", [c for n, c in CASES.items() if n != "positions"], ids=[n for n in CASES if n != "positions"]
)
def test_training_by_position(case):
    """`True` among the tensors: dropout where there is some, the same numbers where there is none."""
    layer = case.make()
    still = layer(*case.positional(case.tensors, False))
    trained = layer(*case.positional(case.tensors, True))
    assert_same(layer(*case.positional(case.tensors, None)), still, 0)
    if case.drops:
        assert np.abs(flat(trained)[0] - flat(still)[0]).max() > 1e-2
    else:
        assert_same(trained, still, 0)
    graph = tf.function(lambda *tensors: layer(*case.positional(tensors, True)))(*case.tensors)
    if case.drops:
        assert np.abs(flat(graph)[0] - flat(still)[0]).max() > 1e-2
    else:
        assert_same(graph, still)


LOAD_AND_GO_ON = """
import sys, warnings
warnings.simplefilter("error", UserWarning)
import keras
import numpy as np
import keras_transformer

folder = sys.argv[1]
data = np.load(folder + "/data.npz")
model = keras.models.load_model(folder + "/model.keras")
np.testing.assert_allclose(model((data["inp"], data["tar"])), data["logits"], atol=1e-6)
schedule = model.optimizer._learning_rate
assert type(schedule) is keras_transformer.CustomSchedule, schedule
np.testing.assert_allclose(float(schedule(10)), float(data["rate"]), rtol=1e-6)
assert int(model.optimizer.iterations) == 2
history = model.fit((data["inp"], data["tar"]), data["real"], batch_size=2, epochs=3, shuffle=False, verbose=0).history
for name in ("loss", "token_accuracy"):
    np.testing.assert_allclose(history[name], data[name], atol=1e-5)
assert int(model.optimizer.iterations) == 5
print("went on")
"""


def test_a_saved_model_goes_on_in_a_new_process(tiny, tmp_path):
    """S2, https://github.com/tensorflow/text/issues/1091, https://github.com/tensorflow/tensorflow/issues/36328,
    https://github.com/keras-team/keras-hub/issues/219, and O3,
    https://github.com/bryanlimy/tf2-transformer-chatbot/issues/12, https://github.com/ncbi/AIONER/issues/5: compiled
    with the schedule, the loss and the accuracy, saved in mid-training, loaded where nothing else is known: the same
    logits, the same rate at step 10, and `fit` goes on with the losses it would have had here; no UserWarning."""
    model = tiny(num_layers=1)
    schedule = CustomSchedule(16, 30)
    model.compile(keras.optimizers.Adam(schedule, 0.9, 0.98), loss=loss_function, metrics=[TokenAccuracy()])
    real = np.array([[6, 7, 3, 0], [8, 9, 5, 3]])
    model.fit((INP, TAR), real, batch_size=2, epochs=2, shuffle=False, verbose=0)
    model.save(tmp_path / "model.keras")
    data = {"inp": INP, "tar": TAR, "real": real, "logits": model((INP, TAR)), "rate": schedule(10)}
    fit = model.fit((INP, TAR), real, batch_size=2, epochs=3, shuffle=False, verbose=0)
    np.savez(tmp_path / "data.npz", **data, **fit.history)
    done = subprocess.run(
        [sys.executable, "-c", LOAD_AND_GO_ON, str(tmp_path)],
        capture_output=True,
        text=True,
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "went on"
    assert "UserWarning" not in done.stderr
