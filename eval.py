"""How good is a policy, and how sure can one be: attempts at held-out tasks, and the statistics on them.

    python eval.py run --tasks test.jsonl --model ckpt --attempts 5 --out eval.jsonl # plays and grades
    python eval.py report eval.jsonl [more.jsonl ...] [--json]                       # means, errors, pass@k
    python eval.py compare before.jsonl after.jsonl                                  # paired by task
    python eval.py plot runs/demo --out curves.png                                   # what training did
    python eval.py show runs/demo/rollouts.jsonl --out page.html                     # episodes to read
    python eval.py export-atif rollouts.jsonl DIR                                    # trajectories for Harbor

`run` plays every task several times through rollout.py, with the paper's evaluation settings, and grades
every episode. Its tasks are tasks.jsonl, a folder of Harbor tasks, or questions with a known answer, one
{"id", "question", "answer"} a line, which the agent answers through the terminal or, with --no-tools, in one
turn. `report` and `compare` group rows by model; a row needs only model, task_id and reward. They also read
folders of Harbor's job results and compact rows {"model", "task", "rewards": "01-10"}, a sign an attempt:

    python eval.py report docs/tb2_trials.jsonl                                      # the paper's Table 16
    python eval.py compare docs/tb2_trials.jsonl:Qwen3.5-9B docs/tb2_trials.jsonl:tmax-9b

Statistics are over tasks, because tasks, not attempts, are what a benchmark samples (DESIGN "Statistics").
Left out: costs in money, and significance tests beyond the paired difference. """

import argparse
import json
import math
import os
import re
import sys
import warnings
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
from tqdm import tqdm

import rollout
from builtin import answers
from extras import figures, page
from extras.harbor import export_atif, import_harbor
from records import numbered_records, read_jsonl
from sandbox import InfraError, TaskError, prepare, resolve_backend

TOKEN_FIELDS = ("token_ids", "loss_mask", "logprobs", "policy_versions")


# ------------------------------------------------------------------------------------------------------------
# run
# ------------------------------------------------------------------------------------------------------------


def run(args):
    """Plays what `--out` lacks. What is ours to fix is tried again; failing that, its row has no reward."""
    sampling = rollout.sampling_from(args)
    tasks = load_any_tasks(args.tasks)[: args.limit]
    if args.no_tools and (without := [t["id"] for t in tasks if "answer" not in t]):
        raise ValueError(f"{args.tasks}: --no-tools needs questions with an answer; {without[0]} has none")
    backend = None if args.no_tools else resolve_backend(args.backend)
    engine, chat = rollout.make_engine(args.engine, args.model, sampling)
    tries = 1 + args.infra_retries
    if args.no_tools:
        engine.tools, broken = [], {}
    else:
        broken = build_images(tasks, backend, tries)

    def play(job):
        group, task, attempt = job
        who = dict(seed=args.seed, group=group, sample=attempt, model=args.model)
        if task["id"] in broken:  # its attempts are missing: a task that does not build is nobody's 0
            return {"attempt": attempt, "task_id": task["id"], **who, "messages": [], "reward": None,
                    "end": "infra_error", "turns": 0, "error": broken[task["id"]]}
        for retries in range(tries):
            if args.no_tools:
                record = answers.answer_once(task, engine, chat, sampling, **who)
            else:
                record = rollout.run_episode(task, engine, chat, sampling, **who, backend=backend)
            if record["end"] != "infra_error":
                break
        row = {"attempt": attempt, **{k: v for k, v in record.items() if k not in TOKEN_FIELDS}}
        if "token_ids" in record:
            row |= {"tokens": len(record["token_ids"]), "sampled_tokens": sum(record["loss_mask"])}
        return row | {"infra_retries": retries}

    jobs = [(g, t, k) for g, t in enumerate(tasks) for k in range(args.attempts)]
    rollout.play_missing(jobs, play, args.out, args.model, args.workers)
    print_report([args.out])


