"""Tasks: where the pipeline starts. Each command writes Task records, one JSON object a line.

    python gen.py builtin --n 640 --seed 0 --split train --out tasks.jsonl
    python gen.py sample --n 1000 --seed 0 --preset sft_v2 --out specs.jsonl
    python gen.py bases
    python gen.py make --specs specs.jsonl --base-url https://host/v1 --model gpt-x --out tasks.jsonl
    python gen.py check tasks.jsonl --check solve
    python gen.py stats tasks.jsonl --against benchmark/ --plot domains.png
    python gen.py export-harbor tasks.jsonl DIR
    python gen.py import-harbor DIR --out tasks.jsonl
    python gen.py import-tmax rows.jsonl task-data.tar.gz --out tasks.jsonl

builtin   the demo's families (builtin/families.py); no LLM, no network; same arguments, same bytes
sample    specs of tasks: one value from each axis of taxonomy.json, which an LLM then turns into a task
bases     builds the images of Dockerfile.base that tasks start from
make      has a language model write a task for each spec, and keeps those that build, fail and can be solved
check     tries the tasks of any file in the same way
stats     what a corpus is made of: balance over the axes, lengths, overlap with a benchmark
*-harbor  Harbor's task folders, out and in; import-tmax: the published TMax-15K (extras/harbor.py)
"""
import argparse
import ast
import io
import json
import os
import re
import sys
import threading
import time
from collections import Counter
from itertools import product
from pathlib import Path

from tqdm import tqdm

import rollout
import sandbox
from backends.docker import docker_api, docker_errors, docker_hosts
from builtin.families import FAMILIES, make_task
from extras.corpus import benchmark_texts, corpus_statistics, plot_domains, stats_lines
from extras.harbor import export_harbor, import_harbor, import_tmax
from records import LIMITS, JsonlWriter, check_task, copy_sources, dockerfile_lines, load_tasks, read_jsonl
from sandbox import InfraError
from taxonomy import (AXES, STRUCTURE, TAXONOMY, axis_values, load_taxonomy, parse_weights, sample_specs,
                      share_table)

HERE = Path(__file__).parent


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
# sample

def sample(args):
    try:
        if args.n < 1:
            raise ValueError(f"--n {args.n}: ask for at least one spec")
        taxonomy, weights = load_taxonomy(args.taxonomy), parse_weights(args.weight)
        specs = sample_specs(args.n, args.seed, args.preset, taxonomy, weights)
        write_tasks(args.out, specs)
    except (ValueError, OSError) as e:
        sys.exit(f"gen.py sample: {e}")
    print(*share_table(specs, taxonomy, args.preset, weights), sep="\n")
    print(f"{args.out}: {len(specs)} specs")


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
    with docker_errors(f"tmax-base:{stage} at {host}"):
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
# make: what the model is told

TASK_PROMPT = """\
You write tasks that teach an AI agent to work in a Linux terminal. A task has an instruction, which is all
that the agent is told; an environment, a container that it works in; a verifier, which grades what the agent
leaves behind; and a reference solution. Write one task along these lines:

domain: {domain}
kind of skill: {skill_type}
skills it must call for: {skills}
who asks, and so in what tone and setting: {persona}
language of any code: {language}
length: {task_complexity}. {task_complexity_is}
means: {command_complexity}. {command_complexity_is}
fixture, the material at its heart: {fixture}. {fixture_is}
verifier: {verifier}. {verifier_is}

What makes a task good:
- One definite outcome. The instruction names each path (absolute), format, port and threshold that is graded.
- It gives away neither the answer nor the way there. It never mentions the verifier, the tests or this text.
- The agent is the user `user`, who owns /app and starts there. It has no root, no internet, one CPU, 2 GB of
  memory, and two minutes a command. What is graded lies below /app or is served on a port above 1024.
- Nothing depends on the date, on chance without a seed, or, unless speed is graded, on the machine's speed.
- You will have to write everything it needs as text: sources, data, scripts that make data. Small is fine,
  trivial is not: let the data have the irregularities that such data has in practice.

First write the task alone; its environment and verifier come next. Reply with these sections and nothing
else, each tag on a line of its own:

<instruction>
what the agent is told
</instruction>
<truth>
what only you and the verifier know: the right answer, with the figures, texts or behaviours that are graded
</truth>
{fixture_part}"""

