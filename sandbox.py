"""A running environment of a task: build, start, a persistent shell, grading, clean-up.

    task = load_tasks("tasks.jsonl")[0]
    with Sandbox(task) as sandbox:              # backend="auto": Docker if a daemon answers, else bubblewrap
        result = sandbox.run("ls -l")           # Result(output, exit_code, timed_out)
        grade = sandbox.grade()                 # Grade(reward, log)

Two backends, one shell. `docker` speaks to any Docker-compatible socket (Docker Engine, Podman); DOCKER_HOST
may name several, separated by commas: the one with the fewest sandboxes is taken. `bwrap` needs neither
daemon nor image: the host's /usr read-only and private folders, for tasks on our base image. In both,
process 1 is a small bash (INIT), its child is the agent's bash (WORKER), and a backend only has to give us
three byte streams: stdin carries the commands in, stdout their output, stderr our control messages (end,
exit code, directory, exports). Who is at fault decides what is raised: InfraError is ours (never scored),
TaskError the task's, AgentFault the agent's (reward 0, trained on).

Left out: a terminal (PTY); under bubblewrap also the network, CPU limits, and any uid but the agent's.
"""
import atexit, base64, collections, contextlib, ctypes, errno, fcntl, fnmatch, functools, glob, hashlib, io
import itertools, json, math, os, platform, posixpath, re, resource, secrets, select, shlex, shutil, signal
import socket, struct, subprocess, sys, tarfile, tempfile, threading, time, warnings
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

LIMITS = dict(agent_s=3600, verifier_s=600, command_s=120, cpus=1, memory_mb=2048, network=False)
PROCESSES, DISK_MB = 512, 1024  # the limits that no task sets; under bubblewrap DISK_MB is each folder's
BUILD_S = 600                           # of a RUN step under bubblewrap; of an image's build
STOP_S, RESTORE_S = 10, 20              # for a shell to be stopped (three tries), and to come back
SILENT_S = 15                           # a Docker or vLLM host is lost then: sooner than its shells are blamed
HOST_WAIT_S = 180                       # how long a sandbox waits for a Docker host that answers
HEAD = TAIL = 5000                      # characters kept of an output's two ends
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
RESTARTED = "[shell restarted: directory and exported variables are kept, the rest is lost]"
EPOCH = 1_700_000_000                   # every file's time, so that equal tasks give equal archives


class Result(NamedTuple):
    output: str
    exit_code: int
    timed_out: bool


class Grade(NamedTuple):
    reward: float
    log: str


class InfraError(Exception):
    """Ours to fix: daemon, image, engine, host disk. Never scored."""


class TaskError(InfraError):
    """The task itself is at fault; the message names the task and what to change."""


class AgentFault(Exception):
    """The agent's doing: reward 0, trained on. `end` names the rollout's end."""


class SandboxKilled(AgentFault):
    end = "sandbox_killed"


class VerifierFailed(AgentFault):
    end = "verifier_failed"

    def __init__(self, reason, log=""):
        super().__init__(reason)
        self.log = log


# ------------------------------------------------------------------------------------ tasks and other records

def numbered_records(path):
    """(line number, record) of each line. Split on b"\\n" only: U+2028 and the like stay inside a record."""
    with open(path, "rb") as f:
        for number, line in enumerate(f, 1):         # a binary file's lines end at b"\n" alone
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except ValueError as e:
                if line.endswith(b"\n"):
                    raise ValueError(f"{path}:{number}: not a line of JSON: {e}") from None
                warnings.warn(f"{path}:{number}: dropped a torn last line of {len(line)} bytes")
                return
            if not isinstance(record, dict):
                raise ValueError(f"{path}:{number}: not a JSON object")
            yield number, record


def read_jsonl(path):
    """A file's records. A torn last line is dropped with a warning; a broken one elsewhere: ValueError."""
    return [record for _, record in numbered_records(path)]


class JsonlWriter:
    """Appends whole lines, from many threads. A last line that a killed writer tore is repaired first."""

    def __init__(self, path):
        self.path, self.lock = str(path), threading.Lock()
        self.file = open(path, "a+b", buffering=0)
        end, tail = self.file.seek(0, os.SEEK_END), b""
        while len(tail) < end and b"\n" not in tail:                 # backwards to the start of the last line
            at = max(0, end - len(tail) - (1 << 20))
            self.file.seek(at)
            tail = self.file.read(end - len(tail) - at) + tail
        torn = tail[tail.rfind(b"\n") + 1:]
        if torn:
            try:
                json.loads(torn)
                self.file.write(b"\n")                               # whole: only its newline was missing
            except ValueError:
                warnings.warn(f"{path}: cut off a torn last line of {len(torn)} bytes")
                self.file.truncate(end - len(torn))

    def write(self, record):
        rest = json.dumps(record).encode() + b"\n"                   # ASCII: lone surrogates survive too
        with self.lock:
            start = self.file.seek(0, os.SEEK_END)
            try:
                while rest:
                    rest = rest[self.file.write(rest):]
            except OSError as e:
                self.file.truncate(start)
                raise OSError(e.errno, f"{self.path}: a record could not be written ({e.strerror}); "
                                       "all earlier ones are whole") from e

    def close(self):
        self.file.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


def load_tasks(path):
    """The tasks of a file. ValueError names the file, line and id of the first one that cannot be used."""
    tasks, lines = [], {}
    for number, task in numbered_records(path):
        where = f"{path}:{number}: task {task.get('id', '(without id)')}"
        task.setdefault("files", {})
        for field, kind in dict(id=str, instruction=str, dockerfile=str, files=dict, tests=dict).items():
            if not isinstance(task.get(field), kind):
                raise ValueError(f"{where}: the field {field!r} is missing or not a {kind.__name__}")
        if task["id"] in lines:
            raise ValueError(f"{where}: line {lines[task['id']]} has the same id")
        lines[task["id"]] = number
        tasks.append(task)
    return tasks


def check_task(task):
    """What can be seen without running anything; TaskError names the task and what to change."""
    def require(condition, what):
        if not condition:
            raise TaskError(f"task {task.get('id') or '(without id)'}: {what}")

    require(isinstance(task.get("id"), str) and task["id"], "id must be a string that is not empty")
    require(dockerfile_lines(task.get("dockerfile") or ""), "its dockerfile is missing")
    for part in ("files", "tests", "solution"):
        tree = task.get(part) or {}
        folders = {path[:slash.start()] for path in tree for slash in re.finditer("/", path)}
        for path, item in tree.items():
            require(path and posixpath.normpath(path) == path and not path.startswith(("/", "..")),
                    f"{part}: the path {path!r} does not stay inside")
            require(path not in folders, f"{part}: {path} is both a file and a folder of other files")
            require(("text" in item) != ("b64" in item), f"{part}/{path} needs text or b64")
            try:
                file_bytes(item), file_mode(path, item)
            except (ValueError, TypeError) as e:
                require(False, f"{part}/{path}: {e}")
    require("test.sh" in (task.get("tests") or {}), "tests/test.sh is missing; nothing grades it")
    require(re.fullmatch(r"[\w.-]+", user_of(task)), f"user {user_of(task)!r} is not a user's name")
    for key, value in (task.get("limits") or {}).items():
        require(key in LIMITS, f"limits: {key} is none of {', '.join(LIMITS)}")
        sane = isinstance(value, bool) if key == "network" else type(value) in (int, float) and value > 0
        require(sane, f"limits: {key} = {value!r} makes no sense")
    require(limits_of(task)["memory_mb"] >= 16, "limits: no shell runs in a memory_mb below 16")


def user_of(task):
    return task.get("user") or "user"


def limits_of(task):
    return LIMITS | (task.get("limits") or {})


def files_of(task):
    return task.get("files") or {}


def file_bytes(item):
    if "text" in item:
        return item["text"].encode("utf-8", "surrogatepass")
    return base64.b64decode(item["b64"], validate=True)


def file_mode(path, item):
    mode = item.get("mode")
    if mode is None:
        return 0o755 if path.endswith(".sh") else 0o644
    return int(mode, 8) if isinstance(mode, str) else int(mode)


def make_tar(tree):
    """{path: a record's file, or None for a folder} as a tar; equal trees give equal bytes."""
    buffer, folders = io.BytesIO(), set()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.GNU_FORMAT) as tar:
        def add(path, kind, mode, data=b""):
            info = tarfile.TarInfo(path)
            info.type, info.mode, info.size, info.mtime = kind, mode, len(data), EPOCH
            tar.addfile(info, io.BytesIO(data))

        for path in sorted(tree):
            parts = path.split("/")
            for i in range(1, len(parts) + (tree[path] is None)):
                folder = "/".join(parts[:i])
                if folder not in folders:
                    folders.add(folder)
                    add(folder, tarfile.DIRTYPE, 0o1777 if folder == "tmp" else 0o755)
            if tree[path] is not None:
                add(path, tarfile.REGTYPE, file_mode(path, tree[path]), file_bytes(tree[path]))
    return buffer.getvalue()


