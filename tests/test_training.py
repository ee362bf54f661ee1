"""The step, the loop, its checkpoints: what is learnt, what is kept when the process is killed."""

import errno
import json
import logging
import os
import signal
import subprocess
import sys
import time

import keras
import numpy as np
import pytest

from keras_transformer import training
from keras_transformer.config import DecodingSettings, settings_from
from keras_transformer.data.pipeline import teacher_forcing
from keras_transformer.data.tokenizer import load_tokenizers
from keras_transformer.errors import DataError, UsageError
from keras_transformer.losses import TokenAccuracy, loss_function
from keras_transformer.report import best_measure, read_metrics
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
        "settings.yaml", "tokenizer", "corpus", "checkpoints", "best.keras", "metrics.jsonl", "tensorboard",
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


def test_every_measure_has_its_checkpoint(tmp_path, files):
    """A kill after it would leave the best model of updates that are no more."""
    training.train(small(files, max_steps=8, evaluate_every=4, checkpoint_every=3), tmp_path / "run")
    steps = [int(path.stem[-2:]) for path in sorted((tmp_path / "run/checkpoints").iterdir())]
    assert steps == [3, 4, 6, 8]


@pytest.mark.parametrize("mean", [3.0, 6.0])
def test_patience_and_the_best_by_loss(tmp_path, files, monkeypatch, mean):
    """Dev losses of 5, 4, 6, 6, 6: with patience 3 it stops at the fifth measure; the best was the second.

    The mean of checkpoints, better or worse, neither prolongs it nor ends it sooner: told to go on with as much
    patience, nothing is left to do, and with more, it goes on.
    """
    losses = iter([5.0, 4.0, 6.0, 6.0, 6.0, mean, 6.0, mean])
    measure = training.DevSet.measure

    def worse(self):
        values, *rest = measure(self)
        return {**values, "dev_loss": next(losses)}, *rest

    monkeypatch.setattr(training.DevSet, "measure", worse)
    settings = small(files, max_steps=60, evaluate_every=2, patience=3, select="loss", average=2)
    training.train(settings, tmp_path / "run")
    assert max(figures(tmp_path / "run")) == 10
    best = keras.models.load_model(tmp_path / "run/best.keras", compile=False)
    assert list(figures(tmp_path / "run", "dev_loss")) == [2, 4, 6, 8, 10]
    training.train(settings, tmp_path / "run")
    assert max(figures(tmp_path / "run")) == 10
    training.train(small(files, max_steps=60, evaluate_every=2, patience=4, select="loss", average=2), tmp_path / "run")
    assert max(figures(tmp_path / "run")) == 12
    after = keras.models.load_model(tmp_path / "run/best.keras", compile=False)
    for one, other in zip(best.weights, after.weights, strict=True):
        np.testing.assert_array_equal(one, other)


def test_the_mean_of_the_last_checkpoints_is_tried(tmp_path, files, monkeypatch, caplog):
    """It is the best here: best.keras is the mean of three checkpoints, by hand from their arrays.

    One that was damaged, step 6's, is passed over for the one before it. metrics.jsonl tells the mean from the run.
    """
    caplog.set_level(logging.INFO, "keras_transformer")
    losses = iter([5.0, 4.0])
    measure = training.DevSet.measure

    def better(self):
        values, *rest = measure(self)
        if not list(figures(tmp_path / "run", "average")):
            (tmp_path / "run/checkpoints/step-00000006.npz").write_bytes(b"PK")
        return {**values, "dev_loss": next(losses)}, *rest

    monkeypatch.setattr(training.DevSet, "measure", better)
    run_dir = tmp_path / "run"
    training.train(small(files, select="loss", average=3, evaluate_every=12), run_dir)
    kernels = []
    for step in (3, 9, 12):
        with np.load(run_dir / f"checkpoints/step-{step:08d}.npz") as stored:
            [name] = [name for name in stored.files if name.endswith("encoder/enc_layer1/mha/wq/kernel")]
            kernels.append(stored[name])
    assert figures(run_dir, "average") == {12: 3}
    assert caplog.messages[-1] == f"best by loss: mean of step-00000003 to step-00000012, in {run_dir}/best.keras"
    best = keras.models.load_model(run_dir / "best.keras", compile=False)
    np.testing.assert_allclose(best.encoder.enc_layers[0].mha.wq.kernel, sum(kernels) / 3, rtol=1e-6)


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


