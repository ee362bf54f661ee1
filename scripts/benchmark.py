"""Speed, measured beside what else one would use: benchmark.py decode | train [--batches FILE] [--peers FOLDER] |
length | serve RUN FILE

Every program runs in a process of its own, one after the other, in rounds; what is printed is the median of the rounds.
A peer is a program in FOLDER that prints "...: RATE tokens/s ..." or "...: RATE target tokens/s ...":
`decode_peer.py NAME BATCHES --size SIZE --beam K --batch ROWS --seconds N`, or
`train_peer.py NAME BATCHES --size SIZE --precision float32|bfloat16 --seconds N`. Batches are an .npz with `vocab` and
ids, 0 = padding: for decode `test`, sources sorted by length; for train `n`, how many batches there are, and `inp0`,
`tar0`, `inp1` ..., sources and targets, these with a start id first.
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
RATE = re.compile(r": (\d+) (?:target )?tokens/s")
LATENCY = re.compile(r"([\d.]+) ms a sentence")
SENTENCES = re.compile(r"([\d.]+) sentences/s")
SHARE = re.compile(r"(\d+) % of")
app = typer.Typer(help=__doc__, add_completion=False, pretty_exceptions_enable=False)
Peers = Annotated[Path | None, typer.Option(help="The folder of decode_peer.py and train_peer.py; left out, no peers.")]
Python = Annotated[str, typer.Option(help="The Python that has the peers' packages.")]
Sizes = Annotated[str, typer.Option(help="Of models, with commas between.")]
Rounds = Annotated[int, typer.Option(help="How often each program runs.")]
Seconds = Annotated[float, typer.Option(help="How long it runs each time.")]


@app.callback()
def main() -> None:
    """Speed, measured beside what else one would use."""


@app.command()
def decode(
    batches: Annotated[Path | None, typer.Option(help="Default: 1,000 random sources of 5 to 25 ids.")] = None,
    peers: Peers = None,
    python: Python = sys.executable,
    sizes: Sizes = "tiny,base",
    rounds: Rounds = 3,
    seconds: Seconds = 8,
) -> None:
    """Tokens a second: beam 1 and 4 in batches of 64, and one sentence alone.

    Every row is decoded to as many tokens as the longest source of its batch, by every program.
    """
    check(sizes, batches, peers and peers / "decode_peer.py")
    with tempfile.TemporaryDirectory() as folder:
        batches = batches or write_random_batches(folder)
        print("| model | batch | beam | program | tokens/s | ms a step | ratio |")
        print("| --- | --- | --- | --- | --- | --- | --- |")
        for size in sizes.split(","):
            for rows, beam in ((64, 1), (64, 4), (1, 1)):
                cell = [batches, "--size", size, "--beam", beam, "--batch", rows, "--seconds", seconds]
                print_cell(size, rows, beam, medians(run_cell(programs(peers, python, beam), cell, rounds)))


@app.command()
def train(
    batches: Annotated[Path | None, typer.Option(help="Default: 20 random ones of 5 to 25 ids a row.")] = None,
    peers: Peers = None,
    python: Python = sys.executable,
    sizes: Sizes = "tiny,base",
    rounds: Rounds = 3,
    seconds: Seconds = 20,
) -> None:
    """Real target tokens a second, padding not counted, of whole updates on a CPU, the optimizer's part included.

    Dropout and label smoothing are 0.1 here. What the matrix products of an update come to (see step_flops) is set
    against the peak: the rate of large square ones in the same process and precision, one on each core.
    """
    check(sizes, batches, peers and peers / "train_peer.py")
    with tempfile.TemporaryDirectory() as folder:
        batches = batches or write_random_batches(folder)
        print("| model | program | float32 | bfloat16 | here / it, best of each |\n| --- | --- | --- | --- | --- |")
        for size in sizes.split(","):
            commands = train_programs(peers, python)
            outputs = run_cell(commands, [batches, "--size", size, "--seconds", seconds], rounds)
            print_train_cell(size, medians(outputs), medians(outputs, SHARE))


@app.command()
def length(
    size: Annotated[str, typer.Option(help="Of the model.")] = "tiny",
    beam: Annotated[int, typer.Option(help="Hypotheses that are followed.")] = 1,
    rounds: Annotated[int, typer.Option(help="How often each length runs.")] = 3,
    seconds: Seconds = 8,
) -> None:
    """What a token costs in outputs of 20 to 200 tokens, 32 sources of 20 ids together: nearly the same."""
    check(size)
    with tempfile.TemporaryDirectory() as folder:
        batches = Path(folder) / "random.npz"
        np.savez(batches, test=np.random.default_rng(0).integers(4, 8000, (128, 20), dtype=np.int32), vocab=8000)
        own, environment = programs(None, "", beam)["float32"]
        commands = {f"{tokens} tokens": ([*own, "--length", str(tokens)], environment) for tokens in (20, 50, 100, 200)}
        cell = [batches, "--size", size, "--beam", beam, "--batch", 32, "--seconds", seconds]
        rates = medians(run_cell(commands, cell, rounds))
    print("| output | tokens/s | cost of a token |\n| --- | --- | --- |")
    for name, rate in rates.items():
        print(f"| {name} | {rate:,.0f} | {rates['20 tokens'] / rate:.2f} |")


@app.command()
def serve(
    run: Annotated[Path, typer.Argument(help="A run folder.")],
    file: Annotated[Path, typer.Argument(help="Sentences, one a line; or .gz.")],
    words: Annotated[int, typer.Option(help="How many a sentence that goes alone has.")] = 13,
    rounds: Rounds = 3,
    seconds: Seconds = 8,
) -> None:
    """Exports of RUN from text to text, greedy: one sentence alone, and sentences 64 together.

    The SavedModel, its signature that is compiled for a text alone, the run itself, and CTranslate2 in float32 with
    SentencePiece, on one core and on all for a text.
    """
    check("tiny", run, file)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        kinds = {"saved_model": [], "compiled": ["--compiled"], "ctranslate2": ["--format", "ctranslate2"]}
        for kind, options in kinds.items():
            export = [sys.executable, "-m", "keras_transformer", "export", run, folder / kind, *options]
            subprocess.run([*export, "--beam-size", "1"], check=True)
        own, environment = [sys.executable, __file__, "own-serve"], {"TF_ENABLE_ONEDNN_OPTS": "0"}
        commands = {
            "SavedModel, a core": ([*own, str(folder / "saved_model"), "--threads", "1"], environment),
            "SavedModel": ([*own, str(folder / "saved_model"), "--threads", "0"], environment),
            "SavedModel, compiled, a core": ([*own, str(folder / "compiled"), "--threads", "1"], environment),
            "translate": ([*own, str(run)], environment),
            "CTranslate2, a core": ([*own, str(folder / "ctranslate2"), "--threads", "1"], {}),
            "CTranslate2": ([*own, str(folder / "ctranslate2"), "--threads", "0"], {}),
        }
        outputs = run_cell(commands, [file, "--words", words, "--seconds", seconds], rounds, SENTENCES)
    latencies, rates = medians(outputs, LATENCY), medians(outputs, SENTENCES)
    base = min(latency for name, latency in latencies.items() if name.startswith("CTranslate2"))
    print(f"| program | ms for a sentence of {words} words | ratio | sentences/s, 64 together |")
    print("| --- | --- | --- | --- |")
    for name, rate in rates.items():
        alone = f"{latencies[name]:.2f} | {latencies[name] / base:.2f}" if name in latencies else " | "
        print(f"| {name} | {alone} | {rate:,.0f} |")


@app.command(hidden=True)
def own_serve(file: Path, folder: Path, words: int = 13, seconds: float = 8, threads: int = 1) -> None:
    """One export's latency and rate; of a run, its rate alone, as `translate` has it."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    from keras_transformer.files import read_lines

    lines = list(read_lines(file))
    alone = [line for line in lines if len(line.split()) == words]
    together = [lines[i : i + 64] for i in range(0, len(lines), 64)]
    if (folder / "model.bin").exists():
        translate, cores = load_ctranslate2(folder, threads), 1
    elif (folder / "saved_model.pb").exists():
        import tensorflow as tf
        import tensorflow_text  # noqa: F401

        tf.config.threading.set_intra_op_parallelism_threads(1)
        tf.config.threading.set_inter_op_parallelism_threads(threads)  # 1: two texts at a time share a core
        signatures = tf.saved_model.load(folder).signatures
        together_by, alone_by = signatures["serving_default"], signatures.get("alone", signatures["serving_default"])
        cores = len(os.sched_getaffinity(0))

        def translate(texts):
            signature = alone_by if len(texts) == 1 else together_by
            return signature(text=tf.constant(texts))["text"].numpy()
    else:
        import tensorflow as tf

        from keras_transformer import Translator
        from keras_transformer.config import DecodingSettings

        tf.config.threading.set_intra_op_parallelism_threads(1)
        translate, alone = Translator.load(folder, DecodingSettings(beam_size=1)).translate, []
        cores = len(os.sched_getaffinity(0))
    milliseconds = 1000 * statistics.median(times(translate, [[line] for line in alone], seconds)) if alone else None
    with ThreadPoolExecutor(cores) as pool:
        translate(together[0])
        begin = time.perf_counter()
        done = 0
        while not done or time.perf_counter() - begin < seconds:
            list(pool.map(translate, together))
            done += len(lines)
        rate = done / (time.perf_counter() - begin)
    latency = f"{milliseconds:.3f} ms a sentence, " if alone else ""
    print(f"own {folder.name}: {latency}{rate:.1f} sentences/s")


