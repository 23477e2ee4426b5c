"""The demo's task families: small terminal tasks that a model of 0.65 M parameters can learn from scratch.

A family is one function. It gets a Draw (seeded random choices) and returns the instruction, the files, the
bash check that grades, the right commands, and some plausible mistakes. `make_task` makes that a Task record.
`python gen.py builtin` writes them to a file; `rollout.py --oracle` plays their demonstrations.

What a tiny model needs shapes every family: instructions of a dozen words, commands without quotes (they look
the same inside JSON), files of a few short lines, and nothing to type but the family's fixed words and words
copied from the instruction or from what a command printed. All variable words come from one pool, so that the
tokenizer can give each of them a single token.

The demonstrator is fallible on purpose: 2 of 3 demonstrations make one of the family's mistakes, each a
choice at one point of the right way (submit early, `wc -c` for `wc -l`, `cp` for `mv`, look and not act). SFT
imitates the mistakes too; RL, which sees only the outcome, has to weed them out.
"""
import hashlib
import random
from typing import Callable, NamedTuple

# No word contains another one (grep would find both), and none is a word of an instruction or a command.
WORDS = """
acorn album alpaca amber anchor apple apron arrow atlas autumn badger bagel bamboo banjo barrel basil basket
beacon beaver berry biscuit blanket blossom bonnet bottle boulder branch bread breeze bridge bronze broom
bucket buffalo butter button cabbage cactus camel candle canoe canyon carbon carpet carrot castle cavern cedar
celery cello chalk cherry chimney cider cinema circus clover cobalt coconut coffee comet copper coral cotton
cougar crayon cricket crystal curtain daisy desert diamond dolphin donkey dragon drawer drum eagle elbow
emerald engine falcon feather fender fiddle finch flame flute forest fossil fountain galaxy garden garlic
gazelle ginger giraffe glacier glove goblin gorilla granite gravel guitar hammer harbor harvest hazel helmet
heron hockey honey horse hotel igloo indigo island ivory jacket jaguar jasmine jelly jersey jigsaw jungle
kettle kitchen kitten koala ladder lagoon lantern laurel lemon lentil leopard lettuce lilac lizard lobster
locket lotus magnet mango maple marble meadow melon mirror mitten monkey mosaic muffin museum mustard napkin
needle nickel noodle nutmeg ocean olive onion opera orange orchid oregano ostrich otter oyster paddle palace
panda papaya parrot pasta peach peanut pebble pelican pencil penguin pepper piano pigeon pillow pirate pizza
planet plaza poem pony poppy potato prairie pretzel pumpkin puppet puzzle pyramid quartz rabbit radish raisin
raven ribbon river robin rocket saddle salmon sandal satin saucer scarf school shovel silver sleigh snow
soccer spider spinach spruce squid stable statue summer swan teapot temple thunder ticket tiger timber toast
tomato tractor trumpet tulip tunnel turkey turnip turtle valley vanilla velvet village violin volcano wagon
waffle walnut walrus weasel whale willow winter wizard yogurt zebra
""".split()

RIGHT_SHARE = 1 / 3  # of the demonstrations; the others make a mistake
DEMOS = 8            # demonstrations a task, in random order: demo 0 is right as often as any other

# A task's Dockerfile adds its files and nothing else, so that both backends start it at once.
DOCKERFILE = "FROM tmax-base:core\nWORKDIR /app\nCOPY --chown=user:user . /app/\n"
LIMITS = {"agent_s": 120, "verifier_s": 30, "command_s": 10, "memory_mb": 512}

# ------------------------------------------------------------------------------------------------------------
# Grading: every tests/test.sh is this head and the family's check, in bash's builtins where they can do it: a
# program started is 2 ms, and RL grades some hundred sandboxes a step.

