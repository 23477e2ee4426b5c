"""taxonomy.json, and how tasks are drawn from its nine axes.

    taxonomy = load_taxonomy()
    specs = sample_specs(1000, 0, "sft_v2", taxonomy)                 # [{"id", "axes": {axis: value}}]

The axes of STRUCTURE are drawn in that order, each given what has been drawn before it. So the earlier ones
are exactly as the preset says, and only verifier and fixture, which have to fit the rest, shift within
their bucket ("old" values are those of the legacy preset, "new" ones all others). The odds of the buckets
are kept exactly: load_taxonomy makes sure that both can be had whatever was drawn before.
"""
import json
import math
import random
from collections import Counter, defaultdict
from hashlib import sha256
from itertools import accumulate
from pathlib import Path

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
