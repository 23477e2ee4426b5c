"""What the verifiers share; it is copied into a task's tests beside them, as /tests/harness.py.

A verifier knows the answers and writes the reward, so nothing of the agent's may run with its powers. What
the agent has left is started as the agent, in a place that has neither /tests nor /logs, within a time and a
size:

    run("python3 /app/solve.py", stdin=b"3 4", timeout=5)  Run(code, out, err, seconds) of the agent's program
    read("/app/out.txt")                                   the bytes of the agent's file, or None

In Docker the grader is root and its programs change to the user `user`, who cannot open either folder. Under
bubblewrap the grader has no other user to change to: each program gets a bubblewrap of its own in there, with
empty folders in the two places and processes that it cannot see. Where neither works, there is no reward.
"""
import contextlib
import ctypes
import functools
import glob
import json
import os
import pwd
import re
import select
import selectors
import shlex
import signal
import subprocess
import sys
import time
from typing import NamedTuple

TESTS, REWARD = "/tests", "/logs/verifier/reward.txt"
OUTPUT = 1 << 20                        # bytes of stdout, and of stderr, that a program may print
WORKDIR = os.getcwd()                   # the image's: what a relative path in the instruction means


class Run(NamedTuple):
    code: int                           # 128 + n for signal n; None if stopped for its time or its output
    out: bytes
    err: bytes
    seconds: float


def refuse(why):
    """A fault of the task's, not the agent's: one line, and no reward."""
    sys.exit(f"{os.path.basename(sys.argv[1])}: {why}" if len(sys.argv) > 1 else why)


def declaration(required, optional={}):
    """The JSON object of the file named on the command line. Both arguments are {field: what makes it good};
    an optional one's is (that, its default)."""
    if len(sys.argv) != 2:
        sys.exit(f"usage: python3 {sys.argv[0]} verifier.json")
    try:
        with open(sys.argv[1], encoding="utf-8") as file:
            declared = json.load(file)
    except (OSError, ValueError) as e:
        refuse(f"not to be read as JSON: {e}")
    if not isinstance(declared, dict):
        refuse("it must be a JSON object")
    rules = required | {field: rule for field, (rule, _) in optional.items()}
    for field in [*required, *declared]:
        if field not in declared:
            refuse(f"the field {field!r} is missing")
        if field not in rules:
            refuse(f"the field {field!r} is none of {', '.join(rules)}")
        if not rules[field](declared[field]):
            refuse(f"the field {field!r} cannot be {json.dumps(declared[field])[:80]}")
    return {field: default for field, (_, default) in optional.items()} | declared


def is_text(value):
    return isinstance(value, str) and value.strip() != ""


def is_number(value):
    return type(value) in (int, float) and abs(value) < 1e300          # neither a bool, nan nor an infinity


def is_count(value):
    return type(value) is int and 1 <= value <= 100_000


def is_command(value):
    try:
        return is_text(value) and shlex.split(value) != []
    except ValueError:                  # an open quote
        return False


def is_content(value):
    """Text as it is, or {"file": a file of the tests}."""
    if isinstance(value, dict):
        return list(value) == ["file"] and is_text(value["file"])
    return isinstance(value, str)


def content(value):
    """Its bytes."""
    if isinstance(value, str):
        return value.encode("utf-8", "surrogatepass")
    path = os.path.normpath(os.path.join(TESTS, value["file"]))
    if not path.startswith(TESTS + "/") or not os.path.isfile(path):
        refuse(f"there is no test file {value['file']!r}")
    with open(path, "rb") as file:
        return file.read()


def text(data, limit=300):
    """The end of some output, for a person to read."""
    return data[-limit:].decode("utf-8", "replace").strip()


def write_reward(value, met):
    """1.0 is for those who met the criterion, and for nobody else."""
    value = 1.0 if met else min(max(float(value), 0.0), 0.999)
    with open(REWARD, "w") as file:
        file.write(f"{value!r}\n")
    print(f"reward {value:.3f}")


# ------------------------------------------------------------------------------------------- the agent's side

def run(command, stdin=b"", timeout=10, limit=OUTPUT):
    """Runs a program of the agent's (a text in shell quoting, or a list of words) as the agent. It and all
    that it has started are ended when it exits, after `timeout` seconds, or past `limit` bytes of output."""
    result = collect(*as_agent(command), stdin, timeout, limit)
    end_descendants()
    return result


def read(path, limit=OUTPUT):
    """The first `limit` bytes of a file of the agent's, as the agent sees it: a link to an answer leads
    nowhere, a pipe ends after a second. None where there is no such file."""
    got = collect(*as_agent(["head", "-c", str(limit), "--", path]), b"", 1, limit)
    return got.out if got.code == 0 else None


