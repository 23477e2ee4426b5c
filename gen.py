"""Tasks: where the pipeline starts. Each command writes Task records, one JSON object a line.

    python gen.py builtin --n 640 --seed 0 --split train --out tasks.jsonl
    python gen.py bases --domain security

builtin   the demo's families (builtin/families.py); no LLM, no network; same arguments, same bytes
bases     builds the images of Dockerfile.base that tasks start from
"""
import argparse
import io
import json
import os
import re
import sys
import time
from collections import Counter
from pathlib import Path

from builtin.families import FAMILIES, make_task
from sandbox import InfraError, docker_api, docker_errors, docker_hosts


def write_tasks(path, tasks):
    """All or nothing: a reader never finds half a corpus under the final name."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(part, "w", encoding="utf-8", newline="\n") as file:
            for task in tasks:
                file.write(json.dumps(task, ensure_ascii=False) + "\n")
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


# ------------------------------------------------------------------------------------------------------------
# builtin

def builtin_tasks(n, seed, split, names):
    """n tasks, round-robin over the families: each has n / len(names), give or take one."""
    seen = {name: set() for name in names}
    tasks = []
    for i in range(n):
        name = names[i % len(names)]
        tasks.append(make_task(FAMILIES[name], split, seed, i // len(names), seen[name]))
    return tasks


def builtin_summary(tasks):
    """One line: tasks by family, domain and verifier, and how often the demonstrator errs."""
    columns = [[task["id"].rsplit("-", 3)[0] for task in tasks],
               [task["axes"]["domain"] for task in tasks],
               [task["axes"]["verifier"] for task in tasks]]
    counts = [", ".join(f"{name} {n}" for name, n in Counter(column).items()) for column in columns]
    right = [demo["right"] for task in tasks for demo in task["demos"]]
    return f"{len(tasks)} tasks; " + "; ".join(counts) + f"; {1 - sum(right) / len(right):.0%} of demos wrong"


def builtin(args):
    names = list(dict.fromkeys(args.families.split(","))) if args.families else list(FAMILIES)
    if unknown := [name for name in names if name not in FAMILIES]:
        sys.exit(f"no such family: {', '.join(unknown)}; there are {', '.join(FAMILIES)}")
    if args.n < 1:
        sys.exit(f"--n {args.n}: ask for at least one task")
    try:
        tasks = builtin_tasks(args.n, args.seed, args.split, names)
        write_tasks(args.out, tasks)
    except (ValueError, OSError) as e:    # a split without that many tasks; a path or disk that takes no file
        sys.exit(f"gen.py builtin: {e}")
    print(f"{args.out}: {builtin_summary(tasks)}")


# ------------------------------------------------------------------------------------------------------------
# bases

BASES = Path(__file__).with_name("Dockerfile.base")


def base_stages():
    """{stage: a Dockerfile of it and the stages that it stands on}, in the order of Dockerfile.base. Docker's
    API builds whatever stands above a stage in its file, needed or not, so each gets a file of its own; equal
    text gives equal layers, which are built once."""
    head, *parts = re.split(r"(?m)^(?=FROM )", BASES.read_text())
    stages = {}
    for part in parts:
        parent, name = re.match(r"FROM (\S+) AS (\S+)", part).groups()
        stages[name] = stages.get(parent, head) + part
    return stages


def build_base(stage, dockerfile, host):
    """Builds and tags one stage on one host: (bytes of the image, seconds). InfraError says why it fails."""
    start, log = time.monotonic(), ""
    with docker_errors(f"tmax-base:{stage}"):
        api = docker_api(host)
        for piece in api.build(fileobj=io.BytesIO(dockerfile.encode()), rm=True, forcerm=True,
                               tag=f"tmax-base:{stage}", decode=True):
            log = (log + piece.get("stream", ""))[-2000:]
            if error := piece.get("error"):
                raise InfraError(f"tmax-base:{stage} does not build at {host}: {log}{error}")
        return api.inspect_image(f"tmax-base:{stage}")["Size"], time.monotonic() - start


def bases(args):
    stages = base_stages()
    if unknown := [name for name in args.domain or () if name not in stages]:
        sys.exit(f"gen.py bases: Dockerfile.base has no {', '.join(unknown)}; it has {', '.join(stages)}")
    try:
        for host in docker_hosts():
            for stage in [name for name in stages if not args.domain or name in args.domain]:
                size, seconds = build_base(stage, stages[stage], host)
                print(f"tmax-base:{stage:24}{size / 1e6:7,.0f} MB{seconds:7.0f} s", flush=True)
    except InfraError as e:
        sys.exit(f"gen.py bases: {e}")


# ------------------------------------------------------------------------------------------------------------

def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, metavar="command")

    p = commands.add_parser("builtin", help="write tasks of the built-in families")
    p.add_argument("--out", required=True, help="the JSONL file to write")
    p.add_argument("--n", type=int, default=640, help="how many tasks")
    p.add_argument("--split", choices=["train", "val", "test"], default="train",
                   help="no two splits share a task")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--families", help="only these, separated by commas")
    p.set_defaults(run=builtin)

    p = commands.add_parser("bases", help="build and tag the base images, tmax-base:<domain>")
    p.add_argument("--domain", action="append",
                   help="only this one (or core, tools, fixtures); may be repeated")
    p.set_defaults(run=bases)

    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