FIXTURE_PART = """\
<fixture>
one JSON object, the declaration of the fixture as described here:
</fixture>

The fixture is made from its declaration while the image is built. Only the artefact itself will be in the
image, never the declaration: put into it what the agent has to find out, and nothing of it into other files.

{contract}
"""

ENVIRONMENT_PROMPT = """\
Good. Now its environment, verifier and reference solution: these sections and nothing else, each tag on a
line of its own; `file` and `test` as often as you need them, or not at all:

<dockerfile>
the lines that follow FROM: COPY, RUN, ENV, WORKDIR. They run as root, in /app.
</dockerfile>
<file path="data/readings.csv">
one file of the build context
</file>
<verifier>
one JSON object, the declaration of the verifier as described below
</verifier>
<test path="expected.txt">
one file for the verifier alone; it will lie in /tests, which exists only while grading
</test>
<solution>
a bash script that solves the task as the agent would: as `user`, in /app, without internet, in two minutes
</solution>

- COPY takes your own files, each by its name or by that of its folder; it never takes a whole context.
- Neither answers nor tests nor the solution may be in the image. In the end /app is made over to `user`.
- {fixture_note}
- Before anybody has done anything, the verifier must give less than 1, and must not crash. After the solution
  it must give exactly 1, every time.
- The image that FROM names was built like this; packages beyond it you install in a RUN (apt-get, pip):

{base}

The verifier, {verifier}:

{contract}
"""

REPAIR_PROMPT = """\
That cannot be used: {complaint}

Correct it, and send the whole reply again, every section of it, with nothing else around them."""


# ------------------------------------------------------------------------------------------------------------
# make: what comes back

ONCE, OFTEN = "instruction|truth|fixture|dockerfile|verifier|solution", "file|test"
SECTION = re.compile(rf'^<({ONCE}|{OFTEN})(?: path="([^"\n]*)")?>[ \t]*\n(.*?)^</\1>[ \t]*$', re.M | re.S)
OPENING = re.compile(rf'^(<({ONCE})>|<({OFTEN}) path="[^"\n]*">)[ \t]*$', re.M)
TAG = re.compile(rf"^[ \t]*</?({ONCE}|{OFTEN})\b.*", re.M)
INSTRUCTIONS = "COPY", "ADD", "RUN", "ENV", "WORKDIR", "ARG", "SHELL"
FIXTURE_STAGE = """\
FROM {base}:fixtures AS fixture
COPY fixture/ /fixture/
RUN python3 /fixture/make.py /fixture/fixture.json /out
"""
KNOBS = {  # the fields of a declaration that make its verifier harder; of a list or an object, its length
    "exact_text": ["files"], "metric_threshold": ["threshold"], "adversarial_corpus": ["malicious", "benign"],
    "fuzz_equivalence": ["n"], "multi_protocol": ["checks"]}


class Rejected(Exception):
    """What a model has sent cannot be used. reason: the word that it is counted under; the message is for the
    model."""

    def __init__(self, reason, message, checked=None):
        super().__init__(message)
        self.reason, self.checked = reason, checked or {}


def malformed(what):
    raise Rejected("format", what)


