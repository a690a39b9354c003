# For pyright all of transformers has any type. Where types are checked, its own __init__.py imports each of several
# hundred models: to look through them took most of the time. Each module that we import has a file here.
from typing import Any

def __getattr__(name: str) -> Any: ...
