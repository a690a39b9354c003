"""Programs that mean harm, in the sandbox: none reads, writes, reaches or outlives what it should not."""

import errno
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import attrs
import pytest

from fppo.workers.memory import ControlGroup, descendants, memory_bound
from fppo.workers.sandbox import PYTHONS, Sandbox, interpreter, refusal

WHY = refusal()
sandboxed = pytest.mark.skipif(WHY is not None, reason=f"no sandbox here: {WHY}")
BOX = Sandbox(seconds=4.0)


def run(program, *, box=BOX, **how):
    return box.run(program, **how)


@sandboxed
def test_a_program_runs_with_its_input():
    ran = run("import sys; print(6 * 7, sys.stdin.read()); sys.exit(3)", stdin="x" * 200_000)
    assert ran.why == "output"
    ran = run("import sys; print(6 * 7, len(sys.stdin.read())); sys.exit(3)", stdin="x" * 200_000)
    assert (ran.why, ran.code, ran.out, ran.err) == ("exit", 3, "42 200000\n", "")
    assert run("import os; os.write(1, b'\\xff\\x00a')").out == "\ufffd\x00a"
    assert "SyntaxError" in run("(").err
    assert "\ufffd" not in run("print('\u00e9')").out


SHORT = Sandbox(seconds=1.5, output=10_000)
BOUNDED = {
    "sleeps": ("import time; time.sleep(100)", "time"),
    "loops": ("while True: pass", "time"),
    "endless output": ("while True: print('x' * 1000)", "output"),
    "endless errors": ("import sys\nwhile True: sys.stderr.write('x' * 1000)", "output"),
    "ignores signals": (
        """
import signal, time
for n in (1, 2, 3, 13, 14, 15):
    signal.signal(n, signal.SIG_IGN)
while True: time.sleep(1)
""",
        "time",
    ),
    "hides its output": ("import os, time\nos.close(1); os.close(2)\ntime.sleep(100)", "time"),
}


@sandboxed
@pytest.mark.parametrize("name", BOUNDED)
def test_time_and_output_end(name):
    program, why = BOUNDED[name]
    ran = run(program, box=SHORT)
    assert ran.why == why
    assert len(ran.out) + len(ran.err) <= 20_000


TOLD = {  # programs that print "held True" where they come to nothing
    "memory": """
x = []
try:
    while True: x.append(bytearray(50 << 20))
except MemoryError:
    print("held", len(x) < 12)
""",
    "files in memory": """
import os
try:
    os.memfd_create("x")
except OSError:
    print("held True")
""",
    "shared memory": """
import ctypes
c = ctypes.CDLL(None)
print("held", c.shmget(0, 1 << 20, 0o1600) == c.msgget(0, 0o1600) == c.semget(0, 1, 0o1600) == -1)
""",
    "calls by other numbers": """
import ctypes, platform
number = {"x86_64": 0x40000000 + 319, "aarch64": 279}[platform.machine()]
print("held", ctypes.CDLL(None).syscall(number, b"x", 0) == -1)
""",
    "fork bomb": """
import os, time
n = 0
try:
    while n < 500:
        if os.fork() == 0:
            time.sleep(1)
            os._exit(0)
        n += 1
except OSError:
    print("held", n < 40)
""",
    "threads": """
import threading, time
n = 0
try:
    while n < 500:
        threading.Thread(target=time.sleep, args=(1,), daemon=True).start()
        n += 1
except RuntimeError:
    print("held", n < 40)
""",
    "limits": """
import resource
try:
    resource.setrlimit(resource.RLIMIT_AS, (1 << 40, 1 << 40))
except (OSError, ValueError):
    print("held True")
""",
    "files": """
import os
seen = [p for p in ("/etc/passwd", "/root", "/home", "/srv", "/var", "/sys", "/opt") if os.path.exists(p)]
print("held", not seen, seen)
""",
    "variables": """
import os
texts = open("/proc/1/environ").read() + open("/proc/self/environ").read()
names = {"PATH", "HOME", "PYTHONDONTWRITEBYTECODE", "PWD", "LC_CTYPE"}
print("held", "SECRET" not in texts and set(os.environ) <= names, os.environ)
""",
    "network": """
import socket
reached = []
for place in (("127.0.0.1", 22), ("10.0.0.1", 80), ("1.1.1.1", 53)):
    s = socket.socket()
    s.settimeout(0.5)
    try:
        s.connect(place)
        reached.append(place)
    except OSError: pass
print("held", not reached and [name for _, name in socket.if_nameindex()] == ["lo"])
""",
    "writes": """
done = []
for p in ("/usr/x", "/box/main.py", "/box/x", "/x", "/bin/x", "/proc/sys/kernel/core_pattern", "/dev/x", "/dev/shm/x"):
    try:
        open(p, "w").write("a")
        done.append(p)
    except OSError: pass
print("held", not done, done)
""",
    "a full disk": """
try:
    for n in range(100): open(f"/tmp/{n}", "wb").write(b"0" * (4 << 20))
except OSError:
    print("held", n < 5)
""",
    "kills": """
import os
print("held", len([p for p in os.listdir("/proc") if p.isdigit()]) < 5, flush=True)
os.kill(-1, 9)
""",
    "the first process": """
import os
for n in (15, 9):
    try: os.kill(1, n)
    except OSError: pass
print("held True")
""",
    "root": """
import os
try:
    os.setuid(0)
except OSError:
    print("held", os.getuid() == 65534)
""",
    "devices": """
import os, stat
try:
    os.mknod("/tmp/d", stat.S_IFBLK | 0o600, os.makedev(8, 0))
except OSError:
    print("held True")
""",
    "namespaces": """
import ctypes
c = ctypes.CDLL(None, use_errno=True)
print("held", c.unshare(0x10000000) != 0 and c.mount(b"none", b"/tmp", b"tmpfs", 0, 0) != 0 and c.chroot(b"/tmp") != 0)
""",
    "descriptors": """
import os
print("held", len(os.listdir("/proc/self/fd")) <= 4, os.listdir("/proc/self/fd"))
""",
    "recursion": """
import sys
print("held True", flush=True)
sys.setrecursionlimit(10 ** 9)
f = lambda: f()
f()
""",
    "links": """
import os
os.symlink("/proc/1/root/etc/passwd", "/tmp/link")
try:
    open("/tmp/link").read()
except OSError:
    print("held True")
""",
}