def parse_reply(text, once, many=()):
    """A reply's sections: {name: text} for those that come once, {name: {path: text}} for the others.

    Strict, since what is guessed at here is a broken task later. Thinking before the answer is skipped, and a
    section that stands in a code fence as a whole is taken out of it; talk between sections does no harm."""
    if re.search("[\0\ufffd\ud800-\udfff]", text):
        malformed("it is not valid UTF-8 text")
    text = (text.partition("</think>")[2] or text).replace("\r\n", "\n")
    parts = {name: {} for name in many}
    for name, path, body in SECTION.findall(text):
        if inner := OPENING.search(body):
            malformed(f"<{name}> is not closed before {inner[0].strip()[:80]}")
        if name not in (*once, *many) or (name in many) != bool(path):
            malformed(f"there must be no <{name}> with{'' if path else 'out'} a path here")
        if path in parts[name] if name in many else name in parts:
            malformed(f"there are two sections <{name}{f' path={path}' * bool(path)}>; give one answer")
        lines = body.strip().split("\n")
        if lines[0].startswith("```") and name not in ("instruction", "truth"):
            if lines[-1].strip() != "```" or len(lines) < 2:
                malformed(f"the code fence in <{name}> does not end with the section")
            body = "\n".join(lines[1:-1]) + "\n"
        if name in many:
            parts[name][path] = body
        else:
            parts[name] = body.strip()
    if stray := TAG.search(SECTION.sub("", text)):
        malformed(f"{stray[0].strip()[:80]}: each tag stands on its own line, and each section is closed")
    for name in once:
        if name not in parts or not parts[name] and name != "dockerfile":
            malformed(f"the section <{name}> is missing or empty")
    return parts


def parse_json(name, text):
    try:
        value = json.loads(text, parse_constant=lambda word: malformed(f"<{name}>: {word} is no JSON"))
    except (ValueError, RecursionError) as e:
        malformed(f"<{name}> is not valid JSON: {e}")
    return value if isinstance(value, dict) else malformed(f"<{name}> must be one JSON object")


PARSER = threading.Lock()  # Python 3.11's raises a SystemError now and then where two threads are in it


def recipe(kind, folder):
    """A fixture's or verifier's script, which goes into the task, and its docstring, which the model sees."""
    path = HERE / folder / f"{kind}.py"
    if not path.exists():
        raise ValueError(f"{kind!r} has no recipe: write {folder}/{kind}.py")
    text = path.read_text(encoding="utf-8")
    with PARSER:
        return text, ast.get_docstring(ast.parse(text))


def fixture_task(spec, declaration, base):
    """The stage that makes a fixture, as something to build."""
    declaration = json.dumps(declaration, ensure_ascii=False, indent=1)
    return {"id": spec["id"], "dockerfile": FIXTURE_STAGE.format(base=base),
            "files": {"fixture/make.py": {"text": recipe(spec["axes"]["fixture"], "fixtures")[0]},
                      "fixture/common.py": {"text": recipe("common", "fixtures")[0]},
                      "fixture/fixture.json": {"text": declaration}}}


def check_dockerfile(text, files):
    """The model's lines may take its own files along and nothing else: no declaration, no other stage."""
    for line in dockerfile_lines(text):
        word, rest = (line.split(None, 1) + [""])[:2]
        if word.upper() not in INSTRUCTIONS:
            malformed(f"<dockerfile> must not have {word}, only {', '.join(INSTRUCTIONS)}")
        options = re.match(r"(?:--\S+\s+)*", rest)[0]
        copies = word.upper() in ("COPY", "ADD")
        if re.sub(r"--(chown|chmod)=\S+", "", options).strip() or options and not copies:
            malformed(f"<dockerfile>: {word} {options.strip()}: no options but COPY's --chown and --chmod")
        if not copies:
            continue
        rest = rest[len(options):]
        try:
            sources = (json.loads(rest) if rest.startswith("[") else rest.split())[:-1]
        except (ValueError, RecursionError):
            sources = [rest]
        for source in map(str, sources):  # plain names and *: no quoting or variable means another file
            taken = [path for path, _ in copy_sources(files, [source]).values()]
            if not re.fullmatch(r"[\w./*@+,-]+", source) or not taken:
                malformed(f"<dockerfile>: {word} {source}: name files that you gave, in plain letters")
            if any(path.startswith("fixture/") for path in taken):
                malformed(f"<dockerfile>: {word} {source} would take the fixture's declaration into the "
                          "image; name your own files one by one")


