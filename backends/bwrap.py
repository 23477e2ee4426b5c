"""bubblewrap's side of a sandbox: no daemon, no image; the host's /usr read-only, and private folders.

For tasks on our base image. Neither kernel nor bubblewrap holds a sandbox's memory to a limit, so a thread
does. Left out: the network, CPU limits, and any uid but the agent's.
"""
import atexit, collections, contextlib, ctypes, fcntl, functools, glob, hashlib, io, itertools, json, math, os
import platform, posixpath, re, resource, select, shlex, shutil, signal, struct, subprocess, sys, tarfile
import tempfile, threading, time
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from backends.common import (BASH, BUILD_S, DISK_MB, ENDED_BY_AGENT, KILLED, PATH, PROCESSES, InfraError,
                             SandboxKilled, TaskError, dead, live, once, run_label, said)
from records import (copy_sources, dockerfile_lines, file_bytes, file_mode, files_of, limits_of, make_tar,
                     user_of)

# How process 1 gets its script, which must not be seen in `ps`: from a file on descriptor $4.
BOOT_FILE = BASH + ['. "/dev/fd/$4"; exit']
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

    def start(self, script):
        self.template = t = bwrap_template(self.task)
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
        with (file_of(script) as script, file_of(t.tar) as tar, file_of(no_namespaces()) as rules,
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

    def grader(self, script, nonce, tests):
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
                argv += [*options, "--remount-ro", "/", "--", *BASH, script, run_label(), unpack, t.workdir,
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


# ---------------------------------------------------------------------------------------------------- streams

class Pipes:
    """A sandbox's three streams: those of a local process."""

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


def available():
    """Bytes of memory that the machine has left."""
    with open("/proc/meminfo") as f:
        return int(re.search(r"MemAvailable:\s+(\d+)", f.read())[1]) << 10


def watch_forever():
    before = 0
    for tick in itertools.count():
        time.sleep(.1)
        # Looking into every sandbox costs more than one look at the machine: if it has lost no memory to
        # speak of, then no sandbox has taken any.
        boxes, now = [box for box in list(live) if isinstance(box, Bwrap)], available()
        look = now < before - (64 << 20) or tick % 20 == 0
        before = now if look else max(now, before)
        for box in boxes if look else ():
            with contextlib.suppress(OSError, AttributeError):     # only just starting, or gone
                if memory_of(box) > box.memory:
                    box.killed = f"its memory limit of {box.memory >> 20} MB"
                    box.kill()


@functools.lru_cache(None)
def watch():
    """One thread for all sandboxes, as the kernel does not hold their limit."""
    threading.Thread(target=watch_forever, daemon=True, name="bwrap-watch").start()


# --------------------------------------------------------------------------------------------------- clean-up

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


def forked():
    """In a forked child, which has none of its parent's threads."""
    global spawner
    spawner = new_spawner()
    watch.cache_clear()


os.register_at_fork(after_in_child=forked)