def load_any_tasks(path: str) -> list[dict]:
    """Task records from tasks.jsonl, a folder of Harbor tasks, or a JSONL of questions with answers.

    A Harbor task that cannot be used is named and left out; in our own files it is an error. """
    if os.path.isdir(path):
        tasks, problems = import_harbor(path)
        for problem in problems:
            print(f"left out: {problem}", file=sys.stderr)
        if not tasks:
            raise ValueError(f"{path} holds no Harbor task that can be used")
        return tasks
    if any("question" in record for record in read_jsonl(path)):
        return answers.answer_tasks(path)
    return rollout.load_checked_tasks(path)


def build_images(tasks: list[dict], backend: str, tries: int) -> dict[str, str]:
    """Builds what each task's episodes start from, once, several at a time; {task id: why it failed}."""

    def build(task):
        for _ in range(tries):
            try:
                prepare(task, backend)
                return task["id"], None
            except InfraError as e:
                reason = str(e)
                if isinstance(e, TaskError):  # the task's own fault stays one
                    break
        return task["id"], reason

    building = rollout.run_jobs(tasks, build, workers=4)
    broken = {id: why for id, why in tqdm(building, total=len(tasks), unit="image") if why}
    for id, why in broken.items():
        tqdm.write(f"{id}: none of its attempts can be played: {why}")
    if len(broken) == len(tasks):
        raise InfraError(f"none of {len(tasks)} tasks can be played, the first because of: {why}")
    return broken


# ------------------------------------------------------------------------------------------------------------
# rows
# ------------------------------------------------------------------------------------------------------------


def read_rows(paths: list[str], binary: bool = False) -> dict[str, list[dict]]:
    """Eval rows by model, in order of appearance. ValueError for what cannot be counted.

    binary: rewards below 1 count as 0, so that a graded verifier only says solved or not. """
    by_model = defaultdict(dict)
    for path in paths:
        for where, row in harbor_rows(path) if os.path.isdir(path) else jsonl_rows(path):
            for key in ("model", "task_id"):
                if not isinstance(row.get(key), str):
                    raise ValueError(f"{where} has no {key}")
            if "reward" not in row:
                raise ValueError(f"{where} has no reward")
            reward, rows = row["reward"], by_model[row["model"]]
            if reward is not None and not (type(reward) in (int, float) and 0 <= reward <= 1):
                raise ValueError(f"{where}: reward {reward!r} is not a number from 0 to 1, or null")
            # One outcome an attempt: a row without reward is replaced by the one of a later try.
            attempt = row.get("attempt", row.get("sample"))
            key = (row["task_id"], row.get("step"), attempt) if attempt is not None else len(rows)
            if rows.get(key, {}).get("reward") is not None:
                what = f"attempt {attempt} of {row['task_id']} by {row['model']}"
                raise ValueError(f"{where}: {what} is there twice")
            rows[key] = row | {"reward": float(reward >= 1)} if binary and reward is not None else row
    if not by_model:
        raise ValueError(f"no rows in {', '.join(map(str, paths))}")
    return {model: list(rows.values()) for model, rows in by_model.items()}


def jsonl_rows(path):
    """(where, row) of a JSONL file; a compact row {model, task, rewards} becomes one row a character."""
    for number, row in numbered_records(path):
        where = f"{path}:{number}"
        if "rewards" not in row:
            yield where, row
            continue
        if not isinstance(row["rewards"], str) or set(row["rewards"]) - set("01-"):
            raise ValueError(f"{where}: rewards {row['rewards']!r} is not a string of 1, 0 and - (no reward)")
        for attempt, sign in enumerate(row["rewards"]):
            yield where, {"model": row.get("model"), "task_id": row.get("task"), "attempt": attempt,
                          "reward": {"0": 0.0, "1": 1.0, "-": None}[sign]}