def content_hash(task, *more):
    parts = [task.get(key) for key in ("dockerfile", "files", *more)]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


made, making, making_lock = {}, {}, threading.Lock()


def once(key, make):
    """make() once a key; other threads wait for it. A failure is not remembered."""
    with making_lock:
        lock = making.setdefault(key, threading.Lock())
    with lock:
        if key not in made:
            made[key] = make()
        return made[key]


# ----------------------------------------------------------------------------------------- inside the sandbox

# The agent's shell. A command arrives as one NUL-ended frame and is eval'ed in this very shell: cd, variables
# and jobs persist. Descriptors 0-2 are set for the eval alone, and what is saved meanwhile bash keeps from
# children; 198 is the control stream, 199 the output, and what traps print between commands is lost. The
# nonce that ends the output is read only when the command is over: no command prints it by accident, and one
# that goes and takes it deceives itself alone. The for loop is there for a stray break. On the way out (exit,
# set -e, SIGPWR at a timeout) the EXIT trap tells directory and exports, over process 1's copy of the control
# stream. A shell without its descriptors, or out of step with its frames (continue 9), ends, and a new one
# comes; if it was process 1's input that ended, so does everything. All in one line, so that the line numbers
# in error messages are those of the agent's command.
WORKER = r"""set +p; unset -v REPLY; exec 199>&1 198>&2 >/dev/null 2>&1; trap 'exit 124' PWR;
trap '{ builtin printf "\0S%q\n" "${PWD-/}" >/proc/1/fd/3; builtin declare -px >/proc/1/fd/3;
  builtin printf "\0" >/proc/1/fd/3; } 2>/dev/null' EXIT;
while builtin read -r -d '' || [[ $? -gt 128 ]] ||
      { [[ /dev/fd/0 -ef /proc/1/fd/0 ]] && builtin kill -TERM 1; builtin false; }; do
  for REPLY in "$REPLY"; do
    case $REPLY in
      run:000:*) builtin eval "${REPLY:8}" </dev/null >&199 2>&1 198>&- 199>&- ;;
      run:*) (builtin exit "${REPLY:4:3}") || builtin eval "${REPLY:8}" </dev/null >&199 2>&1 198>&- 199>&- ;;
      ''|new) builtin continue 2 ;;
      *) builtin exit ;;
    esac;
  done;
  REPLY="$? $-"; set +x;
  builtin printf '\0E%s ' "$REPLY" >&198 || builtin exit;
  builtin read -r -d ''; builtin printf %s "$REPLY" >&199; builtin printf '%s ' "$REPLY" >&198;
  builtin read -r </proc/uptime; builtin printf '%s ' "$REPLY" >&198;
  builtin read -r </proc/loadavg; builtin printf '%s\n%q\n' "$REPLY" "${PWD-/}" >&198;
  builtin declare -px >&198; builtin printf '\0' >&198;
done""".replace("\n", " ")

# Process 1: fills the file system, starts a shell when told so (frames that come before are the last one's),
# reaps orphans (bash does while it waits), and at SIGPWR kills what the current command has started. From
# inside only TERM can end it, and the sandbox with it. sweep kills what is younger than the command (by start
# time in ticks, then pid), except children of older jobs; all are stopped first, until no new ones appear, so
# that no fork bomb outruns it. It uses builtins alone: there may be no process left to have.
INIT = r"""
[[ -z $1 ]] || { tar -xiopf - -C / <&"$1" && eval "exec $1<&-"; } || exit 1
[[ -d $2 ]] || mkdir -p "$2"; cd "$2" || exit 1
eval "$3"
[[ -z $4 ]] || eval "exec $4<&-"
set -m
exec 3>&2
trap 'asked=1' PWR
trap 'printf "\0K\0" >&3; exit 143' TERM
sweep() {
  local round d p a stat; local -A parent fresh; local -a victims running
  for round in {1..40}; do
    parent=() fresh=() victims=() running=()
    for d in /proc/[0-9]*; do
      stat=; read -r -d '' stat <"$d/stat"; set -- ${stat##*) }
      [[ $# -lt 20 || $1 == [ZX] ]] && continue
      p=${d#/proc/}; parent[$p]=$2
      (( ${20} > tick || ${20} == tick && p > last )) && fresh[$p]=$1
    done
    for p in "${!fresh[@]}"; do
      [[ $p == 1 || $p == "$w" ]] && continue
      a=$p; while [[ -n ${fresh[$a]} && $a != "$w" ]]; do a=${parent[$a]:-1}; done
      [[ $a == 1 || $a == "$w" || -z ${parent[$a]} ]] || continue
      victims+=("$p"); [[ ${fresh[$p]} == [Tt] ]] || running+=("$p")
    done
    [[ ${#victims[@]} == 0 ]] && return
    [[ ${#running[@]} == 0 ]] && break
    kill -STOP "${running[@]}"
  done
  kill -KILL "${victims[@]}"
}
while read -r -d '' || [[ $? -gt 128 ]]; do
  [[ $REPLY == new ]] || continue
  REPLY=$worker bash --norc --noprofile -pc 'eval "$REPLY"' bash 2>&3 3>&- &
  w=$! asked=
  while wait "$w"; s=$?; kill -0 "$w"; do
    [[ $asked ]] || { kill -CONT "$w"; continue; }       # it has stopped itself
    asked= order=; while read -r -d '' -t 1 order; do [[ $order == kill:* ]] && break; done
    [[ $order == kill:* ]] || continue
    order=${order#kill:} tick=${order%%:*} last=${order##*:}
    kill -PWR "$w"; sweep
    for round in {1..6}; do kill -0 "$w" || break; read -r -d '' -t .05; done
    kill -KILL "$w"; sweep
  done
  printf '\0R%s\0' "$s" >&3
done 2>/dev/null
"""
BASH = ["bash", "--norc", "--noprofile", "-pc"]                   # -p: BASH_ENV is not read either
SCRIPT = f"worker={shlex.quote(WORKER)}\n{INIT}".encode()
# How process 1 gets the script, which must not be seen in `ps`: from standard input, or, as bash reads that
# byte by byte, from a file on descriptor $4 where there is one.
BOOT = BASH + ['read -r -d ""; eval "$REPLY"']
# The container is root's, since only then has its grader root's powers;
# the agent's shell gives them up first.
BECOME = BASH + ['id "$0" >/dev/null || exit 67; type -P setpriv >/dev/null || exit 68; '
                 'eval "export HOME=~$0"; chown "$0" /proc/self/fd/{0,1,2}; '
                 'exec setpriv --reuid="$0" --regid="$(id -g "$0")" --init-groups -- "$@"']
BECOME_FAILED = {67: "its Dockerfile must make the user", 68: "its image needs setpriv (util-linux)"}
# How a sandbox that was up has ended: nothing inside can send process 1 a SIGKILL, but the agent's user may
# debug it, or leave it no process to fork. (A debugger can also make it look killed: that one we do not see.)
KILLED, ENDED_BY_AGENT = 137, "the agent ended process 1, or left it no process (exit code {})"
BOOT_FILE = BASH + ['. "/dev/fd/$4"; exit']

# The grader, where the agent's processes cannot reach. $4 makes /tests and /logs/verifier, $5 clears up.
GRADER = r"""
eval "$4"
for v in ${!PYTHON*} ${!LD_*} BASH_ENV ENV; do unset "$v"; done
export HOME=/root PYTHONDONTWRITEBYTECODE=1 PYTHONNOUSERSITE=1
folders=$PATH PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
cd "$2" || cd /
eval "$1" || exit 1
IFS=:; for d in $folders; do [[ $d == /* && -O $d && :$PATH: != *":$d:"* ]] && PATH+=:$d; done; unset IFS
bash /tests/test.sh </dev/null 2>&1
printf %s "$3"
for f in reward.txt reward.json; do
  [[ -f /logs/verifier/$f ]] || continue
  LC_ALL=C IFS= read -r -d '' -n 4097 <"/logs/verifier/$f" && REPLY='with a NUL byte or over 4,096 bytes long'
  printf '\0F%s %s\0' "$f" "$REPLY" >&2
done
eval "$5"
printf '\0D\0' >&2
read -r -d '' -t 5                                # so that no stream ends before the other one is read
"""


# ---------------------------------------------------------------------------------------------------- streams

class Capture:
    """An output, capped while it streams: bytes of its head and tail, and how many characters lay between."""
    KEEP = 8 * max(HEAD, TAIL)                       # bytes; a character has at most 4

    def __init__(self):
        self.head, self.tail, self.dropped = bytearray(), bytearray(), 0

    def add(self, data):
        room = max(0, self.KEEP - len(self.head))
        self.head += data[:room]
        self.tail += data[room:]
        if len(self.tail) > 16 * self.KEEP:
            cut = whole(self.tail, len(self.tail) - self.KEEP)
            self.dropped += characters(self.tail[:cut])
            del self.tail[:cut]

    def text(self):
        cut = whole(self.head, len(self.head)) if self.tail else len(self.head)
        head = self.head[:cut].decode("utf-8", "replace")
        tail = (self.head[cut:] + self.tail).decode("utf-8", "replace")
        elided = len(head) + self.dropped + len(tail) - HEAD - TAIL
        if elided <= 0:
            return head + tail
        return f"{head[:HEAD]}\n[... {elided} characters elided ...]\n{(head + tail)[-TAIL:]}"


