"""Harbor, the harness that Terminal-Bench 2 runs on: its task folders both ways, our harness as an agent of
it, its format of trajectories; and the published TMax-15K.

    python gen.py export-harbor tasks.jsonl DIR              # one folder a task: DIR/ID
    python gen.py import-harbor DIR --out tasks.jsonl        # one task folder, or a folder of them
    python gen.py import-tmax rows.jsonl task-data.tar.gz --out tasks.jsonl
    python eval.py export-atif rollouts.jsonl DIR            # trajectories in Harbor's format
    PYTHONPATH=. harbor run -p DIR -a extras.harbor:HarborAgent -m MODEL -e docker --ak engine=chat:URL

A Task record and a Harbor folder say the same, file by file:

    instruction.md          instruction
    task.toml               user, limits (time, cpus, memory, network)
    environment/Dockerfile  dockerfile          environment/*   files
    tests/*                 tests               solution/*      solution

What only a record says (axes, command_s, ...) goes as JSON into [metadata.tmax] at the end of task.toml. What
only a task.toml says (author, difficulty, build time, ...) is kept as the record's field `harbor`. So a task
that is exported and imported again equals what it was, and a folder that is imported and exported again has
the same files, byte for byte. Demonstrations are never exported: they would show others the way.

What a task.toml says about the environment and a record has no field for becomes part of the files concerned:
[verifier.env] and [solution.env] as exports at the top of test.sh and solve.sh, [environment.env] and workdir
as ENV and WORKDIR at the end of the Dockerfile. Where there is a docker_image, the record's Dockerfile starts
from that, as Harbor too prefers it to environment/Dockerfile, which then stays among the files.

Left out, and named with the reason while the other folders are imported: several containers, several steps,
Windows, a verifier in a container of its own, GPUs, MCP servers, allow-lists, secrets of the host. Also left
out: what lies in a folder beside the files above (README.md and the like).
"""

import asyncio
import base64
import contextlib
import functools
import json
import math
import os
import posixpath
import re
import secrets
import shlex
import shutil
import stat
import tarfile
import threading
import tomllib
import zlib
from pathlib import Path

import rollout
import sandbox
from backends.common import InfraError, SandboxKilled, once
from backends.docker import docker_api, docker_errors, docker_hosts
from records import (LIMITS, JsonlWriter, check_task, dockerfile_lines, file_bytes, file_mode, limits_of,
                     numbered_records, user_of)

# ------------------------------------------------------------------------------------------------------------
# 1. A folder, as {path below it: (bytes, mode)}, and its Task record
# ------------------------------------------------------------------------------------------------------------

TREES = {"files": "environment/", "tests": "tests/", "solution": "solution/"}
SCRIPTS = [("tests", "test.sh", "verifier"), ("solution", "solve.sh", "solution")]  # and whose env they see
VERSIONS = ("1.0", "1.1", "1.2", "1.3", "1.4")
RECORD = "\n[metadata.tmax]\nrecord = "  # begins the end of task.toml that says what only the record says
# Added to .dockerignore, so that `COPY . /app/` takes no Dockerfile along: it is not among a record's files.
IGNORED = "\n# not the task's:\nDockerfile\n.dockerignore\n"
# Leading lines that mark a benchmark's files against training on them; Harbor shows them to no agent either.
CANARY = re.compile(r"(?:[ \t]*(?:<!--.*canary.*-->|#.*canary.*)[ \t]*\n)+(?:[ \t]*\n)*", re.IGNORECASE)


def unpack(id: str, folder: dict, image_user) -> dict:
    """The Task record of a Harbor folder {path: (bytes, mode)}; ValueError or TaskError says why not.

    image_user: function(image name) -> the user that the image runs as, "" for root.
    """
    toml = text_of(folder, "task.toml")
    config = parse_toml(toml)
    instruction = text_of(folder, "instruction.md")
    if "environment/docker-compose.yaml" in folder:
        raise ValueError("environment/docker-compose.yaml: a sandbox is one container")
    if "trajectory.json" in folder:
        raise ValueError("trajectory.json: an episode starts without a history")
    said = said_by_record(config)
    head, found, _ = toml.rpartition(RECORD)
    toml = head if found else toml
    environment = table(config, "environment")

    task = {"id": id, "instruction": instruction, "dockerfile": "", "files": {}, "tests": {}, "solution": {}}
    for part, prefix in TREES.items():
        for path in sorted(path for path in folder if path.startswith(prefix)):
            name = path.removeprefix(prefix)
            task[part][name] = as_written(name, *folder[path], (said.get(part) or {}).get(name))
    if image := environment.get("docker_image"):
        upload = ["COPY . ./"] if task["files"] and "Dockerfile" not in task["files"] else []
        lines = [f"FROM {image}", *environment_lines(config), *upload]
        task["dockerfile"] = "".join(f"{line}\n" for line in lines)
    elif task["files"].pop("Dockerfile", None):
        task["dockerfile"] = text_of(folder, "environment/Dockerfile") + environment_block(config)
    else:
        raise ValueError("it has neither environment/Dockerfile nor a docker_image")
    if not task["solution"]:
        del task["solution"]
    base, user, entrypoint = final_stage(task["dockerfile"])
    user = table(config, "agent").get("user", user)
    user = str(image_user(base) if user is None else user).split(":")[0]
    task |= {"user": "root" if user in ("", "0") else user, "limits": limits_from(config)}

    if toml == own_toml(task):
        ignore = task["files"].get(".dockerignore", {})
        if ignore.get("text") == IGNORED:
            del task["files"][".dockerignore"]
        elif "text" in ignore:
            ignore["text"] = ignore["text"].removesuffix(IGNORED)
    else:
        if entrypoint:
            raise ValueError("environment/Dockerfile: a sandbox does not run the image's ENTRYPOINT")
        task["harbor"] = {"toml": toml}
        if canary := CANARY.match(instruction):
            task["harbor"]["canary"] = canary[0]
            task["instruction"] = instruction[canary.end():]
        for part, name, section in SCRIPTS:
            if script := task.get(part, {}).get(name):
                lines = script_lines(script.get("text"), f"{part}/{name}", table(config, section, "env"))
                first = script["text"].find("\n") + 1 if script["text"].startswith("#!") else 0
                script["text"] = script["text"][:first] + lines + script["text"][first:]

    # What the record said in other words comes back in those words, where they still mean the same.
    kept = {key: value for key, value in task.items() if key not in said.get("absent", [])}
    kept |= {key: said[key] for key in ("user", "limits") if key in said}
    if settings(kept) == settings(task):
        task = kept
    for key, value in said.items():
        if key not in ("absent", "user", "limits") and not task.get(key):
            task[key] = value
    check_task(task)
    return task


