"""The command's `translate`, for those who look for a script: python scripts/translate.py --help"""

import os
import sys

os.execv(sys.executable, [sys.executable, "-m", "keras_transformer", "translate", *sys.argv[1:]])
