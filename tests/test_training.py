"""The step, the loop, its checkpoints: what is learnt, what is kept when the process is killed."""

import json
import os
import signal
import subprocess
import sys
import time

import keras
import numpy as np
import pytest

from keras_transformer import training
from keras_transformer.config import settings_from
from keras_transformer.data.pipeline import teacher_forcing
from keras_transformer.errors import DataError, UsageError
from keras_transformer.losses import TokenAccuracy, loss_function
from keras_transformer.schedule import CustomSchedule

LETTERS = [("".join("abcdefghij"[(i * k + 1) % 10] + " " for k in range(1, 4 + i % 3)).strip()) for i in range(1, 25)]
PAIRS = [(letters, letters.translate(str.maketrans("abcdefghij", "0123456789"))) for letters in LETTERS]


@pytest.fixture
def files(tmp_path):
    """Letters and the digits they stand for, as two files."""
    for side, name in enumerate(("letters", "digits")):
        (tmp_path / name).write_text("".join(pair[side] + "\n" for pair in PAIRS), encoding="utf-8")
    return [str(tmp_path / "letters"), str(tmp_path / "digits")]


def small(files, **changes):
    return settings_from(
        {
            "model": {
                "num_layers": 1, "d_model": 16, "num_heads": 2, "dff": 32, "rate": 0.1, "pe_input": 20, "pe_target": 8,
            },
            "data": {"train": files, "dev": files, "vocab_size": 40},
            "training": {
                "max_steps": 12, "tokens_per_batch": 60, "warmup_steps": 20,
                "log_every": 1, "evaluate_every": 6, "checkpoint_every": 3,
                **changes,
            },
        },
        "test",
    )  # fmt: skip


def figures(run_dir, name="loss"):
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return {record["step"]: record[name] for record in map(json.loads, lines) if name in record}


def test_a_run_folder_holds_all_that_the_run_is(tmp_path, files):
    run_dir = tmp_path / "run"
    assert training.train(small(files), run_dir) is None
    assert {path.name for path in run_dir.iterdir()} == {
        "settings.yaml", "tokenizer", "checkpoints", "best.keras", "metrics.jsonl", "tensorboard",
    }  # fmt: skip
    assert list(figures(run_dir)) == list(range(1, 13))
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "dev_bleu" in line] == [6, 12, 12]  # the last is that of the mean
    rates = figures(run_dir, "learning_rate")
    np.testing.assert_allclose(rates[12], float(CustomSchedule(16, 20)(12)), rtol=1e-6)
    assert [path.name for path in sorted((run_dir / "checkpoints").iterdir())] == [
        f"step-{step:08d}.npz" for step in (3, 6, 9, 12)
    ]


def test_a_finished_run_is_left_alone_and_goes_on_with_more_steps(tmp_path, files):
    """T3, https://github.com/keras-team/keras/issues/20712: the same command again trains nothing."""
    run_dir = tmp_path / "run"
    training.train(small(files), run_dir)
    before = (run_dir / "metrics.jsonl").read_bytes()
    assert training.train(small(files), run_dir) is None
    assert (run_dir / "metrics.jsonl").read_bytes() == before
    training.train(small(files, max_steps=15), run_dir)
    assert list(figures(run_dir)) == list(range(1, 16))


def test_patience_and_the_best_by_loss(tmp_path, files, monkeypatch):
    """Dev losses of 5, 4, 6, 6, 6: with patience 3 it stops at the fifth measure; the best was the second.

    Told to go on with more patience, it goes on; with as much as before, nothing is left to do.
    """
    losses = iter([5.0, 4.0, 6.0, 6.0, 6.0, 6.0])
    measure = training.DevSet.measure

    def worse(self):
        values, scores = measure(self)
        return {**values, "dev_loss": next(losses)}, scores

    monkeypatch.setattr(training.DevSet, "measure", worse)
    settings = small(files, max_steps=60, evaluate_every=2, patience=3, select="loss", average=0)
    training.train(settings, tmp_path / "run")
    assert max(figures(tmp_path / "run")) == 10
    best = keras.models.load_model(tmp_path / "run/best.keras", compile=False)
    assert list(figures(tmp_path / "run", "dev_loss")) == [2, 4, 6, 8, 10]
    training.train(settings, tmp_path / "run")
    assert max(figures(tmp_path / "run")) == 10
    training.train(small(files, max_steps=12, evaluate_every=2, patience=4, select="loss", average=0), tmp_path / "run")
    assert max(figures(tmp_path / "run")) == 12
    after = keras.models.load_model(tmp_path / "run/best.keras", compile=False)
    for one, other in zip(best.weights, after.weights, strict=True):
        np.testing.assert_array_equal(one, other)