def assemble(spec, plan, parts, base):
    """The Task record (DESIGN "Records") that the sections of both replies make."""
    axes, declaration = spec["axes"], parse_json("verifier", parts["verifier"])
    files = {path: {"text": text, "mode": "755" if text.startswith("#!") else "644"}
             for path, text in parts["file"].items()}
    tests = {"test.sh": {"text": "python3 /tests/verifier.py /tests/verifier.json\n"},
             "verifier.py": {"text": recipe(axes["verifier"], "verifiers")[0]},
             "verifier.json": {"text": json.dumps(declaration, ensure_ascii=False, indent=1)},
             "harness.py": {"text": recipe("harness", "verifiers")[0]}}
    for path in (*files, *parts["test"]):
        if path.split("/")[0] in (*tests, "fixture", ".dockerignore"):
            malformed(f"the path {path} is not yours to write; choose another")
    if leak := [path for path, text in parts["file"].items() if parts["solution"] in text]:
        malformed(f"<file path={leak[0]}> has the solution in it")
    stage = copy = ""
    if axes["fixture"] != "text_only":
        fixture = fixture_task(spec, plan["fixture"], base)
        files |= fixture["files"]
        stage, copy = fixture["dockerfile"], "COPY --from=fixture /out/ /\n"
    check_dockerfile(parts["dockerfile"], files)
    knob = {}
    for name in KNOBS.get(axes["verifier"], []):
        value = declaration[name] if name in declaration else malformed(f"<verifier> does not declare {name}")
        knob[name] = len(value) if isinstance(value, (list, dict)) else value
    return {
        "id": spec["id"], "instruction": plan["instruction"], "axes": axes, "knob": knob,
        "dockerfile": f"{stage}FROM {base}:{axes['domain']}\nWORKDIR /app\n{copy}{parts['dockerfile']}\n"
                      "RUN chown -R user:user /app\nWORKDIR /app\n",
        "files": files, "tests": tests | {path: {"text": text} for path, text in parts["test"].items()},
        "solution": {"solve.sh": {"text": parts["solution"] + "\n"}},
        "truth": plan["truth"], "user": "user", "limits": dict(LIMITS)}


# ------------------------------------------------------------------------------------------------------------
# check: nothing is kept that was not run

LEVELS = "build", "verify", "solve"


def try_task(task, level, backend):
    """What came of running a task, as far as level goes: {"build": True, "untouched": reward, "solution":
    [reward, reward]}. Rejected has the exact output where it is no good; InfraError is not its fault."""
    checked = {}

    def graded(reason, when, act):
        """The reward after act(sandbox), and what verifier and act have printed."""
        try:
            with sandbox.Sandbox(task, backend) as box:
                said = act(box)
                reward, fault, log = box.verify()
        except sandbox.AgentFault as e:
            raise Rejected(reason, f"{when} the sandbox ended: {e}", checked) from None
        if fault:
            raise Rejected("verifier", f"{when} {fault}; the verifier's output:\n{log}\n{said}", checked)
        return reward, f"The verifier's output:\n{log}\n{said}"

    def solve(box):
        result = box.run(rollout.solution_command(task))
        return f"The solution's output:\n{rollout.observation(result)}"

    try:
        check_task(task)
        sandbox.prepare(task, backend)
        checked["build"] = True
        if level != "build":
            reward, said = graded("verifier", "before anybody has done anything", lambda box: "")
            checked["untouched"] = reward
            if reward >= 1:
                raise Rejected("untouched", f"before anybody has done anything the reward is 1. {said}",
                               checked)
        if level == "solve":
            checked["solution"] = []
            for _ in range(2):           # twice, since a verifier that wavers would teach nothing
                if not task.get("solution"):
                    raise Rejected("solution", "there is no reference solution", checked)
                reward, said = graded("solution", "after the reference solution", solve)
                checked["solution"].append(reward)
                if reward < 1:
                    raise Rejected("solution", f"after the reference solution the reward is {reward}. {said}",
                                   checked)
    except sandbox.TaskError as e:
        raise Rejected("build", str(e), checked) from None
    return checked


class Stop(Exception):
    """Nothing can follow: the money is spent, or the endpoint takes no calls."""


