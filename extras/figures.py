"""The pictures of `eval.py plot`: what training did (metrics.jsonl) and pass@k (eval files), runs over each
other.

After the paper's figures: reward and held-out pass@1 (7, 8), the largest log-prob difference between trainer
and sampler (4), turns an episode (5), tokens a turn and a tool call (6), pass@k (9), groups dropped (11). """

import math
from collections import namedtuple

import numpy as np

# lines: (function of a metrics.jsonl row, style, name or None)
Panel = namedtuple("Panel", "title ylabel lines scale", defaults=["linear"])
PANELS = [
    Panel("Training", "mean reward", [(lambda m: m["reward"], "-", None)]),
    Panel("Held-out tasks", "pass@1", [(lambda m: m["eval_pass1"], "o-", "validation")]),
    Panel("Trainer against sampler", "max |log-prob difference|",
          [(lambda m: m["logprob_diff_max"], "-", None)], "log"),
    Panel("Cut by the mask", "share of sampled tokens",
          [(lambda m: 1 - m["kept_positive"], "-", "advantage > 0"),
           (lambda m: 1 - m["kept_negative"], "--", "advantage < 0")]),
    Panel("Length of episodes", "turns", [(lambda m: m["turns"], "-", None)]),
    Panel("Length of turns", "tokens", [(lambda m: m["tokens_per_turn"], "-", "a turn"),
                                        (lambda m: m["tokens_per_call"], "--", "a tool call")]),
    Panel("Groups dropped", "groups a step", [(lambda m: m["groups_zero"], "-", "all failed"),
                                              (lambda m: m["groups_one"], "--", "all passed")]),
]
TEST = ("s", "test, with standard error")


def draw_runs(training: dict, evals: dict, path: str):
    """Writes a PNG: a colour a label, a panel for what there is.

    training: {label: [one list of metrics.jsonl rows a seed]};
    evals: {label: [(stage or None, line style, step or None, eval.py's statistics)]}. """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.lines import Line2D

    labels = list(dict.fromkeys([*training, *evals]))
    colors = {label: f"C{number}" for number, label in enumerate(labels)}
    rows = [m for seeds in training.values() for metrics in seeds for m in metrics]
    panels = [p for p in PANELS if curve(rows, p.lines[0][0])[0]]
    count = len(panels) + bool(evals)
    columns = min(2, count)
    lines = math.ceil(count / columns)
    figure, grid = pyplot.subplots(lines, columns, squeeze=False, layout="constrained",
                                   figsize=(5 * columns, 2.7 * lines + 0.4))
    for unused in grid.flat[count:]:
        unused.remove()

    def legend(axes, names):  # of line styles; the colours are the whole figure's
        handles = [Line2D([], [], color="0.3", linestyle=style.strip("os") or "none", ms=5, label=name,
                          marker=style.strip("-:") or None) for style, name in dict.fromkeys(names) if name]
        if handles:
            axes.legend(handles=handles, fontsize=9)

    for axes, panel in zip(grid.flat, panels):
        axes.set(title=panel.title, ylabel=panel.ylabel, xlabel="optimiser step", yscale=panel.scale)
        names = [(style, name) for _, style, name in panel.lines]
        for label, seeds in training.items():
            for function, style, _ in panel.lines:
                draw(axes, [curve(metrics, function) for metrics in seeds], style, colors[label])
            for _, _, step, s in evals.get(label, ()) if panel.ylabel == "pass@1" else ():
                if step is not None:
                    axes.errorbar([step], [s["pass_at_k"]["1"]], [s["se_tasks"] or 0], fmt="s", ms=5,
                                  color=colors[label], mec="black", capsize=3, zorder=3)
                    names.append(TEST)
        if panel.ylabel in ("mean reward", "pass@1"):
            axes.set_ylim(0, 1)
        legend(axes, names)
    if evals:
        axes, names = grid.flat[count - 1], []
        axes.set(title="Attempts", ylabel="pass@k", xlabel="k attempts at a task", ylim=(0, 1))
        axes.xaxis.get_major_locator().set_params(integer=True)
        for label, results in evals.items():
            for stage, style in dict.fromkeys((stage, style) for stage, style, _, _ in results):
                seeds = [s["pass_at_k"] for name, _, _, s in results if name == stage]
                points = [([int(k) for k in ks], list(ks.values())) for ks in seeds]
                draw(axes, points, "o" + style, colors[label])
                names.append((style, stage))
        legend(axes, names)
    for axes in grid.flat[:count]:
        axes.grid(alpha=0.25)
    if len(labels) > 1:
        handles = [Line2D([], [], color=colors[label], lw=2.5, label=label) for label in labels]
        figure.legend(handles=handles, loc="outside upper center", ncols=min(4, len(labels)), fontsize=10)
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