TEST_HEAD = r"""#!/bin/bash
cd /app || exit
reward() {  # reward K N: K of N points, where anything short of all is below 1
    local r=1
    (( $1 >= $2 )) || printf -v r '0.%03d' $((1000 * $1 / $2))
    echo $r > /logs/verifier/reward.txt
}

# exact_text, with its conditions on the files
text() {    # an agent may leave a pipe or a gigabyte there
    [ -f "$1" ] && ! IFS= read -r -d '' -n 9999 < "$1" || { REPLY=; return 1; }
    REPLY=${REPLY%"${REPLY##*[!$'\n']}"}
}
is() { text "$1" && [ "$REPLY" = "$2" ]; }
gone() { [ ! -e "$1" ] && [ ! -L "$1" ]; }
moved() { gone "$1" && is "$2" "$3"; }
mode() { [ "$(stat -c %a -- "$1")" = "$2" ]; }
packs() { [ -f "$1" ] && [ "$(tar -tf "$1" | sort | head -c 9999)" = "$2" ]; }

# metric_threshold: the metric over its threshold .95, so 1 from there on and a fraction below
near() {    # near FILE N: the smaller of the file's number and N, over the larger
    local got
    text "$1"; got=$REPLY
    [[ $got =~ ^[0-9]{1,6}$ ]] || return
    got=$((10#$got))
    if (( got < $2 )); then reward $((100 * got)) $((95 * $2)); else reward $((100 * $2)) $((95 * got)); fi
}
f1() {      # f1 FILE LINES: F1 of the file's lines against the wanted ones
    text "$1"
    local got=$REPLY lines
    mapfile -t lines <<< "$got"$'\n'"$2"
    local hits=$(comm -12 <(sort <<< "$got") <(sort <<< "$2") | wc -l)
    reward $((200 * hits)) $((95 * ${#lines[@]}))
}

# adversarial_corpus: the share of bad items caught or of good items kept, whichever is smaller
bads=0 caught=0 goods=0 kept=0
bad() { ((++bads)); "$@" && ((++caught)); }
good() { ((++goods)); "$@" && ((++kept)); }
corpus() { if ((caught * goods < kept * bads)); then reward $caught $bads; else reward $kept $goods; fi; }

reward 0 1
"""


def has(path, lines):
    return f"is {path} '" + "\n".join(map(str, lines)) + "'"


def exact(*conditions):
    """All or nothing."""
    return " && ".join(conditions) + " && reward 1 1"


def corpus(bad, good):
    """Conditions, one an item: a bad one's holds when it is dealt with, a good one's while it is unharmed."""
    return "\n".join([f"bad {c}" for c in bad] + [f"good {c}" for c in good] + ["corpus"])


# ------------------------------------------------------------------------------------------------------------
# Drawing: what a task depends on goes into its key, filler does not. The key decides the split.

class Draw:
    def __init__(self, rng):
        self.rng, self.key = rng, []
        self.deck = rng.sample(WORDS, 20)     # dealt once, so that a task's words are all different

    def words(self, n):
        drawn = self.filler(n)
        self.key += drawn
        return drawn

    def filler(self, n):
        return [self.deck.pop() for _ in range(n)]

    def pick(self, *options):
        self.key.append(self.rng.choice(options))
        return self.key[-1]

    def mix(self, items):      # shuffled
        return self.rng.sample(items, len(items))

    def say(self, *wordings):
        return self.rng.choice(wordings)


class Family(NamedTuple):
    name: str
    make: Callable    # Draw -> dict(instruction, files {path: lines}, check, right, wrong)
    axes: dict


FAMILIES = {}
PERSONAS = {
    "security": "incident responder", "software_engineering": "library maintainer",
    "file_operations": "archivist", "data_querying": "report writer", "data_science": "survey analyst",
    "debugging": "on-call engineer", "scientific_computing": "lab assistant",
    "data_processing": "data engineer", "system_administration": "server administrator"}


def family(domain, skill_type, *primitives, verifier="exact_text"):
    """Registers a function as the family of its name, with its place on the taxonomy's axes."""
    def register(make):
        name = make.__name__.replace("_", "-")
        FAMILIES[name] = Family(name, make, {
            "domain": domain, "skill_type": skill_type, "primitive_skills": list(primitives),
            "persona": PERSONAS[domain], "language": "Bash", "command_complexity": "bash only",
            "fixture": "text_only", "verifier": verifier})
        return make
    return register


# ------------------------------------------------------------------------------------------------------------
# The families, two a domain

