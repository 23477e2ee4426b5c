"""Tasks and the other records that the scripts hand on: one JSON object a line."""
import base64, fnmatch, hashlib, io, json, os, posixpath, re, tarfile, threading, warnings

from backends.common import TaskError

LIMITS = dict(agent_s=3600, verifier_s=600, command_s=120, cpus=1, memory_mb=2048, network=False)
EPOCH = 1_700_000_000                   # every file's time, so that equal tasks give equal archives


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