def run_all(jobs, function, workers, keep, drop, note=lambda: ""):
    """function(job) on many threads; keep(what it returns), or drop(job, its Rejected). Where neither model
    nor task is at fault (endpoint, engine), the job is left for the next run; three of those in a row end
    this one. Returns the counts by outcome, and why it has stopped or None."""
    why, counts, in_a_row = [], Counter(), 0

    def attempt(job):
        if why:
            return job, "left", None
        try:
            return job, "kept", function(job)
        except Rejected as e:
            return job, e.reason, e
        except Stop as e:
            why.append(str(e))
            return job, "left", None
        except InfraError as e:
            return job, "left", e

    with tqdm(total=len(jobs), unit="task") as bar:
        for job, outcome, result in rollout.run_jobs(jobs, attempt, workers):
            counts[outcome] += 1
            in_a_row = in_a_row + 1 if outcome == "left" else 0
            if outcome == "kept":
                keep(result)
            elif outcome != "left":
                drop(job, result)
            elif result:
                tqdm.write(f"{job['id']} is left for the next run: {result}")
                if in_a_row == 3 and not why:
                    why.append(f"three in a row failed through no fault of theirs, the last with: {result}")
            bar.set_postfix_str(outcomes(counts) + note(), refresh=False)
            bar.update(outcome != "left")
    return counts, why[0] if why else None


def outcomes(counts):
    reasons = [f"{reason} {n}" for reason, n in counts.most_common() if reason not in ("kept", "left")]
    dropped = sum(counts.values()) - counts["kept"] - counts["left"]
    return (f"{counts['kept']} kept, {dropped} dropped" + f" ({', '.join(reasons)})" * bool(reasons)
            + f", {counts['left']} left" * bool(counts["left"]))


def open_out(out):
    """The files of a run, tasks.jsonl and tasks.dropped.jsonl, and the ids that they hold already."""
    paths = Path(out), Path(out).with_suffix(".dropped.jsonl")
    paths[0].parent.mkdir(parents=True, exist_ok=True)
    kept, dropped = map(JsonlWriter, paths)             # which cut off what a killed run has torn
    return kept, dropped, {record["id"] for path in paths for record in read_jsonl(path)}


def check(args):
    tasks, backend = load_tasks(args.tasks), sandbox.resolve_backend(args.backend)
    kept, dropped, done = open_out(args.out) if args.out else (None, None, ())

    def keep(task):
        if kept:
            kept.write(task)

    def drop(task, e):
        tqdm.write(f"{task['id']}: {e.reason}: {e}")
        if dropped:
            dropped.write({"id": task["id"], "axes": task.get("axes"), "reason": e.reason, "detail": str(e),
                           "checked": e.checked})

    jobs = [task for task in tasks if task["id"] not in done]
    counts, why = run_all(jobs, lambda task: task | {"checked": try_task(task, args.check, backend)},
                          args.workers, keep, drop)
    print(f"{args.tasks}: {outcomes(counts)}; {len(tasks) - len(jobs)} had been done before")
    if why:
        sys.exit(f"gen.py check: stopped: {why}")
    sys.exit(counts["kept"] < len(jobs))


# ------------------------------------------------------------------------------------------------------------
# make

