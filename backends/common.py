"""What both backends share with sandbox.py: limits, errors, and the clean-up of whatever a run leaves."""
import atexit, functools, hashlib, os, platform, signal, socket, sys, threading

PROCESSES, DISK_MB = 512, 1024          # the limits that no task sets; under bubblewrap each folder's
BUILD_S = 600                           # of an image's build; of a RUN step under bubblewrap
SILENT_S = 15                           # a Docker or vLLM host is lost then: before its shells are blamed
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
BASH = ["bash", "--norc", "--noprofile", "-pc"]                   # -p: BASH_ENV is not read either
# How a sandbox that was up has ended: nothing inside can send process 1 a SIGKILL, but the agent's user may
# debug it, or leave it no process to fork. (A debugger can also make it look killed: that one we do not see.)
KILLED, ENDED_BY_AGENT = 137, "the agent ended process 1, or left it no process (exit code {})"


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


def said(control):
    """What stands in a control stream besides messages: the last words of bwrap, runc or bash."""
    return control.decode("utf-8", "replace").strip()[-500:]


made, making, making_lock = {}, {}, threading.Lock()


def once(key, make):
    """make() once a key; other threads wait for it. A failure is not remembered."""
    with making_lock:
        lock = making.setdefault(key, threading.Lock())
    with lock:
        if key not in made:
            made[key] = make()
        return made[key]


def socket_options():
    """A host that is cut off says no goodbye: the kernel asks whether it is there, or we wait for ever."""
    ask_s = max(1, SILENT_S // 3)
    options = dict(TCP_NODELAY=1, TCP_KEEPIDLE=ask_s, TCP_KEEPINTVL=ask_s, TCP_KEEPCNT=3,
                   TCP_USER_TIMEOUT=SILENT_S * 1000)
    return [(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
            *((socket.IPPROTO_TCP, getattr(socket, k), v) for k, v in options.items() if hasattr(socket, k))]


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


os.register_at_fork(after_in_child=live.clear)       # a child's exit must not end its parent's sandboxes
if threading.current_thread() is threading.main_thread():
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) == signal.SIG_DFL:
            signal.signal(number, on_signal)