def times(translate, batches: list[list[str]], seconds: float) -> list[float]:
    for batch in batches[:10]:
        translate(batch)
    found, begin = [], time.perf_counter()
    while not found or time.perf_counter() - begin < seconds:
        for batch in batches:
            start = time.perf_counter()
            translate(batch)
            found.append(time.perf_counter() - start)
    return found


def load_ctranslate2(folder: Path, threads: int):
    """As one would write it with ctranslate2 and sentencepiece alone."""
    import ctranslate2
    import sentencepiece

    tokenizer = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer" / "joint.model"))
    translator = ctranslate2.Translator(str(folder), intra_threads=threads)

    def translate(texts):
        pieces = [[*found, "</s>"] for found in tokenizer.encode(texts, out_type=str)]
        results = translator.translate_batch(pieces, beam_size=1, max_decoding_length=100)
        return tokenizer.decode([result.hypotheses[0] for result in results])

    return translate


def check(sizes: str, *files: Path | None) -> None:
    for size in sizes.split(","):
        if size not in SIZES:
            raise typer.BadParameter(f"no size is called {size!r}; there are {', '.join(SIZES)}")
    for path in files:
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


def train_programs(peers: Path | None, python: str) -> dict[str, tuple[list[str], dict[str, str]]]:
    """Command and environment of each program in each precision."""
    own = [sys.executable, __file__, "own-train"]
    found = {
        "here float32": [*own, "--precision", "float32"],
        "here bfloat16": [*own, "--precision", "onednn_bfloat16"],
    }
    for name in () if peers is None else ("torch", "hf", "kerashub", "listing"):
        for precision in ("float32", "bfloat16"):
            found[f"{name} {precision}"] = [python, str(peers / "train_peer.py"), name, "--precision", precision]
    return {name: (command, {"KERAS_BACKEND": "tensorflow"}) for name, command in found.items()}


