"""metric_threshold: a number that the agent's work reaches or does not, e.g. an SSIM of .95 or a speed-up of
1.3.

verifier.json declares
    command      a program among the tests, e.g. "python3 /tests/measure.py"; its last line is the metric
    threshold    the metric that earns 1.0
    better       "higher" or "lower": on which side of the threshold the goal lies
    baseline     the metric of a worthless solution, which earns 0; in between, the reward is linear
    timeout_s    for the whole command (optional, 120)

The command knows the answers and runs with the grader's powers. So it must not import or run what the agent has
written; it asks /tests/harness.py, which lies beside it:
    from harness import read, run
    read("/app/out.csv")                                bytes of the agent's file, or None if there is none
    run("python3 /app/fit.py", stdin=b"...", timeout=9) Run(code, out, err, seconds) of the agent's program;
                                                        code is None past its time or over 1 MB of output
A command that fails, or whose last line is no finite number, earns 0.

    {"command": "python3 /tests/measure.py", "threshold": 0.95, "better": "higher", "baseline": 0.5}
"""
import math

from harness import declaration, is_command, is_count, is_number, refuse, text, trusted, write_reward


def main():
    declared = declaration(
        {"command": is_command, "threshold": is_number, "baseline": is_number,
         "better": lambda value: value in ("higher", "lower")}, {"timeout_s": (is_count, 120)})
    threshold, baseline = declared["threshold"], declared["baseline"]
    sign = 1 if declared["better"] == "higher" else -1
    if sign * (threshold - baseline) <= 0:
        refuse(f"{declared['better']} is better, but the threshold {threshold} is not so compared to the "
               f"baseline {baseline}")
    got = trusted(declared["command"], timeout=declared["timeout_s"])
    lines = text(got.out, 10_000).splitlines() or [""]
    try:
        metric = float(lines[-1])
    except ValueError:
        metric = math.nan
    if got.code != 0 or not math.isfinite(metric):
        print(f"no metric: exit code {got.code}, last line {lines[-1][:80]!r}\n{text(got.err, 2000)}")
        return write_reward(0.0, False)
    print(f"metric {metric} (threshold {threshold}, {declared['better']} is better; baseline {baseline})")
    write_reward((metric - baseline) / (threshold - baseline), sign * (metric - threshold) >= 0)


if __name__ == "__main__":
    main()