def whole(data, cut):
    """The last place at or before `cut` that does not split a UTF-8 character."""
    for back in range(1, min(3, cut) + 1):
        byte = data[cut - back]
        if byte >= 0xC0:                             # a leading byte: are all of its bytes before the cut?
            return cut if back >= (4 if byte >= 0xF0 else 3 if byte >= 0xE0 else 2) else cut - back
        if byte < 0x80:
            break
    return cut


def characters(data, continuation=bytes(range(0x80, 0xC0))):
    """How many characters UTF-8 text has, without decoding it: 300 MB of output must not cost seconds."""
    return len(data.translate(None, continuation))


def messages(buffer, data):
    """The NUL-framed messages of a control stream and the rest, which stays bounded whatever comes."""
    *whole_ones, rest = (buffer + data).split(b"\0")
    return whole_ones, rest[-(1 << 20):]


def said(control):
    """What stands in a control stream besides messages: the last words of bwrap, runc or bash."""
    return control.decode("utf-8", "replace").strip()[-500:]


class Pipes:
    """The three streams of a local process."""

    def __init__(self, process):
        self.files, self.outbox = (process.stdin, process.stdout, process.stderr), bytearray()
        self.stdin, stdout, stderr = (f.fileno() for f in self.files)
        self.streams = {stdout: 1, stderr: 2}
        os.set_blocking(self.stdin, False)           # a shell that does not read must not hang us

    def pump(self, seconds):
        """Sends what waits in outbox; returns what comes in time: [(stream, bytes)], b"" at an end."""
        poll, got = select.poll(), []
        for fd in self.streams:
            poll.register(fd, select.POLLIN)
        if self.outbox:
            poll.register(self.stdin, select.POLLOUT)
        for fd, _ in poll.poll(max(0, math.ceil(seconds * 1000))):
            if fd in self.streams:
                got.append((self.streams[fd], os.read(fd, 1 << 20)))
                continue
            try:
                del self.outbox[:os.write(fd, self.outbox[:65536])]
            except BrokenPipeError:
                self.outbox.clear()                  # the end of the other two streams tells the rest
            except BlockingIOError:
                pass
        return got[::-1]                             # control first: why it ends comes before the end

    def close(self):
        for f in self.files:
            f.close()


UNREACHABLE = errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH


class Socket:
    """The same over a Docker attach or exec socket, where each piece has a header of stream and length."""

    def __init__(self, raw):
        self.raw, self.socket = raw, getattr(raw, "_sock", raw)
        self.outbox, self.inbox = bytearray(), bytearray()
        self.socket.setblocking(False)

    def pump(self, seconds):
        poll, got, at = select.poll(), [], 0
        poll.register(self.socket.fileno(), select.POLLIN | (select.POLLOUT if self.outbox else 0))
        try:
            for _, event in poll.poll(max(0, math.ceil(seconds * 1000))):
                if event & select.POLLOUT:
                    del self.outbox[:self.socket.send(self.outbox[:65536])]
                while event & ~select.POLLOUT:
                    data = self.socket.recv(1 << 20)
                    self.inbox += data
                    if not data:
                        return [(1, b"")]
                    if not getattr(self.socket, "pending", int)():  # TLS reads ahead, poll does not see it
                        break
        except OSError as e:
            if e.errno in UNREACHABLE:               # cut off, and not over: nobody has ended it
                raise InfraError(f"Docker: its host is not heard of any more: {e}") from None
            if not isinstance(e, BlockingIOError) and "Want" not in type(e).__name__:  # TLS's own name for it
                return [(1, b"")]                    # reset: the daemon is gone
        while len(self.inbox) >= (end := at + 8 + int.from_bytes(self.inbox[at + 4:at + 8], "big")) >= at + 8:
            if end > at + 8:
                got.append((self.inbox[at], bytes(self.inbox[at + 8:end])))
            at = end
        del self.inbox[:at]
        return got

    def close(self):
        for part in (self.socket, getattr(self.raw, "_response", self.raw)):
            with contextlib.suppress(OSError):
                part.close()


# ------------------------------------------------------------------------------------------------ the sandbox

class Sandbox:
    """One environment. Many may live at once, each used by one thread at a time."""

    def __init__(self, task, backend="auto"):
        self.task, self.backend, self.limits = task, resolve_backend(backend), limits_of(task)
        self.box = self.channel = self.fault = None

    def start(self):
        check_task(self.task)
        self.control, self.spill = b"", Capture()
        self.status, self.flags, self.snapshot, self.mark = 0, "", b"", b"0:0"
        self.box = (Docker if self.backend == "docker" else Bwrap)(self.task)
        live.add(self.box)
        try:
            self.channel = self.box.start()
            if self._new_shell(b":", Capture(), 60) != "end":
                raise InfraError("the sandbox's shell did not come up within 60 s")
            self.box.up = True
        except OSError as e:                         # bwrap is missing, no descriptors or processes left, ...
            self.close()
            raise InfraError(f"{self.backend}: the sandbox does not start: {e}") from e
        except BaseException:
            self.close()
            raise
        return self

    def run(self, command, timeout=None):
        """Runs a command in the living shell. What jobs print between commands comes with the next output."""
        self._check()
        deadline = time.monotonic() + (self.limits["command_s"] if timeout is None else timeout)
        command = command.encode("utf-8", "replace").replace(b"\0", b"")         # bash has no NUL
        capture, self.spill, restarted = self.spill, Capture(), False
        if self._await(None, capture, 0) == "died":                              # in between: a job killed it
            restarted = self._restore(capture)
        outcome = self._frame(command, capture, deadline)
        late = outcome == "late"
        if late:
            self._stop(capture)
        if outcome != "end":
            code = 124 if late else self.status
            restarted = self._restore(capture)
            self.status = code
        text = capture.text()
        if restarted:
            text += ("\n" if text and not text.endswith("\n") else "") + RESTARTED
        return Result(text, self.status, late)

    def grade(self):
        """Runs the task's tests on what the agent has left. VerifierFailed if they give no valid reward
        although they give one on the untouched task, TaskError if not even there."""
        reward, reason, log = self.verify()
        if reason is None:
            return Grade(reward, log)

        def untouched():
            with Sandbox(self.task, self.backend) as sandbox:
                return sandbox.verify()[1]

        key = ("untouched", self.backend, content_hash(self.task, "tests", "user", "limits"))
        if fault := once(key, untouched):
            raise TaskError(f"task {self.task['id']}: no valid reward even on the untouched task: {fault}")
        raise VerifierFailed(reason, log)

    def close(self):
        """Ends everything in there. Twice is fine."""
        if self.box:
            self.box.close()
            live.discard(self.box)
        if self.channel:
            self.channel.close()
        self.box = self.channel = None

    def __enter__(self):
        return self.start()

    def __exit__(self, *_):
        self.close()

    def _check(self):
        if self.fault:
            raise self.fault
        if not self.channel:
            raise InfraError("the sandbox is not running")

    def _die(self, fault):
        self.fault = fault
        self.close()
        raise fault

    def _frame(self, command, capture, deadline):
        """Sends a command and awaits its end. set -x was switched off for our part of the shell's work."""
        nonce = secrets.token_hex(16).encode()
        trace = b"set -x; " if "x" in self.flags else b""
        self.channel.outbox += b"run:%03d:%s%s\0%s\0" % (self.status, trace, command, nonce)
        return self._await(nonce, capture, deadline)

    def _new_shell(self, command, capture, seconds):
        """Has process 1 start a shell, and awaits the end of its first command."""
        self.channel.outbox += b"new\0"
        return self._frame(command, capture, time.monotonic() + seconds)

    def _stop(self, capture):
        """Past its time: process 1 kills what the command has started, and the shell with it."""
        for _ in range(3):
            self.channel.outbox += b"kill:%s\0" % self.mark  # it waits for this a second after the signal
            self.box.interrupt()
            if self._await(None, capture, time.monotonic() + STOP_S) == "died":
                return
        self._die(SandboxKilled("its processes cannot be stopped (process limit)"))

    def _restore(self, capture):
        """The new shell gets the old one's directory and exports; its end marker ends that one's output."""
        folder, _, exports = self.snapshot.partition(b"\n")
        self.status, self.flags = 0, ""
        back = b"builtin cd -- %s\n%s" % (folder, exports)
        if self._new_shell(back, capture, RESTORE_S) != "end":
            self._die(SandboxKilled("its shell does not come back (process limit)"))
        return True

    def _await(self, nonce, capture, deadline):
        """Pumps until the frame of this nonce is over ("end"), the shell has died ("died") or time is up
        ("late"). The end has to be seen on both streams: only then is the output complete."""
        pending, ended, marked, died = b"", False, False, False
        while not (ended and marked):
            left = deadline - time.monotonic()
            try:
                got = self.channel.pump(left)
            except InfraError as e:
                self._die(e)
            for stream, data in got:
                if not data:
                    self._die(self.box.post_mortem(said(self.control)))
                elif stream == 2:
                    come, self.control = messages(self.control, data)
                    for message in come:
                        kind, rest = message[:1], message[1:]
                        if kind == b"E":
                            ended |= self._ended(rest, nonce)
                        elif kind == b"S":
                            self.snapshot = rest
                        elif message == b"K":
                            self._die(SandboxKilled("the agent ended process 1"))
                        elif kind == b"R" and rest.isdigit():
                            self.status, died = int(rest) % 256, True  # its last output may be in this batch
                elif marked:
                    self.spill.add(data)                           # a job's, already after the end
                else:
                    pending += data
                    at = pending.find(nonce) if nonce else -1
                    keep = len(nonce) - 1 if nonce else 0          # the marker may arrive byte by byte
                    cut = at if at >= 0 else max(0, len(pending) - keep)
                    capture.add(pending[:cut])
                    pending = pending[cut:]
                    if at >= 0:
                        self.spill.add(pending[len(nonce):])
                        pending, marked = b"", True
            if died:
                capture.add(pending)
                return "died"
            if left <= 0 and not (ended and marked):
                capture.add(pending)
                return "late"
        return "end"

    def _ended(self, report, nonce):
        """Takes in the report at a frame's end. A malformed one is the agent's forgery."""
        first, _, snapshot = report.partition(b"\n")
        try:                                         # 2 of /proc/uptime and 5 of /proc/loadavg come last
            status, flags, got, uptime, _, _, _, _, _, last = first.split()
            if got != nonce:
                return False
            self.mark = b"%d:%d" % (round(float(uptime) * 100), int(last))
            self.status, self.flags, self.snapshot = int(status) % 256, flags.decode(), snapshot
        except (ValueError, OverflowError):
            return False
        return True

    def verify(self):
        """One run of the tests: (reward, None, log), or (None, why there is no valid reward, log)."""
        self._check()
        nonce, seconds = secrets.token_hex(16), self.limits["verifier_s"]
        capture, idle, control, files, done, window = Capture(), Capture(), b"", {}, False, b""
        deadline, late, box = time.monotonic() + seconds, False, self.box        # close() forgets the box
        try:
            channel = box.grader(nonce, self.task["tests"])
        except (InfraError, OSError) as e:
            self._await(None, idle, time.monotonic() + 2)          # raises the reason if the sandbox is gone
            raise InfraError(f"the grader does not start: {e}") from e
        try:
            while not done or nonce.encode() not in window:
                left = deadline - time.monotonic()
                if late := left <= 0:
                    return None, f"the verifier ran past its {seconds} s", capture.text()
                for stream, data in channel.pump(left):
                    if not data:
                        if self._await(None, idle, time.monotonic() + 1) == "died":  # raises if all is gone
                            self._restore(idle)
                        return None, f"the verifier was ended before its time {said(control)}", capture.text()
                    if stream == 1:
                        capture.add(data)
                        window = window if nonce.encode() in window else window[-64:] + data
                        continue
                    come, control = messages(control, data)
                    for message in come:
                        done |= message == b"D"
                        if message[:1] == b"F":
                            name, _, content = message[1:].partition(b" ")
                            files[name] = content
        finally:
            channel.close()
            box.end_grader(late)
        log = capture.text().replace(nonce, "")
        if len(files) != 1:
            found = "both reward.txt and reward.json" if files else "no reward"
            return None, f"the verifier wrote {found}", log
        try:
            return parse_reward(*files.values()), None, log
        except ValueError as e:
            return None, str(e), log


