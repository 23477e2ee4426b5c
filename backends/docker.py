"""The Docker API's side of a sandbox: Docker Engine, and Podman, whose socket speaks it too.

DOCKER_HOST may name several sockets, separated by commas: the one with the fewest sandboxes is taken. Each
sandbox is a container of its task's image, which is built once per content of Dockerfile and files.
"""
import collections, contextlib, errno, functools, io, json, math, os, re, select, socket, threading, time

from backends.common import (BASH, BUILD_S, DISK_MB, ENDED_BY_AGENT, KILLED, PROCESSES, InfraError,
                             SandboxKilled, TaskError, dead, live, once, run_label, socket_options)
from records import content_hash, file_bytes, files_of, limits_of, make_tar, user_of

HOST_WAIT_S = 180                       # how long a sandbox waits for a Docker host that answers
# How process 1 gets its script, which must not be seen in `ps`: from standard input.
BOOT = BASH + ['read -r -d ""; eval "$REPLY"']
# The container is root's, as only then its grader has root's powers; the agent's shell gives them up first.
BECOME = BASH + ['id "$0" >/dev/null || exit 67; type -P setpriv >/dev/null || exit 68; '
                 'eval "export HOME=~$0"; chown "$0" /proc/self/fd/{0,1,2}; '
                 'exec setpriv --reuid="$0" --regid="$(id -g "$0")" --init-groups -- "$@"']
BECOME_FAILED = {67: "its Dockerfile must make the user", 68: "its image needs setpriv (util-linux)"}
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
        """Of several hosts the one that has the fewest sandboxes of ours. One that does not answer is asked
        last for a minute; where none does, we wait: an episode costs more than that."""
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

    def start(self, script):
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
        self.channel.outbox += script + b"\0"
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

    def grader(self, script, nonce, tests):
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
        channel = self.execute(script, "grader", unpack, self.workdir, nonce, sweep + begin, self.tidy)
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


# ---------------------------------------------------------------------------------------------------- streams

UNREACHABLE = errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH


class Socket:
    """A sandbox's three streams over an attach or exec socket, each piece after its stream and length."""

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


# ----------------------------------------------------------------------------------------------------- limits

def watch_forever():
    while True:
        time.sleep(5)
        boxes = {box.container: box for box in list(live) if isinstance(box, Docker) and box.container}
        for api in {box.api for box in boxes.values() if not box.api.has_quota}:
            with contextlib.suppress(Exception):                   # the next round asks again
                for found in api.containers(size=True, filters={"label": "tmax-run=" + run_label()}):
                    box = boxes.get(found["Id"])
                    if box and (found.get("SizeRw") or 0) > DISK_MB << 20:
                        box.killed = f"its disk limit of {DISK_MB} MB"
                        box.kill()


@functools.lru_cache(None)
def watch():
    """One thread for all containers, where their engine does not hold their disk to a limit."""
    threading.Thread(target=watch_forever, daemon=True, name="docker-watch").start()


os.register_at_fork(after_in_child=watch.cache_clear)