def start(command):
    """Starts services of the agent's. They live until end_descendants(), also when what has started them
    ends: a bubblewrap would take them along, so something waits in there. Returns a function that waits so
    many seconds for that end."""
    waits = '"$@" >/dev/null; echo; exec sleep infinity >/dev/null'
    argv, more = as_agent(["sh", "-c", waits, "sh", *shlex.split(command)])
    said = spawn(argv, more, subprocess.DEVNULL, subprocess.PIPE, subprocess.DEVNULL).stdout
    return lambda seconds: select.select([said], [], [], seconds)


def trusted(command, stdin=b"", timeout=60):
    """Runs a program of the tests with the grader's own powers."""
    result = collect(shlex.split(command), {}, stdin, timeout, 64 * OUTPUT)
    end_descendants()
    return result


def as_agent(command):
    """The arguments of spawn for it. The shell's exec gives a missing program the code 127 in both places."""
    words, more = agents_place()
    command = shlex.split(command) if isinstance(command, str) else command
    env = {**os.environ, "HOME": "/home/user", "USER": "user", "TMPDIR": "/tmp"}
    return [*words, "sh", "-c", 'exec "$@"', "sh", *command], {**more, "env": env, "cwd": WORKDIR}


@functools.lru_cache(None)
def agents_place():
    """How a program becomes the agent's: the words before it, and arguments of Popen."""
    with open("/proc/self/status") as file:
        capabilities = int(re.search(r"CapEff:\s*(\w+)", file.read())[1], 16)
    words, more = [], {}
    if capabilities >> 6 & 3 == 3:      # CAP_SETGID, CAP_SETUID: root under bubblewrap is one in name only
        try:
            user = pwd.getpwnam("user")
        except KeyError:
            refuse("the image has no user `user`, as whom the agent's programs run")
        more = {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}
    else:
        words = ["bwrap", "--dev-bind", "/", "/", "--proc", "/proc", "--tmpfs", TESTS, "--tmpfs", "/logs",
                 "--unshare-user", "--unshare-pid", "--unshare-ipc", "--uid", "1000", "--gid", "1000",
                 "--cap-drop", "ALL", "--die-with-parent", "--"]
    look = collect([*words, "sh", "-c", f"ls {TESTS}/harness.py && exit 3; exit 4"], more, b"", 10, OUTPUT)
    if look.code != 4:
        refuse(f"the agent's programs cannot be kept from {TESTS} here {text(look.err)}")
    return words, more


def spawn(argv, more, stdin, stdout, stderr):
    try:
        return subprocess.Popen(argv, stdin=stdin, stdout=stdout, stderr=stderr, start_new_session=True,
                                **more)
    except OSError as e:                # not the agent's program, which a shell starts
        refuse(f"{argv[0]}: {e.strerror}")


def collect(argv, more, stdin, timeout, limit):
    """Runs it to its end and takes in what it prints, within the limits."""
    begin, printed = time.monotonic(), {}
    with contextlib.ExitStack() as stack:
        source = stack.enter_context(open(os.memfd_create("stdin"), "w+b", 0))
        source.write(stdin)
        source.seek(0)
        pipes = [os.pipe(), os.pipe()]
        if "user" in more:              # or the program could not open /dev/stdin, /dev/stdout, /dev/stderr
            for end in (source.fileno(), pipes[0][1], pipes[1][1]):
                os.fchown(end, more["user"], more["group"])
        try:
            process = spawn(argv, more, source, pipes[0][1], pipes[1][1])
        finally:
            for _, end in pipes:
                os.close(end)
        selector = stack.enter_context(selectors.DefaultSelector())
        for end, _ in pipes:
            printed[end] = bytearray()
            selector.register(stack.enter_context(open(end, "rb", 0)), selectors.EVENT_READ)
        stopped = exited = False
        while not stopped and (selector.get_map() or process.poll() is None):
            for key, _ in selector.select(0.05):
                data = os.read(key.fd, 65536)
                printed[key.fd] += data
                if not data:
                    selector.unregister(key.fileobj)
            now = time.monotonic()
            if process.poll() is not None:
                exited = exited or now
                if now - exited > 0.2:               # something that it has started still holds its output
                    end_descendants()
            stopped = now - begin > timeout or max(map(len, printed.values())) > limit
        process.kill()
        code = process.wait()
    out, err = printed.values()
    return Run(None if stopped else code if code >= 0 else 128 - code, bytes(out), bytes(err),
               time.monotonic() - begin)


# Orphans become this process's children instead of process 1's, so that all of them can be found and ended.
# Other processes of the agent's go on: its services must answer.
ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)              # PR_SET_CHILD_SUBREAPER


def end_descendants(seconds=5):
    """Kills what this process has started and what came of that, in rounds, until nothing is left."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        parents, mine = {}, {os.getpid()}
        for path in glob.glob("/proc/[0-9]*/stat"):
            with contextlib.suppress(OSError), open(path, "rb") as file:
                parents[int(path.split("/")[2])] = int(file.read().rpartition(b")")[2].split()[1])
        while more := {pid for pid, parent in parents.items() if parent in mine} - mine:
            mine |= more
        if len(mine) == 1:
            return
        for pid in mine - {os.getpid()}:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