def parse_reward(data):
    """The one finite number in [0, 1] that a verifier wrote, bare or as {"reward": number}."""
    if len(data) > 4096:
        raise ValueError("the reward is longer than 4,096 bytes")
    text = data.strip(b" \t\r\n")
    shown = text[:40].decode("utf-8", "replace")
    try:
        value = json.loads(text)["reward"] if text[:1] == b"{" else None
    except (ValueError, KeyError, RecursionError):
        raise ValueError(f'the reward {shown!r} is not {{"reward": number}}') from None
    if value is None and re.fullmatch(rb"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", text):
        value = float(text)
    if type(value) not in (int, float):                            # a bool is an int to isinstance
        raise ValueError(f"the reward {shown!r} is not a number" if text else "the reward is empty")
    if not 0 <= value <= 1:
        raise ValueError(f"the reward {shown!r} lies outside [0, 1]")
    return value + 0.0                                             # 1 -> 1.0, -0.0 -> 0.0


def prepare(task, backend):
    """Builds what every episode of the task shares, once per content. start() does it by itself."""
    if backend == "bwrap":
        return bwrap_template(task)
    return [docker_image(task, host) for host in docker_hosts()]


def resolve_backend(name):
    """"docker" or "bwrap"; "auto" takes what works here. InfraError says what to do where nothing does."""
    assert name in ("auto", "docker", "bwrap"), f"backend {name!r} is none of auto, docker, bwrap"
    reasons = []
    for backend in ("docker", "bwrap") if name == "auto" else (name,):
        try:
            once(("works", backend, *docker_hosts()), docker_works if backend == "docker" else bwrap_works)
            return backend
        except InfraError as e:
            reasons.append(f"{backend}: {e}.")
    raise InfraError(" ".join([
        "No sandbox works here.", *reasons, "Start Docker or Podman (macOS, Windows: Docker Desktop), and",
        "set DOCKER_HOST if its socket is elsewhere; or install bubblewrap (apt-get install bubblewrap), and",
        "where the system blocks user namespaces, allow them: sysctl -w",
        "kernel.apparmor_restrict_unprivileged_userns=0",
        "(Ubuntu) or kernel.unprivileged_userns_clone=1 (older Debian)."]))


# ------------------------------------------------------------------------------------------------- bubblewrap

SYSTEM = ["bin", "sbin", "lib", "lib32", "lib64", "libx32"]  # links into /usr, or folders of older systems
ETC = {
    "passwd": "root:x:0:0:root:/root:/bin/bash\nuser:x:1000:1000::/home/user:/bin/bash\n"
              "nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n",
    "group": "root:x:0:\nuser:x:1000:\nnogroup:x:65534:\n",
    "hosts": "127.0.0.1 localhost sandbox\n::1 localhost\n",
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
}
# awk: a link
HOST_ETC = ["alternatives", "ld.so.cache", "ssl/certs", "ssl/openssl.cnf", "magic", "mime.types"]
KEYCTL = {"x86_64": 250, "aarch64": 219}                           # a system call without a function in libc


def new_spawner():
    """One thread; it and what it starts have a session keyring of their own:
    the caller's may hold secrets."""
    def leave_keyring():
        if sys.platform == "linux" and platform.machine() in KEYCTL:
            ctypes.CDLL(None).syscall(KEYCTL[platform.machine()], 1, None)   # KEYCTL_JOIN_SESSION_KEYRING
    return ThreadPoolExecutor(1, "sandbox-spawner", leave_keyring)


spawner = new_spawner()
uids = itertools.count(0x70000000)                                 # for root: host uids that nobody else has


@functools.lru_cache(None)
def etc_folder():
    """A small /etc for all sandboxes of this run:
    one mount in each, where ten would be a good part of its start."""
    folder = tempfile.mkdtemp(prefix=f"etc-{run_label()}.")        # nobody can have been there before us
    os.mkdir(folder + "/ssl")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    for name, text in ETC.items():
        with open(f"{folder}/{name}", "w") as f:
            f.write(text)
    for name in HOST_ETC:
        source = "/etc/" + name
        if os.path.isdir(source):
            shutil.copytree(source, f"{folder}/{name}", symlinks=True, dirs_exist_ok=True)
        elif os.path.exists(source):
            shutil.copyfile(source, f"{folder}/{name}")
    subprocess.run(["chmod", "-R", "u+rwX,go+rX,go-w", folder], check=True)
    return folder


def spawn(argv, **more):
    """A process with three pipes. From one long-lived thread: --die-with-parent means the parent *thread*.
    It yields to the model, which most often runs beside it and which everything waits for."""
    def start():
        process = subprocess.Popen(argv, bufsize=0, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                   stderr=subprocess.PIPE, **more)
        with contextlib.suppress(OSError):           # it has ended already
            os.setpriority(os.PRIO_PROCESS, process.pid, 15)
        return process
    return spawner.submit(start).result()


def as_nobody(uid):
    """If we are root: away with root's power over host files, before bwrap even starts."""
    if os.geteuid():
        return []
    return ["chroot", f"--userspec=+{uid}:+{uid}", "--groups=", "/"]  # half of what setpriv takes


