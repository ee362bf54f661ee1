"""MODEL_CARD.md: what an export was made of, what it is worth, and how it is called."""

from pathlib import Path

from keras_transformer.config import DecodingSettings, Settings
from keras_transformer.evaluation import bleu_signature
from keras_transformer.report import MEASURES, best_measure, code, facts, measures, read_metrics, step_of, table
from keras_transformer.version import __version__

CARD = "MODEL_CARD.md"


def make_card(run_dir: Path, settings: Settings, usage: str) -> str:
    """The card of what is exported from a run.

    Args:
        settings: of the run, with the search that the export was made for.
        usage: how the export is called, in markdown.
    """
    data, name = settings.data, run_dir.resolve().name
    sections = [
        f"# {name}: {data.source_language} to {data.target_language}",
        f"A Transformer, exported by keras-transformer {__version__}.",
        "## How to call it",
        usage.strip(),
        "## What it is",
        table(("", ""), facts(run_dir, settings)),
        "## What it is worth",
        worth(run_dir, settings),
        "## How it searches",
        table(("setting", "here"), search(settings.decoding)),
        "## What it does not do",
        f"It takes sentences of up to {settings.model.pe_input} subword pieces, and cuts longer ones to that. It knows "
        "the language of the text that it was trained on; elsewhere, measure it before you rely on it.",
    ]
    return "\n\n".join(sections) + "\n"


def worth(run_dir: Path, settings: Settings) -> str:
    """The figures of the best model on dev; they are not there of a model that was not trained here."""
    path = run_dir / "metrics.jsonl"
    best = best_measure(settings, read_metrics(path)) if path.exists() and path.stat().st_size else None
    if best is None:
        return "It was not measured here: `keras-transformer evaluate` does that."
    signature = bleu_signature(settings.data.target_language, settings.data.bleu_tokenizer)
    return (
        f"On dev, by the search of the run, after {step_of(best)} updates; BLEU is sacreBLEU's, {code(signature)}:\n\n"
        + table(MEASURES, [measures(best)])
    )


def search(decoding: DecodingSettings) -> list[tuple[str, str]]:
    return [(name, code(value)) for name, value in decoding.model_dump(mode="json").items()]