def pack(task: dict) -> dict:
    """The Harbor folder {path: (bytes, mode)} of a Task record; ValueError names the task and what to do."""
    try:
        check_task(task)
        folder = pack_plainly(task)
        plain = unpack(task["id"], folder, lambda image: user_of(task))
        if settings(plain) != settings(task):
            raise ValueError("its user or limits are not those of the task.toml that it was imported with; "
                             "change them there (the field `harbor`), or take that field out")
        said = {"absent": absent} if (absent := [key for key in plain if key not in task]) else {}
        for key in differing(task, plain):
            said[key] = task[key]
            if key in TREES and task[key]:
                said[key] = {path: {k: True if k == "b64" else v for k, v in item.items() if k != "text"}
                             for path, item in task[key].items() if plain[key].get(path) != item}
        if said:
            record = json.dumps(said, sort_keys=True).replace("'", "\\u0027").replace("\x7f", "\\u007f")
            folder["task.toml"] = folder["task.toml"][0] + f"{RECORD}'{record}'\n".encode(), 0o644
        again = unpack(task["id"], folder, lambda image: user_of(task))
        if lost := differing(task, again):
            raise ValueError(f"a Harbor folder cannot say its {', '.join(lost)}")
    except InfraError as e:  # check_task's; it names the task
        raise ValueError(str(e)) from None
    except ValueError as e:
        raise ValueError(f"task {task['id']}: {e}") from None
    return folder


def pack_plainly(task: dict) -> dict:
    """The folder without [metadata.tmax]."""
    harbor = task.get("harbor") or {}
    toml = harbor["toml"] if harbor else own_toml(task)
    config = parse_toml(toml)
    trees = {part: dict(task.get(part) or {}) for part in TREES}
    files = trees["files"]
    for part, name, section in SCRIPTS if harbor else ():
        if text := trees[part].get(name, {}).get("text"):
            lines = script_lines(text, f"{part}/{name}", table(config, section, "env"))
            trees[part][name] = trees[part][name] | {"text": text.replace(lines, "", 1)}
    if not table(config, "environment").get("docker_image"):
        if "Dockerfile" in files:
            raise ValueError("its files hold a Dockerfile, where Harbor wants the one that makes the image")
        files["Dockerfile"] = {"text": task["dockerfile"].removesuffix(environment_block(config))}
        if not harbor:
            ignore = files.get(".dockerignore", {"text": ""})
            files[".dockerignore"] = ignore | {"text": ignore.get("text", "") + IGNORED}
    instruction = harbor.get("canary", "") + task["instruction"]
    folder = {"task.toml": (toml.encode(), 0o644), "instruction.md": (instruction.encode(), 0o644)}
    for part, prefix in TREES.items():
        for path, item in trees[part].items():
            folder[prefix + path] = file_bytes(item), file_mode(path, item)
    return folder


def differing(task: dict, other: dict) -> list[str]:
    """The fields of a task, but for demos, that another one does not have like this."""
    return [key for key in task if key != "demos" and (key not in other or other[key] != task[key])]


def canonical(path: str, data: bytes, mode: int) -> dict:
    """A record's file: text where it is UTF-8, a mode only where it is not what the name implies."""
    try:
        item = {"text": data.decode()}
    except UnicodeDecodeError:
        item = {"b64": base64.b64encode(data).decode()}
    mode = 0o755 if mode & 0o100 else 0o644  # the executable bit is the file's, the others are the umask's
    return item if mode == file_mode(path, item) else item | {"mode": f"{mode:04o}"}


def as_written(path: str, data: bytes, mode: int, form: dict | None) -> dict:
    """The file in the form that the record had it in, where that says the same; else the canonical one."""
    if form is not None:
        with contextlib.suppress(ValueError):  # the file is no text any more
            content = {"b64": base64.b64encode(data).decode()}
            if "b64" not in form:
                content = {"text": data.decode("utf-8", "surrogatepass")}
            if file_mode(path, form) == mode & 0o7777:
                return form | content
    return canonical(path, data, mode)