def mount_options(writable):
    """What the sandbox and its grader have in common: the host's programs, and a skeleton."""
    argv = ["--ro-bind", "/usr", "/usr"]
    for name in SYSTEM:
        if os.path.islink("/" + name):
            argv += ["--symlink", os.readlink("/" + name), "/" + name]
        elif os.path.isdir("/" + name):
            argv += ["--ro-bind", "/" + name, "/" + name]
    argv += ["--proc", "/proc", "--dev", "/dev"]
    argv += ["--perms", "0755", "--dir", "/home", "--perms", "0755", "--dir", "/var"]
    return argv + ([] if "/var" in writable else ["--symlink", "../tmp", "/var/tmp"])


def tmpfs(path, mode="0755", size=None):
    return ["--perms", mode, "--size", str(size or DISK_MB << 20), "--tmpfs", path]


@contextlib.contextmanager
def placed(tree):
    """Options of bwrap that put a record's files under /, and the descriptors that it reads them from. The
    few files of most tasks need no tar to be started then."""
    folders = {path[:slash.start()] for path in tree for slash in re.finditer("/", path)}
    folders |= {path for path, item in tree.items() if item is None}
    options = [word for path in sorted(folders) for word in ("--perms", "0755", "--dir", "/" + path)]
    with contextlib.ExitStack() as stack:
        fds = []
        for path, item in tree.items():
            if item is not None:
                fds.append(stack.enter_context(file_of(file_bytes(item))))
                options += ["--perms", f"{file_mode(path, item):04o}", "--file", str(fds[-1]), "/" + path]
        yield options, fds


def bwrap_start(program, writable, uid, env, root=False, fds=(), options=(), seal=True):
    """Starts a program in a fresh sandbox, as the agent's user or as a root without power."""
    inner = "0" if root else "1000"
    argv = [*as_nobody(uid), "bwrap", "--unshare-all", "--as-pid-1", "--die-with-parent",
            "--new-session", "--hostname", "sandbox", "--uid", inner, "--gid", inner,
            *mount_options(writable), "--ro-bind", etc_folder(), "/etc"]
    argv += tmpfs("/run") + tmpfs("/dev/shm", "1777")
    for path in writable:
        argv += tmpfs(path, "1777" if path == "/tmp" else "0755")
    argv += options
    for path in ("/dev", "/")[:2 if seal else 1]:
        argv += ["--remount-ro", path]
    return spawn(argv + ["--", *program], env=env, pass_fds=fds)


def bwrap_works():
    """Starts an empty sandbox; InfraError says why it cannot."""
    try:
        process = bwrap_start(["true"], ["/app"], next(uids), {"PATH": PATH})
        complaint = process.communicate(timeout=20)[1]
    except (OSError, subprocess.SubprocessError) as e:
        raise InfraError(str(e)) from None
    if process.returncode:
        raise InfraError(said(complaint) or f"exit code {process.returncode}")
    return True


@contextlib.contextmanager
def file_of(data):
    """A descriptor from which a child can read the data."""
    fd = os.memfd_create("data")
    try:
        with open(fd, "wb", closefd=False) as f:
            f.write(data)
        os.lseek(fd, 0, os.SEEK_SET)
        yield fd
    finally:
        os.close(fd)


# AUDIT_ARCH and the numbers of clone and unshare, for 32-bit programs too
CLONE = {"x86_64": [(0xC000003E, 56, 272), (0x40000003, 120, 310)],
         "aarch64": [(0xC00000B7, 220, 97), (0x40000028, 120, 337)]}


@functools.lru_cache(None)
def no_namespaces():
    """A seccomp program (struct sock_filter) that lets nobody make a user namespace, in which he could mount
    memory that no limit counts. As Docker's own: EPERM for CLONE_NEWUSER, and no clone3, whose flags it
    cannot see. Empty on other machines."""
    allow, eperm, enosys = 0x7FFF0000, 0x50001, 0x50026
    load, both, equal, any_of, answer = 0x20, 0x54, 0x15, 0x45, 0x06
    program = []
    for arch, clone, unshare in CLONE.get(platform.machine(), []):
        program += [(load, 0, 0, 4), (equal, 0, 10, arch),         # if not this: 10 further, to the next one
                    (load, 0, 0, 0), (both, 0, 0, 0xBFFFFFFF),     # the call's number, x32's too
                    (equal, 0, 1, 435), (answer, 0, 0, enosys),    # clone3
                    (equal, 1, 0, unshare), (equal, 0, 2, clone),
                    (load, 0, 0, 16), (any_of, 1, 0, 0x10000000),  # its first argument: CLONE_NEWUSER?
                    (answer, 0, 0, allow), (answer, 0, 0, eperm)]
    if program:
        program.append((answer, 0, 0, enosys))
    return b"".join(struct.pack("HBBI", *step) for step in program)


class Bwrap:
    """bubblewrap's side of a sandbox."""

    def __init__(self, task):
        self.task, self.memory = task, int(limits_of(task)["memory_mb"]) << 20
        self.process = self.verifier = self.pidfd = self.killed = self.up = None
        self.uid = next(uids)

    def start(self):
        self.template = t = prepare(self.task, "bwrap")
        reap_processes()
        raise_file_limit()
        watch()
        # Kernels from 5.14 on count processes by user namespace: that limit is the sandbox's own. The one on
        # data is there because a single hog outruns any watchdog. No cgroup: moving into one halts the whole
        # machine's forks for some 10 ms, and most users may make none.
        setup = (f"ulimit -Su {PROCESSES} -Hu {PROCESSES}; ulimit -Sn 1024; ulimit -c 0; "
                 f"ulimit -d {self.memory >> 10}")
        root = user_of(self.task) == "root"
        env = {"PATH": PATH, "HOME": "/root" if root else "/home/user", "USER": user_of(self.task),
               "SHELL": "/bin/bash", "LC_CTYPE": "C.UTF-8", "TERM": "dumb", **t.env}
        with (file_of(SCRIPT) as script, file_of(t.tar) as tar, file_of(no_namespaces()) as rules,
              placed(t.files) as (options, fds)):
            program = [*BOOT_FILE, run_label(), str(tar) if t.tar else "", t.workdir, setup, str(script)]
            fds += [script, tar] if t.tar else [script]          # what nobody closes, the agent would inherit
            if no_namespaces():
                fds.append(rules)
                options += ["--seccomp", str(rules)]
            self.process = bwrap_start(program, t.writable, self.uid, env, root, fds, options)
        channel = Pipes(self.process)
        if os.geteuid() == 0:                                      # or the agent cannot open /dev/stderr
            for fd in (channel.stdin, *channel.streams):
                os.fchown(fd, self.uid, self.uid)
        return channel

    def init(self):
        """Process 1's pid out here; a descriptor of it is kept, since numbers are used again."""
        if self.pidfd is None:
            self.pid = only_child(self.process.pid)
            self.pidfd = os.pidfd_open(self.pid)
        return self.pid

    def interrupt(self):
        with contextlib.suppress(OSError):                         # if it is gone, the streams end
            self.init()
            signal.pidfd_send_signal(self.pidfd, signal.SIGPWR)

    def post_mortem(self, last_words):
        """Why the streams ended."""
        code = self.process.wait()
        if self.killed or self.up and 0 <= code != KILLED:
            return SandboxKilled(self.killed or ENDED_BY_AGENT.format(code))
        return InfraError(f"the sandbox ended from outside (exit code {code}) {last_words}")

    def grader(self, nonce, tests):
        """New mount and PID namespaces over the same folders, in the same network: services answer, nobody
        reaches in. The unshare is there because bwrap looks itself up in /proc. CAP_SETFCAP gives no power in
        there, but without it no verifier could start a bwrap of its own around the agent's programs."""
        t, init = self.template, f"/proc/{self.init()}"
        with open(f"{init}/ns/net") as net:
            owner = fcntl.ioctl(net.fileno(), 0xB701)              # NS_GET_USERNS: the one that owns it all
        argv = [*as_nobody(self.uid), "nsenter", "--preserve-credentials",
                f"--user=/proc/self/fd/{owner}", f"--mount={init}/ns/mnt", f"--net={init}/ns/net",
                "--", "unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc",
                "bwrap", "--unshare-pid", "--unshare-ipc", "--as-pid-1", "--die-with-parent", "--new-session",
                "--cap-drop", "ALL", "--cap-add", "CAP_SETFCAP", *mount_options(t.writable),
                "--ro-bind", "/etc", "/etc"]
        for path in t.writable:
            argv += ["--bind", path, path]
        for path in ("/tests", "/logs/verifier", "/root", "/run", "/dev/shm"):
            argv += tmpfs(path, "0700")
        # /tmp is the agent's too, whose processes are of the same user
        env = {"LC_CTYPE": "C.UTF-8", "TERM": "dumb", **t.env, "PATH": PATH, "USER": "root",
               "TMPDIR": "/logs/verifier"}
        try:
            few = {"tests/" + path: item for path, item in tests.items()} if len(tests) <= FEW else {}
            with placed(few) as (options, fds), file_of(b"" if few else make_tar(tests)) as tar:
                unpack = "" if few else f"tar -xof - -C /tests <&{tar}"
                argv += [*options, "--remount-ro", "/", "--", *BASH, GRADER, run_label(), unpack, t.workdir,
                         nonce, f"ulimit -u {2 * PROCESSES}; ulimit -d {self.memory >> 10}", ""]
                self.verifier = spawn(argv, env=env, pass_fds=[owner, *fds] if few else [owner, tar])
        finally:
            os.close(owner)
        return Pipes(self.verifier)

    def end_grader(self, late):
        end_process(self.verifier)

    def kill(self):
        for process in (self.process, self.verifier):
            if process:
                end_process(process)

    def close(self):
        self.kill()
        if self.pidfd is not None:
            os.close(self.pidfd)
            self.pidfd = None


