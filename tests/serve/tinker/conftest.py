"""Tests of the server are left out where its packages are missing, as they are without the extra `test`."""

import importlib.util
import os

NEEDED = ("fastapi", "uvicorn", "openai", "httpx2", "tinker")
NEEDING = ("client", "command", "images", "kill", "malformed", "restart", "work")
collect_ignore = [] if all(map(importlib.util.find_spec, NEEDED)) else [f"test_{name}.py" for name in NEEDING]
os.environ["TINKER_TELEMETRY"] = "0"  # its client would send what it does