def text_of(folder: dict, path: str) -> str:
    if path not in folder:
        raise ValueError(f"it has no {path}")
    try:
        return folder[path][0].decode()
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not UTF-8") from None


def settings(task: dict) -> list:
    """What task.toml has fields for: user, seconds of agent and verifier, cpus, memory_mb, network."""
    limits = limits_of(task)
    numbers = [float(limits[key]) for key in ("agent_s", "verifier_s", "cpus")]
    return [user_of(task), *numbers, int(limits["memory_mb"]), limits["network"]]


def own_toml(task: dict) -> str:
    """The task.toml of a record. The verifier is root, as in our sandboxes, whatever the image's USER."""
    user, agent_s, verifier_s, cpus, memory_mb, network = settings(task)
    return (f'schema_version = "1.4"\n\n[agent]\ntimeout_sec = {agent_s}\nuser = "{user}"\n\n'
            f'[verifier]\ntimeout_sec = {verifier_s}\nuser = "root"\n\n'
            f"[environment]\ncpus = {int(cpus) if cpus.is_integer() else cpus}\nmemory_mb = {memory_mb}\n"
            f'network_mode = "{"public" if network else "no-network"}"\n')


# ------------------------------------------------------------------------------------------------------------
# task.toml, and what of it goes into other files
# ------------------------------------------------------------------------------------------------------------


def parse_toml(text: str) -> dict:
    """task.toml; ValueError for what no sandbox of ours can be."""
    try:
        config = tomllib.loads(text)
    except tomllib.TOMLDecodeError as e:
        raise ValueError(f"task.toml: {e}") from None
    version = str(config.get("schema_version", config.get("version", VERSIONS[-1])))
    if version not in VERSIONS:
        raise ValueError(f"task.toml: schema version {version} is none of {', '.join(VERSIONS)}")
    environment, verifier = table(config, "environment"), table(config, "verifier")
    for condition, reason in (
        (config.get("steps"), "it has several steps"),
        (str(environment.get("os", "linux")).lower() != "linux", f"its system is {environment.get('os')}"),
        (environment.get("gpus") or environment.get("tpu"), "it wants a GPU or TPU"),
        (environment.get("mcp_servers"), "it has MCP servers; the agent has bash alone"),
        (environment.get("healthcheck"), "healthcheck: a sandbox starts no services of the image"),
        (verifier.get("environment_mode") == "separate" or "environment" in verifier,
         "its verifier runs in a container of its own"),
        (verifier.get("collect"), "verifier.collect: a sandbox is one container"),
    ):
        if condition:
            raise ValueError(f"task.toml: {reason}")
    return config


def table(config: dict, *names: str) -> dict:
    """A table of task.toml, {} if it is not there."""
    for name in names:
        config = config.get(name, {})
        if not isinstance(config, dict):
            raise ValueError(f"task.toml: {'.'.join(names)} is not a table")
    return config


def said_by_record(config: dict) -> dict:
    """What export wrote into [metadata.tmax]; {} where there is nothing."""
    kinds = {"absent": list, "user": str, "limits": dict, **dict.fromkeys(TREES, dict)}
    try:
        said = json.loads(table(config, "metadata", "tmax").get("record", "{}"))
        for key, kind in kinds.items():
            assert isinstance(said.get(key), (kind, type(None)))
        assert all(isinstance(form, dict) for part in TREES for form in (said.get(part) or {}).values())
        return said
    except (AssertionError, AttributeError, TypeError, json.JSONDecodeError):
        raise ValueError("task.toml: metadata.tmax is not what export-harbor writes; take it out") from None


def limits_from(config: dict) -> dict:
    """A record's limits: what task.toml says, else our defaults; but a network, as Harbor has one."""
    environment = table(config, "environment")
    values = {"agent_s": table(config, "agent").get("timeout_sec"), "cpus": environment.get("cpus"),
              "verifier_s": table(config, "verifier").get("timeout_sec"), "memory_mb": memory_mb(environment)}
    limits = {key: value for key, value in values.items() if value is not None}
    for key, value in limits.items():
        if type(value) not in (int, float) or not math.isfinite(value):
            raise ValueError(f"task.toml: {key} = {value!r} is not a number")
        limits[key] = int(value) if value == int(value) else value
    return limits | {"network": network(config)}


def memory_mb(environment: dict):
    """memory_mb, or the older memory = "2G"."""
    number, old = environment.get("memory_mb"), environment.get("memory")
    if not isinstance(old, str):
        return number
    size = re.fullmatch(r"\s*(\d+\.?\d*)\s*([GMK])(?:i?B)?\s*", old, re.IGNORECASE)
    if not size:
        raise ValueError(f'task.toml: memory = "{old}" is not a size like "2G" or "512M"')
    value = int(float(size[1]) * {"G": 1024, "M": 1, "K": 1 / 1024}[size[2].upper()])
    if number not in (None, value):
        raise ValueError(f'task.toml: memory = "{old}" contradicts memory_mb = {number}')
    return value