class Client:
    """The endpoint and its bill, for many threads."""

    def __init__(self, args):
        self.engine, self.args = rollout.ChatEngine(args.base_url, args.model), args
        self.calls, self.tokens, self.spent, self.in_flight = 0, [0, 0], 0.0, []
        self.room = threading.Condition()
        self.trying = threading.Semaphore(os.cpu_count())    # calls only wait, but builds and tests compute

    def cost(self, tokens):
        return ((self.args.price_in or 0) * tokens[0] + (self.args.price_out or 0) * tokens[1]) / 1e6

    def ask(self, messages, seed, made):
        """The next message and why it ended. A call starts only if --max-cost holds even when it and all
        those in flight cost the most they can, where each byte of a prompt is a token."""
        size = sum(len(m["content"].encode("utf-8", "surrogatepass")) + 100 for m in messages)
        limit, worst, tokens = self.args.max_cost, self.cost([size, self.args.max_reply_tokens]), [0, 0]

        def fits():
            return limit is None or self.spent + sum(self.in_flight) + worst <= limit

        with self.room:
            self.room.wait_for(lambda: fits() or not self.in_flight)
            if not fits():
                raise Stop(f"--max-cost {limit:g}: ${self.spent:.4f} spent, and the next call may take "
                           f"${worst:.4f}")
            self.in_flight.append(worst)
        try:
            message, finish, usage = self.engine.post({
                "model": self.args.model, "messages": messages, "max_tokens": self.args.max_reply_tokens,
                "temperature": self.args.temperature, "seed": seed % 2**31})
            tokens[0] = usage.get("prompt_tokens") or size // 4           # a guess if the server does not say
            said = usage.get("completion_tokens") or len(str(message).encode()) // 4
            tokens[1] = max(said, (usage.get("total_tokens") or 0) - tokens[0])   # some leave thinking out
        except rollout.EndpointError as e:
            if e.status in (0, 401, 403, 404):
                raise Stop(str(e)) from None
            if 400 <= e.status < 500 and e.status not in (408, 409, 429):
                raise Rejected("endpoint", str(e)) from None              # it will not take this very prompt
            raise
        finally:
            with self.room:
                self.in_flight.remove(worst)
                self.calls, self.spent = self.calls + 1, self.spent + self.cost(tokens)
                self.tokens = [a + b for a, b in zip(self.tokens, tokens)]
                self.room.notify_all()
        made["calls"], made["tokens"] = made["calls"] + 1, [a + b for a, b in zip(made["tokens"], tokens)]
        return message, finish

    def bill(self):
        cost = f", ${self.spent:.2f}" * (self.args.price_in is not None or self.args.price_out is not None)
        return f"{self.calls} calls, {self.tokens[0]:,} + {self.tokens[1]:,} tokens{cost}"


def clip(text, ends=3000):
    """Both ends of an output that a model is told of."""
    return text if len(text) <= 2 * ends else f"{text[:ends]}\n[...]\n{text[-ends:]}"


def generate(spec, client, taxonomy, args):
    """A task of a spec: two replies that are good enough, and try_task. Rejected, with the last reply, when
    its repairs are used up."""
    axes, fixture = spec["axes"], spec["axes"]["fixture"]
    made, history, last = {"model": args.model, "calls": 0, "repairs": 0, "tokens": [0, 0]}, [], ""

    def step(prompt, accept):
        """Asks until accept(reply) takes it. The model sees the talk so far and its latest attempt."""
        nonlocal history, last
        question, attempt = [*history, {"role": "user", "content": prompt}], []
        while True:
            seed = rollout.derive_seed(spec["id"], made["calls"])
            message, finish = client.ask(question + attempt, seed, made)
            last = message["content"] if isinstance(message["content"], str) else ""
            reply = {"role": "assistant", "content": last}
            try:
                if message.get("refusal") or finish == "content_filter":
                    raise Rejected("refused", message.get("refusal") or "the endpoint withheld the reply")
                if finish == "length":
                    raise Rejected("cut", f"it was cut at {args.max_reply_tokens} tokens; be briefer")
                result = accept(last)
            except Rejected as e:
                if made["repairs"] == args.repairs:
                    raise
                made["repairs"] += 1
                complaint = REPAIR_PROMPT.format(complaint=clip(str(e)))
                attempt = [reply, {"role": "user", "content": complaint}]
            else:
                history = [*question, reply]
                return result

    def accept_plan(reply):
        plan = parse_reply(reply, ["instruction", "truth"] + ["fixture"] * (fixture != "text_only"))
        if fixture != "text_only":
            plan["fixture"] = parse_json("fixture", plan["fixture"])
            try:
                with client.trying:      # made right away, while the model can still change it
                    sandbox.prepare(fixture_task(spec, plan["fixture"], args.base), "docker")
            except sandbox.TaskError as e:
                raise Rejected("fixture", str(e)) from None
        return plan

    def accept_environment(reply):
        parts = parse_reply(reply, ["dockerfile", "verifier", "solution"], ["file", "test"])
        task = assemble(spec, plan, parts, args.base)
        with client.trying:
            return task | {"checked": try_task(task, args.check, "docker"), "made": made}

    try:
        texts = {axis + "_is": taxonomy[axis][axes[axis]] for axis in STRUCTURE[1:]}
        contract = "" if fixture == "text_only" else recipe(fixture, "fixtures")[1]
        plan = step(TASK_PROMPT.format(
            **axes, **texts, skills="; ".join(axes["primitive_skills"]),
            fixture_part=FIXTURE_PART.format(contract=contract) if contract else ""), accept_plan)
        return step(ENVIRONMENT_PROMPT.format(
            base=base_stages()[axes["domain"]], verifier=axes["verifier"],
            contract=recipe(axes["verifier"], "verifiers")[1],
            fixture_note="The fixture's artefact is in place already when your lines run." if contract else
                         "There is no fixture but your own files."), accept_environment)
    except Rejected as e:
        e.reply, e.made = last, made
        raise


