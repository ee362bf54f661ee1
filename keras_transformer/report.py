"""A run on a page: its curves as a picture, its figures as markdown."""

import json
import math
import statistics
import zipfile
from pathlib import Path

from keras_transformer.config import Settings, run_settings, yaml_value
from keras_transformer.errors import DataError
from keras_transformer.files import open_lines, whole

# What is drawn, one below the other: what the axis is, and the figures of metrics.jsonl on it with what they are.
PANELS = [
    ("loss, nats a token", {"loss": "train, with dropout and label smoothing", "dev_loss": "dev"}),
    ("BLEU on dev", {"dev_bleu": "dev"}),
    ("learning rate", {"learning_rate": "train"}),
    ("gradient norm", {"gradient_norm": "train"}),
    ("target tokens/s", {"tokens_per_second": "train"}),
]
MEASURES = ("dev loss", "dev accuracy", "dev BLEU", "dev exact match")


def write_report(run_dir: Path, out: Path) -> Path:
    """Write report.png and report.md, which shows it, to the folder `out`.

    Returns:
        The path of report.md.

    Raises:
        DataError: `run_dir` is no run folder or has no figures yet, or what it holds is damaged.
    """
    settings = run_settings(run_dir)
    records = read_metrics(run_dir / "metrics.jsonl")
    page = make_page(run_dir, settings, records)
    with whole(out / "report.png") as beside:
        draw_curves(run_dir, settings, records, beside)
    with whole(out / "report.md") as beside:
        beside.write_text(page, encoding="utf-8")
    return out / "report.md"


def read_metrics(path: Path) -> list[dict]:
    """The records of metrics.jsonl, each with "mean": whether it is of the mean of checkpoints.

    Raises:
        DataError: there are none, or a line is no record.
    """
    lines = list(open_lines(path)) if path.exists() else []
    records = []
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
            records.append({**record, "step": record["step"], "mean": "average" in record})
        except (ValueError, TypeError, KeyError) as error:
            if number == len(lines):  # half a line, of a run at work
                break
            raise DataError(f"{path}, line {number}: not a line that train wrote") from error
    if not records:
        raise DataError(f"{path.parent}: no figures yet ({path.name} is missing or empty); train it first")
    return records


def best_measure(settings: Settings, records: list[dict]) -> dict | None:
    """The first of the best measures on dev, which best.keras is of, as `training.measure_and_select` has it."""

    def worth(record):
        return record["dev_bleu"] if settings.training.select == "bleu" else -record["dev_loss"]

    measures = [record for record in records if "dev_loss" in record]
    return max((record for record in measures if math.isfinite(worth(record))), key=worth, default=None)


def draw_curves(run_dir: Path, settings: Settings, records: list[dict], path: Path) -> None:
    from matplotlib.figure import Figure  # pyplot would look for a display
    from matplotlib.ticker import StrMethodFormatter

    best = best_measure(settings, records)
    panels = [(label, curves) for label, curves in PANELS if any(curves.keys() & record for record in records)]
    figure = Figure(figsize=(9, 1 + 2.2 * len(panels)), layout="constrained")
    figure.suptitle(run_dir.resolve().name, parse_math=False)
    all_axes = figure.subplots(len(panels), sharex=True, squeeze=False)[:, 0]

    def draw(axes, name, found, style, label, colour, size):
        steps, values = [record["step"] for record in found], [record[name] for record in found]
        axes.plot(steps, values, style, label=label, color=colour, markersize=size)

    for axes, (label, curves) in zip(all_axes, panels, strict=True):
        for name, curve in curves.items():
            found = [record for record in records if name in record]
            single = [record for record in found if not record["mean"]]
            draw(axes, name, single, ".-", curve, "C1" if curve == "dev" else "C0", 4)
            if means := [record for record in found if record["mean"]]:
                draw(axes, name, means, "D", "dev, mean of checkpoints", "C2", 7)
            if best and name in best:
                draw(axes, name, [best], "*", f"best model: {best[name]:.2f} at {best['step']:,}", "C3", 12)
        if best and curves.keys() & best:
            axes.legend()
        axes.set_ylabel(label)
        axes.margins(y=0.1)
        if "loss" not in curves:
            axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    all_axes[-1].set_xlabel("updates")
    all_axes[-1].xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    figure.savefig(path)


