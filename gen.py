"""Tasks: where the pipeline starts. Each command writes Task records, one JSON object a line.

    python gen.py builtin --n 640 --seed 0 --split train --out tasks.jsonl
    python gen.py sample --n 1000 --seed 0 --preset sft_v2 --out specs.jsonl
    python gen.py stats tasks.jsonl --against benchmark/ --plot domains.png

builtin   the demo's families (builtin/families.py); no LLM, no network; same arguments, same bytes
sample    specs of tasks: one value from each axis of taxonomy.json, which an LLM then turns into a task
stats     what a corpus is made of: balance over the axes, lengths, overlap with a benchmark
"""
import argparse
import json
import math
import os
import random
import statistics
import string
import sys
import textwrap
from collections import Counter, defaultdict
from hashlib import sha256
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace

from builtin.families import FAMILIES, make_task
from sandbox import file_bytes, numbered_records


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
# sample: taxonomy.json and draws from it
#
# The axes of STRUCTURE are drawn in that order, each given what has been drawn before it. So the earlier ones
# are exactly as the preset says, and only verifier and fixture, which have to fit the rest, shift within
# their bucket ("old" values are those of the legacy preset, "new" ones all others). The odds of the buckets
# are kept exactly: load_taxonomy makes sure that both can be had whatever was drawn before.

TAXONOMY = Path(__file__).with_name("taxonomy.json")
STRUCTURE = ("domain", "task_complexity", "command_complexity", "verifier", "fixture")
OF_DOMAIN = {"skill_type": "skill_types", "persona": "personas"}
AXES = ("domain", "skill_type", "primitive_skills", "persona", "language", "task_complexity",
        "command_complexity", "fixture", "verifier")                         # the order in a task's record
PRIMITIVES = (3, 5)                                                          # at least, at most, a task
MOST = 1_000_000                                                             # what a --weight may be


def listed(value):
    """An axis's values in one task: only the primitive skills are several."""
    return value if isinstance(value, list) else [value]


def axis_values(taxonomy, axis, domain=None):
    """An axis's values, in the file's order; skill types and personas of one domain, or of all."""
    if axis == "domain":
        return list(taxonomy["domains"])
    if axis in OF_DOMAIN:
        domains = [domain] if domain else taxonomy["domains"]
        return list(dict.fromkeys(v for d in domains for v in taxonomy["domains"][d][OF_DOMAIN[axis]]))
    if axis == "primitive_skills":
        return [p for d in taxonomy["domains"].values() for ps in d["skill_types"].values() for p in ps]
    return list(taxonomy[axis])


def load_taxonomy(path=TAXONOMY):
    """The nine axes. ValueError says what an edit of the file has broken."""
    try:
        taxonomy = json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as e:
        raise ValueError(f"{path}: not JSON: {e}") from None

    def require(condition, what):
        if not condition:
            raise ValueError(f"{path}: {what}")

    def texts(values):
        return (isinstance(values, (list, dict)) and len(values) > 0 and len(set(values)) == len(values)
                and all(isinstance(value, str) and value for value in values))

    keys = {"domains", "language", "old", "presets", "incompatible", *STRUCTURE[1:]}
    require(isinstance(taxonomy, dict) and set(taxonomy) == keys, f"needs exactly the keys {sorted(keys)}")
    for axis in ("domains", "language", *STRUCTURE[1:]):
        require(isinstance(taxonomy[axis], dict) and texts(taxonomy[axis]), f"{axis}: no values")
    for name, domain in taxonomy["domains"].items():
        require(name.isascii() and name.isidentifier(), f"domain {name!r}: only letters, digits and _")
        require(isinstance(domain, dict) and set(domain) == {"skill_types", "personas"}
                and isinstance(domain["skill_types"], dict), f"{name} needs skill_types and personas")
        require(texts(domain["personas"]), f"{name}: personas is not a list of different texts")
        for skill_type, skills in domain["skill_types"].items():
            require(texts(skills), f"{name}, {skill_type}: not a list of different primitive skills")
        skills = [skill for skills in domain["skill_types"].values() for skill in skills]
        require(len(set(skills)) == len(skills), f"{name} has a primitive skill twice")
        require(len(skills) >= PRIMITIVES[1], f"{name} needs at least {PRIMITIVES[1]} primitive skills")
    require(all(isinstance(w, (int, float)) and w > 0 for w in taxonomy["language"].values()),
            "a language's weight is not a number above 0")
    for axis, values in taxonomy["old"].items():
        require(texts(values) and set(values) < set(taxonomy[axis]), f"old {axis}: list some of it, not all")
    for rule in taxonomy["incompatible"]:
        axes = set(rule) - {"why"}
        # A rule between domain and complexities alone would bend shares that are promised to be exact.
        require(axes & {"verifier", "fixture"} and axes <= set(STRUCTURE), f"no such rule: {rule}")
        for axis in axes:
            unknown = set(rule[axis]) - set(axis_values(taxonomy, axis))
            require(not unknown, f"incompatible: there is no {axis} {', '.join(unknown)}")
    for name, preset in taxonomy["presets"].items():
        if "mix" in preset:
            require(all("new_to_old" in taxonomy["presets"].get(part, {}) for part in preset["mix"]),
                    f"preset {name} mixes presets that are not there")
            continue
        odds = preset.get("new_to_old", {})
        require(set(odds) == set(taxonomy["old"])
                and all(len(pair) == 2 and min(pair) >= 0 < sum(pair) for pair in odds.values()),
                f"preset {name}: new_to_old needs two odds for each of {', '.join(taxonomy['old'])}")
        try:
            draw_tables(taxonomy, name, {})          # finds every combination that leaves nothing to draw
        except ValueError as e:
            raise ValueError(f"{path}: preset {name}: {e}") from None
    return taxonomy


