"""Worker processes start fast: what they import does not load torch."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    "module", ["fppo.workers.process", "fppo.workers.runner", "fppo.rewards", "fppo.rollout.turns.tools"]
)
def test_what_worker_processes_import_loads_no_torch(module):
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