def network(config: dict) -> bool:
    """Whether there is a network: one answer for agent and verifier, since they share the sandbox."""
    environment = table(config, "environment")
    older = "public" if environment.get("allow_internet", True) else "no-network"
    modes = {str(environment.get("network_mode", older))}
    modes |= {str(table(config, section).get("network_mode", *modes)) for section in ("agent", "verifier")}
    if modes not in ({"public"}, {"no-network"}):
        raise ValueError(f"task.toml: network_mode {' and '.join(sorted(modes))}: a sandbox has the public "
                         "network or none, for agent and verifier alike")
    return modes == {"public"}


def resolved(env: dict, where: str) -> dict:
    """Variables with Harbor's ${NAME:-default} replaced; ValueError for what must come from the host."""
    values = {}
    for name, value in env.items():
        if not re.fullmatch(r"[A-Za-z_]\w*", name) or not isinstance(value, str) or not value.isprintable():
            raise ValueError(f"task.toml: {where} {name} = {value!r} is no variable of one line of text")
        if template := re.fullmatch(r"\$\{([^}:]+)(?::-(.*))?\}", value):
            if template[2] is None:
                raise ValueError(f"task.toml: {where} wants the host's {template[1]}, which no sandbox sees")
            value = template[2]
        values[name] = value
    return values


def script_lines(script: str | None, path: str, env: dict) -> str:
    """What goes to a script's top: its variables, and its #! line's options, which `bash test.sh` skips."""
    if script is None:
        raise ValueError(f"{path} is not text")
    words = script.partition("\n")[0][2:].split() if script.startswith("#!") else ["bash"]
    if words and posixpath.basename(words[0]) == "env":
        words = [word for word in words[1:] if word != "-S"]
    if not words or posixpath.basename(words[0]) not in ("bash", "sh", "dash"):
        raise ValueError(f"{path} is not for bash, says its first line")
    values = resolved(env, f"the env of {path}:")
    lines = [f"export {name}={shlex.quote(value)}\n" for name, value in values.items()]
    if options := re.fullmatch(r"-[efuxCv]+(o pipefail)?|-o pipefail", " ".join(words[1:])):
        lines.append(f"set {options[0]}\n")
    return "".join(["# of task.toml and the #! line\n", *lines]) if lines else ""


def environment_lines(config: dict) -> list[str]:
    """workdir and [environment.env] as lines of a Dockerfile."""
    workdir = table(config, "environment").get("workdir")
    lines = [f"WORKDIR {workdir}"] if workdir else []
    for name, value in resolved(table(config, "environment", "env"), "environment.env:").items():
        value = re.sub(r'([\\$"])', r"\\\1", value)
        lines.append(f'ENV {name}="{value}"')
    return lines


def environment_block(config: dict) -> str:
    lines = environment_lines(config)
    return "\n# of task.toml\n" + "".join(f"{line}\n" for line in lines) if lines else ""


def final_stage(dockerfile: str) -> tuple[str, str | None, bool]:
    """(the image that the last stage starts from, its last USER line's user, if it has an ENTRYPOINT)."""
    stages, name, base, user, entrypoint = {}, None, "", None, False
    for line in dockerfile_lines(dockerfile):
        word, *words = line.split()
        words = [word for word in words if not word.startswith("--")]
        if word.upper() == "FROM" and words:
            base, user, entrypoint = stages.get(words[0].lower(), (words[0], None, False))
            name = words[2].lower() if len(words) == 3 else None
        elif word.upper() == "USER" and words:
            user = words[0].strip("\"'")
        elif word.upper() == "ENTRYPOINT":
            entrypoint = words != ["[]"]
        if name:
            stages[name] = base, user, entrypoint
    return base, user, entrypoint


@functools.lru_cache(None)
def local_image_user(image: str) -> str:
    """The USER of an image that the Docker daemon has; "" (root) where it has none or is not there."""
    try:
        with docker_errors("inspect"):
            return docker().inspect_image(image)["Config"].get("User") or ""
    except (InfraError, ImportError):
        return ""


@functools.lru_cache(None)
def docker():
    """One client for all of an import."""
    return docker_api(docker_hosts()[0])


# ------------------------------------------------------------------------------------------------------------
# Folders on disk
# ------------------------------------------------------------------------------------------------------------


def read_folder(top: Path) -> dict:
    """{path: (bytes, mode)} of what is a task's in a folder. Links are refused: they may lead anywhere."""
    folder = {}
    for name in ("task.toml", "instruction.md", "trajectory.json", "environment", "tests", "solution"):
        paths = [top / name] if os.path.lexists(top / name) else []
        for path in paths:  # grows as it goes
            status, below = path.lstat(), path.relative_to(top).as_posix()
            if stat.S_ISDIR(status.st_mode):
                paths += sorted(path.iterdir())
            elif not stat.S_ISREG(status.st_mode):
                raise ValueError(f"{below} is a link or a special file")
            elif not below.isprintable():
                raise ValueError(f"{below!r}: the name of a file must be printable UTF-8")
            else:
                folder[below] = path.read_bytes(), status.st_mode
    return folder


