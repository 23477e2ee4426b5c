"""How good is a policy, and how sure can one be: attempts at held-out tasks, and the statistics on them.

    python eval.py run --tasks test.jsonl --model ckpt --attempts 5 --out eval.jsonl   # plays and grades
    python eval.py report eval.jsonl [more.jsonl ...] [--json]                         # means, errors, pass@k
    python eval.py plot runs/demo --out curve.png                                      # learning curves
    python eval.py export-atif rollouts.jsonl DIR                                      # for Harbor

`run` plays every task several times through rollout.py, with the paper's evaluation settings, and grades
every episode. `report` groups rows by model; a row needs only model, task_id and reward, so results from
elsewhere can be read too. Statistics are over tasks, because tasks, not attempts, are what a benchmark
samples (DESIGN "Statistics").

Left out: paired comparisons, Harbor folders and the trajectory page. """

import argparse
import json
import math
import os
import re
import sys
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
from tqdm import tqdm

import rollout
from extras.harbor import export_atif
from sandbox import InfraError, JsonlWriter, read_jsonl, resolve_backend

TOKEN_FIELDS = ("token_ids", "loss_mask", "logprobs", "policy_versions")


# ------------------------------------------------------------------------------------------------------------
# run
# ------------------------------------------------------------------------------------------------------------


def run(args):
    tasks = rollout.load_checked_tasks(args.tasks)[: args.limit]
    sampling = rollout.sampling_from(args)
    finished = read_jsonl(args.out) if os.path.exists(args.out) else []
    if others := {r["model"] for r in finished} - {args.model}:
        raise ValueError(f"{args.out} holds attempts of {', '.join(sorted(others))}; choose another --out")
    backend = resolve_backend(args.backend)
    engine, chat = rollout.make_engine(args.engine, args.model)
    done = {(r["task_id"], r["attempt"]) for r in finished}
    jobs = [(g, t, k) for g, t in enumerate(tasks) for k in range(args.attempts) if (t["id"], k) not in done]
    rewards = [r["reward"] for r in finished]

    def play(job):
        group, task, attempt = job
        for _ in range(1 + args.infra_retries):  # only what is ours to fix is tried again
            record = rollout.run_episode(task, engine, chat, sampling, seed=args.seed, group=group,
                                         sample=attempt, model=args.model, backend=backend, grade="always")
            if record["end"] != "infra_error":
                break
        return {"attempt": attempt, **{k: v for k, v in record.items() if k not in TOKEN_FIELDS}}

    with JsonlWriter(args.out) as out, tqdm(total=len(jobs) + len(done), initial=len(done), unit="ep") as bar:
        for row in rollout.run_jobs(jobs, play, args.workers):
            out.write(row)
            rewards.append(row["reward"])
            if row["reward"] is None:
                tries = f"{1 + args.infra_retries} tries"
                tqdm.write(f"{row['task_id']}: no outcome after {tries}: {row['error']}")
            bar.set_postfix(mean=f"{np.mean([r or 0 for r in rewards]):.3f}", refresh=False)
            bar.update()
    print_report([args.out])


# ------------------------------------------------------------------------------------------------------------
# report
# ------------------------------------------------------------------------------------------------------------


def read_rows(paths: list[str]) -> dict[str, list[dict]]:
    """Eval rows by model, in order of appearance. ValueError for what cannot be counted."""
    by_model, seen = defaultdict(list), set()
    for path in paths:
        for number, row in enumerate(read_jsonl(path), 1):
            where = f"{path}: row {number}"
            for key in ("model", "task_id", "reward"):
                if key not in row:
                    raise ValueError(f"{where} has no {key}")
            reward = row["reward"]
            if reward is not None and not (isinstance(reward, (int, float)) and 0 <= reward <= 1):
                raise ValueError(f"{where}: reward {reward!r} is not a number from 0 to 1, or null")
            key = (row["model"], row["task_id"], row.get("attempt"))
            if key[2] is not None and key in seen:
                raise ValueError(f"{where}: attempt {key[2]} of {key[1]} by {key[0]} is there twice")
            seen.add(key)
            by_model[row["model"]].append(row)
    if not by_model:
        raise ValueError(f"no rows in {', '.join(paths)}")
    return by_model


def pass_at_k(n: int, c: int, k: int) -> float | None:
    """The chance that at least one of k attempts succeeds, from n of which c did; None when k > n.

    Unbiased: 1 - C(n - c, k) / C(n, k), the share of size-k subsets of the attempts that hold a success.
    """
    return None if k > n else 1 - math.comb(n - c, k) / math.comb(n, k)


def statistics(rows: list[dict]) -> dict:
    """The numbers of one model's rows, as fractions. A missing reward counts as 0 but where the name says not."""
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


def family(task_id: str) -> str | None:
    """A built-in task's family, from its id."""
    found = re.fullmatch(r"(.+)-(?:train|val|test)-\d+-\d+", task_id)
    return found and found[1]


