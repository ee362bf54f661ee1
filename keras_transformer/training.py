"""Training: the step, and the loop around it with measures on dev, checkpoints and resumption."""

import hashlib
import json
import logging
import os
import random
import signal
import time
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

from keras_transformer.checkpoints import checkpoint_files, mean_of_checkpoints, restore_newest, save_checkpoint
from keras_transformer.config import (
    ModelSettings,
    Settings,
    TrainingSettings,
    load_settings,
    run_settings,
    settings_yaml,
)
from keras_transformer.data.pipeline import Corpus, encode_pairs, token_batches
from keras_transformer.data.sources import Pairs, read_pairs
from keras_transformer.data.tokenizer import Tokenizers, load_tokenizers, train_tokenizers
from keras_transformer.errors import DataError, UsageError
from keras_transformer.evaluation import Scores, evaluate, make_bleu
from keras_transformer.files import whole
from keras_transformer.losses import TokenAccuracy
from keras_transformer.model import Transformer
from keras_transformer.precision import fastest_precision, products
from keras_transformer.progress import Progress
from keras_transformer.schedule import CustomSchedule
from keras_transformer.step import make_evaluate_step, make_train_step
from keras_transformer.translator import Translator, TranslatorModule

log = logging.getLogger(__name__)


def make_model(settings: ModelSettings, tokenizers: Tokenizers) -> Transformer:
    """A built Transformer of these settings for these vocabularies."""
    options = settings.model_dump()
    sizes = [options.pop(name) for name in ("num_layers", "d_model", "num_heads", "dff")]
    vocabularies = (tokenizers.source.vocab_size, tokenizers.target.vocab_size)
    model = Transformer(*sizes, *vocabularies, **options)
    model.build((None, None), (None, None))
    return model


def make_optimizer(settings: TrainingSettings, d_model: int) -> keras.optimizers.Optimizer:
    """Adam as in section 5.3."""
    schedule = CustomSchedule(d_model, settings.warmup_steps, settings.learning_rate)
    return keras.optimizers.Adam(schedule, beta_1=0.9, beta_2=0.98, epsilon=1e-9)


class StopSignal:
    """Inside the block, Ctrl-C and SIGTERM set `received`, so that a step and its checkpoint are finished first.

    A second one interrupts at once.
    """

    received: int | None = None

    def __enter__(self):
        self.before = {number: signal.signal(number, self.note) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def note(self, number, frame):
        if self.received:
            raise KeyboardInterrupt
        self.received = number
        log.info("stopping after this step and its checkpoint; once more to stop at once")

    def __exit__(self, *error):
        for number, handler in self.before.items():
            signal.signal(number, handler)


class Recorder:
    """Figures of a run: lines of metrics.jsonl, and TensorBoard curves."""

    def __init__(self, run_dir: Path, step: int):
        self.path = run_dir / "metrics.jsonl"
        self.curves = tf.summary.create_file_writer(str(run_dir / "tensorboard"))
        if self.path.exists():  # what a killed run had measured after its last checkpoint is measured again
            lines = self.path.read_text(encoding="utf-8").splitlines(keepends=True)
            with whole(self.path) as beside:
                beside.write_text("".join(line for line in lines if is_record(line, step)), encoding="utf-8")

    def write(self, step: int, figures: dict[str, float]) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, **figures}) + "\n")
        with self.curves.as_default(step):
            for name, value in figures.items():
                tf.summary.scalar(name, value)
        self.curves.flush()


def is_record(line: str, last_step: int) -> bool:
    """Whether a line of metrics.jsonl is whole and of a step up to `last_step`."""
    try:
        return json.loads(line)["step"] <= last_step
    except json.JSONDecodeError:
        return False


class DevSet:
    """Measures a model on the dev text: loss and accuracy by teacher forcing, BLEU and exact match by translating."""

    def __init__(self, model: Transformer, tokenizers: Tokenizers, pairs: Pairs, corpus: Corpus, settings: Settings):
        self.loss, self.accuracy = keras.metrics.Mean(), TokenAccuracy()
        self.step = make_evaluate_step(model, self.loss, self.accuracy)
        self.translator = Translator(TranslatorModule(model, tokenizers, settings.decoding), settings.decoding)
        self.pairs, self.corpus, self.settings = pairs, corpus, settings

    def measure(self) -> tuple[dict[str, float], Scores]:
        self.loss.reset_state()
        self.accuracy.reset_state()
        for inp, tar in token_batches(self.corpus, self.settings.training.tokens_per_batch, seed=0, epochs=1):
            self.step(inp, tar)
        self.translator.module.update()
        translations = self.translator.translate([source for source, _ in self.pairs])
        data = self.settings.data
        references = [target for _, target in self.pairs]
        scores = evaluate(translations, references, data.target_language, data.bleu_tokenizer)
        return {
            "dev_loss": float(self.loss.result()),
            "dev_accuracy": float(self.accuracy.result()),
            "dev_bleu": scores.bleu,
            "dev_exact_match": scores.exact_match,
        }, scores