def interrupt(monkeypatch, number, at):
    """Have the signal come during step `at`."""
    write = training.Recorder.write

    def write_and_interrupt(self, step, values):
        write(self, step, values)
        if step == at:
            os.kill(os.getpid(), number)
            time.sleep(0.01)

    monkeypatch.setattr(training.Recorder, "write", write_and_interrupt)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_with_a_checkpoint_and_the_run_ends_as_if_undisturbed(tmp_path, files, monkeypatch, number):
    """During step 11 of 12: its checkpoint is written and the caller is told the signal.

    Gone on with, under `deterministic`, all that is kept at the end is the undisturbed run's, to the byte: the
    checkpoints, the last three of which are of steps 6, 9 and 12, and their mean.
    """
    settings = small(files, deterministic=True, keep_checkpoints=3, average=3)
    training.train(settings, tmp_path / "straight")
    before = signal.getsignal(number)
    with monkeypatch.context() as patched:
        interrupt(patched, number, at=11)
        assert training.train(settings, tmp_path / "run") == number
    assert signal.getsignal(number) is before
    assert (tmp_path / "run/checkpoints/step-00000011.npz").exists()
    training.train(settings, tmp_path / "run")
    kept = [sorted((tmp_path / name / "checkpoints").iterdir()) for name in ("straight", "run")]
    assert [[path.stem[-2:] for path in paths] for paths in kept] == [["06", "09", "12"]] * 2
    for straight, run in zip(*kept, strict=True):
        with np.load(straight) as one, np.load(run) as other:
            for name in one.files:
                np.testing.assert_array_equal(one[name], other[name], err_msg=name)
    for name in ("loss", "dev_loss", "dev_bleu", "average"):
        assert figures(tmp_path / "run", name) == figures(tmp_path / "straight", name)


def test_killed_before_its_first_checkpoint_it_begins_anew(tmp_path, files, monkeypatch):
    """D8, https://github.com/huggingface/tokenizers/issues/408: with the tokenizer of the text as it is by then."""
    run_dir = tmp_path / "run"
    with monkeypatch.context() as patched:
        patched.setattr(training.Trainer, "steps", lambda self, stop: sys.exit())
        with pytest.raises(SystemExit):
            training.train(small(files), run_dir)
    assert (run_dir / "tokenizer/joint.model").exists()
    for name in files:
        with open(name, "a", encoding="utf-8") as file:
            file.write("ж щ ю\n")
    training.train(small(files, max_steps=3), run_dir)
    [tokenizer] = set(load_tokenizers(run_dir / "tokenizer"))
    assert tokenizer.decode(tokenizer.encode(["ж щ ю"])) == [b"\xd0\xb6 \xd1\x89 \xd1\x8e"]


def test_a_second_process_is_refused_while_one_trains(tmp_path, files, monkeypatch):
    """It would delete what the first half wrote. When the first has ended, the next goes on."""
    steps, run_dir = training.Trainer.steps, tmp_path / "run"
    command = [sys.executable, "-m", "keras_transformer", "train", run_dir / "settings.yaml", "--run-dir", run_dir]
    results = []

    def meanwhile(self, stop):
        results.append(subprocess.run(command, capture_output=True, text=True, encoding="utf-8"))
        steps(self, stop)

    with monkeypatch.context() as patched:
        patched.setattr(training.Trainer, "steps", meanwhile)
        training.train(small(files, max_steps=3), run_dir)
    [result] = results
    assert result.returncode == 2
    assert result.stderr.splitlines()[-1].startswith(f"error: {run_dir}: another process trains here")
    training.train(small(files, max_steps=6), run_dir)
    assert list(figures(run_dir)) == list(range(1, 7))