def print_report(paths: list[str], as_json: bool = False):
    """The statistics of each model; with as_json one JSON object a line and nothing else."""
    percent = lambda x: "n/a" if x is None else f"{100 * x:.2f}%"  # noqa: E731
    for rows in read_rows(paths).values():
        s = statistics(rows)
        if as_json:
            print(json.dumps(s))
            continue
        print(f"{s['model']}: {s['tasks']} tasks, {s['attempts']} attempts")
        print(f"  mean {percent(s['mean'])}   standard error {percent(s['se_tasks'])} over tasks, "
              f"{percent(s['se_runs'])} over runs")
        print("  " + "   ".join(f"pass@{k} {percent(p)}" for k, p in s["pass_at_k"].items()))
        if s["missing"]:
            print(f"  {s['missing']} attempts have no reward and count as 0; "
                  f"without them the mean is {percent(s['mean_without_missing'])}")
        if any("end" in row for row in rows):
            ends = Counter(row.get("end") for row in rows).most_common()
            print("  ends: " + ", ".join(f"{end} {n}" for end, n in ends)
                  + f"; {np.mean([row.get('turns', 0) for row in rows]):.1f} turns an episode")
        families = defaultdict(list)
        for row in rows:
            families[family(row["task_id"])].append(row)
        if None not in families:
            print("  family            pass@1    mean")
            for name, members in sorted(families.items()):
                one = statistics(members)
                print(f"  {name:<16} {percent(one['pass_at_k']['1']):>7} {percent(one['mean']):>7}")


# ------------------------------------------------------------------------------------------------------------
# plot
# ------------------------------------------------------------------------------------------------------------


def plot(args):
    """Learning curves of runs: reward and held-out pass@1, and how far trainer and sampler were apart."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 3.8), layout="constrained")
    for number, folder in enumerate(args.runs):
        metrics = read_jsonl(Path(folder) / "metrics.jsonl")
        if not metrics:
            raise ValueError(f"{folder}/metrics.jsonl is empty")
        if "reward" not in metrics[0]:
            raise ValueError(f"{folder}/metrics.jsonl is not dppo.py's")
        steps = [m["step"] + 1 for m in metrics]
        color, label = f"C{number}", Path(folder).name + ": " if len(args.runs) > 1 else ""
        reward = [m["reward"] for m in metrics]
        left.plot(steps, reward, color=color, alpha=0.4, label=f"{label}training reward")
        held_out = [(m["step"] + 1, m["eval_pass1"]) for m in metrics if "eval_pass1" in m]
        if held_out:
            left.plot(*zip(*held_out), "o-", color=color, markersize=4, label=f"{label}pass@1, validation")
        for file, step, marker in (("eval_sft.jsonl", 0, "s"), ("eval_rl.jsonl", steps[-1], "D")):
            if (Path(folder) / file).exists():
                s = statistics(read_jsonl(Path(folder) / file))
                label_once = "pass@1, test tasks" if number == 0 and step == 0 else None
                left.errorbar([step], [s["pass_at_k"]["1"]], [s["se_tasks"] or 0], fmt=marker, color="black",
                              capsize=3, label=label_once)
        right.plot(steps, [m["logprob_diff_mean"] for m in metrics], color=color,
                   label=f"{label}mean |log-prob difference|")
        kept = [min(m["kept_positive"], m["kept_negative"]) for m in metrics]
        cut = [1 - k for k in kept]
        right.plot(steps, cut, "--", color=color, label=f"{label}share of tokens cut (larger sign)")
    left.set(xlabel="optimiser step", ylabel="reward, pass@1", ylim=(0, 1), title="Learning")
    right.set(xlabel="optimiser step", title="Trainer against sampler")
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    figure.savefig(args.out, dpi=130)
    print(args.out)


# ------------------------------------------------------------------------------------------------------------


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, metavar="command")

    p = commands.add_parser("run", help="attempt tasks and grade them")
    p.add_argument("--tasks", required=True, help="tasks.jsonl")
    p.add_argument("--model", required=True, help="checkpoint folder, or a name at the chat endpoint")
    p.add_argument("--out", required=True, help="eval.jsonl; an existing one is continued")
    p.add_argument("--engine", default="torch", help="torch, or chat:URL (key in OPENAI_API_KEY)")
    p.add_argument("--attempts", type=int, default=5, help="attempts a task")
    p.add_argument("--limit", type=int, help="only the first so many tasks")
    p.add_argument("--infra-retries", type=int, default=3, help="tries more when no outcome could be had")
    p.add_argument("--backend", default="auto", choices=["auto", "docker", "bwrap"])
    p.add_argument("--workers", type=int, default=64, help="episodes at the same time")
    p.add_argument("--seed", type=int, default=0)
    rollout.add_sampling_flags(p, temperature=0.7, top_p=0.95)
    p.set_defaults(function=run)

    p = commands.add_parser("report", help="means, errors and pass@k of eval files")
    p.add_argument("files", nargs="+")
    p.add_argument("--json", action="store_true", help="one JSON object a model")
    p.set_defaults(function=lambda args: print_report(args.files, args.json))

    p = commands.add_parser("plot", help="learning curves of training runs")
    p.add_argument("runs", nargs="+", help="folders with metrics.jsonl")
    p.add_argument("--out", required=True, help="PNG")
    p.set_defaults(function=plot)

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