@functools.lru_cache(None)
def raise_file_limit():
    """Each sandbox holds four descriptors; the usual 1,024 are few."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def only_child(pid):
    with open(f"/proc/{pid}/task/{pid}/children") as f:
        children = f.read().split()
    if not children:
        raise ProcessLookupError(f"process {pid} has no child")
    return int(children[0])


def end_process(process):
    """Kills a bwrap and the process 1 behind it, with which its whole namespace goes."""
    if process.poll() is None:
        with contextlib.suppress(OSError):
            os.kill(only_child(process.pid), signal.SIGKILL)
        process.kill()
    process.wait()


FEW = 32                                             # files that are handed over one by one, without a tar


class Template(NamedTuple):
    """What a Dockerfile makes of our base image under bubblewrap."""
    tar: bytes                                       # unpacked over /: what RUN steps left, or many files
    files: dict                                      # on top of that: the files of the last COPY steps
    env: dict
    workdir: str
    writable: list                                   # the private folders, a tmpfs each


def bwrap_template(task):
    """Plays the Dockerfile: FROM our base, COPY, ENV, WORKDIR, RUN. One user there is: all is the agent's."""
    def refuse(what):
        raise TaskError(f"task {task['id']}: bubblewrap cannot do `{what}`; use Docker or change the task")

    def place(path):
        """A path of the Dockerfile, without the leading /; its top folder becomes a private one."""
        path = posixpath.normpath(posixpath.join(workdir, path)).lstrip("/")
        top = path.split("/")[0]
        if top in {"usr", "etc", "proc", "dev", "sys", "run", "tests", "logs", *SYSTEM, ""}:
            refuse(f"a write to /{path}")
        if not (path + "/").startswith("home/user/"):
            tops.add(top)
        return path

    if user_of(task) not in ("user", "root") or limits_of(task)["network"]:
        refuse("network: true" if limits_of(task)["network"] else f"user {user_of(task)}")
    files, env, workdir, tar, tree = files_of(task), {}, "/app", b"", {}
    tops = {"app", "home/user", "tmp"} | ({"root"} if user_of(task) == "root" else set())
    for number, line in enumerate(dockerfile_lines(task["dockerfile"])):
        word, _, rest = line.partition(" ")
        word, rest = word.upper(), rest.strip()
        if word in ("ENV", "WORKDIR", "COPY"):
            rest = re.sub(r"\$(\w+)|\$\{(\w+)\}", lambda m: {"PATH": PATH, **env}.get(m[1] or m[2], ""), rest)
        if (number == 0) != (word == "FROM") or (word == "FROM" and rest != "tmax-base:core") or "<<" in rest:
            refuse(line)
        elif word == "WORKDIR":
            workdir = "/" + place(rest)
            tree[workdir[1:]] = None
        elif word == "ENV" and "=" in rest.split()[0]:
            env |= (pair.split("=", 1) for pair in shlex.split(rest))
        elif word == "ENV":
            env |= [rest.split(None, 1)]
        elif word == "COPY":
            options = {}
            while rest.startswith("--"):
                option, _, rest = rest.partition(" ")
                key, _, options[key] = option.partition("=")
            if set(options) - {"--chown", "--chmod"} or ".dockerignore" in files:
                refuse(line)
            *sources, target = json.loads(rest) if rest.startswith("[") else rest.split()
            copied = copy_sources(files, sources)
            if not copied:
                raise TaskError(f"task {task['id']}: its files have nothing for `{line}`")
            folders = tops | {path if tree[path] is None else posixpath.dirname(path) for path in tree}
            into = target.endswith(("/", ".")) or len(sources) > 1 or place(target) in folders
            for name, (path, from_folder) in copied.items():
                item = files[path] | ({"mode": options["--chmod"]} if "--chmod" in options else {})
                tree[place(f"{target}/{name}" if into or from_folder else target)] = item
        elif word == "RUN":
            tar += make_tar(tree)
            tree, writable = {}, sorted("/" + top for top in tops)
            key = ("run", hashlib.sha256(tar).digest(), *env.items(), workdir, *writable, rest)
            tar = once(key, functools.partial(bwrap_run, task, rest, tar, env, workdir, writable))
            with tarfile.open(fileobj=io.BytesIO(tar)) as archive:
                tops |= {name.split("/")[0] for name in archive.getnames()} - {"home"}
        elif word != "FROM":
            refuse(line)
    if len(tree) > FEW:
        tar, tree = tar + make_tar(tree), {}
    return Template(tar, tree, env, workdir, sorted("/" + top for top in tops))


def dockerfile_lines(text):
    """Its instructions, one each: without comments, continued lines joined."""
    text = re.sub(r"(?m)^[ \t]*#.*\n?", "", text)
    return [line.strip() for line in re.sub(r"\\[ \t]*\n", " ", text).split("\n") if line.strip()]


def copy_sources(files, sources):
    """COPY's sources as {name below the target: (path in the context, whether out of a copied folder)}."""
    found = {}
    for source in sources:
        want = [part for part in posixpath.normpath(source).split("/") if part not in ("", ".")]
        for path in files:
            parts = path.split("/")
            if len(parts) >= len(want) and all(map(fnmatch.fnmatchcase, parts, want)):
                inside = len(parts) > len(want)
                found["/".join(parts[len(want):]) if inside else parts[-1]] = path, inside
    return found


def bwrap_run(task, command, tar, env, workdir, writable):
    """One RUN step: what the folders hold afterwards, as a tar. Like the episodes it has no network."""
    script = ('mkdir -p /root; tar -xiopf - -C / <&"$1" && cd "$2" && sh -c "$3" </dev/null >&2 || exit 1\n'
              'cd /; shopt -s dotglob; for d in *; do [[ " $4 " == *" $d "* ]] || set -- "$@" "$d"; done\n'
              'shift 4; exec tar -cpf - --sort=name home/user "$@"')
    shell = "chown() { :; }; chgrp() { :; }; ulimit -u 512; " + (
        shlex.join(json.loads(command)) if command.startswith("[") else command)
    leave = ["usr", "etc", "proc", "dev", "run", "sys", *SYSTEM]
    leave += [folder for folder in ("var", "home") if "/" + folder not in writable]
    with file_of(tar) as fd:
        program = ["bash", "-pc", script, run_label(), str(fd), workdir, shell, " ".join(leave)]
        env = {"PATH": PATH, "HOME": "/root", "LANG": "C.UTF-8", **env}
        process = bwrap_start(program, writable, next(uids), env, root=True, fds=[fd], seal=False)
    try:
        out, log = process.communicate(timeout=BUILD_S)
    except subprocess.TimeoutExpired:
        out, log = b"", b"it ran past %d s" % BUILD_S
    finally:
        end_process(process)
    if process.returncode:
        raise TaskError(f"task {task['id']}: `RUN {command}` fails under bubblewrap (no network there, "
                        f"only private folders can be written; Docker has both): {said(log)}")
    return out


# ----------------------------------------------------------------------------------------------------- Docker

# What root may do in there: the grader, or the agent where a task wants it so. A user has no capability.
ROOT_CAPS = ["CHOWN", "DAC_OVERRIDE", "FOWNER", "KILL", "SETGID", "SETUID"]
NOT_THE_TASK = r"(?i)dial tcp|timeout|connection (refused|reset)|toomanyrequests|no space left|TLS handshake"
host_lock = threading.Lock()
avoided = {}                                         # until when a host that did not answer is asked last
left_behind = set()                                  # (api, container): its host did not answer to remove it


def docker_hosts():
    hosts = [host.strip() for host in os.environ.get("DOCKER_HOST", "").split(",")]
    return [host for host in hosts if host] or ["unix:///var/run/docker.sock"]


