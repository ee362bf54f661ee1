"""The command's `evaluate`, for those who look for a script: python scripts/evaluate.py --help"""

import os
import sys

os.execv(sys.executable, [sys.executable, "-m", "keras_transformer", "evaluate", *sys.argv[1:]])