def unfit(taxonomy, axis, drawn):
    """The values of an axis that a rule forbids, given what has been drawn before it ({axis: value})."""
    return {value for rule in taxonomy["incompatible"] if axis in rule
            and all(drawn.get(other) in rule[other] for other in rule if other not in (axis, "why"))
            for value in rule[axis]}


def probabilities(taxonomy, axis, drawn, odds, weights):
    """{value: probability} of an axis, given what has been drawn before it.

    odds: {axis: (new, old)}; such an axis shares them out over its two buckets, uniformly inside each. Others
    are uniform, languages by their own weights. weights: {(axis, value): factor} on top of that.
    """
    out = unfit(taxonomy, axis, drawn)
    fit = [value for value in axis_values(taxonomy, axis, drawn.get("domain")) if value not in out]
    if axis in odds:
        old = set(taxonomy["old"][axis])
        for bucket, share in (("new", odds[axis][0]), ("old", odds[axis][1])):
            if share and not any((v in old) == (bucket == "old") for v in fit):
                raise ValueError(f"no {bucket} {axis} fits {', '.join(drawn.values())}: see \"incompatible\"")
        sizes = Counter(v in old for v in fit)
        mass = {v: odds[axis][v in old] / sizes[v in old] for v in fit}
    else:
        mass = {v: taxonomy["language"][v] if axis == "language" else 1 for v in fit}
    mass = {v: m * weights.get((axis, v), 1) for v, m in mass.items()}
    total = sum(mass.values())
    if not total:
        given = f" with {', '.join(drawn.values())}" if drawn else ""
        raise ValueError(f"the weights leave no {axis} to draw{given}")
    return {v: m / total for v, m in mass.items() if m}


def draw_tables(taxonomy, preset, weights):
    """Everything that a preset (not a mixture) can draw, worked out once.

    Returns ({(axis, *values drawn before it): (values, cumulative probabilities)}, {axis: {value: share}}).
    Skill type, persona and language depend on the domain alone.
    """
    odds = taxonomy["presets"][preset]["new_to_old"]
    tables, shares, reached = {}, defaultdict(Counter), [({}, 1)]

    def table(axis, drawn, p):
        given = probabilities(taxonomy, axis, drawn, odds, weights)
        tables[axis, *drawn.values()] = list(given), list(accumulate(given.values()))
        for value, q in given.items():
            shares[axis][value] += p * q
        return given

    for axis in STRUCTURE:
        reached = [({**drawn, axis: value}, p * q)
                   for drawn, p in reached for value, q in table(axis, drawn, p).items()]
    for domain, p in shares["domain"].copy().items():
        for axis in ("skill_type", "persona", "language"):
            table(axis, {"domain": domain}, p)
    return tables, shares


