"""Checkpoints: everything comes back, damage is passed over, other models are refused."""

import logging
import re

import keras
import numpy as np
import pytest

from keras_transformer.checkpoints import checkpoint_files, mean_of_checkpoints, restore_newest, save_checkpoint
from keras_transformer.errors import DataError

KERNEL, ITERATIONS, SEED = [[1.5, -2.0, 3e-9]], 7, [2**32 - 1, 0]


def make_variables(kernel=((0.0, 0.0, 0.0),), name="kernel"):
    return [
        keras.Variable(kernel, dtype="float32", name=name),
        keras.Variable(0, dtype="int64", name="iterations"),
        keras.Variable([0, 0], dtype="uint32", name="seed"),
    ]


def save(folder, step, keep=3):
    variables = make_variables()
    for variable, value in zip(variables, (KERNEL, ITERATIONS + step, SEED), strict=True):
        variable.assign(value)
    save_checkpoint(folder, variables, {"step": step, "best_bleu": 12.5}, keep)


def test_round_trip(tmp_path):
    """Values, types and the state of the run are exactly what they were."""
    save(tmp_path / "checkpoints", 20)
    variables = make_variables()
    assert restore_newest(tmp_path / "checkpoints", variables) == {"step": 20, "best_bleu": 12.5}
    for variable, value in zip(variables, (KERNEL, ITERATIONS + 20, SEED), strict=True):
        np.testing.assert_array_equal(variable.numpy(), np.array(value, variable.dtype))


def test_no_checkpoint(tmp_path):
    assert restore_newest(tmp_path, make_variables()) is None
    assert restore_newest(tmp_path / "none", make_variables()) is None


def test_keeps_the_newest(tmp_path):
    """By step, not by name as text: 100 is newer than 20."""
    for step in (3, 20, 100):
        save(tmp_path, step, keep=2)
    assert [path.name for path in checkpoint_files(tmp_path)] == ["step-00000020.npz", "step-00000100.npz"]
    assert len(list(tmp_path.iterdir())) == 2
    assert restore_newest(tmp_path, make_variables())["step"] == 100


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[: len(data) // 2],
        lambda data: data[:-1],
        lambda data: b"",
        lambda data: b"no checkpoint",
        lambda data: data.replace(np.float32(KERNEL).tobytes(), np.float32([[1.5, -2.0, 4.0]]).tobytes()),
        lambda data: re.sub(rb"(PK\x01\x02..).", b"\\1\xff", data, flags=re.DOTALL),
        lambda data: re.sub(rb"(PK\x01\x02....).", b"\\1\x01", data, flags=re.DOTALL),
        lambda data: re.sub(rb"(PK\x01\x02......).", b"\\1\x08", data, flags=re.DOTALL),
    ],
    ids=["half", "all but a byte", "empty", "something else", "another number", "a later zip", "encrypted", "packed"],
)
def test_damaged_one_is_passed_over(tmp_path, caplog, damage):
    """The run goes on from the one before, and says so."""
    for step in (10, 20):
        save(tmp_path, step)
    newest = tmp_path / "step-00000020.npz"
    assert damage(newest.read_bytes()) != newest.read_bytes()
    newest.write_bytes(damage(newest.read_bytes()))
    variables = make_variables()
    with caplog.at_level(logging.WARNING, "keras_transformer"):
        assert restore_newest(tmp_path, variables)["step"] == 10
    assert variables[1].numpy() == ITERATIONS + 10
    assert len(caplog.messages) == 1 and caplog.messages[0].startswith(f"{newest}: damaged, passed over (")


def test_all_damaged(tmp_path):
    save(tmp_path, 10)
    (tmp_path / "step-00000010.npz").write_bytes(b"")
    assert restore_newest(tmp_path, make_variables()) is None


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        (lambda: make_variables([[0.0, 0.0]]), r"0000 kernel is \(1, 3\), the model's is \(1, 2\)"),
        (lambda: make_variables(name="weights"), r"3 variables, the model has 3; they differ in '0000 kernel'"),
        (lambda: make_variables()[:2], r"3 variables, the model has 2; they differ in '0002 seed'"),
        (lambda: make_variables()[::-1], r"they differ in '0000 kernel'"),
    ],
    ids=["shape", "name", "number", "order"],
)
def test_other_variables_are_refused(tmp_path, variables, message):
    """And none is changed, the first that still fits included."""
    save(tmp_path, 10)
    given = variables()
    before = [variable.numpy() for variable in given]
    with pytest.raises(DataError, match=f"step-00000010.npz: .*{message}"):
        restore_newest(tmp_path, given)
    for variable, value in zip(given, before, strict=True):
        np.testing.assert_array_equal(variable.numpy(), value)


def test_a_model_and_its_optimizer(tmp_path, tiny):
    """Every variable of both, seeds and moments too, none left out."""

    def make():
        model = tiny(num_layers=1, name="transformer")
        model.build((None, None), (None, None))
        optimizer = keras.optimizers.Adam(name="adam")
        optimizer.build(model.trainable_variables)
        return [*model.variables, *optimizer.variables]

    saved, fresh = make(), make()
    for number, variable in enumerate(saved):
        variable.assign(np.full(variable.shape, number + 1, variable.dtype))
    save_checkpoint(tmp_path, saved, {"step": 3}, keep=1)
    restore_newest(tmp_path, fresh)
    assert len(fresh) == len(saved) > 100
    for number, variable in enumerate(fresh):
        assert np.all(variable.numpy() == number + 1)