def import_harbor(path: str) -> tuple[list[dict], list[str]]:
    """The Task records of a Harbor task folder, or of all in a folder; "name: why" of each without one."""
    top = Path(path)
    if not top.is_dir():
        raise ValueError(f"{path} is not a folder")
    single = (top / "task.toml").exists()
    tasks, problems = [], []
    for folder in [top.resolve()] if single else sorted(top.iterdir()):
        if folder.is_dir() and not folder.name.startswith("."):
            try:
                tasks.append(unpack(folder.name, read_folder(folder), local_image_user))
            except (ValueError, InfraError, OSError) as e:
                problems.append(f"{folder.name}: {e}")
    if not tasks and not problems:
        raise ValueError(f"{path} holds no task folders")
    return tasks, problems


def export_harbor(tasks: list[dict], out: str):
    """Writes DIR/ID for every task, or nothing: all are looked at before the first is written."""
    for task in tasks:
        id = task["id"]
        if not id.isprintable() or not re.fullmatch(r"[^./\\:][^/\\:]*", id) or len(id.encode()) > 200:
            raise ValueError(f"task id {id!r} is no folder's name; change it")
        if os.path.lexists(Path(out) / id):
            raise ValueError(f"{Path(out) / id} is there already; choose another folder")
    folders = {task["id"]: pack(task) for task in tasks}
    for id, folder in folders.items():
        part = Path(out) / f".{id}.{os.getpid()}"  # a reader never finds half a task under its final name
        try:
            for path, (data, mode) in folder.items():
                file = part / path
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(data)
                file.chmod(mode & 0o7777)
            part.rename(Path(out) / id)
        finally:
            shutil.rmtree(part, ignore_errors=True)


# ------------------------------------------------------------------------------------------------------------
# 2. TMax-15K as published
# ------------------------------------------------------------------------------------------------------------


def import_tmax(rows: list[dict], tarball: str) -> tuple[list[dict], list[str]]:
    """The Task records of the published TMax-15K: (tasks, "id: why there is none").

    rows: {messages, ground_truth: the task's id, env_config: {image}}. tarball: ID/instruction.md,
    ID/tests/*, ID/setup.sh. The image has everything in it: setup.sh is what made it, and comes along unused.
    Nothing is unpacked to disk, so no name in the tarball can lead anywhere.
    """
    folders, problems = read_tarball(tarball, {task_id(row) for row in rows})
    tasks, refused, seen = [], [], set()
    for number, row in enumerate(rows, 1):
        id, folder = task_id(row), folders.get(task_id(row), {})
        try:
            if not id:
                raise ValueError("its ground_truth is not a task's id")
            if id in seen:
                raise ValueError("an earlier row has the same id")
            seen.add(id)
            if why := problems.get(id) or (not folder and f"{tarball} has no folder of that name"):
                raise ValueError(why)
            image = (row.get("env_config") or {}).get("image")
            if not isinstance(image, str) or not re.fullmatch(r"\S+", image):
                raise ValueError("its env_config names no image")
            task = {"id": id, "instruction": text_of(folder, "instruction.md"),
                    "dockerfile": f"FROM {image}\n",
                    "files": {path: canonical(path, *folder[path]) for path in folder if path == "setup.sh"},
                    "tests": {path.removeprefix("tests/"): canonical(path, *folder[path])
                              for path in sorted(folder) if path.startswith("tests/")},
                    "user": local_image_user(image).split(":")[0] or "root"}
            check_task(task)
            tasks.append(task)
        except (ValueError, InfraError) as e:
            refused.append(f"{id or f'row {number}'}: {e}")
    return tasks, refused


def task_id(row: dict) -> str | None:
    id = row.get("ground_truth")
    id = id[0] if isinstance(id, list) and len(id) == 1 else id
    return id if isinstance(id, str) and id else None


MAX_FILE = 64 << 20  # bytes: a small archive must not fill the memory


def read_tarball(path: str, wanted: set) -> tuple[dict, dict]:
    """({id: {path: (bytes, mode)}}, {id: why its folder cannot be used}) of a tarball of task folders."""
    folders, problems = {}, {}
    try:
        with tarfile.open(path) as tar:
            for member in tar:
                id, _, name = posixpath.normpath(member.name).partition("/")
                if member.name.startswith("/") or id == "..":
                    raise ValueError(f"{path}: {member.name} leads out of its folder; do not trust it")
                if id not in wanted or not name or member.isdir():
                    continue
                if not member.isfile():
                    problems[id] = f"{name} is a link or a special file"
                elif member.size > MAX_FILE:
                    problems[id] = f"{name} has {member.size} bytes"
                else:
                    folders.setdefault(id, {})[name] = tar.extractfile(member).read(), member.mode
    except (tarfile.TarError, EOFError, zlib.error) as e:
        raise ValueError(f"{path} is not a whole tarball: {str(e).splitlines()[0]}") from None
    return folders, problems


# ------------------------------------------------------------------------------------------------------------
# 3. Our harness as a Harbor agent
# ------------------------------------------------------------------------------------------------------------

KEEP = sandbox.Capture.KEEP
LOOK_S, FLOOD = 20, 64 << 20  # one look into the container ends after so long, or so much new output
EXACT = 8 << 20  # up to here what lies between an output's ends is counted in characters, beyond in bytes
PATIENCE = 10  # further ticks for the one of two ends (control message, nonce) that is still missing

