"""A running environment of a task: build, start, a persistent shell, grading, clean-up.

    task = load_tasks("tasks.jsonl")[0]
    with Sandbox(task) as sandbox:              # backend="auto": Docker if a daemon answers, else bubblewrap
        result = sandbox.run("ls -l")           # Result(output, exit_code, timed_out)
        grade = sandbox.grade()                 # Grade(reward, log)

Two backends, one shell. `docker` speaks to any Docker-compatible socket (Docker Engine, Podman); DOCKER_HOST may
name several, separated by commas: the one with the least sandboxes is taken. `bwrap` needs neither daemon nor image:
the host's /usr read-only, everything else private, for tasks on our base image. Either way process 1 in there is
a small bash (INIT), its child is the agent's bash (WORKER), and all that we need of a backend is three byte streams:
stdin carries commands in, stdout their output, stderr the control messages: end, exit code, directory, exports.

Who is at fault decides what is raised: InfraError is ours (never scored), TaskError the task's, AgentFault the
agent's (reward 0, trained on). Left out: a terminal (PTY), and a network under bubblewrap.
"""
import atexit, base64, collections, contextlib, fcntl, fnmatch, functools, hashlib, io, itertools, json, math, os
import posixpath, re, resource, secrets, select, shlex, signal, subprocess, tarfile, threading, time, warnings
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

LIMITS = dict(agent_s=3600, verifier_s=600, command_s=120, cpus=1, memory_mb=2048, network=False)
PROCESSES, DISK_MB = 512, 1024          # a sandbox's limits that no task sets
HEAD = TAIL = 5000                      # characters kept of an output's two ends
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
RESTARTED = "[shell restarted: directory and exported variables are kept, the rest is lost]"


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


# ---------------------------------------------------------------------------------------------- inside the sandbox

# The agent's shell. A command arrives as one NUL-ended frame of data and is eval'ed in this very shell, so that cd,
# variables and jobs persist; descriptors 0 and 2 are moved for the eval alone, and bash keeps the saved ones away from
# children. The nonce that ends the output is read only after the command is over, so that no command can print it.
# On the way out (exit, set -e, SIGPWR at a timeout) the EXIT trap tells directory and exports; 3 is process 1's copy
# of the control stream. One line, so that the agent's error messages count lines from its own first one.
WORKER = r"""set +p; unset -v REPLY; exec 199>&1; trap 'exit 124' PWR;
trap '{ builtin printf "\0S%q\n" "${PWD-/}"; builtin declare -px; builtin printf "\0"; } 2>/dev/null >/proc/1/fd/3' EXIT;
while builtin read -r -d '' || [[ $? -gt 128 ]]; do
  case $REPLY in
    run:000:*) builtin eval "${REPLY:8}" </dev/null >&199 2>&1 199>&- ;;
    run:*) (builtin exit "${REPLY:4:3}") || builtin eval "${REPLY:8}" </dev/null >&199 2>&1 199>&- ;;
    *) continue ;;
  esac;
  REPLY="$? $-"; set +x;
  builtin printf '\0E%s ' "$REPLY" >&2;
  builtin read -r -d '';
  builtin printf %s "$REPLY" >&199;
  { builtin printf '%s ' "$REPLY"; builtin read -r </proc/uptime; builtin printf '%s ' "$REPLY";
    builtin read -r </proc/loadavg; builtin printf '%s\n%q\n' "$REPLY" "${PWD-/}"; builtin declare -px;
    builtin printf '\0'; } >&2;
done;
trap - EXIT; builtin kill -TERM 1""".replace("\n", " ")

