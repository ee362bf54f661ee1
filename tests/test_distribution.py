"""Two logical CPUs, and two processes over loopback, against one device with the same text in one batch."""

import json
import os
import socket
import subprocess
import sys
import time

import keras
import numpy as np
import pytest
from test_training import PAIRS, figures, small

from keras_transformer import CustomSchedule, Transformer, distribution
from keras_transformer.config import settings_yaml
from keras_transformer.errors import UsageError
from keras_transformer.step import make_train_step

STEPS = 20
KINDS = [("sgd", 1), ("adam", 1), ("sgd", 2)]  # the optimizer, and batches of each replica in an update
# Trains a model on two replicas on batches of unequal size, and writes what came out, for each of KINDS.
PROGRAM = """
import itertools
import sys
import keras, numpy as np, tensorflow as tf
kind, out = sys.argv[1:]
if kind == "mirrored":
    [cpu] = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
else:
    from keras_transformer.distribution import make_strategy
    strategy = make_strategy()
from test_distribution import KINDS, STEPS, batches, make
from keras_transformer.distribution import distribute, spread_seeds
from keras_transformer.step import IDS, make_accumulated_step, make_train_step
if kind == "mirrored":  # each device drops other units
    with strategy.scope():
        dropout = keras.layers.Dropout(0.5)
    spread_seeds(strategy, dropout.variables)
    outputs = strategy.run(lambda: dropout(tf.ones(100), training=True))
    one, other = (output.numpy() for output in strategy.experimental_local_results(outputs))
    assert 20 < np.count_nonzero(one != other) < 80
def own(worker, workers, replicas):
    mine = [b for i, b in enumerate(batches()) if i // replicas % workers == worker]
    return tf.data.Dataset.from_generator(lambda: iter(mine), output_signature=(IDS, IDS))
arrays = {}
for name, in_update in KINDS:
    with strategy.scope():
        model, optimizer = make(name)
    loss = keras.metrics.Mean()
    data = distribute(strategy, own)
    options = {"label_smoothing": 0.1, "train_loss": loss, "clip_norm": 1.0, "signature": data.element_spec}
    with strategy.scope():
        train_step = make_train_step(model, optimizer, **options)
        accumulated_step = make_accumulated_step(model, optimizer, **options)
    if in_update == 1:
        losses = [train_step(inp, tar) for inp, tar in data]
        assert train_step.experimental_get_tracing_count() == 1
    else:
        data = iter(data)
        losses = [accumulated_step(itertools.islice(data, in_update)) for _ in range(STEPS // in_update)]
    key = f"{name} {in_update}"
    arrays[key + " losses"] = [float(loss) for loss in losses]
    arrays[key + " tokens"] = float(loss.count)
    arrays |= {f"{key} weights {i:03d}": variable.numpy() for i, variable in enumerate(model.variables)}
np.savez(out, **arrays)
"""


def batches():
    """For each of STEPS updates one batch for each replica, with other numbers of rows and tokens."""
    rng = np.random.default_rng(0)
    for i in range(2 * STEPS):
        rows = 0 if i == 2 * STEPS - 1 else 2 + i % 5
        inp = rng.integers(4, 40, (rows, 7)).astype("int32")
        tar = rng.integers(4, 40, (rows, 6)).astype("int32")
        tar[:, 0] = 2
        tar[: rows // 2, 3 + i % 3 :] = 0
        inp[: i % 2, 5:] = 0
        yield inp, tar


def make(name):
    import random

    random.seed(0)
    model = Transformer(2, 16, 2, 32, 40, 40, 60, 60, rate=0.0)
    model.build((None, None), (None, None))
    adam = keras.optimizers.Adam(CustomSchedule(16, 4000), 0.9, 0.98, 1e-9)
    optimizer = keras.optimizers.SGD(0.1) if name == "sgd" else adam
    optimizer.build(model.trainable_variables)
    return model, optimizer


def on_one_device(name, in_update):
    """Losses, number of tokens and weights with all batches of each update in one."""
    model, optimizer = make(name)
    loss = keras.metrics.Mean()
    step = make_train_step(model, optimizer, 0.1, loss, clip_norm=1.0)
    everything = list(batches())
    of_update = [everything[i : i + 2 * in_update] for i in range(0, 2 * STEPS, 2 * in_update)]
    whole = [map(np.concatenate, zip(*some, strict=True)) for some in of_update]
    return [float(step(*batch)) for batch in whole], float(loss.count), model.get_weights()


def free_ports(number):
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(number)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def start_workers(command):
    """Two processes of one job: `command` of the worker's number, with TF_CONFIG."""
    cluster = {"worker": [f"127.0.0.1:{port}" for port in free_ports(2)]}
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONPATH": os.path.dirname(__file__)}
    return [
        subprocess.Popen(
            [sys.executable, *map(str, command(worker))],
            env={
                **environment,
                "TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": "worker", "index": worker}}),
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            encoding="utf-8",
        )
        for worker in (0, 1)
    ]