def test_a_mean_that_is_the_best_stays_on_record(tmp_path, files, monkeypatch):
    """Gone on with and never better, the run's best.keras is that mean, and metrics.jsonl and the report say so."""
    losses = iter([5.0, 4.0, 6.0, 6.0])
    measure = training.DevSet.measure

    def worse(self):
        values, *rest = measure(self)
        return {**values, "dev_loss": next(losses)}, *rest

    monkeypatch.setattr(training.DevSet, "measure", worse)
    run_dir = tmp_path / "run"
    training.train(small(files, max_steps=3, select="loss"), run_dir)
    settings = small(files, max_steps=6, select="loss")
    training.train(settings, run_dir)
    best = best_measure(settings, read_metrics(run_dir / "metrics.jsonl"))
    assert (best["dev_loss"], best["step"], best["average"]) == (4.0, 3, 1)


def test_updates_that_are_not_finite_end_the_run(tmp_path, files, monkeypatch):
    """From the fifth on every loss is NaN: after max_skipped of them it ends and says what to try.

    The last checkpoint is from before; the same command, healed, goes on from it.
    """
    make_train_step = training.make_train_step

    def broken(model, optimizer, **options):
        step = make_train_step(model, optimizer, **options)
        return lambda inp, tar: step(inp, tar) if int(optimizer.iterations) < 4 else step(inp, poisoned(model, tar))

    def poisoned(model, tar):
        model.encoder.enc_layers[0].layernorm1.gamma.assign(np.full(16, np.nan))
        return tar

    monkeypatch.setattr(training, "make_train_step", broken)
    with pytest.raises(DataError, match=r"2 times in a row, up to update 6; .* Try a lower training.learning_rate"):
        training.train(small(files, max_skipped=2, evaluate_every=12), tmp_path / "run")
    assert [path.stem for path in sorted((tmp_path / "run/checkpoints").iterdir())] == ["step-00000003"]
    with pytest.raises(DataError, match=r"3 times in a row, up to update 7"):  # the last, if no sooner
        training.train(small(files, max_steps=7, max_skipped=3, evaluate_every=12), tmp_path / "other")
    monkeypatch.undo()
    training.train(small(files, max_skipped=2, evaluate_every=12), tmp_path / "run")
    losses = figures(tmp_path / "run")
    assert list(losses) == list(range(1, 13)) and np.isfinite(list(losses.values())).all()


def test_a_full_disk_leaves_the_checkpoint_before(tmp_path, files, monkeypatch):
    """The second checkpoint finds no room: one line says so, the first is untouched, and with room the run goes on."""
    savez, sizes = np.savez, []

    def full(path, **arrays):
        savez(path, **arrays)
        sizes.append(path.stat().st_size)
        if len(sizes) == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr(np, "savez", full)
    with pytest.raises(DataError, match="run: no space left on the disk"):
        training.train(small(files), tmp_path / "run")
    [path] = (tmp_path / "run/checkpoints").iterdir()
    assert (path.name, path.stat().st_size) == ("step-00000003.npz", sizes[0])
    training.train(small(files), tmp_path / "run")
    assert list(figures(tmp_path / "run")) == list(range(1, 13))


def test_a_learning_rate_with_which_little_is_learnt_is_warned_of(tmp_path, files, caplog):
    """The paper's, (16 * 20)^-0.5 = 0.056, is high, and 3 updates of 20 to warm up come to 0.0084."""

    def warnings():
        return [record.message for record in caplog.records if record.name.startswith("keras_transformer")]

    caplog.set_level(logging.WARNING, "keras_transformer")
    training.train(small(files, max_steps=3), tmp_path / "run")
    high, rising = warnings()
    assert high.startswith("with training.warmup_steps=20 the learning rate rises to 5.6e-02, which may be too high")
    assert rising.endswith("=20 is no less than training.max_steps=3: the learning rate only rises, to 8.4e-03")
    caplog.clear()
    training.train(small(files, max_steps=3, warmup_steps=2, learning_rate=0.002), tmp_path / "other")
    assert not warnings()