# Process 1: fills the file system, keeps a shell alive, reaps orphans (bash does that while it waits), and at SIGPWR
# kills what the current command started. Signals from inside cannot kill it, except TERM, which ends the sandbox.
# sweep: all that is younger than the command (start time in ticks, then pid), but not the children of older jobs;
# stopped first until nothing new appears, so that a fork bomb cannot outrun it. Builtins only: no process may be left.
INIT = r"""
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
[[ -z $1 ]] || { tar -xiopf - -C / <&"$1" && eval "exec $1<&-"; } || exit 1
[[ -d $2 ]] || mkdir -p "$2"; cd "$2" || exit 1
eval "$3"
read -r -d '' worker
while :; do
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
BOOT = ["bash", "--norc", "--noprofile", "-pc", 'read -r -d ""; eval "$REPLY"']     # keeps `ps` readable in there

# The grader, in a place that the agent's processes cannot reach. $4 makes /tests and /logs/verifier, $5 clears up.
GRADER = r"""
eval "$4"
for v in ${!PYTHON*} ${!LD_*} BASH_ENV ENV; do unset "$v"; done
export HOME=/root PYTHONDONTWRITEBYTECODE=1 PYTHONNOUSERSITE=1
folders=$PATH PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
cd "$2" || exit 1
head -c "$1" | tar -xof - -C /tests || exit 1
IFS=:; for d in $folders; do [[ $d == /* && -O $d && :$PATH: != *":$d:"* ]] && PATH+=:$d; done; unset IFS
bash /tests/test.sh </dev/null 2>&1
printf %s "$3"
for f in reward.txt reward.json; do
  [[ -f /logs/verifier/$f ]] && printf '\0F%s %s\0' "$f" "$(head -c 4097 "/logs/verifier/$f" | base64)" >&2
done
eval "$5"
printf '\0D\0' >&2
read -r -d '' -t 5      # so that no stream ends before the other one is read
"""


# ---------------------------------------------------------------------------------------------- streams

class Capture:
    """An output, capped while it streams: some bytes of its head, some of its tail, a count of what lay between."""
    KEEP = 8 * max(HEAD, TAIL)                       # bytes; a character has at most 4

    def __init__(self):
        self.head, self.tail, self.dropped = bytearray(), bytearray(), 0

    def add(self, data):
        if len(self.head) < self.KEEP:
            room = self.KEEP - len(self.head)
            self.head += data[:room]
            data = data[room:]
        self.tail += data
        if len(self.tail) > 16 * self.KEEP:
            cut = whole(self.tail, len(self.tail) - self.KEEP)
            self.dropped += characters(self.tail[:cut])
            del self.tail[:cut]

    def text(self):
        cut = whole(self.head, len(self.head)) if self.tail else len(self.head)
        head = self.head[:cut].decode("utf-8", "replace")
        tail = (self.head[cut:] + self.tail).decode("utf-8", "replace")
        total = len(head) + self.dropped + len(tail)
        if total <= HEAD + TAIL:
            return head + tail
        return f"{head[:HEAD]}\n[... {total - HEAD - TAIL} characters elided ...]\n{(head + tail)[-TAIL:]}"


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


class Pipes:
    """The three streams of a local process."""

    def __init__(self, process):
        self.files = process.stdin, process.stdout, process.stderr
        self.stdin, stdout, stderr = (f.fileno() for f in self.files)
        self.streams, self.outbox = {stdout: 1, stderr: 2}, bytearray()
        os.set_blocking(self.stdin, False)           # a shell that does not read must not hang us

    def send(self, data):
        self.outbox += data

    def pump(self, seconds):
        """Sends what waits and returns what has come within `seconds`: [(stream, bytes)], b"" at a stream's end."""
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
            except BlockingIOError:
                pass
            except BrokenPipeError:
                self.outbox.clear()                  # the end of the other two streams tells the rest
        return got

    def close(self):
        for f in self.files:
            with contextlib.suppress(OSError):
                f.close()


class Socket:
    """The same over a Docker attach or exec socket: each piece comes with a header of 8 bytes, stream and length."""

    def __init__(self, raw):
        self.raw, self.socket = raw, getattr(raw, "_sock", raw)
        self.outbox, self.inbox = bytearray(), bytearray()
        self.socket.setblocking(False)

    def send(self, data):
        self.outbox += data

    def pump(self, seconds):
        poll, got = select.poll(), []
        poll.register(self.socket.fileno(), select.POLLIN | (select.POLLOUT if self.outbox else 0))
        for _, event in poll.poll(max(0, math.ceil(seconds * 1000))):
            try:
                if event & select.POLLOUT:
                    del self.outbox[:self.socket.send(self.outbox[:65536])]
                if event & ~select.POLLOUT:
                    data = self.socket.recv(1 << 20)
                    if not data:
                        return [(1, b"")]
                    self.inbox += data
            except BlockingIOError:
                pass
            except OSError:
                return [(1, b"")]
        at = 0
        while len(self.inbox) >= at + 8:
            size = int.from_bytes(self.inbox[at + 4:at + 8], "big")
            if len(self.inbox) < at + 8 + size:
                break
            if size:
                got.append((self.inbox[at], bytes(self.inbox[at + 8:at + 8 + size])))
            at += 8 + size
        del self.inbox[:at]
        return got

    def close(self):
        for s in (self.socket, self.raw, getattr(self.raw, "_response", None)):
            with contextlib.suppress(Exception):
                s.close()


# ---------------------------------------------------------------------------------------------- the sandbox

class Sandbox:
    """One environment. Many may live at once, each used by one thread at a time."""

    def __init__(self, task, backend="auto"):
        self.task, self.backend, self.limits = task, resolve_backend(backend), limits_of(task)
        self.box = self.channel = self.fault = None

    def __enter__(self):
        return self.start()

    def __exit__(self, *_):
        self.close()

    def start(self):
        check_task(self.task)
        self.control, self.spill = b"", b""
        self.status, self.flags, self.snapshot, self.mark = 0, "", b"", b"0:0"
        self.box = (Docker if self.backend == "docker" else Bwrap)(self.task)
        live.add(self.box)
        try:
            try:
                self.channel = self.box.start()
            except OSError as e:                     # bwrap is missing, no descriptors or processes left, ...
                raise InfraError(f"{self.backend}: the sandbox does not start: {e}") from e
            if self._frame(b":", Capture(), time.monotonic() + 60) != "end":
                raise InfraError("the sandbox's shell did not come up within 60 s")
        except BaseException:
            self.close()
            raise
        return self

    def run(self, command, timeout=None):
        """Runs a command in the living shell. What background jobs print in between comes with the next output."""
        self._check()
        deadline = time.monotonic() + (self.limits["command_s"] if timeout is None else timeout)
        command = command.encode("utf-8", "replace").replace(b"\0", b"")      # bash has no NUL
        capture, restarted = Capture(), False
        capture.add(self.spill)
        self.spill = b""
        if self._await(None, capture, 0) == "died":                           # between the commands, e.g. by a job
            restarted = self._restore(capture)
        outcome = self._frame(command, capture, deadline)
        late = outcome == "late"
        if late:
            outcome = self._stop(capture)
        if outcome == "died":
            code = 124 if late else self.status
            restarted = self._restore(capture)
            self.status = code
        text = capture.text()
        if restarted:
            text += ("\n" if text and not text.endswith("\n") else "") + RESTARTED
        return Result(text, self.status, late)

    def grade(self):
        """Runs the task's tests on what the agent has left. VerifierFailed if they give no valid reward although they
        give one on the untouched task; TaskError if not even there."""
        reward, reason, log = self._verify()
        if reason is None:
            return Grade(reward, log)
        fault = once(("untouched", self.backend, content_hash(self.task, "tests", "user", "limits")),
                     functools.partial(untouched_fault, self.task, self.backend))
        if fault:
            raise TaskError(f"task {self.task['id']}: its tests give no valid reward on the untouched task: {fault}")
        raise VerifierFailed(reason, log)

    def close(self):
        """Ends everything in there. Twice is fine."""
        if self.box:
            self.box.close()
            live.discard(self.box)
        if self.channel:
            self.channel.close()
        self.box = self.channel = None

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
        nonce = secrets.token_hex(16).encode()
        trace = b"set -x; " if "x" in self.flags else b""          # switched off meanwhile, so as not to trace us
        self.channel.send(b"run:%03d:%s%s\0%s\0" % (self.status, trace, command, nonce))
        return self._await(nonce, capture, deadline)

    def _stop(self, capture):
        """Past its time: process 1 kills what the command started, and the shell with it."""
        for _ in range(3):
            self.channel.send(b"kill:%s\0" % self.mark)           # process 1 waits a second for it after the signal
            self.box.interrupt()
            if self._await(None, capture, time.monotonic() + 10) == "died":
                return "died"
        self._die(SandboxKilled("its processes could not be stopped (process limit)"))

    def _restore(self, capture):
        """The new shell gets the old one's directory and exports. Its end marker also ends the old one's output."""
        folder, _, exports = self.snapshot.partition(b"\n")
        self.status, self.flags = 0, ""
        if self._frame(b"builtin cd -- %s\n%s" % (folder, exports), capture, time.monotonic() + 20) != "end":
            self._die(SandboxKilled("its shell does not come back (process limit)"))
        return True

    def _await(self, nonce, capture, deadline):
        """Pumps until the frame of this nonce is over ("end"), the shell has died ("died") or time is up ("late").
        The end has to be seen on both streams: only then is the output complete."""
        pending, ended, marked = b"", False, False
        while not (ended and marked):
            left = deadline - time.monotonic()
            got = self.channel.pump(left)
            for stream, data in got:
                if not data:
                    self._die(self.box.post_mortem(self.control))
                elif stream == 2:
                    *messages, self.control = (self.control + data).split(b"\0")
                    self.control = self.control[-(1 << 20):]       # whatever is written there, it stays bounded
                    for message in messages:
                        kind, rest = message[:1], message[1:]
                        if kind == b"E":
                            ended |= self._ended(rest, nonce)
                        elif kind == b"S":
                            self.snapshot = rest
                        elif kind == b"K":
                            self._die(SandboxKilled("the agent ended process 1"))
                        elif kind == b"R" and rest.isdigit():
                            capture.add(pending)
                            self.status = int(rest) % 256
                            return "died"
                elif marked:
                    self.spill += data                             # a background job's, already after the end
                else:
                    pending += data
                    at = pending.find(nonce) if nonce else -1
                    keep = len(nonce) - 1 if nonce else 0          # the marker may arrive byte by byte
                    cut = at if at >= 0 else max(0, len(pending) - keep)
                    capture.add(pending[:cut])
                    pending = pending[cut:]
                    if at >= 0:
                        self.spill, pending, marked = pending[len(nonce):], b"", True
            if left <= 0 and not got:
                capture.add(pending)
                return "late"
        return "end"

    def _ended(self, message, nonce):
        """Takes the end's report in. Anything malformed is the agent's forgery, or another frame's end."""
        first, _, snapshot = message.partition(b"\n")
        fields = first.split()             # status, $-, nonce, two of /proc/uptime, five of /proc/loadavg
        try:
            status, flags, got, uptime, *_, last = fields
            if got != nonce or len(fields) != 10:
                return False
            self.status, self.flags, self.snapshot = int(status) % 256, flags.decode(), snapshot
            self.mark = b"%d:%d" % (round(float(uptime) * 100), int(last))
        except ValueError:
            return False
        return True

    def _verify(self):
        """One run of the tests: (reward, None, log), or (None, why there is no valid reward, log)."""
        self._check()
        nonce, tests = secrets.token_hex(16), make_tar(self.task["tests"])
        capture, idle, control, files, done, window = Capture(), Capture(), b"", {}, False, b""
        deadline = time.monotonic() + self.limits["verifier_s"]
        channel = self.box.grader(nonce, tests)
        try:
            channel.send(tests)
            while not done or nonce.encode() not in window:
                left = deadline - time.monotonic()
                if left <= 0:
                    self.box.stop_grader()
                    return None, f"the verifier ran past its {self.limits['verifier_s']} s", capture.text()
                for stream, data in channel.pump(min(left, .5)):
                    if not data:
                        if self._await(None, idle, 0) == "died":   # raises if the whole sandbox is gone
                            self._restore(idle)
                        said = control.decode("utf-8", "replace").strip()[-300:]
                        return None, f"the verifier was ended before its time {said}".strip(), capture.text()
                    if stream == 1:
                        capture.add(data)
                        window = window[-64:] + data if nonce.encode() not in window else window
                        continue
                    *messages, control = (control + data).split(b"\0")
                    for message in messages:
                        if message[:1] == b"F":
                            name, _, content = message[1:].partition(b" ")
                            files[name] = base64.b64decode(content)
                        done |= message == b"D"
        finally:
            channel.close()
            self.box.end_grader()
        log = capture.text().replace(nonce, "")
        if len(files) != 1:
            return None, "the verifier wrote " + ("both reward.txt and reward.json" if files else "no reward"), log
        try:
            return parse_reward(*files.values()), None, log
        except ValueError as e:
            return None, str(e), log


def untouched_fault(task, backend):
    with Sandbox(task, backend) as sandbox:
        return sandbox._verify()[1]


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
    return value + 0.0


# ---------------------------------------------------------------------------------------------- bubblewrap

def spawn(argv, **more):
    """Starts a process with three pipes. From one long-lived thread: --die-with-parent means the parent *thread*."""
    return spawner.submit(subprocess.Popen, argv, bufsize=0, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE, **more).result()


spawner = ThreadPoolExecutor(1, "sandbox-spawner")
uids = itertools.count(0x70000000)                   # as root, each sandbox gets a host uid that nobody else has
TOP = ["bin", "sbin", "lib", "lib32", "lib64", "libx32"]
ETC = {
    "passwd": "root:x:0:0:root:/root:/bin/bash\nuser:x:1000:1000::/home/user:/bin/bash\n"
              "nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n",
    "group": "root:x:0:\nuser:x:1000:\nnogroup:x:65534:\n",
    "hosts": "127.0.0.1 localhost sandbox\n::1 localhost\n",
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
}
HOST_ETC = ["alternatives", "ld.so.cache", "ssl/certs", "ssl/openssl.cnf", "magic", "mime.types"]   # awk is a link there


def as_nobody(uid):
    """As root: away with root's power over host files, before bwrap even starts."""
    return ["setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups", "--"] if os.geteuid() == 0 else []


class Template(NamedTuple):
    """What a Dockerfile makes of our base image under bubblewrap."""
    tar: bytes                                       # concatenated archives, unpacked over /
    env: dict
    workdir: str
    writable: list                                   # the private folders, each a tmpfs


def system_mounts():
    argv = ["--ro-bind", "/usr", "/usr"]
    for name in TOP:
        if os.path.islink("/" + name):
            argv += ["--symlink", os.readlink("/" + name), "/" + name]
        elif os.path.isdir("/" + name):
            argv += ["--ro-bind", "/" + name, "/" + name]
    return argv


def bwrap_argv(uid, writable, seal=True):
    """The command line up to the program, and the descriptors that it reads /etc from."""
    argv = ["bwrap", "--unshare-all", "--as-pid-1", "--die-with-parent", "--new-session", "--hostname", "sandbox",
            "--uid", str(uid), "--gid", str(uid), *system_mounts(), "--size", "1048576", "--tmpfs", "/etc"]
    fds = []
    for name, text in ETC.items():
        read, write = os.pipe()
        os.write(write, text.encode())
        os.close(write)
        fds.append(read)
        argv += ["--perms", "0644", "--file", str(read), "/etc/" + name]
    argv += ["--perms", "0755", "--dir", "/etc/ssl"]
    for name in HOST_ETC:
        argv += ["--ro-bind-try", "/etc/" + name, "/etc/" + name]
    argv += ["--remount-ro", "/etc", "--proc", "/proc", "--dev", "/dev", "--perms", "0755", "--dir", "/home"]
    argv += ["--perms", "0755", "--dir", "/var", "--symlink", "../tmp", "/var/tmp"] if "/var" not in writable else []
    for path in ["/dev/shm", "/run", *writable]:
        argv += ["--perms", "1777" if path in ("/tmp", "/dev/shm") else "0755",
                 "--size", str(DISK_MB << 20), "--tmpfs", path]
    return argv + ["--remount-ro", "/dev"] + (["--remount-ro", "/"] if seal else []), fds


class Bwrap:
    """bubblewrap's side of a sandbox."""

    def __init__(self, task):
        self.task, self.template = task, prepare(task, "bwrap")
        self.process = self.verifier = self.pidfd = self.cgroup = self.killed = None
        self.uid = next(uids) if os.geteuid() == 0 else os.geteuid()
        self.memory = limits_of(task)["memory_mb"] << 20

    def start(self):
        reap_processes()
        raise_file_limit()
        t, root = self.template, user_of(self.task) == "root"
        env = {"PATH": PATH, "HOME": "/root" if root else "/home/user", "USER": user_of(self.task),
               "SHELL": "/bin/bash", "LANG": "C.UTF-8", "TERM": "dumb", **t.env}
        self.cgroup = make_cgroup(self.memory)
        # kernels from 5.14 on count processes by user namespace, so that this limit is the sandbox's own
        setup = f"ulimit -Su {PROCESSES} -Hu {PROCESSES}; ulimit -Sn 1024; ulimit -c 0"
        if not self.cgroup:                          # a single hog outruns any watchdog
            setup += f"; ulimit -d {self.memory >> 10}"
            watch()
        argv, fds = bwrap_argv(0 if root else 1000, t.writable)
        try:
            fds.append(os.memfd_create("template"))
            with open(fds[-1], "wb", closefd=False) as f:
                f.write(t.tar)
                f.seek(0)
            argv = self.outside() + argv + ["--", *BOOT, run_label(), str(fds[-1]), t.workdir, setup]
            self.process = spawn(argv, env=env, pass_fds=fds)
        finally:
            for fd in fds:
                os.close(fd)
        channel = Pipes(self.process)
        if os.geteuid() == 0:                        # or the agent cannot open /dev/stdout and /dev/stderr
            for fd in (channel.stdin, *channel.streams):
                os.fchown(fd, self.uid, self.uid)
        channel.send(b"%s\0%s\0" % (INIT.encode(), WORKER.encode()))
        return channel

    def outside(self):
        """What runs before bwrap: into the cgroup, while still ourselves."""
        argv = []
        if self.cgroup:
            argv += ["sh", "-c", 'echo $$ >"$0" && exec "$@"', self.cgroup + "/cgroup.procs"]
        return argv + as_nobody(self.uid)

    @property
    def init(self):
        """Process 1's pid out here; a descriptor of it is kept, since numbers are used again."""
        if self.pidfd is None:
            self.pid = only_child(self.process.pid)
            self.pidfd = os.pidfd_open(self.pid)
        return self.pid

    def interrupt(self):
        if self.init:
            signal.pidfd_send_signal(self.pidfd, signal.SIGPWR)

    def post_mortem(self, said):
        """Why the streams ended."""
        self.process.wait()
        if self.killed:
            return SandboxKilled(self.killed)
        if self.cgroup and oom_kills(self.cgroup):
            return SandboxKilled(f"its memory limit of {self.memory >> 20} MB")
        said = said.decode("utf-8", "replace").strip()[-500:]
        return InfraError(f"the sandbox's processes ended from outside (exit code {self.process.returncode}) {said}".strip())

    def grader(self, nonce, tests):
        """New mount and PID namespaces over the same folders, in the same network: services answer, nobody reaches in.
        --mount-proc because bwrap looks itself up in /proc."""
        t = self.template
        with open(f"/proc/{self.init}/ns/net") as net:
            owner = fcntl.ioctl(net.fileno(), 0xB701)                # NS_GET_USERNS: the namespace that owns it all
        argv = self.outside() + [
            "nsenter", "--preserve-credentials", f"--user=/proc/self/fd/{owner}", f"--mount=/proc/{self.init}/ns/mnt",
            f"--net=/proc/{self.init}/ns/net", "--", "unshare", "--mount", "--pid", "--fork", "--kill-child",
            "--mount-proc", "bwrap", "--unshare-pid", "--unshare-ipc", "--as-pid-1", "--die-with-parent",
            "--new-session", "--cap-drop", "ALL", *system_mounts(), "--ro-bind", "/etc", "/etc", "--proc", "/proc",
            "--dev", "/dev", "--perms", "0755", "--dir", "/home"]
        argv += ["--dir", "/var", "--symlink", "../tmp", "/var/tmp"] if "/var" not in t.writable else []
        for path in t.writable:
            argv += ["--bind", path, path]
        for path in ("/tests", "/logs/verifier", "/root", "/run"):
            argv += ["--size", str(DISK_MB << 20), "--tmpfs", path]
        argv += ["--remount-ro", "/", "--", "bash", "--norc", "--noprofile", "-pc", GRADER, run_label(),
                 str(len(tests)), t.workdir, nonce, f"ulimit -u {2 * PROCESSES}", ""]
        env = {"LANG": "C.UTF-8", "TERM": "dumb", **t.env, "PATH": PATH, "USER": "root"}
        try:
            self.verifier = spawn(argv, env=env, pass_fds=(owner,))
        finally:
            os.close(owner)
        return Pipes(self.verifier)

    def stop_grader(self):
        pass

    def end_grader(self):
        end_process(self.verifier)
        self.verifier = None

    def kill(self):
        for process in (self.process, self.verifier):
            if process:
                end_process(process)

    def close(self):
        self.kill()
        if self.pidfd is not None:
            os.close(self.pidfd)
        if self.cgroup:
            remove_cgroup(self.cgroup)


@functools.lru_cache(None)
def raise_file_limit():
    """Each sandbox holds four descriptors; the usual 1,024 are few."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def only_child(pid):
    with open(f"/proc/{pid}/task/{pid}/children") as f:
        return int(f.read().split()[0])


def end_process(process):
    """Kills a bwrap and the process 1 behind it, with which its whole namespace goes."""
    if process.poll() is None:
        with contextlib.suppress(OSError, IndexError):
            os.kill(only_child(process.pid), signal.SIGKILL)
        process.kill()
    process.wait()


def bwrap_template(task):
    """Plays the Dockerfile: FROM our base, COPY, ENV, WORKDIR, RUN."""
    def refuse(what):
        raise TaskError(f"task {task['id']}: its Dockerfile has `{what}`, which bubblewrap cannot do; use Docker for it")

    env, workdir, tar, tree, tops = {}, "/app", b"", {}, {"app", "home/user", "tmp"}
    if user_of(task) not in ("user", "root"):
        refuse(f"user {user_of(task)}")
    if limits_of(task)["network"]:
        refuse("network: true (in its limits)")

    def place(path):
        """An absolute path of the Dockerfile, kept inside what can be private here."""
        path = posixpath.normpath(posixpath.join(workdir, path)).lstrip("/")
        top = path.split("/")[0]
        if top in {"usr", "etc", "proc", "dev", "sys", "run", "tests", "logs", *TOP, ""}:
            refuse(f"a write to /{path}")
        if not path.startswith(("app/", "home/user/", "tmp/")) and path not in tops:
            tops.add("home" if top == "home" else top)
        return path

    for number, line in enumerate(dockerfile_lines(task["dockerfile"])):
        word, _, rest = line.partition(" ")
        word, rest = word.upper(), rest.strip()
        if word in ("ENV", "WORKDIR", "COPY"):
            rest = re.sub(r"\$(\w+)|\$\{(\w+)\}", lambda m: {"PATH": PATH, **env}.get(m[1] or m[2], ""), rest)
        if (number == 0) != (word == "FROM") or "<<" in rest:
            refuse(line)
        elif word == "FROM":
            if rest != "tmax-base:core":
                refuse(line)
        elif word == "WORKDIR":
            workdir = "/" + place(rest)
            tree[workdir[1:]] = None
        elif word == "ENV":
            if "=" in rest.split()[0]:
                env.update(pair.split("=", 1) for pair in shlex.split(rest))
            else:
                name, _, value = rest.partition(" ")
                env[name] = value.strip()
        elif word == "COPY":
            options = {}
            while rest.startswith("--"):
                option, _, rest = rest.partition(" ")
                key, _, options[key] = option.partition("=")
            if set(options) - {"--chown", "--chmod"} or ".dockerignore" in files_of(task):
                refuse(line)
            *sources, target = json.loads(rest) if rest.startswith("[") else rest.split()
            known = {"app", "home/user", "tmp", *(posixpath.dirname(p) for p in tree), *(p for p in tree if tree[p] is None)}
            folder = target.endswith(("/", ".")) or len(sources) > 1 or place(target) in known
            copied = copy_sources(files_of(task), sources)
            if not copied:
                raise TaskError(f"task {task['id']}: its Dockerfile copies `{line}`, which its files do not have")
            for name, (path, from_folder) in copied.items():
                to = place(target + "/" + name if folder or from_folder else target)
                item = files_of(task)[path]
                tree[to] = {**item, "mode": options["--chmod"]} if "--chmod" in options else item
        elif word == "RUN":
            tar += make_tar(tree)
            tree = {}
            writable = writable_folders(tops)
            key = hashlib.sha256(repr((tar, env, workdir, writable, rest)).encode()).hexdigest()
            tar = once(("run", key), functools.partial(bwrap_run, task, line, tar, env, workdir, writable))
            tops |= {name.split("/")[0] for name in tar_tops(tar)} - {"home"}
        else:
            refuse(line)
    tops |= {"root"} if user_of(task) == "root" else set()
    return Template(tar + (make_tar(tree) if tree else b""), env, workdir, writable_folders(tops))


def dockerfile_lines(text):
    """Its instructions, one each, without comments, continued lines joined."""
    text = re.sub(r"(?m)^[ \t]*#.*\n?", "", text)
    return [line.strip() for line in re.sub(r"\\[ \t]*\n", " ", text).split("\n") if line.strip()]


def copy_sources(files, sources):
    """{name below the target: (path in the context, came out of a copied folder)}."""
    found = {}
    for source in sources:
        want = [p for p in posixpath.normpath(source).split("/") if p not in ("", ".")]
        for path in files:
            parts = path.split("/")
            if len(parts) >= len(want) and all(map(fnmatch.fnmatchcase, parts, want)):
                inside = len(parts) > len(want)
                found["/".join(parts[len(want):]) if inside else parts[-1]] = path, inside
    return found


def writable_folders(tops):
    return sorted("/" + top for top in tops)


def tar_tops(tar):
    with tarfile.open(fileobj=io.BytesIO(tar), ignore_zeros=True) as archive:
        return archive.getnames()


def bwrap_run(task, line, tar, env, workdir, writable):
    """One RUN step: what the folders hold afterwards, as a tar. Like the episodes it has no network."""
    argv, fds = bwrap_argv(0, writable, seal=False)
    command = line[3:].strip()
    if command.startswith("["):
        command = shlex.join(json.loads(command))
    command = "chown() { :; }; chgrp() { :; }; " + command          # there is one user: all of it is the agent's
    script = ('mkdir -p /root; head -c "$1" | tar -xiopf - -C / && cd "$2" && sh -c "$3" </dev/null >&2 || exit 1\n'
              'cd /; shopt -s dotglob; for d in *; do [[ " $4 " == *" $d "* ]] || set -- "$@" "$d"; done\n'
              'shift 4; exec tar -cpf - --sort=name home/user "$@"')
    system = ["usr", "etc", "proc", "dev", "run", "sys", *TOP] + [f for f in ("var", "home") if "/" + f not in writable]
    argv = as_nobody(next(uids)) + argv
    argv += ["--", "bash", "-pc", script, run_label(), str(len(tar)), workdir, command, " ".join(system)]
    process = spawn(argv, env={"PATH": PATH, "HOME": "/root", "LANG": "C.UTF-8", **env}, pass_fds=fds)
    for fd in fds:
        os.close(fd)
    try:
        out, said = process.communicate(tar, timeout=600)
    except subprocess.TimeoutExpired:
        out, said = b"", b"it ran past 600 s"
    finally:
        end_process(process)
    if process.returncode:
        raise TaskError(f"task {task['id']}: `{line}` fails under bubblewrap (no network, /usr read-only; Docker has "
                        f"both): {said.decode('utf-8', 'replace')[-1000:]}")
    return out


# ---------------------------------------------------------------------------------------------- Docker

BASE_CAPS = ["CHOWN", "DAC_OVERRIDE", "FOWNER", "KILL", "SETGID", "SETUID"]     # the grader's; a user cannot get at them


def docker_hosts():
    return [h.strip() for h in os.environ.get("DOCKER_HOST", "").split(",") if h.strip()] or ["unix:///var/run/docker.sock"]


def docker_api(host):
    """One client a host, shared by the threads."""
    def connect():
        import docker
        tls = docker.utils.kwargs_from_env().get("tls", False)
        docker.APIClient(host, version="auto", timeout=10, tls=tls).ping()
        api = docker.APIClient(host, version="auto", timeout=600, num_pools=64, tls=tls)
        api.tmax_info = api.info()
        api.tmax_podman = any("podman" in c["Name"].lower() for c in api.version().get("Components") or [])
        reap_containers(api)
        return api
    return once(("api", host), connect)


@contextlib.contextmanager
def docker_errors(what, task_errors=()):
    """Whatever the SDK raises becomes ours to fix, but for messages that are known to be the task's fault."""
    import docker, requests
    try:
        yield
    except (docker.errors.DockerException, requests.exceptions.RequestException, OSError) as e:
        message = str(getattr(e, "explanation", None) or e)
        for pattern, advice in task_errors:
            if re.search(pattern, message):
                raise TaskError(f"{what}: {message}; {advice}") from None
        raise InfraError(f"Docker, {what}: {message}") from e


def docker_image(task, host):
    """The image's name on that host; built from Dockerfile and files once per content hash."""
    tag = "tmax-task:" + content_hash(task)[:24]

    def build():
        import docker
        with docker_errors(f"task {task['id']}, build", [("(?i)parse error|unknown instruction|dockerfile", "mend its Dockerfile")]):
            api = docker_api(host)
            with contextlib.suppress(docker.errors.ImageNotFound):
                return api.inspect_image(tag)
            context = dict(files_of(task))
            ignored = file_bytes(context.get(".dockerignore", {"text": ""})).decode("utf-8", "replace")
            context[".dockerignore"] = {"text": ignored + "\n.tmax.dockerfile\n.dockerignore\n"}
            context[".tmax.dockerfile"] = {"text": task["dockerfile"]}
            log = ""
            for piece in api.build(fileobj=io.BytesIO(make_tar(context)), custom_context=True, tag=tag, rm=True,
                                   forcerm=True, dockerfile=".tmax.dockerfile", decode=True):
                log += piece.get("stream", "")
                if "error" in piece:
                    if re.search(r"tmax-base\b.*(denied|not found|no such|does not exist)|(denied|unable|no such).*tmax-base", piece["error"], re.S | re.I):
                        raise InfraError("the base image is missing: docker build -t tmax-base:core --target core "
                                         f"-f Dockerfile.base . ({piece['error'].strip()})")
                    raise TaskError(f"task {task['id']}: its Dockerfile does not build: {log[-1500:]}{piece['error']}")
            return api.inspect_image(tag)

    config = once(("image", host, tag), build)["Config"]
    return tag, config


class Docker:
    """The Docker API's side of a sandbox; Podman's socket speaks it too."""

    def __init__(self, task):
        self.task, self.limits, self.container, self.killed = task, limits_of(task), None, None
        self.host = None

    def choose_host(self):
        """Of several hosts the one that answers and has the least sandboxes of ours."""
        with place_lock:
            load = collections.Counter(box.host for box in list(live) if isinstance(box, Docker))
            for self.host in sorted(docker_hosts(), key=lambda host: load[host]):
                with contextlib.suppress(InfraError), docker_errors("ping"):
                    return docker_api(self.host).ping()
        raise InfraError(f"Docker: no daemon answers at {', '.join(docker_hosts())}")

    def start(self):
        task, limits = self.task, self.limits
        self.choose_host()
        tag, config = docker_image(task, self.host)
        self.workdir = config.get("WorkingDir") or "/"
        image_env = dict(pair.partition("=")[::2] for pair in config.get("Env") or [])
        self.path = image_env.get("PATH", PATH)
        env = {"TERM": "dumb"} | ({} if {"LANG", "LC_ALL"} & set(image_env) else {"LANG": "C.UTF-8"})
        faults = [(r"executable file not found|no such file", "its image needs bash"),
                  (r"unable to find user|no users? found|no matching entries", "its Dockerfile must make that user")]
        with docker_errors(f"task {task['id']}, start", faults):
            self.api = api = docker_api(self.host)
            cpus = min(limits["cpus"], api.tmax_info.get("NCPU") or limits["cpus"])
            from docker.types import LogConfig, Ulimit
            ulimits = {"nofile": (1024, 4096), "core": (0, 0), "fsize": (DISK_MB << 20, DISK_MB << 20)}
            if api.tmax_podman:                      # its own default is more than some hosts permit
                ulimits["nproc"] = (32768, 32768)
            host_config = api.create_host_config(
                network_mode="bridge" if limits["network"] else "none", ipc_mode="private", cap_drop=["ALL"],
                cap_add=BASE_CAPS, security_opt=["no-new-privileges"], pids_limit=PROCESSES,
                mem_limit=f"{limits['memory_mb']}m", memswap_limit=f"{limits['memory_mb']}m", nano_cpus=int(cpus * 1e9),
                log_config=LogConfig(type="none"),
                ulimits=[Ulimit(name=name, soft=soft, hard=hard) for name, (soft, hard) in ulimits.items()],
                storage_opt={"size": f"{DISK_MB}m"} if disk_quota(api.tmax_info) else None)
            self.container = api.create_container(
                tag, entrypoint=BOOT, command=[run_label(), "", self.workdir, ""], user=user_of(task), stdin_open=True,
                environment=env, working_dir="/", labels={"tmax-run": run_label()}, hostname="sandbox",
                host_config=host_config)["Id"]
            channel = Socket(api.attach_socket(self.container, {"stdin": 1, "stdout": 1, "stderr": 1, "stream": 1}))
            api.start(self.container)
        if not disk_quota(api.tmax_info):
            watch()
        channel.send(b"%s\0%s\0" % (INIT.encode(), WORKER.encode()))
        return channel

    def interrupt(self):
        with contextlib.suppress(InfraError), docker_errors("signal"):       # if it is gone, the streams end
            self.api.kill(self.container, "SIGPWR")

    def post_mortem(self, said):
        """Why the streams ended. The engine may take a moment to notice."""
        if self.killed:
            return SandboxKilled(self.killed)
        said = said.decode("utf-8", "replace").strip()[-500:]
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
        return InfraError(f"the container ended from outside (exit code {state.get('ExitCode')}) {said}".strip())

    def grader(self, nonce, tests):
        """As root, whom the agent's user cannot touch. /logs may be the image's own: made root's, not emptied."""
        begin = ("[[ -d /logs && ! -L /logs ]] || rm -f /logs; rm -rf /tests /logs/verifier; mkdir -p /logs; "
                 "chown 0:0 /logs; chmod 755 /logs; mkdir -m 700 /tests /logs/verifier")
        end = "rm -rf /tests /logs/verifier"
        if user_of(self.task) != "root":             # what an earlier or this verifier left running
            kill = 'for d in /proc/[0-9]*; do [[ -O $d && ${d#/proc/} != $$ ]] && kill -9 "${d#/proc/}"; done 2>/dev/null; '
            begin, end = kill + begin, kill + end
        return self.execute(GRADER, str(len(tests)), self.workdir, nonce, begin, end)

    def execute(self, script, *args):
        with docker_errors("exec"):
            created = self.api.exec_create(
                self.container, ["bash", "--norc", "--noprofile", "-pc", script, "grader", *args], user="0", stdin=True,
                environment={"LANG": "C.UTF-8", "USER": "root"})
            return Socket(self.api.exec_start(created["Id"], socket=True))

    def stop_grader(self):
        """An exec has no kill: root's processes are the grader's, or, where the agent is root, everything goes."""
        mine = "-O $d" if user_of(self.task) != "root" else "1"
        channel = self.execute(f'for i in 1 2 3; do for d in /proc/[0-9]*; do [[ {mine} && ${{d#/proc/}} != $$ ]] && '
                               'kill -9 "${d#/proc/}"; done; done 2>/dev/null; rm -rf /tests /logs/verifier')
        end = time.monotonic() + 10
        while time.monotonic() < end and (1, b"") not in channel.pump(1):
            pass
        channel.close()

    def end_grader(self):
        pass

    def kill(self):
        if self.container:
            with contextlib.suppress(Exception):     # it may be gone already; the next start reaps what is left
                self.api.remove_container(self.container, force=True, v=True)

    def close(self):
        self.kill()


place_lock = threading.Lock()


def disk_quota(info):
    """Whether the engine can limit a container's disk; elsewhere watch() polls it."""
    return info.get("Driver") == "overlay2" and ["Backing Filesystem", "xfs"] in info.get("DriverStatus", [])


# ---------------------------------------------------------------------------------------------- limits

@functools.lru_cache(None)
def cgroup_parent():
    """A folder in which we may make memory cgroups (v1 or v2), nearest to our own, or None."""
    for line in open("/proc/self/cgroup"):
        _, controllers, path = line.strip().split(":", 2)
        if controllers not in ("memory", ""):
            continue
        root = "/sys/fs/cgroup" + ("/memory" if controllers else "")
        while True:
            folder = root + path.rstrip("/")
            try:
                if controllers or "memory" in open(folder + "/cgroup.subtree_control").read().split():
                    probe = f"{folder}/{run_label()}.probe"
                    os.mkdir(probe)
                    usable = os.path.exists(probe + "/" + memory_file(probe))
                    os.rmdir(probe)
                    if usable:
                        for name in os.listdir(folder):              # empty ones that a killed run has left
                            if name.startswith("tmax-") and dead(name):
                                with contextlib.suppress(OSError):
                                    os.rmdir(f"{folder}/{name}")
                        return folder
            except OSError:
                pass
            if path in ("/", ""):
                break
            path = posixpath.dirname(path)
    return None


def memory_file(cgroup):
    return "memory.max" if os.path.exists(cgroup + "/cgroup.controllers") else "memory.limit_in_bytes"


numbers = itertools.count()


def make_cgroup(memory):
    parent = cgroup_parent()
    if not parent:
        return None
    cgroup = f"{parent}/{run_label()}.{next(numbers)}"
    os.mkdir(cgroup)
    name = memory_file(cgroup)
    for file, value in ((name, memory), ("memory.memsw.limit_in_bytes", memory), ("memory.swap.max", 0)):
        if file == name or os.path.exists(f"{cgroup}/{file}"):
            with open(f"{cgroup}/{file}", "w") as f:
                f.write(str(value))
    return cgroup


def oom_kills(cgroup):
    for name in ("memory.events", "memory.oom_control"):
        with contextlib.suppress(OSError):
            for line in open(f"{cgroup}/{name}"):
                if line.startswith("oom_kill "):
                    return int(line.split()[1])
    return 0


def remove_cgroup(cgroup, leaving=set()):
    """Its last processes may be still on their way out: then the next call removes it, or the next run."""
    leaving.add(cgroup)
    for folder in list(leaving):
        try:
            os.rmdir(folder)
        except FileNotFoundError:
            pass
        except OSError:
            continue
        leaving.discard(folder)


def bwrap_usage(box):
    """Bytes of memory: private pages of all processes, and what the tmpfs hold."""
    total, todo, page = 0, [box.init], resource.getpagesize()
    for path in box.template.writable + ["/dev/shm", "/run"]:
        s = os.statvfs(f"/proc/{box.pid}/root{path}")
        total += (s.f_blocks - s.f_bfree) * s.f_frsize
    while todo:
        pid = todo.pop()
        with contextlib.suppress(OSError):
            resident, shared = open(f"/proc/{pid}/statm").read().split()[1:3]
            total += (int(resident) - int(shared)) * page
            for task in os.listdir(f"/proc/{pid}/task"):
                todo += map(int, open(f"/proc/{pid}/task/{task}/children").read().split())
    return total


def watch_forever():
    for tick in itertools.count():
        time.sleep(WATCH_S)
        boxes = list(live)
        for box in boxes:
            with contextlib.suppress(OSError, IndexError, AttributeError):       # just starting or just gone
                if isinstance(box, Bwrap) and not box.cgroup and bwrap_usage(box) > box.memory:
                    box.killed = f"its memory limit of {box.memory >> 20} MB"
                    box.kill()
        if tick % 20 == 0:
            for api in {box.api for box in boxes if isinstance(box, Docker) and box.container}:
                if disk_quota(api.tmax_info):
                    continue
                with contextlib.suppress(Exception):
                    sizes = {c["Id"]: c.get("SizeRw") or 0
                             for c in api.containers(size=True, filters={"label": "tmax-run=" + run_label()})}
                    for box in boxes:
                        if isinstance(box, Docker) and sizes.get(box.container, 0) > DISK_MB << 20:
                            box.killed = f"its disk limit of {DISK_MB} MB"
                            api.kill(box.container)


WATCH_S = .25


@functools.lru_cache(None)
def watch():
    """One thread for all sandboxes, where the kernel or the engine does not hold the limit itself."""
    threading.Thread(target=watch_forever, daemon=True, name="sandbox-watch").start()


# ---------------------------------------------------------------------------------------------- clean-up

live = set()                                         # the started boxes


@functools.lru_cache(None)
def label_of(pid):
    with open("/proc/sys/kernel/random/boot_id") as f:
        boot = f.read()[:8]
    return f"tmax-{boot}.{os.stat('/proc/self/ns/pid').st_ino}.{pid}.{start_time(pid)}"


def run_label():
    """Names this run: boot, PID namespace, pid, start time. On every process and container of ours."""
    return label_of(os.getpid())


def start_time(pid):
    try:
        with open(f"/proc/{pid}/stat", "rb") as f:
            return int(f.read().rpartition(b")")[2].split()[19])
    except OSError:
        return None


def dead(label):
    """Whether the run of this label is over. One of another machine or PID namespace we cannot judge."""
    try:
        boot, space, pid, start = label.split(".")[:4]
        mine = run_label().split(".")
        return [boot, space] == mine[:2] and start_time(int(pid)) != int(start)
    except ValueError:
        return False


@functools.lru_cache(None)
def reap_processes():
    """Once a run: kills what SIGKILLed runs have left. Never a living run's."""
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            with open(f"/proc/{pid}/cmdline") as f:
                label = re.search(r"(?:^|\0)(tmax-[0-9a-f]{8}\.[\d.]+)\0", f.read())
            if label and dead(label[1]):
                os.kill(int(pid), signal.SIGKILL)


def reap_containers(api):
    for container in api.containers(all=True, filters={"label": "tmax-run"}):
        if dead(container["Labels"]["tmax-run"]):
            with contextlib.suppress(Exception):     # another start may be reaping too
                api.remove_container(container["Id"], force=True, v=True)


@atexit.register
def kill_all():
    for box in list(live):
        box.kill()


def on_signal(number, frame):
    kill_all()
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


if threading.current_thread() is threading.main_thread():
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) == signal.SIG_DFL:
            signal.signal(number, on_signal)
os.register_at_fork(after_in_child=live.clear)       # a forked child's exit must not end its parent's sandboxes


# ---------------------------------------------------------------------------------------------- tasks

def user_of(task):
    return task.get("user") or "user"


def files_of(task):
    return task.get("files") or {}


def limits_of(task):
    return {**LIMITS, **(task.get("limits") or {})}


def content_hash(task, *more):
    return hashlib.sha256(json.dumps([task.get(k) for k in ("dockerfile", "files", *more)], sort_keys=True).encode()).hexdigest()


made, making, making_lock = {}, {}, threading.Lock()


def once(key, make):
    """make() once a key; others wait for it. A failure is not remembered."""
    with making_lock:
        lock = making.setdefault(key, threading.Lock())
    with lock:
        if key not in made:
            made[key] = make()
        return made[key]


def prepare(task, backend):
    """Builds what every episode of the task shares. start() does it by itself."""
    if backend == "bwrap":
        return bwrap_template(task)
    return [docker_image(task, host) for host in docker_hosts()]


def bwrap_works():
    """Starts an empty sandbox; InfraError says why not."""
    try:
        argv, fds = bwrap_argv(1000, ["/app", "/home/user", "/tmp"])
        try:
            process = spawn(as_nobody(next(uids)) + argv + ["--", "true"], env={"PATH": PATH}, pass_fds=fds)
        finally:
            for fd in fds:
                os.close(fd)
        said = process.communicate(timeout=20)[1].decode("utf-8", "replace").strip()
    except (OSError, subprocess.SubprocessError) as e:
        raise InfraError(str(e)) from None
    if process.returncode:
        raise InfraError(said or f"exit code {process.returncode}")
    return True


def docker_works():
    try:
        import docker                                # noqa: F401
    except ImportError:
        raise InfraError("the Python package docker is not installed") from None
    reasons = []
    for host in docker_hosts():
        try:
            with docker_errors(f"no daemon at {host}"):
                return docker_api(host)
        except InfraError as e:
            reasons.append(str(e))
    raise InfraError("; ".join(reasons))


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
    raise InfraError(" ".join(["No sandbox works here.", *reasons, "Start Docker or Podman (macOS, Windows: Docker Desktop),",
                               "and set DOCKER_HOST if its socket is elsewhere; or install bubblewrap (Debian: apt-get",
                               "install bubblewrap) and, where the system blocks user namespaces, allow them: sysctl -w",
                               "kernel.apparmor_restrict_unprivileged_userns=0 (Ubuntu) or",
                               "kernel.unprivileged_userns_clone=1 (older Debian)."]))


def file_bytes(item):
    return item["text"].encode("utf-8", "surrogatepass") if "text" in item else base64.b64decode(item["b64"], validate=True)


def file_mode(path, mode):
    if mode is None:
        return 0o755 if path.endswith(".sh") else 0o644
    return int(mode, 8) if isinstance(mode, str) else mode


def make_tar(tree):
    """{path: a record's file, or None for a folder} as a tar; equal trees give equal bytes."""
    buffer, folders = io.BytesIO(), set()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.GNU_FORMAT) as tar:
        for path in sorted(tree):
            parts = path.split("/")
            for i in range(1, len(parts) + (tree[path] is None)):
                folder = "/".join(parts[:i])
                if folder not in folders:
                    folders.add(folder)
                    info = tarfile.TarInfo(folder)
                    info.type, info.mode, info.mtime = tarfile.DIRTYPE, 0o1777 if folder == "tmp" else 0o755, EPOCH
                    tar.addfile(info)
            if tree[path] is not None:
                data, info = file_bytes(tree[path]), tarfile.TarInfo(path)
                info.size, info.mode, info.mtime = len(data), file_mode(path, tree[path].get("mode")), EPOCH
                tar.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


EPOCH = 1_700_000_000


def check_task(task):
    """What can be seen without running anything; TaskError names the task and what to change."""
    def require(condition, what):
        if not condition:
            raise TaskError(f"task {task.get('id', '(without id)')}: {what}")

    require(isinstance(task.get("id"), str) and task["id"], "id must be a non-empty string")
    require(isinstance(task.get("dockerfile"), str) and dockerfile_lines(task["dockerfile"]), "its dockerfile is missing")
    for part in ("files", "tests", "solution"):
        tree = task.get(part) or {}
        require(isinstance(tree, dict), f"{part} must be an object: path -> file")
        folders = {path[:slash.start()] for path in tree for slash in re.finditer("/", path)}
        for path, item in tree.items():
            require(path and posixpath.normpath(path) == path and not path.startswith(("/", "..")),
                    f"{part}: the path {path!r} does not stay inside")
            require(path not in folders, f"{part}: {path} is a file and a folder of other files")
            require(isinstance(item, dict) and ("text" in item) != ("b64" in item), f"{part}/{path} needs text or b64")
            try:
                file_bytes(item), file_mode(path, item.get("mode"))
            except (ValueError, TypeError, AttributeError) as e:
                require(False, f"{part}/{path}: {e}")
    require("test.sh" in (task.get("tests") or {}), "tests/test.sh is missing; without it nothing can be graded")
    require(re.fullmatch(r"[\w.-]+", user_of(task)), f"user {user_of(task)!r} is not a user name")
    limits = task.get("limits") or {}
    require(isinstance(limits, dict) and set(limits) <= set(LIMITS), f"limits: only {', '.join(LIMITS)} are known")
    for key, value in limits.items():
        require(isinstance(value, bool) if key == "network" else type(value) in (int, float) and value > 0,
                f"limits: {key} = {value!r} makes no sense")
    require(limits_of(task)["memory_mb"] >= 16, "limits: memory_mb below 16 cannot hold a shell")


# ---------------------------------------------------------------------------------------------- records
def numbered_records(path):
    """(line number, record) of each line. Split on b"\\n" only: U+2028 and the like stay inside a record."""
    with open(path, "rb") as f:
        for number, line in enumerate(f, 1):         # a binary file's lines end at b"\\n" alone
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
    """The records of a file. A torn last line is dropped with a warning; a broken one elsewhere is a ValueError."""
    return [record for _, record in numbered_records(path)]


class JsonlWriter:
    """Appends whole lines, from many threads. What a killed writer left of its last line is repaired first."""

    def __init__(self, path):
        self.path, self.lock = str(path), threading.Lock()
        self.file = open(path, "a+b", buffering=0)
        end, tail = self.file.seek(0, os.SEEK_END), b""
        while len(tail) < end and b"\n" not in tail:                # backwards to the start of the last line
            at = max(0, end - len(tail) - (1 << 20))
            self.file.seek(at)
            tail = self.file.read(end - len(tail) - at) + tail
        torn = tail[tail.rfind(b"\n") + 1:]
        if torn:
            try:
                json.loads(torn)
                self.file.write(b"\n")                              # a whole record, only its newline was missing
            except ValueError:
                warnings.warn(f"{path}: cut off a torn last line of {len(torn)} bytes")
                self.file.truncate(end - len(torn))

    def write(self, record):
        line = json.dumps(record).encode() + b"\n"                  # ASCII: lone surrogates survive too
        with self.lock:
            start, rest = self.file.seek(0, os.SEEK_END), line
            try:
                while rest:
                    rest = rest[self.file.write(rest):]
            except OSError as e:
                self.file.truncate(start)
                raise OSError(e.errno, f"{self.path}: a record was not written, all earlier ones are whole: {e.strerror}") from e

    def close(self):
        self.file.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


def load_tasks(path):
    """The tasks of a file. ValueError names the file, the line and the id of the first one that cannot be used."""
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
