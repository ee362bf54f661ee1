"""A run's page and picture: the figures on them are those of metrics.jsonl, the settings and the model file."""

import json

import pytest

from keras_transformer.config import settings_from, settings_yaml
from keras_transformer.errors import DataError
from keras_transformer.report import write_report

METRICS = [
    {"step": 100, "loss": 6.0, "learning_rate": 0.001, "gradient_norm": 2.0, "tokens_per_second": 2000.0},
    {"step": 200, "loss": 4.0, "learning_rate": 0.002, "gradient_norm": 1.0, "tokens_per_second": 6000.0},
    {"step": 200, "dev_loss": 3.5, "dev_accuracy": 0.4, "dev_bleu": 30.25, "dev_exact_match": 0.1},
    {"step": 300, "dev_loss": 3.0, "dev_accuracy": 0.5, "dev_bleu": 20.0, "dev_exact_match": 0.1},
    {"step": 300, "average": 10, "dev_loss": 3.25, "dev_accuracy": 0.5, "dev_bleu": 30.5, "dev_exact_match": 0.15},
]


@pytest.fixture
def run(tmp_path):
    """Makes a run folder of these settings and these lines of metrics.jsonl."""

    def make(metrics=METRICS, end="", **training):
        folder = tmp_path / "my run"
        folder.mkdir()
        values = {"training": training, "data": {"train": ["a|b.en", "a|b.de"], "dev": ["dev.en", "dev.de"]}}
        (folder / "settings.yaml").write_text(settings_yaml(settings_from(values, "test")), encoding="utf-8")
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in metrics) + end)
        return folder

    return make


@pytest.fixture
def figures(monkeypatch):
    """The matplotlib figures that are saved."""
    from matplotlib.figure import Figure

    saved, savefig = [], Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, path: (saved.append(self), savefig(self, path)))
    return saved


def test_the_page(run, tiny):
    """Tokens by time: 2,000 and 6,000 a second over as many tokens are 3,000. The best by BLEU is the mean, at 300."""
    folder = run(max_steps=1000, warmup_steps=30)
    model = tiny()
    model.build((None, None), (None, None))
    model.save(folder / "best.keras")
    assert write_report(folder, folder) == folder / "report.md"
    page = (folder / "report.md").read_text(encoding="utf-8")
    for line in [
        "# my run",
        "| model | 4+4 layers, d_model 128, 4 heads, dff 256 |",
        f"| weights | {model.count_params():,} |",
        "| train | `[a\\|b.en, a\\|b.de]` |",
        "| updates | 300 of at most 1,000 |",
        "| target tokens a second, mean | 3,000 |",
        "| best model, by dev BLEU | step 300 (mean of checkpoints) |",
        "| dev BLEU | 30.50 |",
        "![The curves of the run](report.png)",
        "| training.max_steps | `1000` | `8000` |",
        "| training.warmup_steps | `30` | `4000` |",
        "| 200 | 3.500 | 40.0 % | 30.25 | 10.0 % |",
        "| 300 | 3.000 | 50.0 % | 20.00 | 10.0 % |",
        "| **300 (mean of checkpoints)** | **3.250** | **50.0 %** | **30.50** | **15.0 %** |",
    ]:
        assert line in page.splitlines()
    assert "tokens_per_batch" not in page and "d_model |" not in page


def test_the_best_by_loss(run):
    folder = run(select="loss")
    page = write_report(folder, folder).read_text(encoding="utf-8")
    assert "| best model, by dev loss | step 300 |\n| dev loss | 3.000 |" in page


def test_the_picture(run, figures, tmp_path):
    """Five panels with names on their axes; the curves are the figures, the mean and the best are marked apart."""
    write_report(run(), tmp_path / "out")
    assert (tmp_path / "out" / "report.png").read_bytes().startswith(b"\x89PNG")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"report.png", "report.md"}
    [figure] = figures
    assert figure.get_suptitle() == "my run" and figure.axes[-1].get_xlabel() == "updates"
    drawn = {axes.get_ylabel(): [line.get_xydata().tolist() for line in axes.lines] for axes in figure.axes}
    assert drawn == {
        "loss, nats a token": [[[100, 6.0], [200, 4.0]], [[200, 3.5], [300, 3.0]], [[300, 3.25]], [[300, 3.25]]],
        "BLEU on dev": [[[200, 30.25], [300, 20.0]], [[300, 30.5]], [[300, 30.5]]],
        "learning rate": [[[100, 0.001], [200, 0.002]]],
        "gradient norm": [[[100, 2.0], [200, 1.0]]],
        "target tokens/s": [[[100, 2000.0], [200, 6000.0]]],
    }
    labels = [text.get_text() for text in figure.axes[1].get_legend().get_texts()]
    assert labels == ["dev", "dev, mean of checkpoints", "best model: 30.50 at 300"]


@pytest.mark.parametrize("end", ["", '{"step": 300, "dev_lo', "{"], ids=["whole", "half a line", "a character"])
def test_a_run_at_work_without_a_measure_yet(run, figures, end):
    """Its last line may be half there; there is no best model and no panel without a curve."""
    folder = run(METRICS[:2], end)
    page = write_report(folder, folder).read_text(encoding="utf-8")
    assert "| updates | 200 of at most 8,000 |" in page and "best model" not in page and "Measures" not in page
    assert len(figures[0].axes) == 4


def test_what_is_no_run_or_damaged_is_named_and_nothing_is_written(run, tmp_path):
    out = tmp_path / "out"
    with pytest.raises(DataError, match="no run folder"):
        write_report(tmp_path, out)
    folder = run()
    (folder / "best.keras").write_bytes(b"rubbish")
    with pytest.raises(DataError, match="best.keras: damaged"):
        write_report(folder, out)
    (folder / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n{"loss"\n{"step": 3, "loss": 1.0}\n')
    with pytest.raises(DataError, match="metrics.jsonl, line 2: not a line that train wrote"):
        write_report(folder, out)
    for text in ("", '{"st'):
        (folder / "metrics.jsonl").write_text(text)
        with pytest.raises(DataError, match="my run: no figures yet"):
            write_report(folder, out)
    (folder / "metrics.jsonl").unlink()
    with pytest.raises(DataError, match="my run: no figures yet"):
        write_report(folder, out)
    assert not out.exists()
