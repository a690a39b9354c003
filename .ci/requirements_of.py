"""Prints what installed packages require, for pip to install after them: PACKAGE ... --without NAME ...

What is left out would bring another torch, as torchvision does, or is not needed here, or not to be had.
"""

import importlib.metadata
import re
import sys

packages, left_out = sys.argv[1 : sys.argv.index("--without")], sys.argv[sys.argv.index("--without") + 1 :]
for package in packages:
    for requirement in importlib.metadata.requires(package) or []:
        name = re.match(r"[\w.-]+", requirement)
        if name and name[0].lower() not in left_out and "extra ==" not in requirement:
            print(requirement)
