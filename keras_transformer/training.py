"""Training: the loop around the step, with measures on dev, checkpoints and resumption."""

import contextlib
import hashlib
import itertools
import logging
import math
import random
import signal
import time
from pathlib import Path
from typing import NamedTuple

import keras
import tensorflow as tf

from keras_transformer.adapting import carry_over, freeze
from keras_transformer.checkpoints import (
    checkpoint_files,
    mean_of_checkpoints,
    newest_state,
    restore_newest,
    save_checkpoint,
)
from keras_transformer.config import Settings, load_settings, run_settings, settings_yaml
from keras_transformer.data.pipeline import Corpus, encode_pairs, token_batches
from keras_transformer.data.shards import prepare_corpus
from keras_transformer.data.sources import Pairs, read_pairs
from keras_transformer.data.tokenizer import Tokenizers, load_tokenizers, train_tokenizers
from keras_transformer.dev_set import DevSet
from keras_transformer.distribution import (
    distribute,
    make_strategy,
    make_total,
    spread_seeds,
    worker_of,
    workers_present,
)
from keras_transformer.errors import DataError, UsageError
from keras_transformer.evaluation import make_bleu
from keras_transformer.files import whole
from keras_transformer.model import Transformer
from keras_transformer.precision import fastest_precision, policy, products
from keras_transformer.progress import Progress
from keras_transformer.recorder import Recorder
from keras_transformer.runs import alone_in, load_run, make_model, save_run, space_left
from keras_transformer.schedule import CustomSchedule
from keras_transformer.step import IDS, make_accumulated_step, make_train_step, parts_of

log = logging.getLogger(__name__)
HIGH_RATE = 0.005  # Wu et al. 2021's for their tiny model


def make_optimizer(schedule: CustomSchedule) -> keras.optimizers.Optimizer:
    """Adam as in section 5.3."""
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


class Text(NamedTuple):
    """What a run trains and measures on. `fingerprint` tells it from other text."""

    tokenizers: Tokenizers
    train_pairs: Pairs
    dev_pairs: list[tuple[str, str]]
    dev_corpus: Corpus
    fingerprint: str


# Of training: a finished or killed run may go on with other values of these; the rest would make it another run.
CHANGEABLE = (
    "max_steps", "log_every", "evaluate_every", "checkpoint_every", "keep_checkpoints", "patience", "average",
    "max_skipped",
)  # fmt: skip


def check_same_run(settings: Settings, run_dir: Path) -> None:
    """Refuse to go on with a run under settings that would make it another one."""
    before = load_settings(run_dir / "settings.yaml").model_dump()
    now = settings.model_dump()
    for section, values in now.items():
        for name, value in values.items():
            changeable = section == "training" and name in CHANGEABLE
            if not changeable and value != before[section][name]:
                raise UsageError(
                    f"{run_dir} was begun with {section}.{name}={before[section][name]}, now it is {value}: "
                    "give another --run-dir, or the settings that it was begun with"
                )


def read_text(settings: Settings, run_dir: Path) -> Text:
    """Read the text, and make the tokenizer where the run has not begun: init_from's, or one of this text."""
    train_pairs = read_pairs(settings.data.train, "train", settings.data)
    dev_pairs = read_pairs(settings.data.dev, "dev", settings.data)
    training = settings.training
    begun = bool(checkpoint_files(run_dir / "checkpoints"))
    if training.init_from and not begun:
        run_settings(Path(training.init_from))  # raises if it is no run folder
    if begun:
        tokenizers = load_tokenizers(run_dir / "tokenizer")
    elif training.init_from and training.init_vocabulary == "keep":
        tokenizers = load_tokenizers(Path(training.init_from) / "tokenizer")
    else:
        tokenizers = train_tokenizers(train_pairs, settings.data.vocab_size, settings.data.joint_vocabulary)
    if settings.model.share_embeddings and tokenizers.source.pieces != tokenizers.target.pieces:
        raise UsageError(
            f"{training.init_from} has a vocabulary of each side: give model.share_embeddings=false, "
            "or training.init_vocabulary=new"
        )
    tables = (settings.model.pe_input, settings.model.pe_target)
    dev_corpus = encode_pairs(dev_pairs, tokenizers, *tables, "dev")
    fingerprint = f"{train_pairs.fingerprint} {dev_pairs.fingerprint}"
    return Text(tokenizers, train_pairs, list(dev_pairs), dev_corpus, fingerprint)