# Puts sandbox.py's shell into a container that we reach by single commands alone. Its streams are a FIFO and
# two files; stdout has a `cat` between, as a command that opens /dev/stdout would empty a file.
START = r"""
umask 077; cd "$1" && mkfifo in pipe && : >out && : >control || exit 1
session=$(type -P setsid)
(ulimit -f 4194304; exec $session cat <pipe >>out 2>/dev/null) &
exec 7>pipe
$session bash --norc --noprofile -p "$1/init" "" "$OLDPWD" "" "" <>in >&7 7>&- 2>>control &
echo $! >pid; echo "@@up@@"
"""
# One look. $2 goes into the shell (base64). It waits $3 ticks at most until control has a whole message after
# byte $4, and out the nonce $6, and tells what is new since $4 and $5: of a flood both ends, and how many
# characters lie between.
LOOK = r"""
cd "$1" && [[ -e /proc/$(<pid)/fd/0 ]] || { echo "@@gone@@"; exit; }  # a zombie has none
[[ -z $2 ]] || base64 -d <<<"$2" >in
for ((i = seen = 0; i < $3; i++)); do
  whole= marked=
  (( $(stat -c %s control) > $4 )) && [[ $(tail -c 1 control | tr '\0' 0) == 0 ]] && whole=1
  [[ -n $6 && $(tail -c 4096 out | tr -d '\0') == *"$6"* ]] && marked=1
  [[ $whole && $marked ]] && break
  [[ $whole$marked ]] && (( ++seen > PATIENCE )) && break
  (( $(stat -c %s out) - $5 > FLOOD )) && break
  sleep .0$((i < 20 ? 1 : 5))
done
control=$(stat -c %s control) out=$(stat -c %s out) new=$((out - $5)) chars=0 tail=
pack() { base64 | tr -d '\n'; }
since() { tail -c "+$(($2 + 1))" "$1" | head -c "$3"; }
if (( new > 2 * KEEP )); then
  chars=$((new - 2 * KEEP))
  (( new > EXACT )) || chars=$(since out $(($5 + KEEP)) $chars | LC_ALL=C tr -d '\200-\277' | wc -c)
  tail=$(since out $((out - KEEP)) KEEP | pack) new=KEEP
fi
head=$(since out "$5" "$new" | pack)
(( out > FLOOD )) && : >out && out=0
echo "@@$control $out $chars,$(since control "$4" $((control - $4)) | pack),$head,$tail@@"
"""
for name in ("KEEP", "FLOOD", "EXACT", "PATIENCE"):
    LOOK = LOOK.replace(name, str(globals()[name]))
DOTS = b"." * (1 << 20)


