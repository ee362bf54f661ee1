"""Native libraries write notes of their own to stderr; here they are kept off it."""

import contextlib
import os
import sys


@contextlib.contextmanager
def quiet_stderr():
    """Keep what native code writes to stderr inside the block, such as TensorFlow's notes at start-up, off it.

    Errors are Python's exceptions and come through.
    """
    sys.stderr.flush()
    terminal, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(terminal, 2)
        os.close(terminal)
        os.close(nowhere)