def checked_specs(specs, taxonomy, source):
    """The specs as they are. ValueError says which is the first that cannot be used."""
    seen = set()
    for spec in specs:
        name, axes = spec.get("id"), spec.get("axes")
        if not isinstance(name, str) or not re.fullmatch(r"\w[\w.-]*", name):
            raise ValueError(f"{source}: the id {name!r} names files: letters, digits, '.', '_' and '-' only")
        if name in seen:
            raise ValueError(f"{source}: there are two specs with the id {name}")
        if not isinstance(axes, dict) or set(AXES) - set(axes):
            raise ValueError(f"{source}: spec {name} needs axes: {', '.join(AXES)}")
        for axis in STRUCTURE:
            if axes[axis] not in axis_values(taxonomy, axis):
                raise ValueError(f"{source}: spec {name}: the taxonomy has no {axis} {axes[axis]!r}")
        for rule in taxonomy["incompatible"]:
            if all(axes[axis] in values for axis, values in rule.items() if axis != "why"):
                raise ValueError(f"{source}: spec {name}: its values do not go together: {rule['why']}")
        for axis in ("fixture", "verifier"):
            if axes[axis] != "text_only":
                recipe(axes[axis], axis + "s")
        seen.add(name)
    return specs


def need_images(images):
    """Looks for the base images before any call is paid."""
    advice = [("(?i)no such image|not known", "`python gen.py bases` builds the base images")]
    for host, image in product(docker_hosts(), sorted(images)):
        with docker_errors(f"{image} at {host}", advice):
            docker_api(host).inspect_image(image)


def make(args):
    if not re.match(r"https?://", args.base_url):
        raise ValueError(f"--base-url {args.base_url}: it begins with http:// or https://, most end in /v1")
    if args.max_cost is not None and None in (args.price_in, args.price_out):
        raise ValueError("--max-cost needs --price-in and --price-out, in dollars a million tokens")
    taxonomy = load_taxonomy(args.taxonomy)
    specs = (read_jsonl(args.specs) if args.specs else
             sample_specs(args.n, args.seed, args.preset, taxonomy, parse_weights(args.weight)))
    checked_specs(specs, taxonomy, args.specs)
    sandbox.resolve_backend("docker")    # bubblewrap has no second stage to make a fixture in
    kept, dropped, done = open_out(args.out)
    jobs = [spec for spec in specs if spec["id"] not in done]
    axes = [spec["axes"] for spec in jobs]
    need_images({f"{args.base}:{a['domain']}" for a in axes}
                | {f"{args.base}:fixtures" for a in axes if a["fixture"] != "text_only"})
    client = Client(args)

    def drop(spec, e):
        dropped.write({**spec, "reason": e.reason, "detail": str(e), "reply": e.reply, "checked": e.checked,
                       "made": e.made})

    counts, why = run_all(jobs, lambda spec: generate(spec, client, taxonomy, args), args.workers, kept.write,
                          drop, lambda: f"; {client.bill()}")
    print(f"{args.out}: {outcomes(counts)}; {len(specs) - len(jobs)} had been done before; {client.bill()}")
    if why:
        sys.exit(f"gen.py make: stopped: {why}; the same command continues")
    if not os.path.getsize(args.out):
        sys.exit(f"gen.py make: no task was kept; the reasons are in {dropped.path}")


# ------------------------------------------------------------------------------------------------------------
# stats

