"""scripts/benchmark.py: programs run in turn, the median of each, and this package's own program."""

import runpy
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "scripts" / "benchmark.py"
PEER = """
import sys, pathlib
calls = pathlib.Path(__file__).with_name("calls")
calls.write_text(calls.read_text() + sys.argv[1] if calls.exists() else sys.argv[1])
rates = {"a": [10, 90, 30], "b": [5, 5, 8]}[sys.argv[1]]
print(f"{sys.argv[1]} {sys.argv[3:]}: {rates[calls.read_text().count(sys.argv[1]) - 1]} tokens/s (median of 4 batches)")
"""


@pytest.fixture(scope="module")
def benchmark():
    return runpy.run_path(str(SCRIPT))


def test_programs_run_in_turn_and_the_median_counts(benchmark, tmp_path, capsys):
    """Three rounds of two programs: a b a b a b; the medians are 30 and 5."""
    (tmp_path / "peer.py").write_text(PEER)
    commands = {name: ([sys.executable, str(tmp_path / "peer.py"), name], {}) for name in ("a", "b")}
    assert benchmark["run_cell"](commands, ["batches.npz", "--beam", 1], 3) == {"a": 30, "b": 5}
    assert (tmp_path / "calls").read_text() == "ababab"
    assert "round 3 b: b ['--beam', '1']: 8 tokens/s" in capsys.readouterr().err


def test_a_program_that_fails_is_shown(benchmark, tmp_path):
    (tmp_path / "peer.py").write_text("import sys; sys.exit('no such model')")
    with pytest.raises(SystemExit, match="no such model"):
        benchmark["run_cell"]({"a": ([sys.executable, str(tmp_path / "peer.py"), "a"], {})}, [], 1)


@pytest.mark.parametrize("beam", [1, 4])
def test_its_own_program_decodes_every_row_to_the_length_of_its_batch(benchmark, tmp_path, beam):
    """It asserts the outputs' lengths itself; here, that it runs and prints a rate."""
    benchmark["write_random_batches"](tmp_path / "random.npz")
    arguments = [tmp_path / "random.npz", "--size", "tiny", "--beam", beam, "--seconds", 0]
    result = subprocess.run(
        [sys.executable, SCRIPT, "own", *map(str, arguments)], capture_output=True, text=True, check=True
    )
    assert float(benchmark["RATE"].search(result.stdout)[1]) > 0
