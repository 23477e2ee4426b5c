"""What a corpus of tasks is made of, for gen.py stats: balance over the axes, lengths, benchmark overlap."""
import math
import os
import statistics
import string
import textwrap
from collections import Counter, defaultdict
from pathlib import Path
from types import SimpleNamespace

from records import file_bytes, numbered_records
from taxonomy import AXES, axis_values, listed

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