def docker_api(host):
    """One client a host, shared by the threads."""
    def connect():
        import docker
        tls = docker.utils.kwargs_from_env().get("tls", False)
        version = docker.APIClient(host, version="auto", timeout=10, tls=tls).api_version
        api = docker.APIClient(host, version=version, timeout=600, num_pools=64, tls=tls)
        api.get_adapter(api.base_url).poolmanager.connection_pool_kw["socket_options"] = socket_options()
        api.engine = api.info()
        api.is_podman = "podman" in json.dumps(api.version().get("Components")).lower()
        # where the engine cannot limit a container's disk, watch() polls it
        api.has_quota = (api.engine.get("Driver") == "overlay2"
                         and ["Backing Filesystem", "xfs"] in api.engine.get("DriverStatus", []))
        for container in api.containers(all=True, filters={"label": "tmax-run"}):
            if dead(container["Labels"]["tmax-run"]):              # what a SIGKILLed run has left
                with contextlib.suppress(docker.errors.APIError):  # another start may be at it too
                    api.remove_container(container["Id"], force=True, v=True)
        return api
    return once(("api", host), connect)


def socket_options():
    """A host that is cut off says no goodbye: the kernel asks whether it still hears us, or we wait for ever."""
    ask_s = max(1, SILENT_S // 3)
    options = dict(TCP_NODELAY=1, TCP_KEEPIDLE=ask_s, TCP_KEEPINTVL=ask_s, TCP_KEEPCNT=3,
                   TCP_USER_TIMEOUT=SILENT_S * 1000)
    return [(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
            *((socket.IPPROTO_TCP, getattr(socket, k), v) for k, v in options.items() if hasattr(socket, k))]


def docker_works():
    reasons = []
    for host in docker_hosts():
        try:
            with docker_errors(f"no daemon at {host}"):
                return docker_api(host)
        except (InfraError, ImportError) as e:
            reasons.append(str(e))
    raise InfraError("; ".join(reasons))


@contextlib.contextmanager
def docker_errors(what, task_errors=()):
    """Whatever the SDK raises becomes ours to fix, but for messages that are known to be the task's fault."""
    import docker, requests, urllib3
    try:
        yield
    except (docker.errors.DockerException, requests.exceptions.RequestException, urllib3.exceptions.HTTPError,
            OSError) as e:
        message = str(getattr(e, "explanation", None) or e)
        for pattern, advice in task_errors:
            if re.search(pattern, message):
                raise TaskError(f"{what}: {message}; {advice}") from None
        raise InfraError(f"Docker, {what}: {message}") from e


def docker_image(task, host):
    """The image's name on that host and its settings; built once per content of Dockerfile and files."""
    tag, what = "tmax-task:" + content_hash(task)[:24], f"task {task['id']}, build"

    def build():
        import docker, urllib3
        with docker_errors(what, [("(?i)parse error|unknown instruction|dockerfile", "mend its Dockerfile")]):
            api = docker_api(host)
            with contextlib.suppress(docker.errors.ImageNotFound):
                return api.inspect_image(tag)["Config"]
            for base in re.findall(r"(?im)^\s*FROM\s+(tmax-base:(\w+))", task["dockerfile"]):
                try:
                    api.inspect_image(base[0])
                except docker.errors.ImageNotFound:
                    raise InfraError(f"{what}: the base image {base[0]} is missing: "
                                     f"python gen.py bases --domain {base[1]}") from None
            ignore = file_bytes(files_of(task).get(".dockerignore", {"text": ""})).decode()
            context = files_of(task) | {
                ".tmax.dockerfile": {"text": task["dockerfile"]},
                ".dockerignore": {"text": ignore + "\n.tmax.dockerfile\n.dockerignore\n"}}
            log, late = "", time.monotonic() + BUILD_S
            try:
                for piece in api.build(fileobj=io.BytesIO(make_tar(context)), custom_context=True, tag=tag,
                                       rm=True, forcerm=True, dockerfile=".tmax.dockerfile", decode=True,
                                       timeout=BUILD_S):
                    log = (log + piece.get("stream", ""))[-1500:]
                    if error := piece.get("error"):          # without the command, which may say anything
                        cause = re.sub(r"""(?s)(['"]).*\1""", "", error)
                        kind = InfraError if re.search(NOT_THE_TASK, cause) else TaskError
                        raise kind(f"task {task['id']}: its Dockerfile does not build: {log}{error}")
                    if time.monotonic() > late:
                        raise TimeoutError
            except (TimeoutError, urllib3.exceptions.ReadTimeoutError):  # the engine stops when we hang up
                if time.monotonic() < late:
                    raise                                                # its host is not heard of any more
                raise TaskError(f"task {task['id']}: its Dockerfile does not build within {BUILD_S} s: "
                                f"{log}") from None
            return api.inspect_image(tag)["Config"]

    return tag, once(("image", host, tag), build)


def remove(api, container):
    """Ends a container; if its host does not answer, the next one that starts there does it."""
    import docker
    try:
        api.remove_container(container, force=True, v=True)
    except docker.errors.APIError:
        pass                                         # it is gone already
    except Exception:
        left_behind.add((api, container))


class Docker:
    """The Docker API's side of a sandbox; Podman's socket speaks it too."""

    def __init__(self, task):
        self.task, self.limits = task, limits_of(task)
        self.host = self.api = self.container = self.channel = self.killed = self.up = None

    def choose_host(self):
        """Of several hosts the one that has the fewest sandboxes of ours. One that does not answer is asked last
        for a minute; where none does, we wait: an episode costs more than that."""
        late = time.monotonic() + HOST_WAIT_S
        while True:
            with host_lock:
                now, self.host = time.monotonic(), None
                load = collections.Counter(box.host for box in list(live) if isinstance(box, Docker))
                self.host = min(docker_hosts(), key=lambda host: (max(now, avoided.get(host, 0)), load[host]))
            try:
                with docker_errors("ping"):
                    return docker_api(self.host).ping()
            except InfraError:
                if time.monotonic() > late:
                    raise InfraError(f"Docker: no daemon answers at {', '.join(docker_hosts())}") from None
            avoided[self.host] = time.monotonic() + 60
            time.sleep(1)

    def start(self):
        task, limits, bytes_of_disk = self.task, self.limits, DISK_MB << 20
        self.choose_host()
        tag, config = docker_image(task, self.host)
        self.workdir = config.get("WorkingDir") or "/"
        env = {"TERM": "dumb"}
        if not any(pair.startswith(("LANG=", "LC_ALL=")) for pair in config.get("Env") or []):
            env["LANG"] = "C.UTF-8"
        faults = [("executable file not found|no such file", "its image needs bash")]
        program = [*BOOT, run_label(), "", self.workdir, ""]
        if user_of(task) != "root":
            program = [*BECOME, user_of(task), *program]
        with docker_errors(f"task {task['id']}, start", faults):
            from docker.types import LogConfig, Ulimit
            self.api = api = docker_api(self.host)
            for one in [one for one in list(left_behind) if one[0] is api]:
                left_behind.discard(one)
                remove(*one)
            ulimits = {"nofile": (1024, 4096), "core": (0, 0), "fsize": (bytes_of_disk, bytes_of_disk)}
            if api.is_podman:  # its own default is more than some hosts permit
                ulimits["nproc"] = (32768, 32768)
            host_config = api.create_host_config(
                network_mode="bridge" if limits["network"] else "none", ipc_mode="private",
                cap_drop=["ALL"], cap_add=ROOT_CAPS, security_opt=["no-new-privileges"],
                mem_limit=f"{int(limits['memory_mb'])}m", memswap_limit=f"{int(limits['memory_mb'])}m",
                nano_cpus=int(min(limits["cpus"], api.engine.get("NCPU") or limits["cpus"]) * 1e9),
                pids_limit=PROCESSES, log_config=LogConfig(type="none"),
                ulimits=[Ulimit(name=name, soft=soft, hard=hard) for name, (soft, hard) in ulimits.items()],
                storage_opt={"size": f"{DISK_MB}m"} if api.has_quota else None)
            self.container = api.create_container(
                tag, entrypoint=program, command=[], user="0", stdin_open=True,
                environment=env, stop_signal="SIGKILL",  # TERM is how the agent ends it
                working_dir="/", hostname="sandbox",
                labels={"tmax-run": run_label()}, host_config=host_config)["Id"]
            streams = {"stdin": 1, "stdout": 1, "stderr": 1, "stream": 1}
            self.channel = Socket(api.attach_socket(self.container, streams))
            api.start(self.container)
        if not api.has_quota:
            watch()
        self.channel.outbox += SCRIPT + b"\0"
        return self.channel

    def interrupt(self):
        with contextlib.suppress(InfraError), docker_errors("signal"):  # if it is gone, the streams end
            self.api.kill(self.container, "SIGPWR")

    def post_mortem(self, last_words):
        """Why the streams ended. The engine may take a moment to know."""
        if self.killed:
            return SandboxKilled(self.killed)
        try:
            with docker_errors("the container is lost"):
                for _ in range(50):
                    state = self.api.inspect_container(self.container)["State"]
                    if not state["Running"]:
                        break
                    time.sleep(.1)
        except InfraError as e:
            return e
        if state.get("OOMKilled"):
            return SandboxKilled(f"its memory limit of {self.limits['memory_mb']} MB")
        code = state.get("ExitCode")
        if self.up and not state["Running"] and code != KILLED:
            return SandboxKilled(ENDED_BY_AGENT.format(code))
        if code in BECOME_FAILED:
            return TaskError(f"task {self.task['id']}, user {user_of(self.task)}: {BECOME_FAILED[code]}")
        return InfraError(f"the container ended from outside (exit code {code}) {last_words}")

    def grader(self, nonce, tests):
        """As root, whom the agent's user cannot touch. /logs may be the image's own: it is made root's, not
        emptied. Other processes of root are a verifier's leavings, unless the agent is root."""
        sweep = ('for d in /proc/[0-9]*; do [[ -O $d && ${d#/proc/} != 1 && ${d#/proc/} != $$ ]] && '
                 'kill -9 "${d#/proc/}"; done 2>/dev/null; ') if user_of(self.task) != "root" else ""
        begin = ("[[ -d /logs && ! -L /logs ]] || rm -f /logs; "
                 "mkdir -p /logs; chown 0:0 /logs; chmod 755 /logs; rm -rf /tests /logs/verifier; "
                 "mkdir -m 700 /tests /logs/verifier || exit 1")
        self.tidy = sweep + "rm -rf /tests /logs/verifier"
        tar = make_tar(tests)
        unpack = f"head -c {len(tar)} | tar -xof - -C /tests"
        channel = self.execute(GRADER, "grader", unpack, self.workdir, nonce, sweep + begin, self.tidy)
        channel.outbox += tar
        return channel

    def execute(self, *program):
        with docker_errors("exec"):
            made = self.api.exec_create(self.container, [*BASH, *program], user="0", stdin=True,
                                        environment={"LANG": "C.UTF-8", "USER": "root"})
            return Socket(self.api.exec_start(made["Id"], socket=True))

    def end_grader(self, late):
        """An exec has no kill: another one does it, and where the agent is root, kills whatever there is."""
        if late:
            channel = self.execute(self.tidy if user_of(self.task) != "root" else "kill -9 -1; " + self.tidy)
            deadline = time.monotonic() + 10
            while (1, b"") not in channel.pump(1) and time.monotonic() < deadline:
                pass
            channel.close()

    def kill(self):
        if self.channel:                             # or the engine waits for us to read the last output
            with contextlib.suppress(OSError):
                self.channel.socket.shutdown(socket.SHUT_RDWR)
        if self.container:
            remove(self.api, self.container)

    close = kill


# ----------------------------------------------------------------------------------------------------- limits

def memory_of(box):
    """Bytes under bubblewrap: the private pages of all processes, the grader's too, what the tmpfs hold with
    a kilobyte for each file's own record, and shared memory that is in no tmpfs."""
    total, todo, page, unnamed = 0, [box.init()], resource.getpagesize(), collections.Counter()
    for path in [*box.template.writable, "/dev/shm", "/run"]:
        disk = os.statvfs(f"/proc/{box.pid}/root{path}")
        total += (disk.f_blocks - disk.f_bfree) * disk.f_frsize + (disk.f_files - disk.f_ffree << 10)
    if box.verifier and box.verifier.poll() is None:
        todo.append(box.verifier.pid)
    for pid in todo:                                 # grows as it goes
        with contextlib.suppress(OSError):
            with open(f"/proc/{pid}/statm") as f:
                resident, shared = f.read().split()[1:3]
            total += (int(resident) - int(shared)) * page
            for thread in os.listdir(f"/proc/{pid}/task"):
                with open(f"/proc/{pid}/task/{thread}/children") as f:
                    todo += map(int, f.read().split())
            unnamed |= unnamed_memory(pid, int(shared) * page > 16 << 20)
    return total + unnamed.total()


def unnamed_memory(pid, mapped):
    """{inode: bytes} of the shared memory that a process holds and no folder shows: memfds, and if `mapped`,
    where it is worth a look, shared anonymous pages. Several processes may hold the same:
    their union is a max."""
    held, device = collections.Counter(), memfd_device()
    for fd in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):
            found = os.stat(f"/proc/{pid}/fd/{fd}")
            if found.st_dev == device:
                held[found.st_ino] = found.st_blocks * 512
    if mapped:
        pages, number = collections.Counter(), b"%02x:%02x" % (os.major(device), os.minor(device))
        with open(f"/proc/{pid}/smaps", "rb") as f:
            areas = rb"(?m)^\S+ \S+ \S+ %s (\d+) .*\n(?:.*\n){1,4}?Rss: +(\d+)" % number
            for inode, kb in re.findall(areas, f.read()):
                pages[int(inode)] += int(kb) << 10
        held |= pages
    return held


@functools.lru_cache(None)
def memfd_device():
    with file_of(b"") as fd:
        return os.fstat(fd).st_dev


WATCH_S = .1


def available():
    """Bytes of memory that the machine has left; 0 where there is no bubblewrap and nobody asks."""
    if sys.platform != "linux":
        return 0
    with open("/proc/meminfo") as f:
        return int(re.search(r"MemAvailable:\s+(\d+)", f.read())[1]) << 10


def watch_forever():
    before = 0
    for tick in itertools.count():
        time.sleep(WATCH_S)
        # Looking into every sandbox costs more than one look at the machine: if it has lost no memory to
        # speak of, then no sandbox has taken any.
        boxes, now = list(live), available()
        look = now < before - (64 << 20) or tick % 20 == 0
        before = now if look else max(now, before)
        for box in boxes if look else ():
            with contextlib.suppress(OSError, AttributeError):     # only just starting, or gone
                if isinstance(box, Bwrap) and memory_of(box) > box.memory:
                    box.killed = f"its memory limit of {box.memory >> 20} MB"
                    box.kill()
        docker_boxes = {box.container: box for box in boxes if isinstance(box, Docker) and box.container}
        apis = {box.api for box in docker_boxes.values() if not box.api.has_quota}
        for api in apis if tick % 50 == 0 else ():
            with contextlib.suppress(Exception):                   # the next round asks again
                for found in api.containers(size=True, filters={"label": "tmax-run=" + run_label()}):
                    box = docker_boxes.get(found["Id"])
                    if box and (found.get("SizeRw") or 0) > DISK_MB << 20:
                        box.killed = f"its disk limit of {DISK_MB} MB"
                        box.kill()


@functools.lru_cache(None)
def watch():
    """One thread for all sandboxes, where neither kernel nor engine holds a limit."""
    threading.Thread(target=watch_forever, daemon=True, name="sandbox-watch").start()


# --------------------------------------------------------------------------------------------------- clean-up

live = set()                                         # the boxes that were started and not yet closed


def run_label():
    """This run's boot, PID namespace, pid and start time. Each of our processes and containers carries it."""
    return label_of(os.getpid())


@functools.lru_cache(None)
def label_of(pid):
    if sys.platform == "linux":
        with open("/proc/sys/kernel/random/boot_id") as f:
            where = f"{f.read()[:8]}.{os.stat('/proc/self/ns/pid').st_ino}"
    else:
        where = hashlib.sha256(platform.node().encode()).hexdigest()[:8] + ".0"
    return f"tmax-{where}.{pid}.{start_time(pid)}"


def start_time(pid):
    """In ticks since boot; None if there is no such process."""
    try:
        if sys.platform != "linux":
            return os.kill(pid, 0) or 0
        with open(f"/proc/{pid}/stat", "rb") as f:
            return int(f.read().rpartition(b")")[2].split()[19])
    except OSError:
        return None


def dead(label):
    """Whether the run of this label is over. Those of other machines and PID namespaces we cannot judge."""
    boot, space, pid, start = label.split(".")[:4]
    return run_label().split(".")[:2] == [boot, space] and str(start_time(int(pid))) != start


@functools.lru_cache(None)
def reap_processes():
    """Once a run: kills what SIGKILLed runs have left. Never a living run's."""
    for folder in glob.glob(tempfile.gettempdir() + "/etc-tmax-*"):
        if dead(folder.rpartition("/etc-")[2]):
            shutil.rmtree(folder, ignore_errors=True)
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            with open(f"/proc/{pid}/cmdline", errors="replace") as f:
                label = re.search(r"\0(tmax-[0-9a-f]{8}\.\d+\.\d+\.\d+)\0", f.read())
            if label and dead(label[1]):
                os.kill(int(pid), signal.SIGKILL)


@atexit.register
def kill_all():
    threads = []
    for box in list(live):                           # side by side: an engine takes its time for each
        thread = threading.Thread(target=box.kill)
        try:
            thread.start()
            threads.append(thread)
        except RuntimeError:                         # Python is shutting down and starts no threads
            box.kill()
    for thread in threads:
        thread.join()


def on_signal(number, frame):
    kill_all()
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def forked():
    """In a forked child: its exit must not end its parent's sandboxes, and it has no spawner thread."""
    global spawner
    live.clear()
    spawner = new_spawner()


os.register_at_fork(after_in_child=forked)
if threading.current_thread() is threading.main_thread():
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) == signal.SIG_DFL:
            signal.signal(number, on_signal)