# A finished or killed run may go on with other values of these; the rest would make it another run.
CHANGEABLE = ("max_steps", "log_every", "evaluate_every", "checkpoint_every", "keep_checkpoints", "patience", "average")


def check_same_run(settings: Settings, run_dir: Path) -> None:
    """Refuse to go on with a run under settings that would make it another one."""
    before = load_settings(run_dir / "settings.yaml").model_dump()
    now = settings.model_dump()
    for section, values in now.items():
        for name, value in values.items():
            if name not in CHANGEABLE and value != before[section][name]:
                raise UsageError(
                    f"{run_dir} was begun with {section}.{name}={before[section][name]}, now it is {value}: "
                    "give another --run-dir, or the settings that it was begun with"
                )


def train(settings: Settings, run_dir: str | Path) -> int | None:
    """Train a model into a run folder, or go on with the one that is there.

    Bad settings and bad text are refused before anything is written.

    Returns:
        The signal that stopped it after a checkpoint, or None if it came to its end.
    """
    run_dir = Path(run_dir)
    begun = (run_dir / "settings.yaml").exists()
    if begun:
        check_same_run(settings, run_dir)
    elif run_dir.exists() and any(not path.name.startswith(".") for path in run_dir.iterdir()):
        raise UsageError(f"{run_dir} is not empty and no run folder (it has no settings.yaml)")
    make_bleu(settings.data.target_language, settings.data.bleu_tokenizer)
    training = settings.training
    # Keras draws the seeds of its initializers and of its dropout from here. `keras.utils.set_random_seed` would do so
    # too, but it destroys the resources of every tensorflow-text tokenizer of the process.
    random.seed(training.seed)
    train_pairs = read_pairs(settings.data.train, "train", settings.data)
    dev_pairs = read_pairs(settings.data.dev, "dev", settings.data)
    if (run_dir / "tokenizer").exists():
        tokenizers = load_tokenizers(run_dir / "tokenizer")
    else:
        tokenizers = train_tokenizers(train_pairs, settings.data.vocab_size, settings.data.joint_vocabulary)
    tables = (settings.model.pe_input, settings.model.pe_target)
    corpus = encode_pairs(train_pairs, tokenizers, *tables, "train")
    dev_corpus = encode_pairs(dev_pairs, tokenizers, *tables, "dev")
    model = make_model(settings.model, tokenizers)
    optimizer = make_optimizer(training, settings.model.d_model)
    optimizer.build(model.trainable_variables)
    variables = [*model.variables, *optimizer.variables]
    text = hashlib.sha256(repr((train_pairs, dev_pairs)).encode("utf-8", "surrogatepass")).hexdigest()
    begin = {"step": 0, "best": None, "best_step": 0, "measures_since_best": 0, "averaged_at": None, "text": text}
    state = {**begin, **(restore_newest(run_dir / "checkpoints", variables) or {})}
    if state["text"] != text:
        raise DataError(f"{run_dir}: the training or dev text is no longer the one that the run was begun with")
    log.info(
        "%s: %d weights, %d source and %d target pieces, step %d of %d, on %s",
        run_dir,
        model.count_params(),
        model.input_vocab_size,
        model.target_vocab_size,
        state["step"],
        training.max_steps,
        ", ".join(device.name.removeprefix("/physical_device:") for device in tf.config.get_visible_devices()),
    )
    ended = state["step"] >= training.max_steps or out_of_patience(state, training)
    if ended and (not training.average or state["averaged_at"] == state["step"]):
        log.info("nothing left to do")
        return None
    dev = DevSet(model, tokenizers, dev_pairs, dev_corpus, settings)
    with whole(run_dir / "settings.yaml") as beside:
        beside.write_text(settings_yaml(settings), encoding="utf-8")
    if not (run_dir / "tokenizer").exists():
        tokenizers.save(run_dir / "tokenizer")
    return run_steps(model, optimizer, corpus, dev, variables, state, training, run_dir)


def out_of_patience(state: dict, training: TrainingSettings) -> bool:
    return training.patience is not None and state["measures_since_best"] >= training.patience


def measure_and_select(name: str, model, dev: DevSet, recorder: Recorder, state: dict, run_dir: Path) -> None:
    """Measure on dev; write best.keras if none before was better."""
    figures, scores = dev.measure()
    recorder.write(state["step"], figures)
    log.info(
        "%s: dev loss %.3f, BLEU %.2f, exact match %.1f %%",
        name, figures["dev_loss"], scores.bleu, 100 * scores.exact_match,
    )  # fmt: skip
    worth = scores.bleu if dev.settings.training.select == "bleu" else -figures["dev_loss"]
    state["measures_since_best"] += 1
    if state["best"] is None or worth > state["best"]:
        state.update(best=worth, best_step=state["step"], measures_since_best=0)
        with whole(run_dir / "best.keras") as beside:
            model.save(beside)


