"""The command: `keras-transformer demo | train | translate | evaluate | export | settings`.

TensorFlow is imported where work begins, so that --help and usage errors answer at once.
"""

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from keras_transformer.config import PRESETS, load_settings, preset, settings_yaml
from keras_transformer.errors import DataError, UserError
from keras_transformer.quiet import quiet_stderr

app = typer.Typer(
    help="Train a Transformer on your own sentence pairs, translate with it, measure it and export it.",
    epilog="Begin with: keras-transformer demo",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
Run = Annotated[Path, typer.Argument(metavar="RUN", help="A run folder, or an exported SavedModel.")]


def load_tensorflow() -> None:
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    os.environ["KERAS_BACKEND"] = "tensorflow"  # the layers run on others too, the command does not
    with quiet_stderr():
        import tensorflow as tf
        import tensorflow_text  # noqa: F401

        tf.constant(0)  # the first tensor starts the devices, which have notes of their own
    from keras_transformer.progress import show_logs

    show_logs()


@app.command()
def demo() -> None:
    """Train on the built-in phrasebook, in minutes, then translate phrases that the model never saw.

    The phrasebook is made from CLDR: dates, times, prices, quantities and lists, in English and German. The run is kept
    in runs/phrasebook, as [bold]keras-transformer train[/bold] without settings keeps it.
    """
    settings, run_dir = load_settings(None), Path("runs/phrasebook")
    load_tensorflow()
    from keras_transformer import evaluation, training
    from keras_transformer.data.sources import read_pairs

    if stopped_by := training.train(settings, run_dir):
        typer.echo("stopped after a checkpoint; the same command goes on", err=True)
        raise typer.Exit(128 + stopped_by)
    pairs = read_pairs(settings.data.dev, "test", settings.data)
    translations = with_progress(load_translator(run_dir), [source for source, _ in pairs])
    for (source, target), translation in list(zip(pairs, translations, strict=True))[:10]:
        typer.echo(f"{source}\n  {translation}" + ("" if translation == target else f"\n  (right: {target})"))
    scores = evaluation.evaluate(translations, [target for _, target in pairs], settings.data.target_language)
    typer.echo(f"\n{len(pairs)} phrases that are neither in train nor in dev:\n{scores}")


@app.command()
def train(
    config: Annotated[
        Path | None, typer.Argument(metavar="[CONFIG.yaml]", help="Settings; left out, the built-in phrasebook's.")
    ] = None,
    run_dir: Annotated[
        Path | None, typer.Option(help="Where the run is kept. Default: runs/NAME-OF-CONFIG.", show_default=False)
    ] = None,
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Change a setting: training.max_steps=1000. Repeatable."),
    ] = None,
) -> None:
    """Train a model; the same command again goes on from the last checkpoint.

    [bold]keras-transformer train[/bold]  (on the built-in phrasebook)

    [bold]keras-transformer train my.yaml --set 'data.train=\\[a.en.gz, a.de.gz]' --run-dir runs/a[/bold]

    The run folder holds settings.yaml, tokenizer/, checkpoints/, best.keras, metrics.jsonl and TensorBoard curves.
    """
    settings = load_settings(config, changes or [])
    if run_dir is None:
        run_dir = Path("runs") / (config.stem if config else "phrasebook")
    load_tensorflow()
    from keras_transformer import training

    stopped_by = training.train(settings, run_dir)
    if stopped_by:
        typer.echo(f"stopped after a checkpoint; the same command goes on with {run_dir}", err=True)
        raise typer.Exit(128 + stopped_by)


@app.command()
def translate(
    run: Run,
    file: Annotated[
        Path | None, typer.Argument(metavar="[FILE]", help="Sentences, one a line; or .gz. Default: stdin.")
    ] = None,
) -> None:
    """Translate text: a line out for each line in.

    [bold]echo "Hello." | keras-transformer translate runs/phrasebook[/bold]

    A sentence longer than the model's position table is cut to it, and bytes that are not UTF-8 become U+FFFD, each
    with a warning on stderr.
    """
    lines = read_input(file)
    for line in with_progress(load_translator(run), lines):
        sys.stdout.buffer.write(line.encode("utf-8") + b"\n")
    sys.stdout.buffer.flush()


@app.command()
def evaluate(
    run: Run,
    source: Annotated[Path, typer.Argument(metavar="SOURCE", help="Sentences to translate, one a line; or .gz.")],
    reference: Annotated[Path, typer.Argument(metavar="REFERENCE", help="Right translations, one a line; or .gz.")],
    language: Annotated[
        str | None, typer.Option(help="The target's code, such as de. Default: the run's.", show_default=False)
    ] = None,
) -> None:
    """Translate SOURCE and score it against REFERENCE: sacreBLEU and chrF on detokenised text, with signatures."""
    from keras_transformer.data.sources import text_pairs

    pairs = text_pairs(source, reference)
    translator = load_translator(run)
    from keras_transformer import evaluation
    from keras_transformer.translator import run_settings

    language = language or run_settings(run).data.target_language
    evaluation.make_bleu(language)
    translations = with_progress(translator, [source for source, _ in pairs])
    typer.echo(str(evaluation.evaluate(translations, [target for _, target in pairs], language)))


@app.command()
def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The folder to write; must not be there.")],
) -> None:
    """Write the best model of RUN as a SavedModel that takes and gives strings.

    Its signature serving_default takes `text`, strings (batch,), and gives `text` and `score`, the log-probability. It
    loads wherever tensorflow and tensorflow-text are installed; TensorFlow Serving runs it too.
    """
    if out.exists():
        raise DataError(f"{out} is there already")
    load_tensorflow()
    from keras_transformer.export.saved_model import export_saved_model

    export_saved_model(run, out)
    typer.echo(f"wrote {out}", err=True)


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


def load_translator(run: Path):
    load_tensorflow()
    from keras_transformer.translator import Translator

    return Translator.load(run)


def read_input(file: Path | None) -> list[str]:
    """The lines of a file, plain or .gz, or of stdin; bytes that are not UTF-8 become U+FFFD, with a warning."""
    from keras_transformer.files import BOM, read_bytes, split_records

    name = "stdin" if file is None else str(file)
    data = sys.stdin.buffer.read().removeprefix(BOM) if file is None else read_bytes(file)
    texts = []
    for number, line in enumerate(split_records(data), 1):
        text = line.decode("utf-8", "replace")
        if text.encode("utf-8") != line:
            typer.echo(f"{name}, line {number}: not UTF-8, the bad bytes became U+FFFD", err=True)
        texts.append(text)
    return texts


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
        message, code = f"{error.filename or 'file'}: {error.strerror or error}", 1
    else:
        return
    typer.echo(f"error: {message}", err=True)
    sys.exit(code)
