"""What a training step computes in.

- float32.
- onednn_bfloat16: on a CPU, oneDNN multiplies matrices in bfloat16; weights and everything else are float32.
- mixed_bfloat16, mixed_float16: Keras's policies, for GPUs; float32 weights, the rest in 16 bits.
"""

import contextlib
import os
from pathlib import Path

import tensorflow as tf

OPTION = "auto_mixed_precision_onednn_bfloat16"
# TensorFlow's rewrite of a graph would have these in bfloat16 too where they stand between two products: the softmax,
# the normalisation, the residual sums. They gain nothing by it.
FLOAT32 = (
    "Softmax,Mean,Rsqrt,SquaredDifference,Sqrt,Square,Sum,Max,Exp,Log,Add,AddV2,AddN,Sub,Mul,RealDiv,"
    "BiasAdd,BiasAddGrad,Relu,ReluGrad"
)


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


def cores() -> int:
    """How many this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def policy(precision: str) -> str:
    """The dtype policy of the model's layers."""
    return "float32" if precision == "onednn_bfloat16" else precision


@contextlib.contextmanager
def products(precision: str):
    """Inside the block, a tf.function that is called multiplies matrices in this precision."""
    before = tf.config.optimizer.get_experimental_options().get(OPTION, False)
    if precision == "onednn_bfloat16":
        for change in ("DENYLIST_ADD", "INFERLIST_REMOVE", "CLEARLIST_REMOVE"):
            os.environ.setdefault(f"TF_AUTO_MIXED_PRECISION_GRAPH_REWRITE_{change}", FLOAT32)
        tf.config.optimizer.set_experimental_options({OPTION: True})
    try:
        yield
    finally:
        tf.config.optimizer.set_experimental_options({OPTION: before})
