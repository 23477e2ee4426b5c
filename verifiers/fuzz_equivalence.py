"""fuzz_equivalence: on n random inputs the agent's program must print, bit for bit, what an oracle prints.

verifier.json declares
    command      the agent's program; it reads an input from stdin and answers on stdout
    oracle       a program among the tests that does the same rightly, e.g. "python3 /tests/oracle.py"
    generator    a program among the tests that prints one input; it gets a seed, a whole number, as its last
                 argument, and gives the same input for the same seed
    n            how many inputs
    seed         of the first one (optional, 0); the others have the seeds after it
    timeout_s    for one input (optional, 5)

The reward is the share of inputs on which the program exits with 0 within the time and prints the oracle's
bytes. The oracle must exit with 0, and its answers must not all be the same. After three inputs in a row that
ran out of time, the rest is not tried. Oracle and generator run with the grader's powers.

    {"command": "/app/encode", "n": 200,
     "oracle": "python3 /tests/oracle.py", "generator": "python3 /tests/generate.py"}
"""
from harness import OUTPUT, declaration, is_command, is_count, refuse, run, text, trusted, write_reward


def main():
    declared = declaration(
        {"command": is_command, "oracle": is_command, "generator": is_command, "n": is_count},
        {"seed": (lambda value: type(value) is int, 0), "timeout_s": (is_count, 5)})
    n, cases = declared["n"], []
    for seed in range(declared["seed"], declared["seed"] + n):
        made = trusted(f"{declared['generator']} {seed}")
        if made.code != 0:
            refuse(f"the generator fails for seed {seed} (exit code {made.code}): {text(made.err)}")
        answer = trusted(declared["oracle"], stdin=made.out)
        if answer.code != 0:
            refuse(f"the oracle fails for seed {seed} (exit code {answer.code}): {text(answer.err)}")
        cases.append((seed, made.out, answer.out))
    if n > 1 and len({answer for _, _, answer in cases}) == 1:
        refuse("the oracle answers all inputs alike, so a constant would be as good as the program")
    equal = late = shown = 0
    for seed, given, answer in cases:
        if late == 3:
            break
        got = run(declared["command"], given, declared["timeout_s"], limit=len(answer) + OUTPUT)
        late = late + 1 if got.code is None else 0
        if got.code == 0 and got.out == answer:
            equal += 1
        elif (shown := shown + 1) <= 5:
            print(f"seed {seed}: exit code {got.code}, {len(got.out)} bytes, not the oracle's {len(answer)}; "
                  f"{text(got.err, 200)}")
    print(f"equal on {equal} of {n} inputs")
    write_reward(equal / n, equal == n)


if __name__ == "__main__":
    main()
