"""What the README shows keeps what it says."""

import re
from pathlib import Path

from fppo import laws

README = Path(__file__).parent.parent / "README.md"


def test_the_kernel_of_the_readme_keeps_the_laws_in_under_15_lines():
    found = re.search(r"```python\n# mine\.py\n(.*?)```", README.read_text(), re.DOTALL)
    assert found is not None
    source = found.group(1)
    assert source.count("\n") < 15
    module: dict = {}
    exec(source, module)
    laws.check_log_probs(module["my_log_probs"])
