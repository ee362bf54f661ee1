"""The command: `keras-transformer demo | train | report | translate | evaluate | score | average | export |
import-marian | settings`.

TensorFlow is imported where work begins, so that --help and usage errors answer at once.
"""

import contextlib
import enum
import itertools
import math
import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from keras_transformer.config import PRESETS, Settings, load_settings, preset, run_settings, settings_yaml
from keras_transformer.errors import DataError, UsageError, UserError
from keras_transformer.quiet import quiet_stderr
from keras_transformer.version import __version__

app = typer.Typer(
    help="Train a Transformer on your own sentence pairs, translate with it, measure it and export it.",
    epilog="Begin with: keras-transformer demo",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
BeamSize = Annotated[
    int | None, typer.Option(help="Hypotheses that are followed; 1 is greedy. Default: the run's.", show_default=False)
]
LengthPenalty = Annotated[
    float | None, typer.Option(help="Above 0, longer translations rank higher.", show_default=False)
]
Precision = Annotated[
    str | None,
    typer.Option(metavar="float32|bfloat16|int8", help="What is computed in.", show_default=False),
]
Decoding = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change a setting: decoding.no_repeat_ngram=3. Repeatable."),
]
Run = Annotated[
    Path, typer.Argument(metavar="RUN", help="A run folder, or an exported SavedModel or CTranslate2 folder.")
]


def print_version(asked: bool) -> None:
    if asked:
        typer.echo(__version__)
        raise typer.Exit