def test_the_mean_of_checkpoints(tmp_path):
    """Of (1, 3) and (2, 7): (1.5, 5). Between and after them is what has no mean: dropout's seeds, the updates."""

    def make(kernel, seed, bias):
        return [
            keras.Variable(kernel, dtype="float32", name="kernel"),
            keras.Variable(seed, dtype="uint32", name="seed", trainable=False),
            keras.Variable(bias, dtype="float32", name="bias"),
        ]

    for step, kernel in ((1, [1.0, 3.0]), (2, [2.0, 7.0])):
        iterations = keras.Variable(step, dtype="int64", name="iterations", trainable=False)
        variables = [*make(kernel, [2**32 - 1, step], [step]), iterations]
        save_checkpoint(tmp_path, variables, {"step": step}, keep=5)
    paths, (kernel, bias) = mean_of_checkpoints(tmp_path, 5, make([0.0, 0.0], [0, 0], [0]))
    assert paths == checkpoint_files(tmp_path)
    np.testing.assert_array_equal(kernel, [1.5, 5.0])
    np.testing.assert_array_equal(bias, [1.5])


def test_the_mean_of_a_checkpoint_and_itself_is_itself(tmp_path, rng):
    """T5, https://github.com/OpenNMT/OpenNMT-tf/issues/161: to the bit, as often as it is taken."""
    kernel = keras.Variable(rng.normal(size=(50, 50)), dtype="float32", name="kernel")
    for step in range(7):
        save_checkpoint(tmp_path, [kernel], {"step": step}, keep=7)
    _, [mean] = mean_of_checkpoints(tmp_path, 7, [kernel])
    np.testing.assert_array_equal(mean, kernel.numpy())


def test_checkpoints_of_two_models_have_no_mean(tmp_path, tiny):
    """T5, https://github.com/OpenNMT/OpenNMT-tf/issues/161: refused by the variable's name and both shapes."""
    models = [tiny(num_layers=1, d_model=size, name="transformer") for size in (16, 32)]
    for step, model in enumerate(models, 1):
        model.build((None, None), (None, None))
        save_checkpoint(tmp_path, model.variables, {"step": step}, keep=5)
    message = r"step-00000002.npz: 0000 \S*embedding\S* is \(40, 32\), the model's is \(40, 16\)"
    with pytest.raises(DataError, match=message):
        mean_of_checkpoints(tmp_path, 5, models[0].variables)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_one_that_diverged_has_no_mean(tmp_path, value):
    """T5, https://github.com/OpenNMT/OpenNMT-tf/issues/161: the file is named, and the variable."""
    for step, kernel in ((1, [1.0, 2.0]), (2, [1.0, value])):
        save_checkpoint(tmp_path, [keras.Variable(kernel, name="kernel")], {"step": step}, keep=5)
    with pytest.raises(DataError, match="step-00000002.npz: 0000 kernel holds NaN or infinity"):
        mean_of_checkpoints(tmp_path, 5, [keras.Variable([0.0, 0.0], name="kernel")])


def test_the_mean_passes_over_a_damaged_one(tmp_path, caplog):
    """T5, https://github.com/OpenNMT/OpenNMT-tf/issues/161: of the two newest that can be read, 1 and 3, it is 2."""
    for step in range(1, 5):
        save_checkpoint(tmp_path, [keras.Variable([float(step)], name="kernel")], {"step": step}, keep=5)
    for step in (2, 4):
        (tmp_path / f"step-{step:08d}.npz").write_bytes(b"rubbish")
    paths, [mean] = mean_of_checkpoints(tmp_path, 2, [keras.Variable([0.0], name="kernel")])
    assert [path.stem[-1] for path in paths] == ["1", "3"] and mean == [2.0]
    assert sum("damaged, passed over" in message for message in caplog.messages) == 2


def test_a_damaged_newer_one_does_not_cost_the_one_just_written(tmp_path):
    """Gone on from 1 past the damaged 3, with one to be kept: 2 is it, and 3 waits to be written again."""
    for step in (1, 3):
        save(tmp_path, step)
    (tmp_path / "step-00000003.npz").write_bytes(b"rubbish")
    save(tmp_path, 2, keep=1)
    assert restore_newest(tmp_path, make_variables())["step"] == 2
    save(tmp_path, 3, keep=1)
    assert [path.stem[-1] for path in checkpoint_files(tmp_path)] == ["3"]


def test_what_a_killed_process_half_wrote_goes_with_the_next(tmp_path):
    """Whatever step it was of, which the run may never come to again."""
    (tmp_path / ".step-00000007.npz.unfinished-x").mkdir()
    (tmp_path / ".step-00000007.npz.unfinished-x" / "step-00000007.npz").write_bytes(b"half")
    save(tmp_path, 10)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000010.npz"]