def harbor_rows(folder):
    """(where, row) of the trials in a Harbor job folder, or in a folder of such folders.

    A trial is a folder with a result.json that has a trial_name. What lies inside a trial is never read: an
    agent may have written it. """
    for depth in ("*/result.json", "*/*/result.json", "result.json"):
        trials = {path: json_of(path) for path in sorted(Path(folder).glob(depth))}
        trials = {path: trial for path, trial in trials.items() if "trial_name" in trial}
        if trials:
            break
    else:
        raise ValueError(f"{folder} holds no results of Harbor trials (JOB/TRIAL/result.json)")
    for job in {path.parent.parent for path in trials}:
        for config in sorted(job.glob("*/config.json")):
            if config.parent / "result.json" not in trials:
                warnings.warn(f"{config.parent} has no result.json: unfinished, and not counted")
    for path, trial in trials.items():
        agent, result = trial.get("agent_info") or {}, trial.get("agent_result") or {}
        rewards = (trial.get("verifier_result") or {}).get("rewards") or {}
        if rewards and "reward" not in rewards and len(rewards) > 1:
            raise ValueError(f"{path}: several rewards ({', '.join(rewards)}), none of them named reward")
        failure = (trial.get("exception_info") or {}).get("exception_type")
        yield path, {
            "model": (agent.get("model_info") or {}).get("name") or agent.get("name"),
            "task_id": (trial.get("task_name") or "").rpartition("/")[2] or None,  # of org/name, as our ids
            "reward": rewards.get("reward", next(iter(rewards.values()), None)),
            "end": failure or "finished",
            "turns": (result.get("metadata") or {}).get("n_episodes"),
            "sampled_tokens": result.get("n_output_tokens"),
        }


def json_of(path) -> dict:
    try:
        value = json.loads(path.read_bytes())
    except ValueError as e:
        raise ValueError(f"{path}: not JSON: {e}") from None
    return value if isinstance(value, dict) else {}


# ------------------------------------------------------------------------------------------------------------
# report
# ------------------------------------------------------------------------------------------------------------


def pass_at_k(n: int, c: int, k: int) -> float | None:
    """The chance that at least one of k attempts succeeds, from n of which c did; None when k > n.

    Unbiased: 1 - C(n - c, k) / C(n, k), the share of size-k subsets of the attempts that hold a success.
    """
    return None if k > n else 1 - math.comb(n - c, k) / math.comb(n, k)


def statistics(rows: list[dict]) -> dict:
    """The numbers of one model's rows, as fractions. A missing reward counts as 0 unless said."""
    rewards = defaultdict(list)
    for row in rows:
        rewards[row["task_id"]].append(row["reward"])
    counted = [[reward or 0.0 for reward in attempts] for attempts in rewards.values()]
    means = np.array([np.mean(attempts) for attempts in counted])
    present = [[r for r in attempts if r is not None] for attempts in rewards.values()]
    within = [np.var(attempts, ddof=1) / len(attempts) for attempts in counted if len(attempts) > 1]
    ks = range(1, min(map(len, counted)) + 1)
    passed = {k: [pass_at_k(len(a), sum(r >= 1 for r in a), k) for a in counted] for k in ks}
    return {
        "model": rows[0]["model"],
        "tasks": len(means),
        "attempts": len(rows),
        "mean": float(means.mean()),
        # Over tasks: how far the mean would move with other tasks. Over runs: with other attempts at these
        # tasks.
        "se_tasks": float(means.std(ddof=1) / math.sqrt(len(means))) if len(means) > 1 else None,
        "se_runs": float(math.sqrt(sum(within)) / len(means)) if len(within) == len(means) else None,
        "pass_at_k": {str(k): float(np.mean(values)) for k, values in passed.items()},
        "missing": sum(row["reward"] is None for row in rows),
        "mean_without_missing": float(np.mean([np.mean(p) for p in present if p])) if any(present) else None,
    }


def percent(x) -> str:
    return "n/a" if x is None else f"{100 * x:.2f}%"