def assign_mean(model: Transformer, paths: list[Path]) -> None:
    means = mean_of_checkpoints(paths, model.variables)
    for variable, mean in zip(model.trainable_variables, means, strict=True):
        variable.assign(mean)


def average_checkpoints(run_dir: Path, out: Path, last: int | None = None) -> list[Path]:
    """Write the mean of a run's newest checkpoints as a run folder that translates: settings, tokenizer, best.keras.

    Args:
        run_dir: the run, finished or not.
        out: the folder, which is written whole or not at all.
        last: the most checkpoints to take; None for the run's training.average, or 10 if that is 0.

    Returns:
        The checkpoints that were taken, oldest first.

    Raises:
        DataError: `run_dir` is no run folder or has no checkpoints, or they have no mean.
    """
    settings = run_settings(run_dir)
    paths = checkpoint_files(run_dir / "checkpoints")[-(last or settings.training.average or 10) :]
    if not paths:
        raise DataError(f"{run_dir}: no checkpoints")
    tokenizers = load_tokenizers(run_dir / "tokenizer")
    model = make_model(settings.model, tokenizers)
    assign_mean(model, paths)
    with whole(out) as beside:
        beside.mkdir()
        (beside / "settings.yaml").write_text(settings_yaml(settings), encoding="utf-8")
        tokenizers.save(beside / "tokenizer")
        model.save(beside / "best.keras")
    return paths


def try_average(model, dev: DevSet, recorder: Recorder, state: dict, run_dir: Path, newest: int) -> None:
    """Measure the mean of the newest checkpoints: is it the best model yet?"""
    paths = checkpoint_files(run_dir / "checkpoints")[-newest:]
    trained = [np.array(variable) for variable in model.trainable_variables]
    assign_mean(model, paths)
    measure_and_select(f"mean of {paths[0].stem} to {paths[-1].stem}", model, dev, recorder, state, run_dir)
    for variable, value in zip(model.trainable_variables, trained, strict=True):
        variable.assign(value)


def run_steps(model, optimizer, corpus, dev, variables, state, training, run_dir) -> int | None:
    """The loop from state["step"] to the last update."""
    train_loss = keras.metrics.Mean()
    gradient_norm = keras.metrics.Mean()
    parts = 1 if tf.config.get_visible_devices("GPU") else len(os.sched_getaffinity(0))
    train_step = make_train_step(
        model, optimizer, training.label_smoothing, train_loss, None, training.clip_norm, gradient_norm, parts
    )
    precision = fastest_precision() if training.precision == "auto" else training.precision
    recorder = Recorder(run_dir, state["step"])
    batches = token_batches(corpus, training.tokens_per_batch, training.seed, step=state["step"])
    begin = time.perf_counter()
    tokens = tf.Variable(0, dtype=tf.int64)
    last = state["step"] >= training.max_steps or out_of_patience(state, training)
    with StopSignal() as stop, Progress("train", training.max_steps, state["step"]) as progress:
        for inp, tar in [] if last else batches:
            with products(precision):
                train_step(inp, tar)
            tokens.assign_add(tf.math.count_nonzero(tar[:, 1:]))
            step = state["step"] = state["step"] + 1
            progress.advance(1)
            last = step == training.max_steps
            if step % training.log_every == 0 or last:
                seconds = time.perf_counter() - begin
                figures = {
                    "loss": float(train_loss.result()),
                    "learning_rate": float(optimizer.learning_rate),
                    "gradient_norm": float(gradient_norm.result()),
                    "tokens_per_second": int(tokens) / seconds,
                }
                recorder.write(step, figures)
                progress.show(
                    f"loss {figures['loss']:.3f}, learning rate {figures['learning_rate']:.2e}, "
                    f"{figures['tokens_per_second']:,.0f} tokens/s"
                )
                train_loss.reset_state()
                gradient_norm.reset_state()
                tokens.assign(0)
                begin = time.perf_counter()
            paused = time.perf_counter()
            if step % training.evaluate_every == 0 or last:
                measure_and_select(f"step {step}", model, dev, recorder, state, run_dir)
                if out_of_patience(state, training):
                    log.info("no better one than step %d's in %d measures", state["best_step"], training.patience)
                    last = True
            if step % training.checkpoint_every == 0 or last or stop.received:
                save_checkpoint(run_dir / "checkpoints", variables, state, training.keep_checkpoints)
            begin += time.perf_counter() - paused  # the rate is that of training alone
            if last or stop.received:
                break
    if stop.received:
        return stop.received
    if training.average:
        try_average(model, dev, recorder, state, run_dir, training.average)
        state["averaged_at"] = state["step"]
        save_checkpoint(run_dir / "checkpoints", variables, state, training.keep_checkpoints)
    return None
