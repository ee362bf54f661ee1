"""What a training step computes in.

- float32.
- onednn_bfloat16: float32 weights; on a CPU, oneDNN multiplies matrices in bfloat16.
- mixed_bfloat16, mixed_float16: Keras's policies, for GPUs; float32 weights, the rest in 16 bits.
"""

import contextlib
from pathlib import Path

import tensorflow as tf


def fastest_precision() -> str:
    """The fastest of this machine that trains as well as float32."""
    gpus = tf.config.list_physical_devices("GPU")
    if gpus:
        capability = tf.config.experimental.get_device_details(gpus[0]).get("compute_capability", (0, 0))
        return "mixed_bfloat16" if capability >= (8, 0) else "mixed_float16" if capability >= (7, 0) else "float32"
    return "onednn_bfloat16" if cpu_flags() & {"avx512_bf16", "amx_bf16"} else "float32"


def cpu_flags() -> set[str]:
    """What this processor's instructions are called on Linux; elsewhere, nothing."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return set()
    return next((set(line.split()) for line in lines if line.startswith("flags")), set())


def policy(precision: str) -> str:
    """The dtype policy of the model's layers."""
    return "float32" if precision == "onednn_bfloat16" else precision


@contextlib.contextmanager
def products(precision: str):
    """Inside the block, a tf.function that is called multiplies matrices in this precision."""
    option = "auto_mixed_precision_onednn_bfloat16"
    if precision != "onednn_bfloat16":
        yield
        return
    tf.config.optimizer.set_experimental_options({option: True})
    try:
        yield
    finally:
        tf.config.optimizer.set_experimental_options({option: False})