@family("security", "Systems", "searching file contents", "finding infected files", "deleting files",
        verifier="adversarial_corpus")
def purge_files(d):
    word, *infected = d.words(3)
    x, y = sorted(infected)                     # in the order in which grep prints them
    bad = {f"{name}.txt": d.mix([word, *d.filler(1)]) for name in (x, y)}
    good = {f"{name}.txt": d.filler(2) for name in d.filler(2)}
    look = f"grep -l {word} *"
    return dict(
        instruction=d.say(f"Delete every file that contains {word}.",
                          f"Remove all files with the word {word} and keep the others."),
        files=bad | good,
        check=corpus(bad=[f"gone {path}" for path in bad], good=[has(*item) for item in good.items()]),
        right=[look, f"rm {x}.txt {y}.txt"],
        wrong=[[], [look], [look, f"rm {x}.txt"]])


KINDS = "sh", "py", "log", "csv", "dat"


@family("security", "Systems", "creating directories", "matching file names", "quarantining files",
        verifier="adversarial_corpus")
def quarantine(d):
    (folder,), kind = d.words(1), d.pick(*KINDS)
    other = d.say(*[k for k in KINDS if k != kind])
    bad = {f"{name}.{kind}": d.filler(1) for name in d.filler(2)}
    good = {f"{name}.{other}": d.filler(1) for name in d.filler(2)}
    make = f"mkdir {folder}"
    return dict(
        instruction=d.say(f"Quarantine every {kind} file in a new folder {folder}.",
                          f"Move all {kind} files, but no {other} files, to a new folder {folder}."),
        files=bad | good,
        check=corpus(bad=[f"moved {path} {folder}/{path} {word}" for path, (word,) in bad.items()],
                     good=[has(*item) for item in good.items()]),
        right=[make, f"mv *.{kind} {folder}"],
        wrong=[[make], [make, f"cp *.{kind} {folder}"], [make, f"mv *.{other} {folder}"]])


@family("software_engineering", "Data Processing", "editing in place", "substitution", "renaming a symbol")
def rename_call(d):
    file, old, new = d.words(3)
    x, y = d.filler(2)
    code = [f"{x} = {old} + 1", f"{y} = {old} * {old}"]     # twice in one line, so that s///g matters
    return dict(
        instruction=d.say(f"Rename {old} to {new} in {file}.py.",
                          f"In {file}.py replace each {old} by {new}."),
        files={f"{file}.py": code},
        check=exact(has(f"{file}.py", [line.replace(old, new) for line in code])),
        right=[f"sed -i s/{old}/{new}/g {file}.py"],
        wrong=[[], [f"sed s/{old}/{new}/g {file}.py"], [f"sed -i s/{old}/{new}/ {file}.py"]])


@family("software_engineering", "Systems", "file permissions", "running scripts", "capturing output")
def run_script(d):
    script, out = d.words(2)
    (word,) = d.filler(1)
    allow = f"chmod +x {script}.sh"
    return dict(
        instruction=d.say(f"Make {script}.sh executable, run it and save its output in {out}.txt.",
                          f"Allow {script}.sh to run, then write what it prints to {out}.txt."),
        files={f"{script}.sh": ["#!/bin/sh", f"echo {word}"]},
        check=exact(f"[ -x {script}.sh ]", has(f"{out}.txt", [word])),
        right=[allow, f"./{script}.sh > {out}.txt"],
        wrong=[[allow], [allow, f"./{script}.sh"], [allow, f"cat {script}.sh > {out}.txt"]])


@family("file_operations", "Archives", "creating archives", "selecting files", "tar")
def pack_archive(d):
    a, b, out = d.words(3)
    (other,) = d.filler(1)
    return dict(
        instruction=d.say(f"Pack {a}.txt and {b}.txt into the archive {out}.tar.",
                          f"Create {out}.tar with {a}.txt and {b}.txt in it."),
        files={f"{name}.txt": d.filler(2) for name in (a, b, other)},
        check=exact(f"packs {out}.tar '" + "\n".join(sorted([f"{a}.txt", f"{b}.txt"])) + "'"),
        right=[f"tar -cf {out}.tar {a}.txt {b}.txt"],
        wrong=[[], [f"tar -cf {out}.tar {a}.txt"], [f"cat {a}.txt {b}.txt > {out}.tar"]])


