"""The notebooks run from top to bottom, and what is stored in them is what a reader should see."""

import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))
PICTURES = {"01_the_transformer_step_by_step": 9}
ABSOLUTE_PATH = re.compile(r"(?<![^\s'\"(=])/\w+/")

every_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def outputs(notebook):
    return [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]


def printed(notebook):
    """The text among the outputs, streams and values."""
    texts = [output.get("text") or output.get("data", {}).get("text/plain", "") for output in outputs(notebook)]
    return "\n".join(texts)


def count_pictures(notebook):
    return sum("image/png" in output.get("data", {}) for output in outputs(notebook))


def test_every_notebook_is_known():
    assert {path.stem for path in NOTEBOOKS} == set(PICTURES)


@pytest.mark.slow
@every_notebook
def test_runs(path, tmp_path, monkeypatch):
    monkeypatch.setenv("KERAS_TRANSFORMER_NOTEBOOK_STEPS", "30")
    monkeypatch.setenv("JUPYTER_PLATFORM_DIRS", "1")  # jupyter_core warns where it is not said which folders it uses
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))  # no history left in the home folder
    notebook = nbformat.read(path, as_version=4)
    resources = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(notebook, timeout=900, kernel_name="python3", resources=resources).execute()
    assert count_pictures(notebook) == PICTURES[path.stem]


@every_notebook
def test_is_stored_with_its_outputs(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    counts = [cell.execution_count for cell in notebook.cells if cell.cell_type == "code"]
    assert counts == list(range(1, len(counts) + 1)), "run it from the top, in a fresh kernel"
    assert count_pictures(notebook) == PICTURES[path.stem]
    assert not [output for output in outputs(notebook) if output.output_type == "error"]
    assert not [output.text for output in outputs(notebook) if output.get("name") == "stderr"]
    assert not ABSOLUTE_PATH.search(printed(notebook))
    assert path.stat().st_size < 700_000
