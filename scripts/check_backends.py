"""Check that the layers give TensorFlow's numbers on Keras's JAX and PyTorch backends too.

    pip install jax torch
    python scripts/check_backends.py [jax] [torch]

Each backend runs in a process of its own with the same weights and ids; logits, attention weights, losses and learning
rates are compared to 1e-5.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np


def compute(path: Path) -> None:
    """Run the layers under the backend of this process and store their outputs."""
    import keras

    import keras_transformer as kt

    random = np.random.default_rng(0)
    inp, tar = random.integers(4, 50, (3, 7)), random.integers(4, 50, (3, 6))
    inp[1, 4:], tar[2, 3:], tar[:, 0] = 0, 0, 2
    results = {}
    for norm in ("post", "pre"):
        for share in (False, True):
            model = kt.Transformer(2, 32, 4, 64, 50, 50, 20, 20, norm=norm, share_embeddings=share, activation="gelu")
            model.build((None, None), (None, None))
            weights = np.random.default_rng(1)
            model.set_weights([weights.normal(0, 0.2, w.shape).astype("float32") for w in model.weights])
            logits, attention_weights = model(inp, tar, False, *kt.create_masks(inp, tar))
            name = f"{norm} {'shared' if share else 'apart'}"
            results[f"{name} logits"] = logits
            results[f"{name} door of one structure"] = model((inp, tar))
            results |= {f"{name} {key}": value for key, value in attention_weights.items()}
            for smoothing in (0.0, 0.1):
                results[f"{name} loss {smoothing}"] = kt.loss_function(tar, logits, smoothing)
    schedule = kt.CustomSchedule(512)
    results["schedule"] = np.array([keras.ops.convert_to_numpy(schedule(step)) for step in (0, 1, 4000, 9000)])
    np.savez(path, **{name: keras.ops.convert_to_numpy(value) for name, value in results.items()})


def main(backends: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        files = {}
        for backend in ["tensorflow", *backends]:
            files[backend] = Path(folder) / f"{backend}.npz"
            environment = {**os.environ, "KERAS_BACKEND": backend, "TF_CPP_MIN_LOG_LEVEL": "3"}
            subprocess.run([sys.executable, __file__, "--compute", files[backend]], env=environment, check=True)
        expected = np.load(files["tensorflow"])
        for backend in backends:
            got = np.load(files[backend])
            worst = max((float(np.abs(got[name] - expected[name]).max()), name) for name in expected.files)
            print(f"{backend}: {len(expected.files)} results, largest difference {worst[0]:.1e} ({worst[1]})")
            if worst[0] > 1e-5:
                sys.exit(1)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--compute"]:
        compute(Path(sys.argv[2]))
    else:
        main(sys.argv[1:] or ["jax", "torch"])
