"""Tasks: where the pipeline starts. Each command writes Task records, one JSON object a line.

    python gen.py builtin --n 640 --seed 0 --split train --out tasks.jsonl
    python gen.py export-harbor tasks.jsonl DIR
    python gen.py import-harbor DIR --out tasks.jsonl
    python gen.py import-tmax rows.jsonl task-data.tar.gz --out tasks.jsonl

builtin   the demo's families (builtin/families.py); no LLM, no network; same arguments, same bytes
*-harbor  Harbor's task folders, out and in; import-tmax: the published TMax-15K (extras/harbor.py)
"""
import argparse
import json
import os
import sys
from collections import Counter
from pathlib import Path

from builtin.families import FAMILIES, make_task
from extras.harbor import export_harbor, import_harbor, import_tmax
from sandbox import load_tasks, read_jsonl


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
# export-harbor, import-harbor, import-tmax

def export_to_harbor(args):
    try:
        tasks = load_tasks(args.tasks)
        export_harbor(tasks, args.dir)
    except (ValueError, OSError) as e:
        sys.exit(f"gen.py export-harbor: {e}")
    print(f"{args.dir}: {len(tasks)} task folders")


def import_from(name, read):
    """Writes what `read()` gives, (tasks, what could not be imported); it fails only if nothing could."""
    def run(args):
        try:
            tasks, problems = read(args)
            for problem in problems:
                print(f"left out: {problem}", file=sys.stderr)
            if not tasks:
                raise ValueError("nothing could be imported")
            write_tasks(args.out, tasks)
        except (ValueError, OSError) as e:
            sys.exit(f"gen.py {name}: {e}")
        print(f"{args.out}: {len(tasks)} tasks; {len(problems)} left out")
    return run


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

    p = commands.add_parser("export-harbor", help="write tasks as Harbor's folders")
    p.add_argument("tasks", help="tasks.jsonl")
    p.add_argument("dir", help="gets a folder a task")
    p.set_defaults(run=export_to_harbor)

    p = commands.add_parser("import-harbor", help="read Harbor's task folders")
    p.add_argument("dir", help="a task folder, or a folder of them")
    p.add_argument("--out", required=True, help="the JSONL file to write")
    p.set_defaults(run=import_from("import-harbor", lambda args: import_harbor(args.dir)))

    p = commands.add_parser("import-tmax", help="read the published TMax-15K")
    p.add_argument("rows", help="its rows as JSONL: {messages, ground_truth, env_config: {image}}")
    p.add_argument("tarball", help="its task-data.tar.gz: ID/instruction.md, ID/tests/test.sh, ...")
    p.add_argument("--out", required=True, help="the JSONL file to write")
    p.set_defaults(run=import_from(
        "import-tmax", lambda args: import_tmax(read_jsonl(args.rows), args.tarball)))

    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
