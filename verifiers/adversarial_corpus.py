"""adversarial_corpus: the agent's filter must reject every malicious item and keep every benign one.

verifier.json declares
    command      the agent's filter; {file} stands for the item's path. Its exit code is the verdict: 0 keeps
                 the item, 1 rejects it. Any other code, or no end within the time, is wrong either way.
    malicious    the items to reject, at least one: each a text, or {"file": name} for a file among the tests
    benign       the items to keep, likewise
    suffix       of the items' names, e.g. ".html" (optional, none)
    timeout_s    for one item (optional, 5)

The reward is the share rejected of the malicious plus the share kept of the benign minus 1, and never below
0: a filter that says the same of everything earns 0. Items come in random order under random names. After
three items in a row that ran out of time, the rest is not tried.

    {"command": "python3 /app/filter.py {file}", "suffix": ".html",
     "malicious": ["<img src=x onerror=alert(1)>", {"file": "evil2.html"}], "benign": ["<b>hello</b>"]}
"""
import os
import random
import shlex
import shutil
import tempfile

from harness import content, declaration, is_command, is_content, is_count, run, write_reward

VERDICTS = {0: "kept", 1: "rejected"}


def is_corpus(value):
    return isinstance(value, list) and value != [] and all(map(is_content, value))


def main():
    declared = declaration({"command": lambda value: is_command(value) and "{file}" in value,
                            "malicious": is_corpus, "benign": is_corpus},
                           {"suffix": (lambda value: isinstance(value, str) and "/" not in value, ""),
                            "timeout_s": (is_count, 5)})
    items = [(kind, i, content(item)) for kind in ("malicious", "benign")
             for i, item in enumerate(declared[kind])]
    chance = random.SystemRandom()
    chance.shuffle(items)
    right, late = {"malicious": 0, "benign": 0}, 0
    for kind, i, data in items:
        if late == 3:
            break
        folder = tempfile.mkdtemp(dir="/tmp")    # for the agent to read; its programs see no other of ours
        path = f"{folder}/{chance.getrandbits(64):x}{declared['suffix']}"
        with open(path, "wb") as file:
            file.write(data)
        os.chmod(folder, 0o755)
        os.chmod(path, 0o644)
        words = [word.replace("{file}", path) for word in shlex.split(declared["command"])]
        got = run(words, timeout=declared["timeout_s"])
        shutil.rmtree(folder)
        late = late + 1 if got.code is None else 0
        good = got.code == (1 if kind == "malicious" else 0)
        right[kind] += good
        if not good:
            print(f"{kind}[{i}]: {VERDICTS.get(got.code, 'no verdict')} (exit code {got.code})")
    rejected, kept = (right[kind] / len(declared[kind]) for kind in right)
    print(f"rejected {right['malicious']} of {len(declared['malicious'])} malicious items, "
          f"kept {right['benign']} of {len(declared['benign'])} benign ones")
    write_reward(rejected + kept - 1, rejected == kept == 1)


if __name__ == "__main__":
    main()