def print_report(paths: list[str], as_json: bool = False, binary: bool = False):
    """The statistics of each model; with as_json one JSON object a line and nothing else."""
    by_model = read_rows(paths, binary)
    every = [statistics(rows) for rows in by_model.values()]
    if as_json:
        for s in every:
            print(json.dumps(s))
        return
    # pass@k for every k up to 5, then for powers of two; n/a beyond the attempts that every task has.
    most = max(n for rows in by_model.values() for n in Counter(row["task_id"] for row in rows).values())
    ks = [k for k in range(1, most + 1) if k <= 5 or k & (k - 1) == 0 or k == most]
    table = [["model", "tasks", "attempts", "mean", "SE tasks", "SE runs", *(f"pass@{k}" for k in ks),
              "missing", "mean without"]]
    for s in every:
        errors = percent(s["se_tasks"]), percent(s["se_runs"])
        passed = [percent(s["pass_at_k"].get(str(k))) for k in ks]
        table.append([s["model"], s["tasks"], s["attempts"], percent(s["mean"]), *errors, *passed,
                      s["missing"], percent(s["mean_without_missing"])])
    print_table(table)
    print("SE tasks: the mean's standard error over tasks; SE runs: over repeats at these same tasks.\n"
          "A missing reward counts as 0, and is left out in the last column.")
    for model, rows in by_model.items():
        print_details(model, rows)


def print_table(table: list[list]):
    widths = [max(len(str(line[column])) for line in table) for column in range(len(table[0]))]
    for line in table:
        cells = [str(cell).rjust(width) for cell, width in zip(line, widths)]
        print("  ".join([str(line[0]).ljust(widths[0]), *cells[1:]]))


def print_details(model: str, rows: list[dict]):
    """What a model's rows say besides rewards: how episodes ended, their length, the built-in families."""
    lines = []
    if any("end" in row for row in rows):
        ends = Counter(row.get("end") for row in rows).most_common()
        lines.append("ends: " + ", ".join(f"{end} {n}" for end, n in ends))
    if retries := sum(row.get("infra_retries") or 0 for row in rows):
        lines.append(f"tries repeated after an infra error: {retries}")
    if missing := Counter(row.get("error") for row in rows if row["reward"] is None):
        lines.append(f"attempts without reward: {missing.total()}")
        lines += [f"  {n} because of: {reason}" for reason, n in missing.most_common(5) if reason]
    for key, name in (("turns", "turns an episode"), ("sampled_tokens", "tokens sampled an episode")):
        values = [row[key] for row in rows if row.get(key) is not None]
        if values:
            middle = np.median(values)
            lines.append(f"{name}: {np.mean(values):.1f} (median {middle:.0f}, most {max(values)})")
    families = defaultdict(list)
    for row in rows:
        found = re.fullmatch(r"(.+)-(?:train|val|test)-\d+-\d+", row["task_id"])
        families[found and found[1]].append(row)
    if lines:
        print(f"\n{model}\n  " + "\n  ".join(lines))
    if None not in families:
        every = {name: statistics(members) for name, members in sorted(families.items())}
        print_table([["  family", "tasks", "pass@1", "mean"], *(
            [f"  {name}", s["tasks"], percent(s["pass_at_k"]["1"]), percent(s["mean"])]
            for name, s in every.items())])


# ------------------------------------------------------------------------------------------------------------
# compare
# ------------------------------------------------------------------------------------------------------------


def rows_of_one(source: str, binary: bool = False) -> list[dict]:
    """The rows of PATH, or of PATH:MODEL where it holds several models."""
    path, _, model = (source, "", "") if os.path.exists(source) else source.partition(":")
    by_model = read_rows([path], binary)
    if not model and len(by_model) > 1:
        raise ValueError(f"{path} holds several models; say {path}:MODEL, one of {', '.join(by_model)}")
    if model and model not in by_model:
        raise ValueError(f"{path} has no model {model}, only {', '.join(by_model)}")
    return by_model[model or next(iter(by_model))]