def preset_parts(taxonomy, preset):
    """[(name, count)]: what a mixture mixes, and the preset itself where it is none."""
    if preset not in taxonomy["presets"]:
        raise ValueError(f"no preset {preset}; there are {', '.join(taxonomy['presets'])}")
    mix = taxonomy["presets"][preset].get("mix", {preset: 1})
    divisor = math.gcd(*mix.values())
    return [(name, count // divisor) for name, count in mix.items()]


def expected_shares(taxonomy, preset, weights):
    """{axis: {value: share}} of an endless sample."""
    parts = preset_parts(taxonomy, preset)
    shares = defaultdict(Counter)
    for name, count in parts:
        for axis, values in draw_tables(taxonomy, name, weights)[1].items():
            for value, share in values.items():
                shares[axis][value] += share * count / sum(count for _, count in parts)
    return shares


def check_weights(taxonomy, preset, weights):
    expected = expected_shares(taxonomy, preset, {})
    for (axis, value), weight in weights.items():
        if axis not in expected:
            raise ValueError(f"weight {axis}={value}: no such axis; there are {', '.join(sorted(expected))}")
        if value not in axis_values(taxonomy, axis):
            raise ValueError(f"weight {axis}={value}: no such value; "
                             f"there are {', '.join(axis_values(taxonomy, axis))}")
        if not 0 <= weight <= MOST:
            raise ValueError(f"weight {axis}={value}:{weight}: a weight is a number from 0 to {MOST:,}")
        if weight and not expected[axis][value]:
            raise ValueError(f"weight {axis}={value}: preset {preset} never draws it; take another preset")


def sample_specs(n, seed=0, preset="tmax15k", taxonomy=None, weights=None):
    """n specs, [{"id", "axes": {axis: value}}], each drawn from a random stream of its own.

    So a sample is the beginning of every longer one. A mixture deals its presets out in turn: exact shares,
    not random ones. weights: {(axis, value): factor} makes a value that many times as likely against the
    others of its axis; 0 leaves it out. ValueError for an unknown preset, axis, value or a bad weight.
    """
    taxonomy, weights = taxonomy or load_taxonomy(), weights or {}
    parts = preset_parts(taxonomy, preset)
    check_weights(taxonomy, preset, weights)
    tables = {name: draw_tables(taxonomy, name, weights)[0] for name, _ in parts}
    turns = sorted(((k + .5) / count, name) for name, count in parts for k in range(count))   # evenly spread
    specs = []
    for i in range(n):
        rng = random.Random(f"{preset} {seed} {i}")
        table = tables[turns[i % len(turns)][1]]

        def draw(axis, *drawn):
            values, cumulative = table[axis, *drawn]
            return rng.choices(values, cum_weights=cumulative)[0]

        drawn = []
        for axis in STRUCTURE:
            drawn.append(draw(axis, *drawn))
        axes = dict(zip(STRUCTURE, drawn))
        for axis in ("skill_type", "persona", "language"):
            axes[axis] = draw(axis, axes["domain"])
        axes["primitive_skills"] = draw_primitives(rng, taxonomy, axes["domain"], axes["skill_type"])
        axes = {axis: axes[axis] for axis in AXES}
        # The fingerprint keeps the ids of corpora apart that differ in seed, preset, weights or taxonomy.
        fingerprint = sha256(json.dumps([preset, seed, axes]).encode()).hexdigest()[:8]
        specs.append({"id": f"{axes['domain']}-{i:05d}-{fingerprint}", "axes": axes})
    return specs


def draw_primitives(rng, taxonomy, domain, skill_type):
    """3 to 5 primitive skills: of the skill type as long as it has any, then others of the domain."""
    skills = taxonomy["domains"][domain]["skill_types"]
    count = rng.randint(*PRIMITIVES)
    own = rng.sample(skills[skill_type], min(count, len(skills[skill_type])))
    others = [p for name, ps in skills.items() if name != skill_type for p in ps]
    return own + rng.sample(others, count - len(own))


def parse_weights(texts):
    """["axis=value:w"] as {(axis, value): w}."""
    weights = {}
    for text in texts:
        name, colon, number = text.rpartition(":")
        axis, equals, value = name.partition("=")
        try:
            weight = float(number)
        except ValueError:
            weight = None
        if not (colon and equals) or weight is None:
            raise ValueError(f"--weight {text}: write axis=value:w, for example fixture=image:3")
        if (axis, value) in weights:
            raise ValueError(f"--weight {axis}={value} is there twice")
        weights[axis, value] = weight
    return weights


def share_table(specs, taxonomy, preset, weights):
    """Lines: each value's share in the sample, in an endless one, and in one without incompatible pairs."""
    expected = expected_shares(taxonomy, preset, weights)
    free = expected_shares({**taxonomy, "incompatible": []}, preset, weights)
    yield f"{'axis':<19}{'value':<32}{'share':>8}{'expected':>10}{'if all fitted':>15}"
    for axis in (*STRUCTURE, "language"):
        counts = Counter(spec["axes"][axis] for spec in specs)
        for value in axis_values(taxonomy, axis):
            want, otherwise = expected[axis][value], free[axis][value]
            moved = "" if math.isclose(want, otherwise) else f"{otherwise:>15.2%}"
            yield f"{axis:<19}{value:<32}{counts[value] / len(specs):>8.2%}{want:>10.2%}{moved}"
    for axis in ("skill_type", "primitive_skills", "persona"):
        counts = Counter(value for spec in specs for value in listed(spec["axes"][axis]))
        yield (f"{axis}: {len(counts)} of {len(axis_values(taxonomy, axis))} drawn, "
               f"{min(counts.values())} to {max(counts.values())} times each")


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
# stats

PUNCTUATION = str.maketrans(dict.fromkeys(string.punctuation + "\u2018\u2019\u201c\u201d\u2013\u2014", " "))
NGRAM = 13                                                       # words; the paper's measure of contamination
PAPER = {"domain": .998, "skill_type": .732}                     # its balance scores


def balance(counts):
    """exp(H) / N, H being the entropy of {value: count} in nats: 1 where all N values are equally frequent,
    1/N where only one occurs. A value that never occurs counts in N."""
    total = sum(counts.values())
    return math.exp(-sum(n / total * math.log(n / total) for n in counts.values() if n)) / len(counts)


def words_of(text):
    """Words for comparing: case and punctuation do not count."""
    return text.lower().translate(PUNCTUATION).split()


def ngrams(words):
    """Every run of NGRAM words (stride 1)."""
    return zip(*(words[i:] for i in range(NGRAM)))


def benchmark_texts(path):
    """{name: task text} of a folder with Harbor task folders somewhere in it, or of a JSONL file."""
    if os.path.isdir(path):
        texts = {str(file.parent.relative_to(path)): file.read_text(encoding="utf-8", errors="replace")
                 for file in sorted(Path(path).rglob("instruction.md"))}
    else:
        texts = {}
        for number, record in numbered_records(path):
            if not isinstance(record.get("instruction"), str):
                raise ValueError(f"{path}:{number}: no instruction, or not a string")
            texts[str(record.get("id", number))] = record["instruction"]
    if not texts:
        raise ValueError(f"{path}: neither an instruction.md nor a record with an instruction in there")
    return texts


def corpus_statistics(path, bench):
    """Reads a file of tasks or specs once, a line at a time: a corpus may be larger than memory.

    bench: {name: text}. Returns a namespace: tasks, axes {axis: Counter}, composition (a Counter of domain
    and skill type), lengths {what: [a number a task]}; and of the overlap with bench: ngrams in all, hits
    {task id: how many of them are in bench}, found {names of bench with a hit}.
    """
    owners = defaultdict(set)                            # n-gram -> the benchmark tasks that have it
    for name, text in bench.items():
        for ngram in ngrams(words_of(text)):
            owners[ngram].add(name)
    corpus = SimpleNamespace(tasks=0, axes=defaultdict(Counter), composition=Counter(),
                             lengths=defaultdict(list), ngrams=0, hits=Counter(), found=set())
    ids = set()
    for number, task in numbered_records(path):
        where = f"{path}:{number}"
        name = str(task.get("id", where))
        if name in ids:
            raise ValueError(f"{where}: an earlier line has the id {name} too")
        ids.add(name)
        corpus.tasks += 1
        try:
            measure_task(task, corpus)
            words = words_of(task.get("instruction", "")) if bench else []
        except (AttributeError, KeyError, TypeError, ValueError) as e:
            raise ValueError(f"{where}: not a task record: {e!r}") from None
        corpus.ngrams += max(0, len(words) - NGRAM + 1)
        if shared := list(filter(owners.__contains__, ngrams(words))):
            corpus.hits[name] = len(shared)
            corpus.found.update(*map(owners.get, shared))
    if not corpus.tasks:
        raise ValueError(f"{path}: no tasks in there")
    return corpus


def measure_task(task, corpus):
    axes = task.get("axes") or {}                        # imported tasks have none
    for axis in AXES:
        for value in listed(axes.get(axis, [])):
            if not isinstance(value, str):
                raise TypeError(f"{axis} is {value!r}")
            corpus.axes[axis][value] += 1
    if "domain" in axes:
        corpus.composition[axes["domain"], axes.get("skill_type", "")] += 1
    if "instruction" in task:                            # specs have none yet
        corpus.lengths["instruction, words"].append(len(task["instruction"].split()))
        corpus.lengths["instruction, characters"].append(len(task["instruction"]))
    if task.get("solution"):
        contents = [file_bytes(item) for item in task["solution"].values()]
        corpus.lengths["solution, lines"].append(sum(content.count(b"\n") for content in contents))
        corpus.lengths["solution, bytes"].append(sum(map(len, contents)))


def plot_domains(composition, path):
    """The corpus by domain, each bar divided into its skill types (the paper's Fig. 3)."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    total, domains = composition.total(), Counter()
    for (domain, _), n in composition.items():
        domains[domain] += n
    names = sorted(domains, key=lambda name: (-domains[name], name))
    figure, axes = pyplot.subplots(figsize=(11, 1 + .55 * len(names)), layout="constrained")
    for row, domain in enumerate(names):
        left = 0
        parts = sorted((part, n / total) for (name, part), n in composition.items() if name == domain)
        for number, (skill_type, share) in enumerate(parts):
            label = skill_type.replace(" ", "\n") if share > .008 else ""               # where it has room
            axes.barh(row, share, left=left, color=f"C{row % 10}", alpha=(.75, .45)[number % 2],
                      edgecolor="white")
            axes.text(left + share / 2, row, label, fontsize=6, ha="center", va="center")
            left += share
        axes.text(left, row, f" {left:.1%}", fontsize=9, va="center")
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.xaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
    axes.set(title=f"{total:,} tasks by domain and skill type", xlabel="share of the corpus")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=140)


def stats_lines(path, corpus, taxonomy, against, bench):
    """What is printed: our numbers, with the paper's where it gives one."""
    yield f"{path}: {corpus.tasks} tasks"
    if corpus.axes:
        yield f"\n{'axis':<19}{'values':>7}{'balance':>9}{'paper':>7}   most frequent, least frequent"
    for axis, counts in corpus.axes.items():
        every = {value: counts[value] for value in [*axis_values(taxonomy, axis), *counts]}
        ends = [f"{textwrap.shorten(value, 24, placeholder='...')} {every[value] / counts.total():.1%}"
                for value in (max(every, key=every.get), min(every, key=every.get))]
        yield (f"{axis:<19}{len(every):>7}{balance(every):>9.3f}{PAPER.get(axis, ''):>7}   {', '.join(ends)}")
    if corpus.lengths:
        yield f"\n{'length':<26}{'tasks':>7}{'mean':>9}{'median':>9}{'95%':>9}{'max':>9}"
    for what, numbers in corpus.lengths.items():
        numbers.sort()
        middle, most = statistics.median(numbers), numbers[round(.95 * (len(numbers) - 1))]
        yield (f"{what:<26}{len(numbers):>7}{statistics.mean(numbers):>9.1f}{middle:>9.1f}{most:>9}"
               f"{numbers[-1]:>9}")
    if bench:
        texts = len(corpus.lengths["instruction, words"])
        if not texts:
            raise ValueError(f"{path}: no task text to compare with {against}; leave --against out")
        yield (f"\n{NGRAM}-gram overlap with {against}: {len(corpus.hits) / texts:.1%} of tasks (paper 0.0%)")
        yield (f"  {len(corpus.hits)} of {texts} tasks have one in common with {len(corpus.found)} of the "
               f"benchmark's {len(bench)};")
        yield f"  {corpus.hits.total()} of all {corpus.ngrams} {NGRAM}-grams"
        yield from (f"  {n:>6} of them in {name}" for name, n in corpus.hits.most_common(5))


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

    p = commands.add_parser("stats", help="balance, lengths and benchmark overlap of a corpus")
    p.add_argument("tasks", help="tasks.jsonl or specs.jsonl")
    p.add_argument("--against", metavar="BENCH", help="JSONL with instructions, or a folder of Harbor tasks")
    p.add_argument("--plot", metavar="PNG", help="draw the composition by domain")
    p.add_argument("--taxonomy", default=TAXONOMY, help="another file of axes")
    p.set_defaults(run=stats)

    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