@sandboxed
@pytest.mark.parametrize("name", TOLD)
def test_hostile_programs_come_to_nothing(name, monkeypatch):
    monkeypatch.setenv("SECRET_KEY", "SECRET")
    ran = run(TOLD[name])
    assert ran.out.startswith("held True"), ran


PASSES = """
import ctypes, mmap, os, time
for n in range(10):
    if os.fork() == 0:
        {before}
        {held}
        time.sleep(60)
        os._exit(0)
time.sleep(60)
"""
HELD = "held = b'x' * (30 << 20)"
TOGETHER = {  # children of which each is below the bound, and all are not
    "children": PASSES.format(before="", held=HELD),
    "shared mappings": PASSES.format(before="", held="held = mmap.mmap(-1, 30 << 20); held.write(b'x' * (30 << 20))"),
    "in sessions of their own": PASSES.format(before="os.fork() and os._exit(0); os.setsid()", held=HELD),
    "hidden": PASSES.format(before="ctypes.CDLL(None).prctl(4, 0)", held=HELD),
}
SHARED = """
import os, time
held = b"x" * (60 << 20)
for n in range(10):
    if os.fork() == 0:
        time.sleep(0.5)
        os._exit(0)
for n in range(10):
    os.wait()
print("held")
"""  # what a process has from its parent counts once
SMALL = Sandbox(seconds=20.0, memory=128 << 20)


@sandboxed
@pytest.mark.parametrize("name", TOGETHER)
def test_the_memory_of_all_processes_is_bounded_together(name):
    ran = run(TOGETHER[name], box=SMALL)
    assert ran.why == "memory"
    assert ran.seconds < SMALL.seconds
    ran = run(SHARED, box=SMALL)
    assert (ran.why, ran.out) == ("exit", "held\n"), ran


@pytest.mark.parametrize("name", ["children", "shared mappings", "hidden"])
@pytest.mark.usefixtures("unboxed")
def test_where_there_is_no_control_group_the_sum_is_watched(name):
    assert run(TOGETHER[name], box=SMALL).why == "memory"


@pytest.mark.usefixtures("unboxed")
def test_what_processes_share_counts_once():
    assert run(SHARED, box=SMALL)[:3] == ("exit", 0, "held\n")


def test_a_command_is_bounded_by_a_group_or_by_the_sum():
    """Where a group can be made the kernel holds the bound, and the group is removed."""
    command = [sys.executable, "-c", "held = b'x' * (100 << 20); print('held')"]
    with memory_bound(64 << 20) as bound:
        with subprocess.Popen(bound.entering(command), stdout=subprocess.PIPE, start_new_session=True) as process:
            bound.admit(process.pid)
            said = process.stdout.read()
        if isinstance(bound, ControlGroup):
            assert (said, bound.exceeded(process.pid)) == (b"", True)
            assert bound.directory.exists()
        else:
            assert said == b"held\n"
    assert not isinstance(bound, ControlGroup) or not bound.directory.exists()