def stats(args):
    try:
        taxonomy, bench = load_taxonomy(args.taxonomy), benchmark_texts(args.against) if args.against else {}
        corpus = corpus_statistics(args.tasks, bench)
        print(*stats_lines(args.tasks, corpus, taxonomy, args.against, bench), sep="\n")
        if args.plot:
            if not corpus.composition:
                raise ValueError(f"{args.tasks}: no task has axes to draw; leave --plot out")
            plot_domains(corpus.composition, args.plot)
            print(f"\n{args.plot}: the composition")
    except (ValueError, OSError) as e:
        sys.exit(f"gen.py stats: {e}")


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

    p = commands.add_parser("sample", help="draw specs of tasks from taxonomy.json")
    p.add_argument("--out", required=True, help="the JSONL file to write")
    p.add_argument("--n", type=int, default=1000, help="how many specs")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--preset", default="tmax15k",
                   help="legacy, sft_v2, rl_v2 or tmax15k (legacy and rl_v2, 2:1)")
    p.add_argument("--weight", action="append", default=[], metavar="AXIS=VALUE:W",
                   help="makes a value W times as likely against the others of its axis; repeatable")
    p.add_argument("--taxonomy", default=TAXONOMY, help="another file of axes")
    p.set_defaults(run=sample)

    p = commands.add_parser("bases", help="build and tag the base images, tmax-base:<domain>")
    p.add_argument("--domain", action="append",
                   help="only this one (or core, tools, fixtures); may be repeated")
    p.set_defaults(run=bases)

    p = commands.add_parser("make", help="have a language model write tasks, and keep those that work")
    # what
    p.add_argument("--out", required=True,
                   help="tasks.jsonl; an existing one is continued; the dropped go to tasks.dropped.jsonl")
    p.add_argument("--specs", help="specs that gen.py sample wrote; or have some drawn by the next four")
    p.add_argument("--n", type=int, default=100)
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--preset", default="tmax15k")
    p.add_argument("--weight", action="append", default=[], metavar="AXIS=VALUE:W")
    p.add_argument("--taxonomy", default=TAXONOMY)
    # who
    p.add_argument("--base-url", required=True,
                   help="an OpenAI-compatible endpoint, up to /v1; its key in OPENAI_API_KEY")
    p.add_argument("--model", required=True, help="the model's name there")
    p.add_argument("--temperature", type=float, default=1.0)
    p.add_argument("--max-reply-tokens", type=int, default=32768)
    p.add_argument("--price-in", type=float, help="dollars a million tokens of the prompts")
    p.add_argument("--price-out", type=float, help="and of the replies")
    p.add_argument("--max-cost", type=float, help="dollars that this run may spend; it then stops")
    # how
    p.add_argument("--check", choices=LEVELS, default="verify", help="how far a task is tried to be kept")
    p.add_argument("--repairs", type=int, default=3, help="how often a task may be sent back to the model")
    p.add_argument("--workers", type=int, default=32, help="tasks at the same time")
    p.add_argument("--base", default="tmax-base", help="the base images are BASE:domain")
    p.set_defaults(run=make)

    p = commands.add_parser("check", help="build tasks, run their tests untouched, and their solutions")
    p.add_argument("tasks", help="tasks.jsonl")
    p.add_argument("--out", help="where the tasks that pass go, with what was found; it is continued")
    p.add_argument("--check", choices=LEVELS, default="verify")
    p.add_argument("--backend", default="auto", choices=["auto", "docker", "bwrap"])
    p.add_argument("--workers", type=int, default=os.cpu_count(), help="tasks at the same time")
    p.set_defaults(run=check)

    p = commands.add_parser("stats", help="balance, lengths and benchmark overlap of a corpus")
    p.add_argument("tasks", help="tasks.jsonl or specs.jsonl")
    p.add_argument("--against", metavar="BENCH", help="JSONL with instructions, or a folder of Harbor tasks")
    p.add_argument("--plot", metavar="PNG", help="draw the composition by domain")
    p.add_argument("--taxonomy", default=TAXONOMY, help="another file of axes")
    p.set_defaults(run=stats)

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
    try:
        args.run(args)
    except KeyboardInterrupt:
        sys.exit(f"gen.py {args.run.__name__}: stopped; the same command continues")
    except (InfraError, ValueError, OSError) as e:
        sys.exit(f"gen.py {args.run.__name__}: {e}")


if __name__ == "__main__":
    main()