@family("file_operations", "File I/O", "concatenating files", "redirection", "deleting files")
def join_files(d):
    a, b, out = d.words(3)
    first, second = d.filler(2), d.filler(2)
    join = f"cat {a}.txt {b}.txt > {out}.txt"
    return dict(
        instruction=d.say(f"Join {a}.txt and {b}.txt into {out}.txt, then delete both.",
                          f"Merge {a}.txt and {b}.txt into {out}.txt and remove the two old files."),
        files={f"{a}.txt": first, f"{b}.txt": second},
        check=exact(has(f"{out}.txt", first + second), f"gone {a}.txt", f"gone {b}.txt"),
        right=[join, f"rm {a}.txt {b}.txt"],
        wrong=[[join], [join, f"rm {a}.txt"], [f"cat {a}.txt > {out}.txt", f"rm {a}.txt {b}.txt"]])


@family("data_querying", "Query Construction", "searching rows", "reading a field", "writing an answer")
def look_up(d):
    table, name, value, out = d.words(4)
    rows = d.mix([f"{name},{value}", ",".join(d.filler(2)), ",".join(d.filler(2))])
    look = f"grep {name} {table}.csv"
    return dict(
        instruction=d.say(f"Look up {name} in {table}.csv and write its value to {out}.txt.",
                          f"Which value has {name} in {table}.csv? Answer in {out}.txt."),
        files={f"{table}.csv": rows},
        check=exact(has(f"{out}.txt", [value])),
        right=[look, f"echo {value} > {out}.txt"],
        wrong=[[look], [look, f"echo {name} > {out}.txt"], [f"grep {name} {table}.csv > {out}.txt"]])


@family("data_querying", "Result Processing", "selecting columns", "delimiters", "redirection")
def cut_column(d):
    (table, out), k = d.words(2), d.pick(1, 2, 3)
    rows = [d.filler(3) for _ in range(3)]
    return dict(
        instruction=d.say(f"Save column {k} of {table}.csv in {out}.txt.",
                          f"Write only column {k} of {table}.csv to {out}.txt."),
        files={f"{table}.csv": [",".join(row) for row in rows]},
        check=exact(has(f"{out}.txt", [row[k - 1] for row in rows])),
        right=[f"cut -d , -f {k} {table}.csv > {out}.txt"],
        wrong=[[], [f"cut -d , -f {k} {table}.csv"], [f"cut -d , -f {k % 3 + 1} {table}.csv > {out}.txt"]])


@family("data_science", "Data Processing", "handling missing values", "filtering rows", "redirection",
        verifier="metric_threshold")
def drop_missing(d):
    table, out = d.words(2)
    whole = [f"{name},{digit}" for name, digit in zip(d.filler(2), d.mix(range(1, 10)))]
    rows = d.mix(whole + [f"{name},null" for name in d.filler(3)])
    return dict(
        instruction=d.say(f"Drop the null rows of {table}.csv and save the rest in {out}.csv.",
                          f"Write all rows of {table}.csv without null to {out}.csv."),
        files={f"{table}.csv": rows},
        check=f"f1 {out}.csv '" + "\n".join(whole) + "'",
        right=[f"grep -v null {table}.csv > {out}.csv"],
        wrong=[[], [f"grep null {table}.csv > {out}.csv"], [f"cp {table}.csv {out}.csv"]])


@family("data_science", "Algorithmic", "counting labels", "finding duplicates", "writing an answer")
def repeated_label(d):
    labels, out, label = d.words(3)
    x, y = d.filler(2)
    look = f"sort {labels}.txt | uniq -d"
    return dict(
        instruction=d.say(f"Which label occurs twice in {labels}.txt? Answer in {out}.txt.",
                          f"Find the repeated label of {labels}.txt and write it to {out}.txt."),
        files={f"{labels}.txt": [x, label, y, label]},
        check=exact(has(f"{out}.txt", [label])),
        right=[look, f"echo {label} > {out}.txt"],
        wrong=[[look], [f"sort {labels}.txt | uniq -u", f"echo {min(x, y)} > {out}.txt"],
               [f"head -n 1 {labels}.txt > {out}.txt"]])