def paired(a: list[dict], b: list[dict], resamples: int = 10_000, seed: int = 0) -> dict:
    """B's mean minus A's over the tasks that both have, with its standard error and 95% bootstrap interval.

    Paired by task: how hard a task is cancels out, so the error is smaller than that of two means apart.
    Tasks are what is resampled. """
    means = []
    for rows in (a, b):
        rewards = defaultdict(list)
        for row in rows:
            rewards[row["task_id"]].append(row["reward"] or 0.0)
        means.append({task: float(np.mean(values)) for task, values in rewards.items()})
    tasks = [task for task in means[0] if task in means[1]]
    if not tasks:
        raise ValueError("A and B have no task in common; their task ids must be the same")
    difference = np.array([means[1][task] - means[0][task] for task in tasks])
    rng, n = np.random.default_rng(seed), len(tasks)
    again = [difference[rng.integers(n, size=n)].mean() for _ in range(resamples)]
    low, high = np.percentile(again, [2.5, 97.5])
    return {
        "tasks": n,
        "unpaired": sum(len(m) for m in means) - 2 * n,
        "mean_a": float(np.mean([means[0][task] for task in tasks])),
        "mean_b": float(np.mean([means[1][task] for task in tasks])),
        "difference": float(difference.mean()),
        "se": float(difference.std(ddof=1) / math.sqrt(n)) if n > 1 else None,
        "low": float(low),
        "high": float(high),
        "won": int((difference > 1e-9).sum()),
        "lost": int((difference < -1e-9).sum()),
    }


def compare(args):
    a, b = rows_of_one(args.a, args.binary), rows_of_one(args.b, args.binary)
    c = paired(a, b)
    points = lambda x: "n/a" if x is None else f"{100 * x:+.2f}"  # noqa: E731
    print(f"A: {a[0]['model']}  mean {percent(c['mean_a'])}")
    print(f"B: {b[0]['model']}  mean {percent(c['mean_b'])}")
    print(f"B - A, paired over {c['tasks']} tasks: {points(c['difference'])} points, standard error "
          f"{points(c['se']).lstrip('+')}, 95% bootstrap interval {points(c['low'])} to {points(c['high'])}")
    level = c["tasks"] - c["won"] - c["lost"]
    print(f"B is ahead on {c['won']} tasks, behind on {c['lost']}, level on {level}")
    if missing := sum(row["reward"] is None for row in a + b):
        print(f"{missing} missing rewards count as 0")
    if c["unpaired"]:
        print(f"{c['unpaired']} tasks that only one of the two has are left out")
    if c["low"] <= 0 <= c["high"]:
        print("The difference could be noise: the interval contains 0.")
    else:
        better, worse = ("B", "A") if c["difference"] > 0 else ("A", "B")
        print(f"{better} is better than {worse}; noise alone is unlikely: the interval does not contain 0.")
    if c["tasks"] < 10:
        print(f"But {c['tasks']} tasks are too few for the interval to be trusted.")


# ------------------------------------------------------------------------------------------------------------
# plot
# ------------------------------------------------------------------------------------------------------------

STAGES = {"sft": ("before", "--"), "rl": ("after", "-")}  # run.sh's names of eval files


def plot(args):
    """Draws runs over each other: a run is a folder with metrics.jsonl and eval_*.jsonl, or an eval file.

    Folders whose names differ only in a number at the end of -s0 or -seed0 are one curve: each seed is thin,
    their mean is thick. """
    training, evals = defaultdict(list), defaultdict(list)  # by label; see figures.draw_runs
    for run in map(Path, args.runs):
        if run.is_file():
            for model, rows in read_rows([run]).items():
                evals[model].append((None, "-", None, statistics(rows)))
            continue
        label = re.sub(r"[-_.]s(eed)?[-_]?\d+$", "", run.resolve().name)
        metrics = read_jsonl(run / "metrics.jsonl")
        if not metrics:
            raise ValueError(f"{run}/metrics.jsonl is empty")
        if not {"step", "reward"} <= metrics[0].keys():
            raise ValueError(f"{run}/metrics.jsonl is not dppo.py's")
        training[label].append(metrics)
        for file in sorted(run.glob("eval_*.jsonl"), reverse=True):  # sft before rl
            stage, style = STAGES.get(file.stem[5:], (file.stem[5:], ":"))
            step = {"before": 0, "after": metrics[-1]["step"] + 1}.get(stage)
            for rows in read_rows([file]).values():
                evals[label].append((stage, style, step, statistics(rows)))
    figures.draw_runs(training, evals, args.out)
    print(args.out)


