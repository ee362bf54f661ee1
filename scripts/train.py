"""The command's `train`, for those who look for a script: python scripts/train.py --help"""

import os
import sys

os.execv(sys.executable, [sys.executable, "-m", "keras_transformer", "train", *sys.argv[1:]])
