"""The pictures of `eval.py plot`: what training did (metrics.jsonl) and pass@k (eval files), runs over each other.

After the paper's figures: reward and held-out pass@1 (7, 8), the largest log-prob difference between trainer and
sampler (4), turns an episode (5), tokens a turn and a tool call (6), pass@k (9), groups dropped (11). """

import math

import numpy as np

# One panel each: title, y label, log scale, and its lines as (function of a metrics.jsonl row, style, name).
PANELS = [
    ("Training", "mean reward", False, [(lambda m: m["reward"], "-", None)]),
    ("Held-out tasks", "pass@1", False, [(lambda m: m["eval_pass1"], "o-", "validation")]),
    ("Trainer against sampler", "max |log-prob difference|", True, [(lambda m: m["logprob_diff_max"], "-", None)]),
    ("Cut by the mask", "share of sampled tokens", False, [
        (lambda m: 1 - m["kept_positive"], "-", "advantage > 0"),
        (lambda m: 1 - m["kept_negative"], "--", "advantage < 0")]),
    ("Length of episodes", "turns", False, [(lambda m: m["turns"], "-", None)]),
    ("Length of turns", "tokens", False, [
        (lambda m: m["tokens_per_turn"], "-", "a turn"), (lambda m: m["tokens_per_call"], "--", "a tool call")]),
    ("Groups dropped", "groups a step", False, [
        (lambda m: m["groups_zero"], "-", "all failed"), (lambda m: m["groups_one"], "--", "all passed")]),
]


def draw_runs(training: dict, evals: dict, path: str):
    """Writes a PNG. A panel without data is left out.

    training: {label: [one list of metrics.jsonl rows a seed]};
    evals: {label: [(stage, line style, step or None, eval.py's statistics)]}. """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.lines import Line2D

    labels = list(dict.fromkeys([*training, *evals]))
    colors = {label: f"C{number}" for number, label in enumerate(labels)}
    panels = [panel for panel in PANELS if any(curve(m, line[0])[0] for line in panel[3]
                                               for seeds in training.values() for m in seeds)]
    count = len(panels) + bool(evals)
    columns = min(2, count)
    figure, grid = pyplot.subplots(math.ceil(count / columns), columns, squeeze=False, layout="constrained",
                                   figsize=(5 * columns, 2.7 * math.ceil(count / columns) + 0.4))
    grid = list(grid.flat)
    for axes in grid[count:]:
        axes.remove()
    for axes, (title, y, log, lines) in zip(grid, panels):
        axes.set(title=title, ylabel=y, xlabel="optimiser step", yscale="log" if log else "linear")
        for label, seeds in training.items():
            for function, style, _ in lines:
                draw(axes, [curve(metrics, function) for metrics in seeds], style, colors[label])
        names = [(style, name) for _, style, name in lines if name]
        if title == "Held-out tasks":
            for label, results in evals.items():
                for _, _, step, s in results:
                    if step is not None:
                        axes.errorbar([step], [s["pass_at_k"]["1"]], [s["se_tasks"] or 0], fmt="s", ms=5,
                                      color=colors[label], mec="black", capsize=3, zorder=3)
                        names += [("s", "test, with standard error")]
        if y in ("mean reward", "pass@1"):
            axes.set_ylim(0, 1)
        if names:
            axes.legend(handles=[Line2D([], [], color="0.3", linestyle=style.strip("os") or "none", label=name,
                                        marker=style.strip("-:") or None, ms=5)
                                 for style, name in dict.fromkeys(names)], fontsize=9)
    if evals:
        axes = grid[count - 1]
        axes.set(title="Attempts", ylabel="pass@k", xlabel="k attempts at a task", ylim=(0, 1))
        stages = {}
        for label, results in evals.items():
            for stage, style in dict.fromkeys((stage, style) for stage, style, _, _ in results):
                some = [s["pass_at_k"] for name, _, _, s in results if name == stage]
                draw(axes, [([int(k) for k in one], list(one.values())) for one in some], "o" + style, colors[label])
                stages[stage] = style
        axes.xaxis.get_major_locator().set_params(integer=True)
        if list(stages) != [None]:
            axes.legend(handles=[Line2D([], [], color="0.3", linestyle=style, label=stage)
                                 for stage, style in stages.items() if stage], fontsize=9)
    for axes in grid[:count]:
        axes.grid(alpha=0.25)
    if len(labels) > 1:
        figure.legend(handles=[Line2D([], [], color=colors[label], lw=2.5, label=label) for label in labels],
                      loc="outside upper center", ncols=min(4, len(labels)), fontsize=10)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def curve(metrics: list[dict], function) -> tuple[list, list]:
    """(steps, values) of the rows that have the number."""
    points = []
    for m in metrics:
        try:
            points.append((m["step"] + 1, function(m)))
        except KeyError:  # held-out pass@1 is there now and then; older runs lack this or that
            pass
    return [x for x, _ in points], [y for _, y in points]


def draw(axes, curves: list[tuple[list, list]], style: str, color: str):
    """One curve, or several seeds' thin ones with their mean, over the steps that all of them have."""
    if len(curves) > 1:
        for xs, ys in curves:
            axes.plot(xs, ys, style.strip("o"), color=color, alpha=0.3, lw=0.8)
    values = [dict(zip(xs, ys)) for xs, ys in curves]
    common = [x for x in values[0] if all(x in v for v in values)]
    axes.plot(common, [np.mean([v[x] for v in values]) for x in common], style, color=color, ms=4)