class HarborShell:
    """Where a HarborSandbox has its shell, and the way there: sandbox.py's box and channel in one.

    execute: function(command, seconds) -> (exit code, output), by Harbor's stateless exec; InfraError. A look
    is one exec, and most commands take one look: .2 s or more with Docker, where sandbox.py's own take 2 ms.
    """

    def __init__(self, execute):
        self.execute, self.outbox = execute, bytearray()
        self.control = self.out = 0  # bytes of both files that we have seen
        self.nonce = ""

    def start(self, script):
        self.folder = f"/tmp/.shell-{secrets.token_hex(8)}"
        # The one place where the shell counts on its process 1.
        init = script.replace(b">/proc/1/fd/3", f">>{self.folder}/control".encode())
        assert init != script, "sandbox.py's EXIT trap writes elsewhere now"
        steps = ["umask 077", f"mkdir {self.folder}"]
        for name, data in (("init", init), ("start", START.encode()), ("look", LOOK.encode())):
            steps.append(f"echo {base64.b64encode(data).decode()} | base64 -d >{self.folder}/{name}")
        _, said = self.execute(" && ".join([*steps, f"bash {self.folder}/start {self.folder}"]), 60)
        if "@@up@@" not in said:
            raise InfraError(f"no shell in Harbor's environment: {said[-500:]}")
        return self

    def pump(self, seconds):
        """Sends what waits in outbox; returns what comes in time: [(stream, bytes)], b"" at an end."""
        if seconds <= 0 and not self.outbox:
            return []  # not worth an exec
        while len(self.outbox) > 30_000:  # an argument has at most 128 KB, a FIFO 64 KB
            self.execute(self.feeding(30_000), 60)
        if self.outbox.endswith(b"\0"):
            self.nonce = self.outbox[:-1].rpartition(b"\0")[2].decode()
        given, ticks = base64.b64encode(self.outbox).decode(), int(20 * min(max(seconds, .05), LOOK_S))
        self.outbox.clear()
        code, said = self.execute(f"bash {self.folder}/look {self.folder} '{given}' {ticks} {self.control} "
                                  f"{self.out} '{self.nonce}'", 3 * LOOK_S)
        if "@@gone@@" in said:
            return [(1, b"")]
        found = re.search(r"@@(\d+) (\d+) (\d+),([^,@]*),([^,@]*),([^,@]*)@@", said)
        if not found and code in (137, 143):
            return []  # the shell's sweep after a timeout took this look for a part of the command
        if not found:
            raise InfraError(f"Harbor's environment, exit code {code}: {said[-500:]}")
        self.control, self.out, between = map(int, found.groups()[:3])
        control, head, tail = map(base64.b64decode, found.groups()[3:])
        dots = [DOTS] * (between // len(DOTS)) + [DOTS[:between % len(DOTS)]]  # counted, but never shown
        pieces = [(2, control), (1, head), *((1, piece) for piece in dots), (1, tail)]
        return [(stream, data) for stream, data in pieces if data]

    def feeding(self, size: int) -> str:
        """The command that writes the first bytes of outbox into the shell."""
        piece = base64.b64encode(self.outbox[:size]).decode()
        del self.outbox[:size]
        return f"echo {piece} | base64 -d >{self.folder}/in"

    def interrupt(self):
        self.execute(f"{self.feeding(len(self.outbox))}; kill -PWR $(cat {self.folder}/pid)", 60)

    def post_mortem(self, last_words):
        return SandboxKilled("the agent ended its shell, or emptied /tmp")

    def close(self):
        """Ends the shell; the agent's own processes go on, as the verifier may want them."""
        with contextlib.suppress(InfraError):  # Harbor ends the container soon
            self.execute(f"cd {self.folder} && read -r p <pid && kill -9 $p $(cat /proc/$p/task/$p/children)"
                         f"; rm -rf {self.folder}", 60)
        self.execute = lambda command, seconds: (0, "")  # closed as box and as channel


class HarborSandbox(sandbox.Sandbox):
    """sandbox.py's living shell in an environment of Harbor's, which grades by itself."""

    def __init__(self, task, execute):
        self.task, self.limits, self.execute = task, limits_of(task), execute
        self.box = self.channel = self.fault = None

    def start(self):
        self.box = HarborShell(self.execute)
        self._open()
        return self

    def grade(self):
        return sandbox.Grade(None, "Harbor's verifier grades")


try:  # where the harbor package is installed, which is not among our requirements
    from harbor.agents.base import BaseAgent
    from harbor.agents.capabilities import AgentCapabilities
    from harbor.agents.options import AgentOptions
except ImportError:
    BaseAgent = None

if BaseAgent:
    class Options(AgentOptions):
        """--ak NAME=VALUE; defaults are the paper's evaluation's, as in eval.py run."""

        engine: str = "torch"
        seed: int = 0
        command_s: float = LIMITS["command_s"]
        temperature: float = 0.7
        top_p: float = 0.95
        max_turns: int = 64
        max_turn_tokens: int = 16_384
        max_tokens: int = 65_536
        max_prompt_tokens: int = 2_048

    class HarborAgent(BaseAgent):
        """Our harness in any of Harbor's environments: run_episode with its prompt, parser and token records.

        MODEL is rollout.py's --model, engine its --engine. The trial's agent/ folder gets rollout.jsonl (one
        record, as rollout.py writes it, the reward left to Harbor) and trajectory.json (ATIF).
        """

        capabilities = AgentCapabilities(atif=True)
        options_model = Options

        @staticmethod
        def name():
            return "tmax"

        def version(self):
            return "1"

        async def setup(self, environment):
            """Nothing to install: the model is asked from here, the shell is the container's own bash."""

        async def run(self, instruction, environment, context):
            loop, stopped = asyncio.get_running_loop(), threading.Event()

            def execute(command, seconds):
                if stopped.is_set():
                    raise InfraError("Harbor has ended the agent")
                run = environment.exec(f"bash -c {shlex.quote(command)}", timeout_sec=seconds)
                try:
                    result = asyncio.run_coroutine_threadsafe(run, loop).result(seconds + 60)
                except Exception as e:  # every environment has its own
                    raise InfraError(f"Harbor's environment: {type(e).__name__}: {e}") from e
                return result.return_code, (result.stdout or "") + (result.stderr or "")

            thread = asyncio.to_thread(self.play, instruction, execute, stopped, context)
            episode = asyncio.ensure_future(thread)
            try:
                await asyncio.shield(episode)
            except asyncio.CancelledError:  # Harbor's time limit: what there is gets written
                stopped.set()
                await asyncio.wait([episode], timeout=10)
                raise

        def play(self, instruction, execute, stopped, context):
            """One episode, in a thread of its own; fills Harbor's context and the trial's files."""
            said = self.options.model_dump()
            sampling = rollout.Sampling(**{key: said[key] for key in rollout.Sampling._fields})
            which = said["engine"], self.model_name, sampling  # one engine for all trials of a job
            engine, chat = once(("engine", *which), lambda: rollout.make_engine(*which))
            limits = {"agent_s": math.inf, "command_s": said["command_s"]}  # Harbor limits the whole
            task = {"id": self.session_id or "task", "instruction": instruction, "limits": limits}
            record = rollout.run_episode(task, engine, chat, sampling, seed=said["seed"], sample=0,
                                         model=self.model_name, box=HarborSandbox(task, execute))
            record["reward"] = None
            if stopped.is_set():
                record["end"] = "agent_timeout"
            with JsonlWriter(self.logs_dir / "rollout.jsonl") as out:
                out.write(record)
            trajectory = atif(record)
            (self.logs_dir / "trajectory.json").write_text(json.dumps(trajectory))
            if "token_ids" in record:
                turns = list(token_turns(record))
                context.n_input_tokens = sum(start for start, _ in turns)
                context.n_output_tokens = sum(end - start for start, end in turns)
                context.rollout_details = [{
                    "prompt_token_ids": [record["token_ids"][:start] for start, _ in turns],
                    "completion_token_ids": [record["token_ids"][start:end] for start, end in turns],
                    "logprobs": [record["logprobs"][start:end] for start, end in turns]}]
            context.metadata = {key: record[key] for key in ("end", "turns", "times", "error")}
            if record["end"] == "infra_error":
                raise InfraError(record["error"])  # Harbor counts it as an error of the trial


# ------------------------------------------------------------------------------------------------------------
# 4. ATIF, Harbor's format of trajectories
# ------------------------------------------------------------------------------------------------------------


def token_turns(record: dict):
    """(start, end) in token_ids of every turn that the model sampled: the runs of ones in the loss mask."""
    mask = [0, *record["loss_mask"], 0]
    edges = [i for i in range(len(mask) - 1) if mask[i] != mask[i + 1]]
    return zip(edges[::2], edges[1::2])


def atif(record: dict) -> dict:
    """A rollout or eval row as an ATIF trajectory; ValueError where it has no messages.

    A step is a message: system, user, or a turn of the model with its calls and what they gave. Where the
    record has tokens, `metrics` has those of the turn with their log-probs, and its extra.context_token_ids
    those between it and the turn before, or the prompt: in a row they are the episode, each token once.
    """
    messages = record.get("messages") or []
    if [message.get("role") for message in messages[:2]] != ["system", "user"]:
        raise ValueError("it has no messages")
    turns = list(token_turns(record)) if "token_ids" in record else []
    steps, agent_steps, results, position = [], [], [], 0
    for message in messages:
        if message["role"] == "tool":
            results[-1].append({"content": message["content"]})
            continue
        step = {"step_id": len(steps) + 1, "source": message["role"], "message": message.get("content") or ""}
        steps.append(step)
        if message["role"] != "assistant":
            continue
        agent_steps.append((step, message))
        results.append([])
        step |= {"source": "agent", "llm_call_count": 1}
        if message.get("reasoning_content"):
            step["reasoning_content"] = message["reasoning_content"]
        if turns:
            start, end = turns.pop(0)
            logprobs = record["logprobs"][start:end]
            step["metrics"] = {
                "prompt_tokens": start, "completion_tokens": end - start,
                "completion_token_ids": record["token_ids"][start:end],
                "extra": {"context_token_ids": record["token_ids"][position:start]}}
            if None not in logprobs:  # a chat API's rollouts have none
                step["metrics"]["logprobs"] = logprobs
            position = end
    for (step, message), given in zip(agent_steps, results):
        calls = calls_of(message, len(given))
        for i, call in enumerate(calls):
            id, error = f"call_{step['step_id']}_{i}", {"extra": {"error": call.error}} if call.error else {}
            arguments = {} if call.command is None else {"command": call.command}
            step.setdefault("tool_calls", []).append(
                {"tool_call_id": id, "function_name": "bash", "arguments": arguments, **error})
            if len(given) == len(calls):
                given[i]["source_call_id"] = id
        if given:
            step["observation"] = {"results": given}
    id = f"{record.get('task_id')}__{record.get('attempt', record.get('sample', 0))}"
    metrics = [step["metrics"] for step in steps if "metrics" in step]
    counts = ("prompt_tokens", "completion_tokens")
    totals = {f"total_{kind}": sum(m[kind] for m in metrics) for kind in counts}
    left_out = ("messages", "token_ids", "loss_mask", "logprobs", "trainer_logprobs")
    return {"schema_version": "ATIF-v1.7", "session_id": id, "trajectory_id": id,
            "agent": {"name": "tmax", "version": "1", "model_name": record.get("model") or "unknown",
                      "tool_definitions": [rollout.TOOL]},
            "steps": steps, "final_metrics": {"total_steps": len(steps), **(totals if metrics else {})},
            "extra": {key: value for key, value in record.items() if key not in left_out}}


def calls_of(message: dict, results: int) -> list:
    """The calls of an assistant's message, as the episode read them, given how many results followed."""
    if message.get("tool_calls"):
        return [rollout.check_call(call["function"].get("name"), call["function"].get("arguments"))
                for call in message["tool_calls"]]
    text = message.get("content") or ""
    calls = rollout.parse_calls(text, "qwen3_xml" if "<function=" in text else "hermes")
    return calls if len(calls) == results else []  # what looks like a call was a draft, or cut by a limit


def export_atif(path: str, out: str) -> int:
    """Writes an ATIF file for every record of a JSONL file, and says how many. ValueError names the line that
    cannot be one. Where Harbor is installed, its own models have a look."""
    trajectories = []
    for number, record in numbered_records(path):
        try:
            trajectory = atif(record)
            text = json.dumps(trajectory, allow_nan=False)
            if BaseAgent:
                from harbor.models.trajectories import Trajectory
                Trajectory.model_validate(trajectory)
        except ValueError as e:
            raise ValueError(f"{path}:{number}: {e}") from None
        name = re.sub(r"[^\w.-]", "_", trajectory["trajectory_id"])[:150]
        trajectories.append((Path(out) / f"{number:06d}-{name}.json", text))
    if not trajectories:
        raise ValueError(f"{path} has no records")
    if there := [str(file) for file, _ in trajectories if file.exists()]:
        raise ValueError(f"{there[0]} is there already; choose another folder")
    Path(out).mkdir(parents=True, exist_ok=True)
    for file, text in trajectories:
        file.write_text(text, encoding="utf-8")
    return len(trajectories)
