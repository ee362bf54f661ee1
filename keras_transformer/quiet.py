"""Native libraries write notes of their own to stderr; here they are kept off it."""

import contextlib
import os
import sys
import tempfile


@contextlib.contextmanager
def quiet_stderr():
    """Hold back what native code writes to stderr, such as TensorFlow's notes at start-up; show it if this fails."""
    sys.stderr.flush()
    terminal = os.dup(2)
    with tempfile.TemporaryFile() as held:
        os.dup2(held.fileno(), 2)
        try:
            yield
        except BaseException:
            held.seek(0)
            os.write(terminal, held.read())
            raise
        finally:
            os.dup2(terminal, 2)
            os.close(terminal)