def count_weights(path: Path) -> int:
    """How many weights a .keras file holds.

    Raises:
        DataError: it is damaged.
    """
    import h5py

    count = 0

    def add(name, item):
        nonlocal count
        count += item.size if isinstance(item, h5py.Dataset) else 0

    try:
        with zipfile.ZipFile(path) as parts, parts.open("model.weights.h5") as file, h5py.File(file, "r") as weights:
            weights.visititems(add)
    except (OSError, KeyError, RuntimeError, zipfile.BadZipFile) as error:
        raise DataError(f"{path}: damaged ({error})") from error
    return count


def make_page(run_dir: Path, settings: Settings, records: list[dict]) -> str:
    training = settings.training
    rows = [*facts(run_dir, settings), ("updates", f"{records[-1]['step']:,} of at most {training.max_steps:,}")]
    rates = [record["tokens_per_second"] for record in records if "tokens_per_second" in record]
    if rates:  # each over about as many tokens: the harmonic mean is all tokens by all the time
        rows.append(("target tokens a second, mean", f"{statistics.harmonic_mean(rates):,.0f}"))
    best = best_measure(settings, records)
    if best:
        rows.append((f"best model, by dev {training.select.replace('bleu', 'BLEU')}", f"step {step_of(best)}"))
        rows += zip(MEASURES, measures(best), strict=True)
    sections = [f"# {run_dir.resolve().name}", table(("", ""), rows), "![The curves of the run](report.png)"]
    sections += ["## Settings that are not the defaults", table(("setting", "here", "default"), changes(settings))]
    if best:
        lines = []
        for record in records:
            if "dev_loss" in record:
                cells = (step_of(record), *measures(record))
                lines.append([f"**{cell}**" for cell in cells] if record is best else cells)
        sections += ["## Measures on dev", table(("step", *MEASURES), lines)]
    return "\n\n".join(sections) + "\n"


def facts(run_dir: Path, settings: Settings) -> list[tuple[str, str]]:
    """What a model is and what it was made of."""
    model, data = settings.model, settings.data
    pieces = f"at most {data.vocab_size:,} pieces, {'joint' if data.joint_vocabulary else 'of each side'}"
    rows = [
        ("model", f"{model.num_layers}+{model.num_layers} layers, d_model {model.d_model}, {model.num_heads} heads, "
                  f"dff {model.dff}"),
        ("vocabulary", pieces),
        ("train", code(data.train)),
        ("dev", code(data.dev)),
        ("languages", f"{data.source_language} to {data.target_language}"),
    ]  # fmt: skip
    if (run_dir / "best.keras").exists():
        rows.insert(1, ("weights", f"{count_weights(run_dir / 'best.keras'):,}"))
    return rows


def step_of(record: dict) -> str:
    return f"{record['step']:,}" + (" (mean of checkpoints)" if record["mean"] else "")


def measures(record: dict) -> tuple[str, ...]:
    return (
        f"{record['dev_loss']:.3f}",
        f"{100 * record['dev_accuracy']:.1f} %",
        f"{record['dev_bleu']:.2f}",
        f"{100 * record['dev_exact_match']:.1f} %",
    )


def changes(settings: Settings) -> list[tuple[str, str, str]]:
    """Name, value and default of each setting that is not its default."""
    defaults = Settings().model_dump(mode="json")
    return [
        (f"{section}.{name}", code(value), code(defaults[section][name]))
        for section, values in settings.model_dump(mode="json").items()
        for name, value in values.items()
        if value != defaults[section][name]
    ]


def code(value: object) -> str:
    return f"`{yaml_value(value)}`"


def table(head, rows) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