def test_processes_of_every_generation_are_seen():
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(["sh", "-c", "sh -c 'cat; true'; true"], **pipes) as process:
        process.stdin.write(b"up\n")
        process.stdin.flush()
        assert process.stdout.readline() == b"up\n"
        assert len(descendants(process.pid)) == 2
        process.communicate()


@sandboxed
def test_nothing_outlives_a_program():
    """A child that leaves its session and keeps the output open ends with its parent."""
    began = time.monotonic()
    ran = run("import os, time\nif os.fork() == 0:\n  os.setsid(); time.sleep(60); print('late')\nprint('parent')")
    assert (ran.why, ran.out) == ("exit", "parent\n")
    assert time.monotonic() - began < 30


REACH = """
import socket
s = socket.socket(socket.AF_UNIX)
try:
    s.connect("\\0fppo-test-sandbox")
    print("in")
except OSError:
    print("held")
"""


@sandboxed
def test_what_is_beside_it_is_not_seen(tmp_path):
    (tmp_path / "secret").write_text("x")
    (tmp_path / "secret").chmod(0o644)
    assert (
        run(f"import os; print(os.path.exists({str(tmp_path / 'secret')!r}), os.listdir('/tmp'))").out == "False []\n"
    )
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("\0fppo-test-sandbox")
        server.listen()
        threading.Thread(target=server.accept, daemon=True).start()
        ran = run(REACH)
        with socket.socket(socket.AF_UNIX) as other:
            other.connect("\0fppo-test-sandbox")  # so that nobody waits
    assert ran.out == "held\n"