def test_the_mean_of_the_last_checkpoints_is_tried(tmp_path, files):
    """It is measured; best.keras is the mean itself where that is the best, by hand from the checkpoints' arrays."""
    run_dir = tmp_path / "run"
    training.train(small(files, select="loss", average=2, evaluate_every=12), run_dir)
    kernels = []
    for step in (9, 12):
        with np.load(run_dir / f"checkpoints/step-{step:08d}.npz") as stored:
            [name] = [name for name in stored.files if name.endswith("encoder/enc_layer1/mha/wq/kernel")]
            kernels.append(stored[name])
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    single, mean = [line["dev_loss"] for line in lines if "dev_loss" in line]
    assert single != mean
    best = keras.models.load_model(run_dir / "best.keras", compile=False)
    expected = (kernels[0] + kernels[1]) / 2 if mean < single else kernels[1]
    np.testing.assert_allclose(best.encoder.enc_layers[0].mha.wq.kernel, expected, rtol=1e-6)


def test_average_writes_the_mean_beside_the_run(tmp_path, files):
    """Of the last 2 of 4 checkpoints by hand, to float32's rounding; of all by the setting. The run stays as it is."""
    run_dir = tmp_path / "run"
    training.train(small(files, average=0, evaluate_every=12), run_dir)
    kernels = []
    for step in (3, 6, 9, 12):
        with np.load(run_dir / f"checkpoints/step-{step:08d}.npz") as stored:
            [name] = [name for name in stored.files if name.endswith("encoder/enc_layer1/mha/wq/kernel")]
            kernels.append(stored[name])
    before = (run_dir / "best.keras").read_bytes()
    for last, expected in ((2, kernels[2:]), (None, kernels)):
        out = tmp_path / f"last {last}"
        assert len(training.average_checkpoints(run_dir, out, last)) == len(expected)
        assert {path.name for path in out.iterdir()} == {"settings.yaml", "tokenizer", "best.keras"}
        mean = keras.models.load_model(out / "best.keras", compile=False).encoder.enc_layers[0].mha.wq.kernel
        np.testing.assert_allclose(mean, np.mean(expected, 0), rtol=1e-6, atol=1e-9)
    assert (run_dir / "best.keras").read_bytes() == before
    for path in (run_dir / "checkpoints").iterdir():
        path.unlink()
    with pytest.raises(DataError, match="run: no checkpoints"):
        training.average_checkpoints(run_dir, tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_killed_and_resumed_equals_uninterrupted(tmp_path, files):
    """T1, https://github.com/joeynmt/joeynmt/pull/127: SIGKILL after step 4, the last checkpoint being step 3's.

    With dropout, batches from three epochs and Adam's moments, every later loss and rate is the uninterrupted run's to
    the bit, and so are the final weights.
    """
    training.train(small(files), tmp_path / "straight")
    run_dir = tmp_path / "killed"
    program = (
        "import sys, time\n"
        "from keras_transformer import training\n"
        "from keras_transformer.config import load_settings\n"
        "write = training.Recorder.write\n"
        "def slow(self, step, figures):\n"
        "    write(self, step, figures)\n"
        "    if step == 4: print('here', flush=True); time.sleep(600)\n"
        "training.Recorder.write = slow\n"
        "training.train(load_settings(sys.argv[1]), sys.argv[2])\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program, tmp_path / "straight" / "settings.yaml", run_dir],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
    )
    assert process.stdout.readline() == b"here\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    assert list(figures(run_dir)) == [1, 2, 3, 4]
    training.train(small(files), run_dir)
    for name in ("loss", "learning_rate", "dev_loss", "dev_bleu"):
        assert figures(run_dir, name) == figures(tmp_path / "straight", name)
    with (
        np.load(run_dir / "checkpoints/step-00000012.npz") as resumed,
        np.load(tmp_path / "straight/checkpoints/step-00000012.npz") as straight,
    ):
        assert resumed.files == straight.files
        for name in straight.files:
            np.testing.assert_array_equal(resumed[name], straight[name], err_msg=name)


def test_ctrl_c_ends_with_a_checkpoint(tmp_path, files, monkeypatch):
    """The signal comes during step 5: its checkpoint is written and the caller is told the signal."""
    write = training.Recorder.write

    def interrupt(self, step, values):
        write(self, step, values)
        if step == 5:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.01)

    monkeypatch.setattr(training.Recorder, "write", interrupt)
    assert training.train(small(files), tmp_path / "run") == signal.SIGINT
    assert (tmp_path / "run/checkpoints/step-00000005.npz").exists()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_settings_that_would_make_it_another_run_are_refused(tmp_path, files):
    run_dir = tmp_path / "run"
    training.train(small(files, max_steps=3), run_dir)
    with pytest.raises(UsageError, match="begun with training.warmup_steps=20, now it is 30"):
        training.train(small(files, warmup_steps=30), run_dir)