def train(settings: Settings, run_dir: str | Path, strategy: tf.distribute.Strategy | None = None) -> int | None:
    """Train a model into a run folder, or go on with the one that is there.

    Bad settings and bad text are refused before anything is written.

    Args:
        settings: all of the run's.
        run_dir: the run folder.
        strategy: the devices to train on, not in its scope; None for what `distribution.make_strategy` finds.

    Returns:
        The signal that stopped it after a checkpoint, or None if it came to its end.
    """
    run_dir = Path(run_dir)
    strategy = strategy or make_strategy()
    if settings.training.deterministic:
        tf.config.experimental.enable_op_determinism()
    # Keras draws the seeds of its initializers and of its dropout from here. `keras.utils.set_random_seed` would do so
    # too, but it destroys the resources of every tensorflow-text tokenizer of the process.
    random.seed(settings.training.seed)
    with workers_present(), space_left(run_dir):
        if (run_dir / "settings.yaml").exists():
            check_same_run(settings, run_dir)
        # A run that was stopped while it tokenised has a corpus and no more.
        elif run_dir.exists() and any(path.name != "corpus" and path.name[0] != "." for path in run_dir.iterdir()):
            raise UsageError(f"{run_dir} is not empty and no run folder (it has no settings.yaml)")
        make_bleu(settings.data.target_language, settings.data.bleu_tokenizer)
        text = read_text(settings, run_dir)
        with alone_in(run_dir) if worker_of(strategy)[0] == 0 else contextlib.nullcontext():
            return Trainer(settings, run_dir, text, strategy).run()


def assign_mean(model: Transformer, run_dir: Path, last: int) -> list[Path]:
    """Give a model the mean of a run's newest checkpoints, which are returned, oldest first.

    The states of dropout's random numbers have none.
    """
    weights = [variable for variable in model.variables if variable.trainable]
    paths, means = mean_of_checkpoints(run_dir / "checkpoints", last, model.variables)
    for weight, mean in zip(weights, means, strict=True):
        weight.assign(mean)
    return paths


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
    tokenizers = load_tokenizers(run_dir / "tokenizer")
    model = make_model(settings.model, tokenizers)
    paths = assign_mean(model, run_dir, last or settings.training.average or 10)
    save_run(out, settings, tokenizers, model)
    return paths


