"""The tests of the server are left out where its packages are missing, as they are without the extra `test`."""

import importlib.util

NEEDED = ("fastapi", "uvicorn", "openai", "httpx2")
collect_ignore_glob = [] if all(map(importlib.util.find_spec, NEEDED)) else ["test_*.py"]
