"""The command's `export`, for those who look for a script: python scripts/export.py --help"""

import os
import sys

os.execv(sys.executable, [sys.executable, "-m", "keras_transformer", "export", *sys.argv[1:]])