def run_cell(commands, cell: list, rounds: int, figure: re.Pattern = RATE) -> dict[str, list[str]]:
    """What each program prints, round by round; they run in turn."""
    outputs: dict[str, list[str]] = {name: [] for name in commands}
    for number in range(rounds):
        for name, (command, environment) in commands.items():
            command = [*command[:3], *map(str, cell), *command[3:]]
            result = subprocess.run(
                command, env={**os.environ, **environment}, capture_output=True, text=True, encoding="utf-8"
            )
            if not figure.search(result.stdout):
                sys.exit(f"{' '.join(command)} failed:\n{result.stderr[-2000:]}")
            outputs[name].append(result.stdout)
            print(f"round {number + 1} {name}: {result.stdout.strip()}", file=sys.stderr)
            # CTranslate2's program tries four ways and names the best: that one alone in the later rounds.
            if best := re.search(r"\[MKL (\d), (\d+) translators\]", result.stdout):
                inter = ["--inter", best[2]]
                commands[name] = (commands[name][0] + inter, {"CT2_USE_MKL": best[1]})
    return outputs


def medians(outputs: dict[str, list[str]], figure: re.Pattern = RATE) -> dict[str, float]:
    """The median of the figure that each program printed, of those that printed it."""
    found = {name: [float(match[1]) for match in map(figure.search, texts) if match] for name, texts in outputs.items()}
    return {name: statistics.median(values) for name, values in found.items() if values}