@pytest.mark.parametrize("kind", ["mirrored", "workers"])
def test_two_replicas_train_as_one_device(tmp_path, kind):
    """X3, https://github.com/keras-team/keras/issues/19308 and https://github.com/keras-team/keras/issues/16285.

    And X4, https://github.com/OpenNMT/OpenNMT-tf/issues/544: the last batch of one replica has no rows. Updates of one
    and of two batches of each replica. Losses to 1e-5;
    the weights too with SGD. Adam divides rounding noise by itself where a gradient is almost 0.
    """
    if kind == "mirrored":
        environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONPATH": os.path.dirname(__file__)}
        command = [sys.executable, "-c", PROGRAM, kind, tmp_path / "0.npz"]
        result = subprocess.run(command, env=environment, capture_output=True, text=True, encoding="utf-8")
        assert result.returncode == 0, result.stderr
        outputs = [tmp_path / "0.npz"]
    else:
        outputs = [tmp_path / "0.npz", tmp_path / "1.npz"]
        for worker in start_workers(lambda worker: ["-c", PROGRAM, kind, outputs[worker]]):
            _, errors = worker.communicate(timeout=300)
            assert worker.returncode == 0, errors
    for name, in_update in KINDS:
        losses, tokens, weights = on_one_device(name, in_update)
        for output in outputs:
            with np.load(output) as found:
                key = f"{name} {in_update}"
                np.testing.assert_allclose(found[f"{key} losses"], losses, atol=1e-5)
                assert found[f"{key} tokens"] == tokens
                for i, weight in enumerate(weights if name == "sgd" else []):
                    np.testing.assert_allclose(found[f"{key} weights {i:03d}"], weight, atol=1e-5)


@pytest.fixture
def settings_file(tmp_path):
    """Of a small run on two files."""
    for side, name in enumerate(("letters", "digits")):
        (tmp_path / name).write_text("".join(pair[side] + "\n" for pair in PAIRS), encoding="utf-8")
    files = [str(tmp_path / "letters"), str(tmp_path / "digits")]
    settings = small(files, max_steps=1000, checkpoint_every=10, evaluate_every=1000, log_every=10)
    (tmp_path / "settings.yaml").write_text(settings_yaml(settings), encoding="utf-8")
    return tmp_path / "settings.yaml"


@pytest.mark.slow
def test_a_lost_worker_ends_the_job_which_goes_on_when_started_again(tmp_path, settings_file):
    """One of two is killed: the other says so and ends; both started again finish the run from the last checkpoint."""
    run_dir = tmp_path / "run"

    def command(steps):
        arguments = ["train", settings_file, "--run-dir", run_dir, "--set", f"training.max_steps={steps}"]
        return lambda worker: ["-m", "keras_transformer", *arguments]

    chief, other = start_workers(command(1000))
    deadline = time.monotonic() + 200
    while not list(run_dir.glob("checkpoints/step-*.npz")) and time.monotonic() < deadline:
        time.sleep(0.2)
    other.kill()
    other.communicate()
    _, errors = chief.communicate(timeout=200)
    assert chief.returncode == 1
    assert "error: another worker of this job is gone" in errors.splitlines()[-1]
    reached = max(int(path.stem[5:]) for path in run_dir.glob("checkpoints/step-*.npz"))
    assert 10 <= reached < 1000

    workers = start_workers(command(reached + 20))
    for worker in workers:
        _, errors = worker.communicate(timeout=200)
        assert worker.returncode == 0, errors
        assert f"step {reached} of {reached + 20}" in errors
    assert max(figures(run_dir)) == reached + 20


def test_a_bad_tf_config_is_one_line(monkeypatch):
    monkeypatch.setenv("TF_CONFIG", "{cluster")
    with pytest.raises(UsageError, match="^TF_CONFIG: "):
        distribution.make_strategy()


UNDER_A_STRATEGY = """
import sys
import tensorflow as tf
[cpu] = tf.config.list_physical_devices("CPU")
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
from keras_transformer.config import load_settings
from keras_transformer.training import train
train(load_settings(sys.argv[1], sys.argv[3:]), sys.argv[2], tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]))
"""


@pytest.mark.slow
def test_a_run_on_two_devices_goes_on_bit_for_bit(tmp_path, settings_file):
    """With dropout, and two batches of each device in an update: 6 updates, stopped after 4 or not."""

    def train(name, *changes):
        arguments = [sys.executable, "-c", UNDER_A_STRATEGY, settings_file, tmp_path / name, *changes]
        result = subprocess.run(
            arguments, env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}, capture_output=True, text=True, encoding="utf-8"
        )
        assert result.returncode == 0, result.stderr

    train("straight", "training.accumulate=2", "training.max_steps=6")
    train("stopped", "training.accumulate=2", "training.max_steps=4", "training.average=0")
    train("stopped", "training.accumulate=2", "training.max_steps=6")
    name = "checkpoints/step-00000006.npz"
    with np.load(tmp_path / "straight" / name) as straight, np.load(tmp_path / "stopped" / name) as stopped:
        for key in straight.files:
            if key != "state.json":
                np.testing.assert_array_equal(straight[key], stopped[key], err_msg=key)
        assert json.loads(str(straight["state.json"]))["batches"] == 6 * 2 * 2
