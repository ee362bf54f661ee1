"""Speed, measured beside what else one would use: benchmark.py decode [--batches FILE] [--peers FOLDER], and length

Every program runs in a process of its own, one after the other, in rounds; what is printed is the median of the rounds.
A peer is a program `decode_peer.py NAME BATCHES --size SIZE --beam K --batch ROWS --seconds N` in FOLDER that prints
"...: RATE tokens/s ..."; batches are an .npz with `test`, source ids sorted by length, 0 = padding, and `vocab`.
"""

import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

SIZES = {
    "tiny": {"num_layers": 4, "d_model": 128, "num_heads": 4, "dff": 256},
    "base": {"num_layers": 6, "d_model": 512, "num_heads": 8, "dff": 2048},
}
RATE = re.compile(r": (\d+) tokens/s")
app = typer.Typer(help=__doc__, add_completion=False, pretty_exceptions_enable=False)


@app.callback()
def main() -> None:
    """Speed, measured beside what else one would use."""


@app.command()
def decode(
    batches: Annotated[Path | None, typer.Option(help="Default: 1,000 random sources of 5 to 25 ids.")] = None,
    peers: Annotated[Path | None, typer.Option(help="The folder of decode_peer.py; left out, no peers.")] = None,
    python: Annotated[str, typer.Option(help="The Python that has the peers' packages.")] = sys.executable,
    sizes: Annotated[str, typer.Option(help="Of models, with commas between.")] = "tiny,base",
    rounds: Annotated[int, typer.Option(help="How often each program runs.")] = 3,
    seconds: Annotated[float, typer.Option(help="How long it runs each time.")] = 8,
) -> None:
    """Tokens a second: beam 1 and 4 in batches of 64, and one sentence alone.

    Every row is decoded to as many tokens as the longest source of its batch, by every program.
    """
    check(sizes, peers, batches)
    with tempfile.TemporaryDirectory() as folder:
        if batches is None:
            batches = Path(folder) / "random.npz"
            write_random_batches(batches)
        print("| model | batch | beam | program | tokens/s | ms a step | ratio |")
        print("| --- | --- | --- | --- | --- | --- | --- |")
        for size in sizes.split(","):
            for rows, beam in ((64, 1), (64, 4), (1, 1)):
                cell = [batches, "--size", size, "--beam", beam, "--batch", rows, "--seconds", seconds]
                print_cell(size, rows, beam, run_cell(programs(peers, python, beam), cell, rounds))


@app.command()
def length(
    size: Annotated[str, typer.Option(help="Of the model.")] = "tiny",
    beam: Annotated[int, typer.Option(help="Hypotheses that are followed.")] = 1,
    rounds: Annotated[int, typer.Option(help="How often each length runs.")] = 3,
    seconds: Annotated[float, typer.Option(help="How long it runs each time.")] = 8,
) -> None:
    """What a token costs in outputs of 20 to 200 tokens, 32 sources of 20 ids together: nearly the same."""
    check(size)
    with tempfile.TemporaryDirectory() as folder:
        batches = Path(folder) / "random.npz"
        np.savez(batches, test=np.random.default_rng(0).integers(4, 8000, (128, 20), dtype=np.int32), vocab=8000)
        own, environment = programs(None, "", beam)["float32"]
        commands = {f"{tokens} tokens": ([*own, "--length", str(tokens)], environment) for tokens in (20, 50, 100, 200)}
        rates = run_cell(
            commands, [batches, "--size", size, "--beam", beam, "--batch", 32, "--seconds", seconds], rounds
        )
    print("| output | tokens/s | cost of a token |\n| --- | --- | --- |")
    for name, rate in rates.items():
        print(f"| {name} | {rate:,.0f} | {rates['20 tokens'] / rate:.2f} |")


def check(sizes: str, peers: Path | None = None, batches: Path | None = None) -> None:
    for size in sizes.split(","):
        if size not in SIZES:
            raise typer.BadParameter(f"no size is called {size!r}; there are {', '.join(SIZES)}")
    for path in (batches, peers and peers / "decode_peer.py"):
        if path and not path.exists():
            raise typer.BadParameter(f"{path}: no such file")


def programs(peers: Path | None, python: str, beam: int) -> dict[str, tuple[list[str], dict[str, str]]]:
    """Command and environment of each program."""
    own = [sys.executable, __file__, "own"]
    found = {
        "float32": ([*own, "--precision", "float32"], {"TF_ENABLE_ONEDNN_OPTS": "0"}),
        "bfloat16": ([*own, "--precision", "bfloat16"], {}),
    }
    if peers is not None:
        peer = [python, str(peers / "decode_peer.py")]
        found |= {"hf": ([*peer, "hf"], {}), "ct2 float32": ([*peer, "ct2"], {})}
        found["ct2 int8"] = ([*peer, "ct2", "--compute", "int8"], {})
        if beam == 1:
            found["listing"] = ([*peer, "listing"], {})
    return found


