"""A running environment of a task: build, start, a persistent shell, grading, clean-up.

    task = load_tasks("tasks.jsonl")[0]
    with Sandbox(task) as sandbox:              # backend="auto": Docker if a daemon answers, else bubblewrap
        result = sandbox.run("ls -l")           # Result(output, exit_code, timed_out)
        grade = sandbox.grade()                 # Grade(reward, log)

Two backends, one shell. `docker` (backends/docker.py) speaks to any Docker-compatible socket: Docker Engine,
Podman. `bwrap` (backends/bwrap.py) needs neither daemon nor image, for tasks on our base image. In both,
process 1 is a small bash (INIT), its child is the agent's bash (WORKER), and a backend only has to start the
two scripts below, INIT and GRADER, and give us three byte streams of each: stdin carries the commands in,
stdout their output, stderr our control messages (end, exit code, directory, exports). Who is at fault decides
what is raised: InfraError is ours (never scored), TaskError the task's, AgentFault the agent's (reward 0,
trained on).

Left out: a terminal (PTY); under bubblewrap also the network, CPU limits, and any uid but the agent's.
"""
import json, re, secrets, shlex, time
from typing import NamedTuple

from backends.bwrap import Bwrap, bwrap_template, bwrap_works
from backends.common import AgentFault, InfraError, SandboxKilled, TaskError, VerifierFailed, live, once, said
from backends.docker import Docker, docker_hosts, docker_image, docker_works
from records import check_task, content_hash, limits_of, load_tasks

__all__ = ["Sandbox", "Result", "Grade", "load_tasks", "parse_reward", "prepare", "resolve_backend",
           "InfraError", "TaskError", "AgentFault", "SandboxKilled", "VerifierFailed"]

STOP_S, RESTORE_S = 10, 20              # for a shell to be stopped (three tries), and to come back
HEAD = TAIL = 5000                      # characters kept of an output's two ends
RESTARTED = "[shell restarted: directory and exported variables are kept, the rest is lost]"


class Result(NamedTuple):
    output: str
    exit_code: int
    timed_out: bool


class Grade(NamedTuple):
    reward: float
    log: str


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
SCRIPT = f"worker={shlex.quote(WORKER)}\n{INIT}".encode()

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


# ------------------------------------------------------------------------------------------------ the sandbox

class Sandbox:
    """One environment. Many may live at once, each used by one thread at a time."""

    def __init__(self, task, backend="auto"):
        self.task, self.backend, self.limits = task, resolve_backend(backend), limits_of(task)
        self.box = self.channel = self.fault = None

    def start(self):
        check_task(self.task)
        self.box = (Docker if self.backend == "docker" else Bwrap)(self.task)
        live.add(self.box)
        try:
            self._open()
        except OSError as e:                         # bwrap is missing, no descriptors or processes left, ...
            self.close()
            raise InfraError(f"{self.backend}: the sandbox does not start: {e}") from e
        except BaseException:
            self.close()
            raise
        return self

    def _open(self):
        """Starts process 1 in the box, and waits for its first shell."""
        self.control, self.spill = b"", Capture()
        self.status, self.flags, self.snapshot, self.mark = 0, "", b"", b"0:0"
        self.channel = self.box.start(SCRIPT)
        if self._new_shell(b":", Capture(), 60) != "end":
            raise InfraError("the sandbox's shell did not come up within 60 s")
        self.box.up = True

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
            channel = box.grader(GRADER, nonce, self.task["tests"])
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