def test_a_folder_of_something_else_is_refused(tmp_path, files):
    (tmp_path / "run").mkdir()
    (tmp_path / "run/thesis.tex").write_text("years of work")
    with pytest.raises(UsageError, match="not empty and no run folder"):
        training.train(small(files), tmp_path / "run")
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["thesis.tex"]


def test_bad_text_is_refused_before_anything_is_written(tmp_path, files):
    """D4, https://github.com/modernmt/modernmt/issues/245: both files and both counts are named."""
    (tmp_path / "digits").write_text("1\n2\n3\n4\n")
    with pytest.raises(DataError, match=r"letters has 24 lines, .*digits has 4"):
        training.train(small(files), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.parametrize("direction", ["letters to digits", "digits to letters"])
def test_learns_the_direction_that_was_asked_for(tmp_path, files, direction):
    """D12, https://github.com/keras-team/keras-io/pull/1997: ten pairs overfitted, from the settings and by fit()."""
    from keras_transformer.data.pipeline import encode_pairs, token_batches
    from keras_transformer.translator import Translator, TranslatorModule, load_run

    if direction == "digits to letters":
        files.reverse()
    settings = settings_from(
        {
            "model": {"num_layers": 1, "d_model": 32, "num_heads": 4, "dff": 64, "rate": 0.0},
            "data": {"train": files, "dev": files, "vocab_size": 40},
            "training": {"max_steps": 400, "tokens_per_batch": 200, "warmup_steps": 100, "evaluate_every": 400},
        },
        "test",
    )
    training.train(settings, tmp_path / "run")
    side = 0 if direction == "letters to digits" else 1
    sources, targets = [pair[side] for pair in PAIRS], [pair[1 - side] for pair in PAIRS]
    assert Translator.load(tmp_path / "run").translate(sources) == targets

    _, tokenizers = load_run(tmp_path / "run")
    model = training.make_model(settings.model, tokenizers)
    model.compile(keras.optimizers.Adam(0.003), loss_function, metrics=[TokenAccuracy()])
    corpus = encode_pairs(list(zip(sources, targets, strict=True)), tokenizers, 256, 256, "train")
    batches = token_batches(corpus, 200, seed=1).map(teacher_forcing)
    history = model.fit(batches, epochs=1, steps_per_epoch=300, shuffle=False, verbose=0)
    assert history.history["token_accuracy"][-1] > 0.5  # over the whole epoch, its beginning included
    module = TranslatorModule(model, tokenizers, settings.decoding)
    assert Translator(module, settings.decoding).translate(sources) == targets
