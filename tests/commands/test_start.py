"""The start of a command: what ctrl-C does there, and what is set before torch is loaded."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from fppo.runtime import barriers

PRESSING = """
import os, signal, sys

class Presses:
    def find_spec(self, name, path=None, target=None):
        if name == where:
            os.kill(os.getpid(), signal.SIGINT)

where = sys.argv.pop()
signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever runs the tests may ignore it
sys.meta_path.insert(0, Presses())
"""
START = "from fppo.commands.start import main\nsys.exit(main())\n"


def pressed(program, *arguments):
    done = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True)
    return done.returncode, done.stderr


@pytest.mark.parametrize("module", ["fppo.commands.cli", "tyro", "torch"])
def test_it_ends_with_one_line_while_it_is_loaded(module):
    assert pressed(PRESSING + START, "plan", "--model.path", "quickstart", module) == (130, "fppo plan: interrupted\n")


@pytest.mark.slow
def test_what_would_catch_it_amid_an_import_does_not(tmp_path):
    """Python makes a RuntimeError of what a class' attributes raise as it is made, and modules try others."""
    (tmp_path / "careful.py").write_text(
        "class Attribute:\n    def __set_name__(self, owner, name):\n        import wave\n"
        "try:\n    class Holder:\n        held = Attribute()\nexcept RuntimeError:\n    pass\nprint('went on')\n"
    )
    program = PRESSING + f"sys.path.insert(0, {str(tmp_path)!r})\n"
    program += "from fppo.commands import cli, start\n"
    program += "cli.main = lambda: __import__('careful') and 0\nsys.exit(start.main())\n"
    assert pressed(program, "train", "wave") == (130, "fppo train: interrupted\n")


@pytest.mark.slow
def test_it_is_an_exception_where_a_command_is_at_work():
    """So that what it has begun is put in order."""
    program = PRESSING + "from fppo.commands import cli, start\n"
    program += "def work():\n    try: os.kill(os.getpid(), signal.SIGINT)\n    finally: print('in order', flush=True)\n"
    program += "cli.main = work\nsys.exit(start.main())\n"
    done = subprocess.run([sys.executable, "-c", program, "--help", ""], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "in order\n", "fppo: interrupted\n")


@pytest.mark.slow
def test_behind_the_work_it_changes_nothing():
    program = PRESSING + "from fppo.commands import cli, start\ncli.main = lambda: 3\nstatus = start.main()\n"
    assert pressed(program + "os.kill(os.getpid(), signal.SIGINT)\nimport time; time.sleep(9)\n", "") == (3, "")


@pytest.mark.slow
def test_where_it_is_ignored_it_stays_so():
    """As in the background of a shell, and behind nohup."""
    program = PRESSING + "signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
    program += "from fppo.commands import cli, start\ncli.main = lambda: __import__('wave') and 0\n"
    assert pressed(program + "sys.exit(start.main())\n", "wave") == (0, "")


@pytest.mark.slow
@pytest.mark.parametrize("given", [{}, {"GOMP_SPINCOUNT": "7"}])
def test_threads_sleep_at_barriers_unless_the_user_says_how_they_wait(given):
    """By what OpenMP says that it has read: a variable that came too late is not there."""
    own = {name: value for name, value in os.environ.items() if name not in barriers.WAITING}
    program = "import sys\nfrom fppo.commands import cli, start\n"
    program += "assert 'torch' not in sys.modules\ncli.main = lambda: __import__('torch') and 0\nstart.main()\n"
    environment = own | given | {"OMP_DISPLAY_ENV": "VERBOSE"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env=environment)
    said = [line.split(" = ")[1].strip("'") for line in done.stderr.splitlines() if "GOMP_SPINCOUNT = " in line]
    if not said:
        pytest.skip("torch has another OpenMP than GNU's here")
    assert said == [given.get("GOMP_SPINCOUNT", "0")]


def test_a_script_that_has_loaded_torch_hears_that_it_is_too_late():
    assert "torch" in sys.modules
    with pytest.raises(RuntimeError, match=r"before the first import of torch, or start the script with OMP_WAIT"):
        barriers.wait_asleep()


@pytest.mark.slow
@pytest.mark.parametrize(
    "closed", [">&-", "2>&-", "<&-", ">&- 2>&- <&-", ">/dev/full", "2>/dev/full", ">/dev/full 2>&1"]
)
def test_closed_and_full_outputs_give_no_traceback(tmp_path, closed):
    """What is printed goes nowhere, and to no file that is opened later; a full disk is told, and is no success."""
    code = (
        "import os, sys; from fppo.commands import start; sys.argv = ['fppo', 'completion', 'bash']\n"
        "status = start.main(); file = open('opened', 'w')\n"
        "try: print('printed', flush=True)\n"
        "except OSError: status = 2\n"
        "assert file.fileno() > 2 and not os.get_inheritable(file.fileno()); os._exit(status)"
    )
    line = f'exec "$0" -c "$1" {closed}'
    done = subprocess.run(["sh", "-c", line, sys.executable, code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == (2 if closed.startswith(">/dev/full") else 0)
    assert "Traceback" not in done.stderr
    assert (tmp_path / "opened").read_text() == ""
    assert closed != ">/dev/full" or "No space left on device" in done.stderr