def run_cell(commands, cell: list, rounds: int) -> dict[str, float]:
    """The median rate of each program, which run in turn."""
    rates: dict[str, list[float]] = {name: [] for name in commands}
    for number in range(rounds):
        for name, (command, environment) in commands.items():
            command = [*command[:3], *map(str, cell), *command[3:]]
            result = subprocess.run(
                command, env={**os.environ, **environment}, capture_output=True, text=True, encoding="utf-8"
            )
            rate = RATE.search(result.stdout)
            if rate is None:
                sys.exit(f"{' '.join(command)} failed:\n{result.stderr[-2000:]}")
            rates[name].append(float(rate[1]))
            print(f"round {number + 1} {name}: {result.stdout.strip()}", file=sys.stderr)
            # CTranslate2's program tries four ways and names the best: that one alone in the later rounds.
            if best := re.search(r"\[MKL (\d), (\d+) translators\]", result.stdout):
                inter = ["--inter", best[2]]
                commands[name] = (commands[name][0] + inter, {"CT2_USE_MKL": best[1]})
    return {name: statistics.median(values) for name, values in rates.items()}


def print_cell(size: str, rows: int, beam: int, rates: dict[str, float]) -> None:
    base = rates.get("hf", rates["float32"])
    for name, rate in rates.items():
        print(f"| {size} | {rows} | {beam} | {name} | {rate:,.0f} | {1000 * rows / rate:.2f} | {rate / base:.2f} |")
    sys.stdout.flush()


def write_random_batches(path: Path) -> None:
    draw = np.random.default_rng(0)
    lengths = np.sort(draw.integers(5, 26, 1000))
    ids = draw.integers(4, 8000, (1000, 25), dtype=np.int32)
    np.savez(path, test=np.where(np.arange(25) < lengths[:, None], ids, 0), vocab=8000)


@app.command(hidden=True)
def own(
    batches: Path,
    size: str = "tiny",
    beam: int = 1,
    batch: int = 64,
    seconds: float = 8,
    precision: str = "float32",
    length: int = 0,
) -> None:
    """This package's own rate; with --length, every output of so many tokens."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)
    data = np.load(batches)
    test = data["test"]
    parts = [test[i : i + batch] for i in range(0, len(test), batch)]
    parts = [part[:, : max(1, int((part != 0).sum(1).max()))] for part in parts]
    search = make_search(SIZES[size], int(data["vocab"]), beam, precision)
    cores = len(os.sched_getaffinity(0))
    with ThreadPoolExecutor(cores) as pool:

        def run(ids):
            tokens = length or ids.shape[1]
            shares = [share for share in np.array_split(ids, cores) if len(share)]
            outputs = list(pool.map(lambda share: search(share, tokens).ids.numpy(), shares))
            assert sum(output.shape[0] for output in outputs) == len(ids)
            assert all(output.shape[2] == tokens and (output != 0).all() for output in outputs)
            return len(ids) * tokens

        middle = len(parts) // 2
        run(parts[middle])
        rates, begin = [], time.perf_counter()
        while time.perf_counter() - begin < seconds or len(rates) < 4:
            ids = parts[(middle + len(rates)) % len(parts)]
            start = time.perf_counter()
            rates.append(run(ids) / (time.perf_counter() - start))
    print(f"own {size} beam {beam} {precision}: {np.median(rates):.0f} tokens/s (median of {len(rates)} batches)")


def make_search(sizes: dict[str, int], vocab: int, beam: int, precision: str):
    """Random weights; from source ids and a number of tokens to hypotheses of exactly that many, as a tf.function."""
    import tensorflow as tf

    from keras_transformer.decoding import Limits, beam_search, greedy
    from keras_transformer.model import Transformer
    from keras_transformer.translator import begin_decoding

    options = {"pe_input": 300, "pe_target": 300, "share_embeddings": True, "dtype": precision}
    model = Transformer(**sizes, input_vocab_size=vocab, target_vocab_size=vocab, **options)
    model.build((None, None), (None, None))
    step_weights = tf.nest.map_structure(tf.Variable, model.step_weights())

    @tf.function(input_signature=[tf.TensorSpec((None, None), tf.int32), tf.TensorSpec((), tf.int32)], autograph=False)
    def search(ids, tokens):
        step, state = begin_decoding(model, ids, beam, step_weights)
        exactly = tf.fill(tf.shape(ids)[:1], tokens)
        limits = Limits(exactly, exactly)
        return greedy(step, state, limits) if beam == 1 else beam_search(step, state, limits, beam)

    return search


if __name__ == "__main__":
    app()