@family("debugging", "Forensics", "searching logs", "locating a file by its contents", "copying files")
def find_log(d):
    word, log, out = d.words(3)
    logs = {f"{log}.log": d.mix([word, *d.filler(1)])} | {f"{name}.log": d.filler(2) for name in d.filler(2)}
    look = f"grep -l {word} *"
    return dict(
        instruction=d.say(f"Find the log that mentions {word} and copy it to {out}.txt.",
                          f"One log mentions {word}. Copy that log to {out}.txt."),
        files=logs,
        check=exact(has(f"{out}.txt", logs[f"{log}.log"]), has(f"{log}.log", logs[f"{log}.log"])),
        right=[look, f"cp {log}.log {out}.txt"],
        wrong=[[look], [look, f"mv {log}.log {out}.txt"], [f"grep -h {word} * > {out}.txt"]])


@family("debugging", "Debugging", "reading a configuration", "editing in place", "substitution")
def fix_port(d):
    (config,), old = d.words(1), d.pick(*range(1, 10))
    new = d.pick(*[i for i in range(1, 10) if i != old])
    host, user = d.filler(2)
    look = f"grep port {config}.conf"
    return dict(
        instruction=d.say(f"The port in {config}.conf is wrong, set it to {new}.",
                          f"Change the port of {config}.conf to {new}."),
        files={f"{config}.conf": [f"host={host}", f"port={old}", f"user={user}"]},
        check=exact(has(f"{config}.conf", [f"host={host}", f"port={new}", f"user={user}"])),
        right=[look, f"sed -i s/{old}/{new}/ {config}.conf"],
        wrong=[[look], [look, f"sed s/{old}/{new}/ {config}.conf"],
               [look, f"echo port={new} > {config}.conf"]])


@family("scientific_computing", "Statistical", "sorting numbers", "finding an extreme", "pipes",
        verifier="metric_threshold")
def peak_reading(d):
    data, out = d.words(2)
    low, peak = d.mix(range(1, 6))[:3], d.rng.randint(7, 9)
    return dict(
        instruction=d.say(f"Write the largest number of {data}.dat to {out}.txt.",
                          f"Save the peak reading of {data}.dat in {out}.txt."),
        files={f"{data}.dat": d.mix([peak, *low[1:]]) + low[:1]},     # the last line is not the largest
        check=f"near {out}.txt {peak}",
        right=[f"sort -n {data}.dat | tail -n 1 > {out}.txt"],
        wrong=[[], [f"sort -n {data}.dat | head -n 1 > {out}.txt"], [f"tail -n 1 {data}.dat > {out}.txt"]])


@family("scientific_computing", "Data Processing", "counting samples", "redirection", "writing an answer")
def count_samples(d):
    data, out = d.words(2)
    samples = [" ".join(d.filler(2)) for _ in range(d.rng.randint(2, 6))]
    return dict(
        instruction=d.say(f"Count the lines of {data}.dat into {out}.txt.",
                          f"How many lines has {data}.dat? Answer in {out}.txt."),
        files={f"{data}.dat": samples},
        check=exact(has(f"{out}.txt", [len(samples)])),
        right=[f"wc -l < {data}.dat > {out}.txt"],
        wrong=[[], [f"wc -c < {data}.dat > {out}.txt"], [f"wc -w < {data}.dat > {out}.txt"]])


@family("data_processing", "Manipulation", "sorting", "removing duplicates", "redirection")
def sort_unique(d):
    data, out = d.words(2)
    x, y, z = d.filler(3)
    return dict(
        instruction=d.say(f"Sort {data}.txt without duplicates into {out}.txt.",
                          f"Write the sorted lines of {data}.txt, each once, to {out}.txt."),
        files={f"{data}.txt": [x, *d.mix([y, z]), x]},
        check=exact(has(f"{out}.txt", sorted([x, y, z]))),
        right=[f"sort -u {data}.txt > {out}.txt"],
        wrong=[[], [f"sort {data}.txt > {out}.txt"], [f"uniq {data}.txt > {out}.txt"]])