# ------------------------------------------------------------------------------------------------------------


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, metavar="command")

    p = commands.add_parser("run", help="attempt tasks and grade them")
    # what
    p.add_argument("--tasks", required=True, help="tasks.jsonl, a folder of Harbor tasks, or questions.jsonl")
    p.add_argument("--out", required=True, help="eval.jsonl; an existing one is continued")
    p.add_argument("--attempts", type=int, default=5, help="attempts a task")
    p.add_argument("--limit", type=int, help="only the first so many tasks")
    p.add_argument("--no-tools", action="store_true", help="questions: one turn, without a terminal")
    # who
    p.add_argument("--model", required=True, help="checkpoint folder, or a name at the chat endpoint")
    p.add_argument("--engine", default="torch",
                   help="torch, http://HOST:PORT[,...] (vLLM), or chat:URL (key in OPENAI_API_KEY)")
    # how
    p.add_argument("--infra-retries", type=int, default=3, help="tries more when no outcome could be had")
    p.add_argument("--backend", default="auto", choices=["auto", "docker", "bwrap"])
    p.add_argument("--workers", type=int, default=64, help="episodes at the same time")
    p.add_argument("--seed", type=int, default=0)
    rollout.add_sampling_flags(p, temperature=0.7, top_p=0.95)
    p.set_defaults(function=run)

    p = commands.add_parser("report", help="means, errors and pass@k")
    p.add_argument("files", nargs="+", help="eval files, or folders of Harbor job results")
    p.add_argument("--json", action="store_true", help="one JSON object a model")
    p.add_argument("--binary", action="store_true", help="a reward below 1 counts as 0")
    p.set_defaults(function=lambda args: print_report(args.files, args.json, args.binary))

    p = commands.add_parser("compare", help="is B better than A? Paired by task")
    p.add_argument("a", help="eval file or Harbor job folder; FILE:MODEL where it holds several models")
    p.add_argument("b")
    p.add_argument("--binary", action="store_true", help="a reward below 1 counts as 0")
    p.set_defaults(function=compare)

    p = commands.add_parser("plot", help="training curves and pass@k, several runs over each other")
    p.add_argument("runs", nargs="+", help="folders with metrics.jsonl and eval_*.jsonl, or eval files")
    p.add_argument("--out", required=True, help="PNG")
    p.set_defaults(function=plot)

    p = commands.add_parser("show", help="a page to read episodes in")
    p.add_argument("rollouts", help="rollouts.jsonl, or an eval file")
    p.add_argument("--out", required=True, help="page.html")
    p.add_argument("--model", help="folder with the tokenizer, where the records' own model is not one")
    p.set_defaults(function=lambda args: print(page.write_page(args.rollouts, args.out, args.model)))

    p = commands.add_parser("export-atif", help="rollouts or eval rows as Harbor's trajectories")
    p.add_argument("file", help="rollouts.jsonl or eval.jsonl")
    p.add_argument("dir", help="gets a JSON file a record")
    p.set_defaults(function=lambda args: print(f"{args.dir}: {export_atif(args.file, args.dir)} written"))

    args = parser.parse_args()
    try:
        args.function(args)
    except KeyboardInterrupt:
        sys.exit("eval.py: stopped; finished attempts are kept, the same command continues")
    except (InfraError, ValueError, OSError) as e:
        sys.exit(f"eval.py: {e}")


if __name__ == "__main__":
    main()