def test_without_bubblewrap_programs_are_refused_by_name(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "bubblewrap is not installed" in refusal()
    with pytest.raises(RuntimeError, match="untrusted programs are not run: bubblewrap is not installed"):
        BOX.run("print(1)")
    (tmp_path / "bwrap").write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n")
    os.chmod(tmp_path / "bwrap", 0o755)
    found = refusal()  # root, who becomes another user, is not let in to a test's directory
    assert "cannot make a sandbox here (" in found or "does not start" in found
    assert "No permissions" in found or "ermission denied" in found


@pytest.mark.parametrize("bad", [{"seconds": 0}, {"memory": 1}, {"processes": 0}, {"output": 0}])
def test_limits_that_are_none(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        Sandbox(**bad)


@pytest.fixture
def unboxed(monkeypatch, tmp_path):
    """Has programs run here as they are, without a sandbox or a control group; the commands that would have started
    one, the descriptors that they have, and how they start."""
    commands, popen, mkdir = [], subprocess.Popen, os.mkdir

    def started(command, *, pass_fds, **how):
        commands.append((command, pass_fds, how))
        program = ""
        if len(pass_fds) > 1:
            with open(pass_fds[0], "rb", closefd=False) as source:
                program = source.read().decode()
        pipes = {name: how[name] for name in ("stdin", "stdout", "stderr", "start_new_session")}
        return popen([sys.executable, "-I", "-S", "-c", program], **pipes)

    def without_groups(path, *how):
        if "/fppo-" in os.fspath(path):
            raise OSError(errno.EROFS, "read-only")
        mkdir(path, *how)

    bubblewrap = str(tmp_path / "bwrap")
    Path(bubblewrap).touch(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(subprocess, "Popen", started)
    monkeypatch.setattr(os, "mkdir", without_groups)
    monkeypatch.setattr(os, "access", lambda path, how: path in (PYTHONS[1], bubblewrap))
    return commands


@pytest.mark.usefixtures("unboxed")
def test_a_program_ends_by_itself_or_by_what_bounds_it():
    """A fault of bubblewrap's own is none of the program's."""
    ran = run("import sys; print(6 * 7, sys.stdin.read()); print('e', file=sys.stderr); sys.exit(3)", stdin="ab")
    assert ran[:4] == ("exit", 3, "42 ab\n", "e\n")
    assert 0 < ran.seconds < BOX.seconds
    ran = run("import os; os.write(1, b'\\xff\\x00'); os.kill(os.getpid(), 9)")
    assert ran[:4] == ("signal", -9, "\ufffd\x00", "")
    assert run("raise SystemExit(137)")[:2] == ("signal", 137)
    assert run("raise SystemExit(128)")[:2] == ("exit", 128)
    text = "import sys; sys.stdout.write('a' * {}); sys.stdout.flush(); sys.stderr.write('b' * {})"
    small = Sandbox(seconds=4.0, output=10)
    assert run(text.format(4, 6), box=small)[:4] == ("exit", 0, "a" * 4, "b" * 6)
    assert run(text.format(5, 6), box=small).why == "output"
    ran = run(text.format(30, 0), box=small)
    assert (ran.why, ran.out) == ("output", "a" * 10)
    began = time.monotonic()
    ran = run("import os, time; print('x', flush=True); time.sleep(60)", box=Sandbox(seconds=3.0))
    assert (ran.why, ran.code, ran.out) == ("time", -9, "x\n")
    assert time.monotonic() - began < 30
    with pytest.raises(RuntimeError, match="untrusted programs are not run: bwrap: no"):
        run("import sys; print('bwrap: no\\x1b', file=sys.stderr); sys.exit(1)")


@pytest.mark.parametrize(("closed", "other"), [(1, 2), (2, 1)])
@pytest.mark.usefixtures("unboxed")
def test_all_of_one_pipe_is_read_once_a_program_has_closed_the_other(closed, other):
    many = 200_000  # more than a pipe holds, so that the other has ended before all of it is read
    program = f"import os; os.close({closed}); os.fdopen({other}, 'w', closefd=False).write('a' * {many})"
    ran = run(program, box=attrs.evolve(BOX, output=many))
    assert (ran.why, ran.code, len(ran.out), len(ran.err)) == ("exit", 0, *((0, many) if closed == 1 else (many, 0)))


VIEW = (
    "{bwrap} --unshare-all --unshare-user --disable-userns --die-with-parent --new-session --cap-drop ALL "
    "--clearenv --setenv PATH /usr/bin --setenv HOME /tmp --setenv PYTHONDONTWRITEBYTECODE 1 --uid 65534 --gid 65534 "
    "--hostname sandbox --ro-bind /usr /usr --symlink usr/lib /lib --symlink usr/lib64 /lib64 --symlink usr/bin /bin "
    "--proc /proc --dev /dev --remount-ro /dev --seccomp {rules} --size 16777216 --tmpfs /tmp"
)


def test_the_sandbox_has_no_more_than_it_needs(unboxed, tmp_path, monkeypatch):
    """Word by word, since on most machines nothing else would tell; and a program is bounded before it begins."""
    Sandbox(seconds=4.5, memory=1 << 30, processes=32).run("")
    (((*command, launch, memory, seconds, processes, space), (source, rules), _),) = unboxed
    view, python = VIEW.format(bwrap=tmp_path / "bwrap", rules=rules).split(), [PYTHONS[1], "-I", "-S", "-c"]
    main = ["--ro-bind-data", f"{source}", "/box/main.py", "--chdir", "/tmp", "--remount-ro", "/"]
    assert command == [*view, *main, *python]
    assert refusal() is None
    tried, (rules,), _ = unboxed[1]
    view = VIEW.format(bwrap=tmp_path / "bwrap", rules=rules).split()
    assert tried == [*view, *main[3:], *python, ""]
    names = ("AS", "CPU", "FSIZE", "CORE", "NOFILE", "NPROC")
    shown = "import os, resource, sys\n"
    shown += "os.execv = lambda path, words: print(path == sys.executable == words[0], words[1:], "
    shown += f"[resource.getrlimit(getattr(resource, 'RLIMIT_' + x)) for x in {names}])\n"
    monkeypatch.undo()
    bounded = [sys.executable, "-I", "-S", "-c", shown + launch, memory, seconds, processes, space]
    said = subprocess.run(bounded, capture_output=True, text=True, check=True).stdout
    limits = [(x, x) for x in (1 << 30, 5, 16 << 20, 0, 128, 32)]
    assert said == f"True ['-I', '/box/main.py'] {limits}\n"


def test_a_python_that_no_user_can_read_is_named(unboxed, monkeypatch):
    assert interpreter() == PYTHONS[1]
    monkeypatch.setattr(os, "access", lambda path, how: path.endswith("bwrap"))
    assert interpreter() is None
    assert "there is no Python that any user can read" in refusal()


@pytest.mark.parametrize("root", [True, False])
def test_bubblewrap_starts_as_nobody_with_nothing_of_this_process(unboxed, monkeypatch, root, tmp_path):
    nobody = 65534 if root else None
    monkeypatch.setattr(os, "getuid", lambda: 0 if root else 1000)
    assert run("print(1)").out == "1\n"
    ((_, _, how),) = unboxed
    del how["stdin"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "start_new_session": True}
    assert how == pipes | {"env": {}, "user": nobody, "group": nobody, "extra_groups": [] if root else None}

    def fails(command, **how):
        raise OSError(errno.EPERM, "not permitted")

    monkeypatch.setattr(subprocess, "Popen", fails)
    with pytest.raises(
        RuntimeError, match=f"bwrap does not start{' as the user 65534' if root else ''}: not permitted"
    ):
        run("print(1)")