@family("data_processing", "Data I/O", "selecting lines", "head and tail", "redirection")
def pick_lines(d):
    (data, out), side, n = d.words(2), d.pick("first", "last"), d.pick(2, 3, 4)
    lines = d.filler(6)
    tool, other = ("head", "tail") if side == "first" else ("tail", "head")
    return dict(
        instruction=d.say(f"Save the {side} {n} lines of {data}.txt in {out}.txt.",
                          f"Write only the {side} {n} lines of {data}.txt to {out}.txt."),
        files={f"{data}.txt": lines},
        check=exact(has(f"{out}.txt", lines[:n] if side == "first" else lines[-n:])),
        right=[f"{tool} -n {n} {data}.txt > {out}.txt"],
        wrong=[[f"{tool} -n {n} {data}.txt"], [f"{other} -n {n} {data}.txt > {out}.txt"],
               [f"{tool} {data}.txt > {out}.txt"]])


@family("system_administration", "Filesystem", "renaming files", "log rotation", "creating files")
def rotate_log(d):
    log, old = d.words(2)
    lines = d.filler(3)
    move = f"mv {log}.log {old}.log"
    return dict(
        instruction=d.say(f"Rename {log}.log to {old}.log, then start an empty {log}.log.",
                          f"Rotate {log}.log: move it to {old}.log and create an empty {log}.log."),
        files={f"{log}.log": lines},
        check=exact(has(f"{old}.log", lines), has(f"{log}.log", [])),
        right=[move, f"touch {log}.log"],
        wrong=[[], [move], [f"cp {log}.log {old}.log", f"touch {log}.log"]])


@family("system_administration", "Configuration", "file permissions", "protecting secrets", "chmod")
def private_key(d):
    key, other = d.words(2)
    secrets = {f"{name}.key": d.filler(1) for name in d.mix([key, other])}
    return dict(
        instruction=d.say(f"Make {key}.key private to its owner, but not {other}.key.",
                          f"Nobody but the owner may read {key}.key. Leave {other}.key alone."),
        files=secrets,
        check=exact(f"mode {key}.key 600", f"! mode {other}.key 600",
                    *[has(*item) for item in secrets.items()]),
        right=[f"chmod 600 {key}.key"],
        wrong=[[], [f"chmod 644 {key}.key"], [f"chmod 600 {other}.key"]])


# ------------------------------------------------------------------------------------------------------------
# From a draw to a Task record

def split_of(name, key):
    """train, val or test (8 : 1 : 1), fixed by the key alone: no draw of any seed is ever in two splits."""
    bucket = hashlib.sha256(repr((name, key)).encode()).digest()[0]
    return "val" if bucket < 26 else "test" if bucket < 52 else "train"


def make_task(family, split, seed, index, seen):
    """The task's record; `seen` holds the family's keys so far and gets this one."""
    rng = random.Random(f"{family.name} {split} {seed} {index}")
    for _ in range(10_000):
        draw = Draw(rng)
        made = family.make(draw)
        key = tuple(sorted(map(str, draw.key)))     # sorted: the same words in other roles are no new task
        if split_of(family.name, key) == split and key not in seen:
            break
    else:
        raise ValueError(f"family {family.name} has no {split} task left after {index}: ask for fewer tasks")
    seen.add(key)
    files = {path: {"text": "".join(f"{line}\n" for line in lines)} for path, lines in made["files"].items()}
    demos = [{"commands": made["right"], "right": True} if rng.random() < RIGHT_SHARE else
             {"commands": rng.choice(made["wrong"]), "right": False} for _ in range(DEMOS)]
    return {
        "id": f"{family.name}-{split}-{seed}-{index:05d}",
        "instruction": made["instruction"],
        "axes": {**family.axes, "task_complexity": "short" if len(made["right"]) == 1 else "moderate"},
        "dockerfile": DOCKERFILE,
        "files": files,
        "tests": {"test.sh": {"text": TEST_HEAD + made["check"] + "\n"}},
        "solution": {"solve.sh": {"text": "#!/bin/bash\n" + "".join(f"{c}\n" for c in made["right"])}},
        "demos": demos,
        "user": "user",
        "limits": LIMITS,
    }