def test_init_from_what_is_no_run_is_refused(tmp_path, files):
    with pytest.raises(DataError, match=f"^{tmp_path}/nothing: no run folder"):
        training.train(small(files, init_from=str(tmp_path / "nothing")), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_init_from_begins_with_another_runs_model(tmp_path, files, monkeypatch):
    """With its tokenizer and all its weights; frozen parts keep them, the rest moves, shared embeddings included."""
    training.train(small(files), tmp_path / "base")
    base = keras.models.load_model(tmp_path / "base/best.keras", compile=False)
    steps, begun_with = training.Trainer.steps, []

    def look(self, stop):
        begun_with.extend(variable.numpy() for variable in self.model.trainable_variables)
        steps(self, stop)

    monkeypatch.setattr(training.Trainer, "steps", look)
    settings = small(files, init_from=str(tmp_path / "base"), frozen=["encoder"], average=0)
    training.train(settings, tmp_path / "run")
    tokenizers = [(tmp_path / name / "tokenizer/joint.model").read_bytes() for name in ("base", "run")]
    assert tokenizers[0] == tokenizers[1]
    moving = [v for v in base.trainable_variables if "/encoder/" not in v.path or "/embedding/" in v.path]
    for one, other in zip(moving, begun_with, strict=True):
        np.testing.assert_array_equal(one, other)
    tuned = keras.models.load_model(tmp_path / "run/best.keras", compile=False)
    for one, other in zip(base.trainable_variables, tuned.trainable_variables, strict=True):
        assert np.array_equal(one, other) != any(one is variable for variable in moving), one.path
    (tmp_path / "base").rename(tmp_path / "elsewhere")  # once begun, it needs the other run no more
    training.train(
        small(files, max_steps=13, init_from=str(tmp_path / "base"), frozen=["encoder"], average=0), tmp_path / "run"
    )


def test_checkpoints_of_which_none_can_be_read_are_refused(tmp_path, files):
    """To begin anew in the same folder would be to lose what may still be saved by hand."""
    training.train(small(files, max_steps=3), tmp_path / "run")
    for path in (tmp_path / "run/checkpoints").iterdir():
        path.write_bytes(b"PK")
    with pytest.raises(DataError, match="none of its checkpoints can be read"):
        training.train(small(files, max_steps=6), tmp_path / "run")


def test_auto_keeps_the_precision_that_a_run_was_begun_in(tmp_path, files, monkeypatch):
    monkeypatch.setattr(training, "fastest_precision", lambda: "mixed_float16")
    training.train(small(files, max_steps=3), tmp_path / "run")
    monkeypatch.setattr(training, "fastest_precision", lambda: "float32")
    training.train(small(files, max_steps=6), tmp_path / "run")
    with np.load(tmp_path / "run/checkpoints/step-00000006.npz") as stored:
        assert json.loads(str(stored["state.json"]))["precision"] == "mixed_float16"


def test_accumulated_batches_count_as_one_update(tmp_path, files):
    """Three updates of two batches: the schedule is at its third value, and the text six batches on."""
    training.train(small(files, max_steps=3, accumulate=2, checkpoint_every=1), tmp_path / "run")
    with np.load(tmp_path / "run/checkpoints/step-00000003.npz") as stored:
        state = json.loads(str(stored["state.json"]))
    assert (state["step"], state["batches"]) == (3, 6)
    rates = figures(tmp_path / "run", "learning_rate")
    np.testing.assert_allclose(rates[3], float(CustomSchedule(16, 20)(3)), rtol=1e-6)


@pytest.mark.parametrize("precision", ["mixed_bfloat16", "mixed_float16"])
def test_mixed_precision_trains_and_its_model_is_float32(tmp_path, files, precision):
    """X1, https://github.com/athena-team/athena/issues/77: every loss is finite, and it falls."""
    settings = small(files, precision=precision, max_steps=40, log_every=10, evaluate_every=40, checkpoint_every=40)
    training.train(settings, tmp_path / "run")
    losses = list(figures(tmp_path / "run").values())
    assert np.isfinite(losses).all() and losses[-1] < losses[0]
    best = keras.models.load_model(tmp_path / "run/best.keras", compile=False)
    assert best.dtype_policy.name == best.encoder.enc_layers[0].mha.wq.dtype_policy.name == "float32"


def test_settings_that_would_make_it_another_run_are_refused(tmp_path, files):
    run_dir = tmp_path / "run"
    training.train(small(files, max_steps=3), run_dir)
    with pytest.raises(UsageError, match="begun with training.warmup_steps=20, now it is 30"):
        training.train(small(files, warmup_steps=30), run_dir)
    other_search = small(files, max_steps=3).model_copy(update={"decoding": DecodingSettings(patience=1.0)})
    with pytest.raises(UsageError, match="begun with decoding.patience=2.0, now it is 1.0"):
        training.train(other_search, run_dir)


def test_a_vocabulary_of_each_side_cannot_be_shared(tmp_path, files):
    """From a run that has them, under the default share_embeddings: one line, and nothing is written."""
    settings = small(files, max_steps=3).model_dump()
    settings["model"]["share_embeddings"] = settings["data"]["joint_vocabulary"] = False
    training.train(settings_from(settings, "test"), tmp_path / "base")
    with pytest.raises(UsageError, match="base has a vocabulary of each side: give model.share_embeddings=false"):
        training.train(small(files, init_from=str(tmp_path / "base")), tmp_path / "run")
    assert not (tmp_path / "run").exists()


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


def test_no_pair_short_enough_leaves_nothing(tmp_path, files):
    settings = small(files)
    settings = settings.model_copy(update={"data": settings.data.model_copy(update={"max_length": 2})})
    with pytest.raises(DataError, match="train: none of the 24 pairs is left: .* 24 over max_length"):
        training.train(settings, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_other_text_is_refused_and_the_corpus_stays(tmp_path, files, monkeypatch):
    """A run that was stopped when the corpus was just there goes on, on that corpus; with other text it does not."""
    run_dir = tmp_path / "run"
    with monkeypatch.context() as patched:
        patched.setattr(training, "settings_yaml", lambda settings: sys.exit())
        with pytest.raises(SystemExit):
            training.train(small(files, max_steps=3), run_dir)
    [corpus] = run_dir.iterdir()
    before = corpus.stat().st_ino, sorted(corpus.iterdir())
    training.train(small(files, max_steps=3), run_dir)
    (tmp_path / "digits").write_text("1 2 3\n" * 24)
    with pytest.raises(DataError, match="text is no longer the one that the run was begun with"):
        training.train(small(files, max_steps=4), run_dir)
    assert (corpus.stat().st_ino, sorted(corpus.iterdir())) == before


@pytest.mark.slow
@pytest.mark.parametrize("direction", ["letters to digits", "digits to letters"])
def test_learns_the_direction_that_was_asked_for(tmp_path, files, direction):
    """D12, https://github.com/keras-team/keras-io/pull/1997: ten pairs overfitted, from the settings and by fit()."""
    from keras_transformer.data.pipeline import encode_pairs, token_batches
    from keras_transformer.runs import load_run, make_model
    from keras_transformer.translator import Translator
    from keras_transformer.translator_module import TranslatorModule

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
    model = make_model(settings.model, tokenizers)
    model.compile(keras.optimizers.Adam(0.003), loss_function, metrics=[TokenAccuracy()])
    corpus = encode_pairs(list(zip(sources, targets, strict=True)), tokenizers, 256, 256, "train")
    batches = token_batches(corpus, 200, seed=1).map(teacher_forcing)
    history = model.fit(batches, epochs=1, steps_per_epoch=300, shuffle=False, verbose=0)
    assert history.history["token_accuracy"][-1] > 0.5  # over the whole epoch, its beginning included
    module = TranslatorModule(model, tokenizers, settings.decoding)
    assert Translator(module, settings.decoding).translate(sources) == targets