class Trainer:
    """A run from its last checkpoint to its end.

    Attributes:
        state: plain values that a checkpoint holds beside the variables: `step` counts updates, `batches` those taken
            of the text; `best` is what the best model was worth on dev, `best_model` its name in the log, and
            `measures_since_best` how many measures ago that was; `averaged_at` is the step at which the mean of
            checkpoints was tried; `skipped` counts updates that were not finite; `text` is the text's fingerprint.
    """

    def __init__(self, settings: Settings, run_dir: Path, text: Text, strategy: tf.distribute.Strategy):
        self.settings, self.run_dir, self.text, self.strategy = settings, run_dir, text, strategy
        self.total, workers = make_total(strategy), worker_of(strategy)[1]
        self.chief = worker_of(strategy)[0] == 0
        training = settings.training
        self.precision = self.choose_precision()
        with strategy.scope():
            self.model = make_model(settings.model, text.tokenizers, policy(self.precision))
            freeze(self.model, training.frozen)
            self.schedule = CustomSchedule(settings.model.d_model, training.warmup_steps, training.learning_rate)
            self.optimizer = make_optimizer(self.schedule)
            if self.precision == "mixed_float16":
                self.optimizer = keras.optimizers.LossScaleOptimizer(self.optimizer)
            self.optimizer.build(self.model.trainable_variables)
        self.variables = [*self.model.variables, *self.optimizer.variables]
        first = {"step": 0, "batches": 0, "best": None, "best_model": None, "measures_since_best": 0}
        first |= {"averaged_at": None, "skipped": 0, "text": text.fingerprint, "precision": self.precision}
        restored = restore_newest(run_dir / "checkpoints", self.variables)
        if restored is None and checkpoint_files(run_dir / "checkpoints"):
            raise DataError(f"{run_dir}: none of its checkpoints can be read; begin anew in another --run-dir")
        if restored is None and training.init_from:
            new = carry_over(*load_run(Path(training.init_from)), self.model, text.tokenizers)
            log.info("weights of %s; %d pieces are new", training.init_from, new)
        self.state = {**first, **(restored or {})}
        # The checkpoint of a signal, which an undisturbed run has not and its mean must not have.
        step = self.state["step"]
        self.unscheduled = None if self.scheduled(step) else step
        if self.state["text"] != text.fingerprint:
            raise DataError(f"{run_dir}: the training or dev text is no longer the one that the run was begun with")
        number = int(hashlib.sha256(text.fingerprint.encode()).hexdigest()[:4], 16)
        if self.total(number) != workers * number:
            raise DataError(f"{run_dir}: the workers do not have the same training and dev text")
        spread_seeds(strategy, self.model.variables)
        self.loss, self.gradient_norm = keras.metrics.Mean(), keras.metrics.Mean()
        self.skipped = tf.Variable([self.state["skipped"], 0])

    def run(self) -> int | None:
        """As `train`."""
        training, state, text = self.settings.training, self.state, self.text
        log.info(
            "%s: %d weights, %d source and %d target pieces, step %d of %d, in %s on %s",
            self.run_dir,
            self.model.count_params(),
            self.model.input_vocab_size,
            self.model.target_vocab_size,
            state["step"],
            training.max_steps,
            self.precision,
            ", ".join(device.name.removeprefix("/device:") for device in tf.config.list_logical_devices()),
        )
        if self.ended() and (not training.average or state["averaged_at"] == state["step"]):
            log.info("nothing left to do")
            return None
        if self.chief:
            self.look_at_schedule()
            self.dev = DevSet(self.model, text.tokenizers, text.dev_pairs, text.dev_corpus, self.settings)
            corpus = self.prepare_corpus()
            with whole(self.run_dir / "settings.yaml") as beside:
                beside.write_text(settings_yaml(self.settings), encoding="utf-8")
            if not state["step"]:
                text.tokenizers.save(self.run_dir / "tokenizer")
            self.recorder = Recorder(self.run_dir, state["step"], state["averaged_at"] == state["step"])
        self.total(0)  # until here the others wait for the corpus
        self.corpus = corpus if self.chief else self.prepare_corpus()
        with StopSignal() as stop:
            if not self.ended():
                self.steps(stop)
            if not stop.received and training.average and self.chief:
                self.try_average()
                state["averaged_at"] = state["step"]
                self.save()
            if not stop.received and self.chief and state["best_model"]:
                log.info("best by %s: %s, in %s", training.select, state["best_model"], self.run_dir / "best.keras")
            if not stop.received:
                self.total(0)  # until here the others wait for the mean
        return stop.received

    def look_at_schedule(self) -> None:
        """Warn of a learning rate with which models often learn nothing."""
        training, schedule = self.settings.training, self.schedule
        peak = float(schedule(training.warmup_steps))
        if training.learning_rate is None and peak > HIGH_RATE:
            log.warning(
                "with training.warmup_steps=%d the learning rate rises to %.1e, which may be too high to learn: "
                "give training.learning_rate (0.002, say), or more steps to warm up",
                training.warmup_steps, peak,
            )  # fmt: skip
        if training.warmup_steps >= training.max_steps:
            log.warning(
                "training.warmup_steps=%d is no less than training.max_steps=%d: the learning rate only rises, to %.1e",
                training.warmup_steps, training.max_steps, float(schedule(training.max_steps)),
            )  # fmt: skip

    def choose_precision(self) -> str:
        """The settings'; with auto, the one that the run was begun in, or this machine's fastest."""
        if self.settings.training.precision != "auto":
            return self.settings.training.precision
        begun = newest_state(self.run_dir / "checkpoints")
        return begun["precision"] if begun else fastest_precision()

    def prepare_corpus(self) -> Corpus:
        tables = (self.settings.model.pe_input, self.settings.model.pe_target)
        text, folder = self.text, self.run_dir / "corpus"
        return prepare_corpus(text.train_pairs, text.tokenizers, *tables, "train", folder, self.settings.data)

    def ended(self) -> bool:
        return self.state["step"] >= self.settings.training.max_steps or self.out_of_patience()

    def out_of_patience(self) -> bool:
        patience = self.settings.training.patience
        return patience is not None and self.state["measures_since_best"] >= patience

    def make_step(self, signature):
        """A function of an iterator of batches that makes one update."""
        training = self.settings.training
        replicas = self.strategy.num_replicas_in_sync
        options = {
            "label_smoothing": training.label_smoothing,
            "train_loss": self.loss,
            "clip_norm": training.clip_norm,
            "gradient_norm": self.gradient_norm,
            "skipped": self.skipped,
            "parts": 1 if replicas > 1 else parts_of(training.tokens_per_batch),
            "signature": signature,
        }
        with self.strategy.scope():
            if training.accumulate == 1:
                train_step = make_train_step(self.model, self.optimizer, **options)
                return lambda batches: train_step(*next(batches))
            accumulated_step = make_accumulated_step(self.model, self.optimizer, **options)
            return lambda batches: accumulated_step(itertools.islice(batches, training.accumulate))

    def steps(self, stop: StopSignal) -> None:
        """The updates from state["step"] on, until the last, or the one in which a signal came."""
        training, state = self.settings.training, self.state

        def make_batches(worker, workers, replicas):
            return token_batches(
                self.corpus, training.tokens_per_batch, training.seed, None, state["batches"], worker, workers,
                replicas,
            )  # fmt: skip

        batches = distribute(self.strategy, make_batches)
        step = self.make_step(batches.element_spec if self.strategy.num_replicas_in_sync > 1 else (IDS, IDS))
        batches = iter(batches)
        in_update = training.accumulate * self.strategy.num_replicas_in_sync
        with Progress("train", training.max_steps, state["step"], shown=self.chief) as progress:
            progress.show("the first update takes longer: it builds the graph")
            begun = state["step"]
            begin = time.perf_counter()
            last = False
            while not last:
                with products(self.precision):
                    step(batches)
                state["step"] += 1
                state["batches"] += in_update
                if state["step"] == begun + 1:
                    progress.skip(1)
                else:
                    progress.advance(1)
                last = state["step"] == training.max_steps
                if state["step"] % min(training.max_skipped, training.checkpoint_every) == 0 or last:
                    self.check_finite()
                if state["step"] % training.log_every == 0 or last:
                    self.show(progress, time.perf_counter() - begin)
                    begin = time.perf_counter()
                paused = time.perf_counter()
                if state["step"] % training.evaluate_every == 0 or last:
                    if self.chief:
                        self.measure_and_select(f"step {state['step']}")
                    if self.total(self.chief and self.out_of_patience()):
                        if self.chief:  # which alone knows
                            log.info("no better one than %s in %s measures", state["best_model"], training.patience)
                        last = True
                stopped = self.total(bool(stop.received))
                if (self.scheduled(state["step"]) or last or stopped) and self.chief:
                    self.save()
                begin += time.perf_counter() - paused  # the rate is that of the updates alone
                if stopped:
                    stop.received = stop.received or signal.SIGTERM
                    return

    def scheduled(self, step: int) -> bool:
        """Whether a run writes a checkpoint at this step: one at each measure, too, which best.keras goes by."""
        training = self.settings.training
        return step % training.checkpoint_every == 0 or step % training.evaluate_every == 0

    def save(self) -> None:
        state = self.state
        state["skipped"] = int(self.skipped[0])
        # One that is soon to go again takes no other's place.
        keep = self.settings.training.keep_checkpoints + (not self.scheduled(state["step"]))
        save_checkpoint(self.run_dir / "checkpoints", self.variables, state, keep, instead_of=self.unscheduled)
        self.unscheduled = None

    def check_finite(self) -> None:
        """Stop where every one of the last updates was skipped. The weights are those of the last that was not."""
        in_a_row = int(self.skipped[1])
        if in_a_row < self.settings.training.max_skipped:
            return
        raise DataError(
            f"{self.run_dir}: loss or gradient was infinite or not a number {in_a_row} times in a row, up to update "
            f"{self.state['step']}; the checkpoints have the weights from before. Try a lower training.learning_rate, "
            "more training.warmup_steps, a training.clip_norm, or training.precision=float32"
        )

    def show(self, progress: Progress, seconds: float) -> None:
        """Record and show the figures of the updates since the last time, which took so long."""
        skipped = int(self.skipped[0])
        figures = {"learning_rate": float(keras.ops.convert_to_numpy(self.optimizer.learning_rate))}
        if tokens := float(self.loss.count):  # 0 if every update was skipped
            figures |= {"loss": float(self.loss.result()), "gradient_norm": float(self.gradient_norm.result())}
            figures["tokens_per_second"] = tokens / seconds
        if skipped:
            figures["skipped"] = skipped
        self.loss.reset_state()
        self.gradient_norm.reset_state()
        if self.chief:
            self.recorder.write(self.state["step"], figures)
        formats = {
            "loss": "loss {:.3f}", "learning_rate": "learning rate {:.2e}", "gradient_norm": "gradient {:.2f}",
            "tokens_per_second": "{:,.0f} tokens/s", "skipped": "{} updates skipped",
        }  # fmt: skip
        progress.show(", ".join(text.format(figures[name]) for name, text in formats.items() if name in figures))

    def measure_and_select(self, name: str, averaged: int = 0) -> None:
        """Measure on dev the model, or the mean of so many checkpoints; write best.keras if none before was better."""
        figures, scores, examples = self.dev.measure()
        state = self.state
        self.recorder.write(state["step"], ({"average": averaged} if averaged else {}) | figures)
        self.recorder.write_translations(state["step"], examples)
        log.info(
            "%s: dev loss %.3f, BLEU %.2f, exact match %.1f %%",
            name, figures["dev_loss"], scores.bleu, 100 * scores.exact_match,
        )  # fmt: skip
        worth = scores.bleu if self.settings.training.select == "bleu" else -figures["dev_loss"]
        better = math.isfinite(worth) and (state["best"] is None or worth > state["best"])
        if not averaged:  # patience is for the run itself, which its mean does not prolong
            state["measures_since_best"] = 0 if better else state["measures_since_best"] + 1
        if better:
            state.update(best=worth, best_model=name)
            with whole(self.run_dir / "best.keras") as beside:
                self.dev.model.save(beside)

    def try_average(self) -> None:
        """Measure the mean of the newest checkpoints: is it the best model yet?"""
        variables = self.model.trainable_variables
        trained = [variable.numpy() for variable in variables]
        paths = assign_mean(self.model, self.run_dir, self.settings.training.average)
        self.measure_and_select(f"mean of {paths[0].stem} to {paths[-1].stem}", len(paths))
        for variable, value in zip(variables, trained, strict=True):
            variable.assign(value)
