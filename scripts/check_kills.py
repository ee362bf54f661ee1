"""Nothing lost: check_kills.py [--runs 30] kills training runs at random moments and has each go on to its end.

A run of the phrasebook's first sentences, deterministic, with dropout and a checkpoint at every update, so that many a
kill falls into the writing of one. Its last weights, moments and random states must be the undisturbed run's, bit for
bit.
"""

import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

STEPS = 150


def train(run_dir: str) -> None:
    sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    from keras_transformer import training
    from keras_transformer.config import settings_from

    files = [str(Path(run_dir).parent / name) for name in ("source", "target")]
    sizes = {"num_layers": 1, "d_model": 32, "num_heads": 2, "dff": 64, "rate": 0.1, "pe_input": 64, "pe_target": 64}
    updates = {"max_steps": STEPS, "tokens_per_batch": 512, "warmup_steps": 20, "deterministic": True, "average": 3}
    often = {"checkpoint_every": 1, "evaluate_every": 50, "log_every": 1}
    data = {"train": files, "dev": files, "vocab_size": 300}
    decoding = {"beam_size": 1, "max_length": 10}
    values = {"model": sizes, "data": data, "training": updates | often, "decoding": decoding}
    training.train(settings_from(values, "check_kills.py"), run_dir)


def main(
    runs: Annotated[int, typer.Option(help="How many runs are killed.")] = 30,
    seed: Annotated[int, typer.Option(help="Of the moments.")] = 0,
) -> None:
    from keras_transformer.data.phrasebook import phrasebook

    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    # Each child is a copy of a process that has imported everything, and starts at once.
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload(["keras_transformer.training"])
    moments = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        for side, name in enumerate(("source", "target")):
            text = "".join(pair[side] + "\n" for pair in phrasebook("en", "de")["train"][:400])
            (Path(folder) / name).write_text(text, encoding="utf-8")
        straight = Path(folder) / "straight"
        for run_dir in (straight, Path(folder) / "timed"):  # the first also waits for the imports
            begin = time.perf_counter()
            child = processes.Process(target=train, args=(str(run_dir),))
            child.start()
            child.join()
            seconds = time.perf_counter() - begin
        print(f"undisturbed: {seconds:.1f} s", flush=True)
        killed = wrong = writing = 0
        for number in range(runs):
            run_dir = Path(folder) / f"run-{number}"
            child = processes.Process(target=train, args=(str(run_dir),))
            child.start()
            child.join(moments.uniform(0, seconds))
            child.kill()
            child.join()
            killed += child.exitcode == -signal.SIGKILL  # one that was slow to die may have come to its end
            files = sorted(path.stem for path in run_dir.glob("checkpoints/step-*.npz"))
            unfinished = [path.name for path in run_dir.rglob(".*unfinished*")]
            writing += bool(unfinished)
            child = processes.Process(target=train, args=(str(run_dir),))
            child.start()
            child.join()
            same = child.exitcode == 0 and same_checkpoint(straight, run_dir)
            wrong += not same
            last = files[-1] if files else "no checkpoint"
            print(f"{number + 1}: killed at {last} {unfinished}: {'same' if same else 'DIFFERENT'}", flush=True)
    print(f"{killed} of {runs} runs killed, {writing} while they wrote a file, {wrong} with other weights at the end")
    raise typer.Exit(1 if wrong else 0)


def same_checkpoint(one: Path, other: Path) -> bool:
    name = f"checkpoints/step-{STEPS:08d}.npz"
    with np.load(one / name) as a, np.load(other / name) as b:
        # The state has the text's fingerprint and the best score, which are the same too.
        return a.files == b.files and all(a[key].tobytes() == b[key].tobytes() for key in a.files)


if __name__ == "__main__":
    typer.run(main)
