"""`python -m fppo`, which torchrun needs."""

import sys

from fppo.commands.start import main

if __name__ == "__main__":
    sys.exit(main())