def print_cell(size: str, rows: int, beam: int, rates: dict[str, float]) -> None:
    base = rates.get("hf", rates["float32"])
    for name, rate in rates.items():
        print(f"| {size} | {rows} | {beam} | {name} | {rate:,.0f} | {1000 * rows / rate:.2f} | {rate / base:.2f} |")
    sys.stdout.flush()


def print_train_cell(size: str, rates: dict[str, float], shares: dict[str, float]) -> None:
    def best(program):
        return max(rates[f"{program} float32"], rates[f"{program} bfloat16"])

    for program in dict.fromkeys(name.split()[0] for name in rates):
        names = [f"{program} {precision}" for precision in ("float32", "bfloat16")]
        cells = [
            f"{rates[name]:,.0f}" + (f" ({shares[name]:.0f} % of peak)" if name in shares else "") for name in names
        ]
        print(f"| {size} | {program} | {' | '.join(cells)} | {best('here') / best(program):.2f} |")
    sys.stdout.flush()


def write_random_batches(folder: str | Path) -> Path:
    """1,000 sources to decode; 20 batches to train on, of at most 4,096 target ids that follow another."""
    draw = np.random.default_rng(0)
    lengths = np.sort(draw.integers(5, 26, 1000))
    ids = draw.integers(4, 8000, (1000, 25), dtype=np.int32)
    arrays = {"test": np.where(np.arange(25) < lengths[:, None], ids, 0), "vocab": 8000, "n": 20}
    for k, length in enumerate(draw.integers(5, 26, 20)):
        arrays[f"inp{k}"] = draw.integers(4, 8000, (4096 // length, length), dtype=np.int32)
        arrays[f"tar{k}"] = np.insert(draw.integers(4, 8000, arrays[f"inp{k}"].shape, dtype=np.int32), 0, 2, axis=1)
    path = Path(folder) / "random.npz"
    np.savez(path, **arrays)
    return path


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

    from keras_transformer.translator import workers

    tf.config.threading.set_intra_op_parallelism_threads(1)
    data = np.load(batches)
    test = data["test"]
    parts = [test[i : i + batch] for i in range(0, len(test), batch)]
    parts = [part[:, : max(1, int((part != 0).sum(1).max()))] for part in parts]
    search = make_search(SIZES[size], int(data["vocab"]), beam, precision)
    with ThreadPoolExecutor(workers()) as pool:

        def run(ids):
            tokens = length or ids.shape[1]
            shares = [share for share in np.array_split(ids, workers()) if len(share)]
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


def make_model(sizes: dict[str, int], vocab: int, dtype: str):
    from keras_transformer.model import Transformer

    options = {"pe_input": 300, "pe_target": 300, "share_embeddings": True, "dtype": dtype}
    model = Transformer(**sizes, input_vocab_size=vocab, target_vocab_size=vocab, rate=0.1, **options)
    model.build((None, None), (None, None))
    return model


def make_search(sizes: dict[str, int], vocab: int, beam: int, precision: str):
    """Random weights; from source ids and a number of tokens to hypotheses of exactly that many, as a tf.function."""
    import tensorflow as tf

    from keras_transformer.decoding import Limits, beam_search, greedy
    from keras_transformer.translator_module import begin_decoding

    model = make_model(sizes, vocab, precision)
    step_weights = tf.nest.map_structure(tf.Variable, model.step_weights())

    @tf.function(input_signature=[tf.TensorSpec((None, None), tf.int32), tf.TensorSpec((), tf.int32)], autograph=False)
    def search(ids, tokens):
        step, state = begin_decoding(model, ids, beam, step_weights)
        exactly = tf.fill(tf.shape(ids)[:1], tokens)
        limits = Limits(exactly, exactly)
        return greedy(step, state, limits) if beam == 1 else beam_search(step, state, limits, beam)

    return search


@app.command(hidden=True)
def own_train(batches: Path, size: str = "tiny", seconds: float = 20, precision: str = "float32") -> None:
    """This package's own rate of training, and its share of the machine's peak."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    import keras
    import tensorflow as tf

    from keras_transformer.precision import cores, products
    from keras_transformer.schedule import CustomSchedule
    from keras_transformer.step import make_train_step, parts_of, threads_of

    positions = 4096
    tf.config.threading.set_intra_op_parallelism_threads(threads_of(positions))
    data = np.load(batches)
    pairs = [(data[f"inp{k}"], data[f"tar{k}"]) for k in range(int(data["n"]))]
    vocab = int(data["vocab"])
    model = make_model(SIZES[size], vocab, "float32")
    optimizer = keras.optimizers.Adam(CustomSchedule(SIZES[size]["d_model"]), beta_1=0.9, beta_2=0.98, epsilon=1e-9)
    step = make_train_step(model, optimizer, label_smoothing=0.1, clip_norm=1.0, parts=parts_of(positions))
    with products(precision):
        peak = peak_flops(cores())
        for inp, tar in pairs[:2]:
            float(step(inp, tar))
        rates, flops, begin = [], [], time.perf_counter()
        while time.perf_counter() - begin < seconds or len(rates) < 4:
            inp, tar = pairs[(2 + len(rates)) % len(pairs)]
            start = time.perf_counter()
            float(step(inp, tar))
            spent = time.perf_counter() - start
            rates.append((tar[:, 1:] != 0).sum() / spent)
            flops.append(step_flops(SIZES[size], vocab, inp.shape, tar.shape) / spent)
        peak = max(peak, peak_flops(cores()))
    print(
        f"own {size} {precision}: {np.median(rates):.0f} target tokens/s (median of {len(rates)} steps), "
        f"{100 * np.median(flops) / peak:.0f} % of {peak / 1e9:.0f} GFLOP/s"
    )


def peak_flops(cores: int, size: int = 2048) -> float:
    """Floating-point operations a second in products of square matrices, one on each core: the fastest of 5 times."""
    import tensorflow as tf

    pairs = [(tf.random.normal((size, size)), tf.random.normal((size, size))) for _ in range(cores)]

    @tf.function(autograph=False)
    def multiply(pairs):
        return [tf.matmul(a, b) for a, b in pairs]

    def timed():
        start = time.perf_counter()
        multiply(pairs)
        return time.perf_counter() - start

    timed()  # traces it
    return 2 * size**3 * cores / min(timed() for _ in range(5))


def step_flops(sizes: dict[str, int], vocab: int, inp_shape: tuple[int, int], tar_shape: tuple[int, int]) -> int:
    """Floating-point operations of the matrix products that an update of the model needs.

    The product of (a, b) and (b, c) has 2abc of them, and the backward pass two products for each of the forward pass.
    Counted are attention's projections, its scores and the sums of its values, the feed-forward networks and the
    projection onto the vocabulary, at the batch's shapes, with the padding and what the look-ahead mask hides. Not
    counted are softmax, normalisation, dropout, the loss, the optimizer, and what is computed a second time.
    """
    num_layers, d_model, dff = sizes["num_layers"], sizes["d_model"], sizes["dff"]
    batch, inp_len = inp_shape
    tar_len = tar_shape[1] - 1  # the decoder does not read the last id
    projections, ffn = 4 * 2 * d_model**2, 2 * 2 * d_model * dff  # a token's: query, key, value and the output's
    inp = projections + 4 * inp_len * d_model + ffn
    tar = projections + 4 * tar_len * d_model + projections // 2 + 4 * inp_len * d_model + ffn
    memory = projections // 2  # key and value of each source token for each layer of the decoder
    forward = num_layers * (inp_len * (inp + memory) + tar_len * tar) + tar_len * 2 * d_model * vocab
    return 3 * batch * forward


if __name__ == "__main__":
    app()