@app.callback(help=app.info.help)
def every_command(
    version: Annotated[
        bool, typer.Option("--version", callback=print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """What the command takes before the name of a subcommand."""


def load_tensorflow(threads: Callable[[], int] = lambda: 0) -> None:
    """Import TensorFlow, quietly; `threads` tells on how many cores an operation is computed, 0 for all."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    os.environ["KERAS_BACKEND"] = "tensorflow"  # the layers run on others too, the command does not
    with quiet_stderr():
        import tensorflow as tf
        import tensorflow_text  # noqa: F401

        with contextlib.suppress(RuntimeError):  # it has begun already, when the command is called from Python
            tf.config.threading.set_intra_op_parallelism_threads(threads())
        if not os.environ.get("TF_CONFIG"):  # a job of several machines has to be set up before
            tf.constant(0)  # the first tensor starts the devices, which have notes of their own
    from keras_transformer.progress import show_logs

    show_logs()


def training_threads(settings: Settings) -> int:
    from keras_transformer.step import threads_of

    return threads_of(settings.training.tokens_per_batch)


@app.command()
def demo() -> None:
    """Train on the built-in phrasebook, in minutes, then translate phrases that the model never saw.

    The phrasebook is made from CLDR: dates, times, prices, quantities and lists, in English and German. The run is kept
    in runs/phrasebook, as [bold]keras-transformer train[/bold] without settings keeps it.
    """
    settings, run_dir = load_settings(None), Path("runs/phrasebook")
    load_tensorflow(lambda: training_threads(settings))
    from keras_transformer import evaluation, training
    from keras_transformer.data.sources import read_pairs

    if stopped_by := training.train(settings, run_dir):
        typer.echo("stopped after a checkpoint; the same command goes on", err=True)
        raise typer.Exit(128 + stopped_by)
    pairs = read_pairs(settings.data.dev, "test", settings.data)
    translations = with_progress(load_translator(run_dir, settings.decoding), [source for source, _ in pairs])
    for (source, target), translation in list(zip(pairs, translations, strict=True))[:10]:
        typer.echo(f"{source}\n  {translation}" + ("" if translation == target else f"\n  (right: {target})"))
    scores = evaluation.evaluate(translations, [target for _, target in pairs], settings.data.target_language)
    typer.echo(f"\n{len(pairs)} phrases that are neither in train nor in dev:\n{scores}")


@app.command()
def train(
    config: Annotated[
        Path | None,
        typer.Argument(
            metavar="[CONFIG.yaml]", help="Settings. Default: those in --run-dir, or else the built-in phrasebook's."
        ),
    ] = None,
    run_dir: Annotated[
        Path | None,
        typer.Option(
            help="Where the run is kept. Default: runs/NAME-OF-CONFIG, or the run that CONFIG.yaml is in.",
            show_default=False,
        ),
    ] = None,
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Change a setting: training.max_steps=1000. Repeatable."),
    ] = None,
) -> None:
    """Train a model; the same command again goes on from the last checkpoint.

    [bold]keras-transformer train[/bold]  (on the built-in phrasebook)

    [bold]keras-transformer train my.yaml --run-dir runs/a --set 'data.train=\\[a.en.gz, a.de.gz]' --set
    'data.dev=\\[b.en.gz, b.de.gz]'[/bold]

    The run folder holds settings.yaml, tokenizer/, corpus/, checkpoints/, best.keras, metrics.jsonl and TensorBoard
    curves.
    """
    if config is None and run_dir is not None and (run_dir / "settings.yaml").exists():
        config = run_dir / "settings.yaml"
    settings = load_settings(config, changes or [])
    if run_dir is None and config and config.name == "settings.yaml" and (config.parent / "checkpoints").exists():
        run_dir = config.parent
    if run_dir is None:
        run_dir = Path("runs") / (config.stem if config else "phrasebook")
    load_tensorflow(lambda: training_threads(settings))
    from keras_transformer import training

    stopped_by = training.train(settings, run_dir)
    if stopped_by:
        typer.echo(f"stopped after a checkpoint; the same command goes on with {run_dir}", err=True)
        raise typer.Exit(128 + stopped_by)


@app.command()
def report(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder, finished or not.")],
    out: Annotated[Path | None, typer.Option(help="The folder to write to. Default: RUN.", show_default=False)] = None,
) -> None:
    """Draw the curves of RUN and write its figures on a page: report.png and report.md.

    Loss, BLEU on dev, learning rate, gradient norm and speed; sizes, settings that are not the defaults, the best
    model, every measure on dev. RUN may be at work still.
    """
    from keras_transformer.report import write_report

    page = write_report(run, out or run)
    typer.echo(f"wrote {page} and {page.with_suffix('.png').name}", err=True)


@app.command()
def translate(
    run: Run,
    file: Annotated[
        Path | None, typer.Argument(metavar="[FILE]", help="Sentences, one a line; or .gz. Default, and -: stdin.")
    ] = None,
    beam_size: BeamSize = None,
    n_best: Annotated[
        int | None, typer.Option(help="Translations of each sentence, so many lines each.", show_default=False)
    ] = None,
    length_penalty: LengthPenalty = None,
    precision: Precision = None,
    changes: Decoding = None,
    prefix: Annotated[
        str, typer.Option(help="What each translation is to begin with, in whole pieces.", show_default=False)
    ] = "",
    window: Annotated[
        int | None,
        typer.Option(min=1, help="Lines taken together; 1 answers each at once, as at a terminal.", show_default=False),
    ] = None,
    scores: Annotated[
        bool, typer.Option("--scores", help="Put score and log-probability before each translation, and tabs between.")
    ] = False,
) -> None:
    """Translate text: a line out for each line in, however long the file.

    [bold]echo "Hello." | keras-transformer translate runs/phrasebook[/bold]

    [bold]keras-transformer translate runs/a news.en --beam-size 5 --set decoding.no_repeat_ngram=3[/bold]

    A sentence longer than the model's position table is cut to it, and bytes that are not UTF-8 become U+FFFD, each
    with a warning on stderr. The score is the log-probability divided by the length norm. Lines are translated by
    windows, sorted by length, of up to 4,096. [bold]keras-transformer settings[/bold] lists what --set can change.
    """
    if file == Path("-"):
        file = None
    translator = load_translator(run, decoding_of(run, beam_size, n_best, length_penalty, precision, changes))
    from keras_transformer.progress import Progress

    lines, total = read_input(file)
    terminal = file is None and sys.stdin.isatty()
    at_once = {"window": window or 1} if window or terminal else {}
    done = 0
    try:
        with Progress("translate", total, unit="lines", shown=not terminal) as progress:
            for translations in translator.stream(lines, prefix, progress.advance, **at_once):
                for found in translations:
                    numbers = f"{found.score:.6f}\t{found.log_prob:.6f}\t" if scores else ""
                    write_line(numbers + found.text)
                done += 1
                if at_once:
                    sys.stdout.buffer.flush()
        sys.stdout.buffer.flush()
    except KeyboardInterrupt:
        sys.stdout.buffer.flush()
        typer.echo(f"stopped; the first {done} lines are written", err=True)
        raise


@app.command()
def score(
    run: Run,
    source: Annotated[Path, typer.Argument(metavar="SOURCE", help="Sentences, one a line; or .gz.")],
    target: Annotated[Path, typer.Argument(metavar="TARGET", help="Their translations, one a line; or .gz.")],
    precision: Precision = None,
) -> None:
    """How probable TARGET is as the translation of SOURCE, line by line and piece by piece.

    A line out for each pair: the log-probability, a tab, and each piece with its own, the end of the sentence included.
    The last line, on stderr, has the perplexity of the whole: e to the minus mean log-probability of a piece.
    """
    counts = count_lines(source), count_lines(target)
    if None not in counts and counts[0] != counts[1]:  # of pipes, it is seen at the end of the shorter
        raise DataError(f"{source} has {counts[0]} lines, {target} has {counts[1]}")
    translator = load_translator(run, decoding_of(run, precision=precision))
    from keras_transformer.progress import Progress, log

    total, pieces = 0.0, 0
    with Progress("score", counts[0], unit="lines") as progress:
        for scored in translator.score(zip_files(source, target), progress.advance):
            line_total = math.fsum(log_prob for _, log_prob in scored)
            write_line(f"{line_total:.6f}\t" + " ".join(f"{piece}={log_prob:.6f}" for piece, log_prob in scored))
            total, pieces = total + line_total, pieces + len(scored)
    sys.stdout.buffer.flush()
    if not pieces:
        raise DataError(f"{source}: no lines to score")
    log.info("%d pieces, log-probability %.4f, perplexity %.4f", pieces, total, math.exp(-total / pieces))


@app.command()
def evaluate(
    run: Run,
    source: Annotated[Path, typer.Argument(metavar="SOURCE", help="Sentences to translate, one a line; or .gz.")],
    reference: Annotated[Path, typer.Argument(metavar="REFERENCE", help="Right translations, one a line; or .gz.")],
    language: Annotated[
        str | None, typer.Option(help="The target's code, such as de. Default: the run's.", show_default=False)
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(
            help="BLEU's, such as none for tokenised text. Default: the run's, or else the language's.",
            show_default=False,
        ),
    ] = None,
    beam_size: BeamSize = None,
    length_penalty: LengthPenalty = None,
    precision: Precision = None,
    changes: Decoding = None,
) -> None:
    """Translate SOURCE and score it against REFERENCE: sacreBLEU and chrF on detokenised text, with signatures."""
    from keras_transformer.data.sources import text_pairs

    pairs = text_pairs(source, reference)
    data = run_settings(run, [f"data.bleu_tokenizer={tokenizer}"] if tokenizer else []).data
    translator = load_translator(run, decoding_of(run, beam_size, None, length_penalty, precision, changes))
    from keras_transformer import evaluation

    language, tokenizer = language or data.target_language, data.bleu_tokenizer
    evaluation.make_bleu(language, tokenizer)
    translations = with_progress(translator, [source for source, _ in pairs])
    typer.echo(str(evaluation.evaluate(translations, [target for _, target in pairs], language, tokenizer)))


@app.command()
def average(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder, finished or not.")],
    last: Annotated[
        int | None,
        typer.Option(
            min=1, help="Newest checkpoints to take. Default: the run's training.average.", show_default=False
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="The folder to write; must not be there. Default: RUN/average.", show_default=False),
    ] = None,
) -> None:
    """Write the mean of RUN's newest checkpoints, as a folder that translate, evaluate and export take in place of RUN.

    [bold]keras-transformer average runs/a --last 5 --out runs/a5[/bold]

    [bold]keras-transformer evaluate runs/a5 dev.en dev.de[/bold]

    A finished run has tried the mean of its last checkpoints already, and kept it if it was the best on dev.
    """
    out = out or run / "average"
    if out.exists():
        raise DataError(f"{out} is there already")
    run_settings(run)
    load_tensorflow()
    from keras_transformer.training import average_checkpoints

    paths = average_checkpoints(run, out, last)
    typer.echo(f"wrote {out}: the mean of {len(paths)}, {paths[0].stem} to {paths[-1].stem}", err=True)


class Format(enum.StrEnum):
    saved_model = "saved_model"
    ctranslate2 = "ctranslate2"
    marian = "marian"


@app.command()
def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The folder to write; must not be there.")],
    format: Annotated[Format, typer.Option(help="What to write.")] = Format.saved_model,
    beam_size: BeamSize = None,
    length_penalty: LengthPenalty = None,
    precision: Precision = None,
    compiled: Annotated[
        bool, typer.Option("--compiled", help="saved_model, greedy: a signature more, which XLA compiles.")
    ] = False,
    changes: Decoding = None,
) -> None:
    """Write the best model of RUN for use elsewhere, with a MODEL_CARD.md that says how.

    [bold]saved_model[/bold] takes and gives strings, by the search that is given here, wherever tensorflow and
    tensorflow-text are installed, TensorFlow Serving included. Its signatures: serving_default takes `text`, strings
    (batch,), and gives `text`, `log_prob` and `score`; n_best gives several of each; options takes length_penalty,
    max_length and min_length too. With --beam-size 1 --compiled, alone takes one text and answers in little more than
    half the time: XLA compiles it, which takes seconds for the first text of up to 16 pieces, of up to 32, and so on.

    [bold]ctranslate2[/bold] is for CTranslate2, whose products in int8 are a CPU's fastest: --precision int8.

    [bold]marian[/bold] is for Hugging Face's MarianMTModel and MarianTokenizer.

    translate, evaluate and score take a SavedModel or a CTranslate2 folder in place of RUN.
    """
    if out.exists():
        raise DataError(f"{out} is there already")
    if not (run / "best.keras").exists() and ((run / "saved_model.pb").exists() or (run / "model.bin").exists()):
        raise DataError(f"{run} is an export already: give the run folder it came from")
    if compiled and format != Format.saved_model:
        raise UsageError(f"--compiled is for a SavedModel, not for --format {format.value}")
    decoding = decoding_of(run, beam_size, None, length_penalty, precision, changes)
    load_tensorflow()
    if format == Format.saved_model:
        from keras_transformer.export.saved_model import export_saved_model

        write = partial(export_saved_model, compiled=compiled)
    elif format == Format.ctranslate2:
        from keras_transformer.export.ctranslate2 import export_ctranslate2 as write
    else:
        from keras_transformer.marian import export_marian as write

    write(run, out, decoding)
    typer.echo(f"wrote {out}", err=True)


@app.command()
def import_marian(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A Marian model as Hugging Face keeps it.")],
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The run folder to write; must not be there.")],
    source_language: Annotated[
        str | None, typer.Option(help="The source's code. Default: tokenizer_config.json's.", show_default=False)
    ] = None,
    target_language: Annotated[
        str | None, typer.Option(help="The target's code. Default: tokenizer_config.json's.", show_default=False)
    ] = None,
) -> None:
    """Make a run folder of a Marian model, such as OPUS-MT's, which translates, exports and is trained on like any.

    [bold]keras-transformer import-marian opus-mt-en-de runs/opus[/bold]

    [bold]echo "Hello." | keras-transformer translate runs/opus[/bold]

    FOLDER holds config.json, model.safetensors (or, if PyTorch is installed, pytorch_model.bin), source.spm, target.spm
    and vocab.json. To go on training on your own text: [bold]keras-transformer train runs/opus/settings.yaml --run-dir
    runs/mine --set training.init_from=runs/opus --set 'data.train=\\[a.en, a.de]' --set 'data.dev=\\[b.en, b.de]' --set
    training.learning_rate=0.0001 --set training.warmup_steps=100[/bold]
    """
    if run.exists():
        raise DataError(f"{run} is there already")
    load_tensorflow()
    from keras_transformer import marian

    marian.import_marian(folder, run, source_language, target_language)
    typer.echo(f"wrote {run}", err=True)


@app.command()
def settings(
    size: Annotated[
        str, typer.Option("--preset", metavar="|".join(PRESETS), help="The model's size; base and big are the paper's.")
    ] = "tiny",
) -> None:
    """Print every setting as commented YAML, ready to edit.

    [bold]keras-transformer settings --preset base > my.yaml[/bold]
    """
    typer.echo(settings_yaml(preset(size)), nl=False)


def decoding_of(run: Path, beam_size=None, n_best=None, length_penalty=None, precision=None, changes=None):
    """The decoding settings of a run, with what the command line changes."""
    options = {"beam_size": beam_size, "n_best": n_best, "length_penalty": length_penalty, "precision": precision}
    options = [f"decoding.{name}={value}" for name, value in options.items() if value is not None]
    for change in changes or []:
        if not change.startswith("decoding."):
            raise UsageError(f"--set here takes decoding.NAME=VALUE, got {change!r}")
    return run_settings(run, [*(changes or []), *options]).decoding


def load_translator(run: Path, decoding):
    # A batch on each core, each operation on one: the fastest way to translate on a CPU. So is Eigen in float32.
    if "tensorflow" not in sys.modules and decoding.precision == "float32":
        os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")
    load_tensorflow(lambda: 1)
    from keras_transformer.translator import Translator

    return Translator.load(run, decoding)


def read_input(file: Path | None) -> tuple[Iterator[str], int | None]:
    """The lines of a file, plain or .gz, or of stdin, and their number, if it can be known.

    Bytes that are not UTF-8 become U+FFFD, with a warning.
    """
    from keras_transformer.files import open_lines, records

    name = "stdin" if file is None else str(file)
    lines = records(sys.stdin.buffer) if file is None else open_lines(file)

    def decoded():
        for number, line in enumerate(lines, 1):
            text = line.decode("utf-8", "replace")
            if text.encode("utf-8") != line:
                typer.echo(f"{name}, line {number}: not UTF-8, the bad bytes became U+FFFD", err=True)
            yield text

    return decoded(), None if file is None else count_lines(file)


def count_lines(file: Path) -> int | None:
    """How many lines a file has; None if it is a pipe, which can be read but once."""
    from keras_transformer.files import open_lines

    return None if file.exists() and not file.is_file() else sum(1 for _ in open_lines(file))


def zip_files(source: Path, target: Path) -> Iterator[tuple[str, str]]:
    """Pairs of lines of two files.

    Raises:
        DataError: one is longer, or a line is not UTF-8.
    """
    from keras_transformer.files import decode_line, open_lines

    for number, (one, other) in enumerate(itertools.zip_longest(open_lines(source), open_lines(target)), 1):
        if one is None or other is None:
            raise DataError(f"{source if one is None else target} ends at line {number - 1}, the other file goes on")
        yield decode_line(one, source, number), decode_line(other, target, number)


def write_line(text: str) -> None:
    sys.stdout.buffer.write(text.encode("utf-8") + b"\n")


def with_progress(translator, lines: list[str]) -> list[str]:
    from keras_transformer.progress import Progress

    with Progress("translate", len(lines), unit="lines") as progress:
        return translator.translate(lines, progress.advance)


def main() -> None:
    """Run the command; a mistake of the user's is one line on stderr, without a traceback."""
    for stream in (sys.stdout, sys.stderr):  # whatever the locale
        stream.reconfigure(encoding="utf-8")
    try:
        app()
    except UserError as error:
        message, code = str(error), error.exit_code
    except OSError as error:  # a file where a folder should be, a disk that is full or not ours
        message, code = f"{error.filename or 'output'}: {error.strerror or error}", 1
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what could not be written would be tried again at the end
    else:
        return
    typer.echo(f"error: {message}", err=True)
    sys.exit(code)
