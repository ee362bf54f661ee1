"""scripts/benchmark.py: programs run in turn, the median of each, and this package's own programs."""

import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
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
    outputs = benchmark["run_cell"](commands, ["batches.npz", "--beam", 1], 3)
    assert benchmark["medians"](outputs) == {"a": 30, "b": 5}
    assert (tmp_path / "calls").read_text() == "ababab"
    assert "round 3 b: b ['--beam', '1']: 8 tokens/s" in capsys.readouterr().err


def test_a_program_that_fails_is_shown(benchmark, tmp_path):
    (tmp_path / "peer.py").write_text("import sys; sys.exit('no such model')")
    with pytest.raises(SystemExit, match="no such model"):
        benchmark["run_cell"]({"a": ([sys.executable, str(tmp_path / "peer.py"), "a"], {})}, [], 1)


@pytest.mark.parametrize("beam", [1, 4])
def test_its_own_program_decodes_every_row_to_the_length_of_its_batch(benchmark, tmp_path, beam):
    """It asserts the outputs' lengths itself; here, that it runs and prints a rate."""
    arguments = [benchmark["write_random_batches"](tmp_path), "--size", "tiny", "--beam", beam, "--seconds", 0]
    result = subprocess.run(
        [sys.executable, SCRIPT, "own", *map(str, arguments)], capture_output=True, text=True, check=True
    )
    assert float(benchmark["RATE"].search(result.stdout)[1]) > 0


def test_its_own_program_trains(benchmark, tmp_path):
    """A rate and a share of the peak, of whole updates on batches of a few rows."""
    ids = np.random.default_rng(0).integers(4, 50, (6, 9), dtype=np.int32)
    np.savez(tmp_path / "small.npz", n=2, inp0=ids, tar0=ids, inp1=ids, tar1=ids, vocab=50)
    arguments = [tmp_path / "small.npz", "--size", "tiny", "--seconds", "0"]
    result = subprocess.run(
        [sys.executable, SCRIPT, "own-train", *arguments], capture_output=True, text=True, check=True
    )
    assert float(benchmark["RATE"].search(result.stdout)[1]) > 0
    assert 0 <= float(benchmark["SHARE"].search(result.stdout)[1]) <= 100


def test_the_operations_of_an_update(benchmark):
    """One layer, d_model 2, dff 3, 5 ids, one token in and one out; a product of (a, b) and (b, c) has 2abc.

    Encoder: 4 projections 32, scores and sums 8, feed-forward 24. Decoder: 32 and 8, 2 projections for the source's
    attention 16, their scores and sums 8, feed-forward 24, and 2 projections of the source 16. Vocabulary: 20. The
    backward pass has two for each.
    """
    sizes = {"num_layers": 1, "d_model": 2, "dff": 3}
    once = 32 + 8 + 24 + 32 + 8 + 16 + 8 + 24 + 16 + 20
    assert benchmark["step_flops"](sizes, 5, (1, 1), (1, 2)) == 3 * once
    assert benchmark["step_flops"](sizes, 5, (4, 1), (4, 2)) == 4 * 3 * once
    # Twice as many tokens have twice as many products; in attention, each has two partners.
    assert benchmark["step_flops"](sizes, 5, (1, 2), (1, 3)) == 3 * (2 * once + 2 * 3 * 8)


def test_training_peers_run_in_both_precisions(benchmark, tmp_path):
    program = "import sys; print(f'{sys.argv[1:]}: {len(sys.argv[1])} target tokens/s (median of 4 steps)')"
    (tmp_path / "train_peer.py").write_text(program)
    commands = benchmark["train_programs"](tmp_path, sys.executable)
    assert list(commands)[:2] == ["here float32", "here bfloat16"]
    commands = {name: command for name, command in commands.items() if not name.startswith("here")}
    outputs = benchmark["run_cell"](commands, ["batches.npz", "--size", "tiny"], 1)
    assert outputs["hf bfloat16"][0].startswith("['hf', 'batches.npz', '--size', 'tiny', '--precision', 'bfloat16']")
    rates = benchmark["medians"](outputs)
    assert len(rates) == 8 and rates["listing float32"] == 7 and benchmark["medians"](outputs, benchmark["SHARE"]) == {}


def test_the_table_of_training(benchmark, capsys):
    """The ratio is of the faster precision of each: 1,200 by 400."""
    rates = {"here float32": 800, "here bfloat16": 1200, "hf float32": 400, "hf bfloat16": 300}
    benchmark["print_train_cell"]("tiny", rates, {"here float32": 61, "here bfloat16": 40})
    assert capsys.readouterr().out == (
        "| tiny | here | 800 (61 % of peak) | 1,200 (40 % of peak) | 1.00 |\n| tiny | hf | 400 | 300 | 3.00 |\n"
    )
