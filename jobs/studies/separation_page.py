"""Writes the separation study: `results.json` (the data), and rendered from it `results.csv`, `results.md`, figures."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from jobs.studies.outcomes import LEVEL, Spread, as_lines, difference, shown, shown_difference, significant
from jobs.studies.publish import DATA_NAME, csv_of, figure_title, provenance, read_data, write_data, write_texts
from jobs.studies.separation import ARMS, BASELINE, BASELINES, NAME, REPRODUCES, SHARED, TAU, TITLE
from jobs.studies.study_figures import STYLE, as_svg
from pipeline.versions import versions

Results = Sequence[Mapping[str, Any]]
MEASURES = {
    "nce": ("held-out NCE, nats", ".3f"),
    "mrr": ("held-out MRR, %", ".1f"),
    "gcl": ("training GCL", ".4f"),
    "error_in_use": ("error in use (MSE)", ".3f"),
    "error_cold": ("error cold (MSE)", ".3f"),
    "chi2": ("chi^2", ".0f"),
}
"""Title, with the unit, and format specification of each metric of a run."""


def publish(size: str, results: Results, *, total: int, folder: Path, command: str) -> list[Path]:
    """Write all files of the study to `folder`. Returns their paths."""
    facts = {"arms": ARMS, "units": total, "runs": list(results)}
    write_data(folder, study=NAME, size=size, command=command, versions=versions(), **facts)
    return [folder / DATA_NAME, *render(folder)]


def render(folder: Path) -> list[Path]:
    """Render tables and figures from `folder/results.json`. Returns their paths."""
    data = read_data(folder)
    drawn = draw(data["runs"])
    texts = {"results.csv": as_csv(data["runs"]), "results.md": as_markdown(data, list(drawn)), **drawn}
    return write_texts(folder, texts)


def values_of(results: Results, *, pairs: int, batch: int, arm: str, measure: str) -> dict[int, Any]:
    """An entry of the results of one arm at one setting, by seed."""
    runs = {
        result["run"]["seed"]: result.get(measure)
        for result in sorted(results, key=lambda one: one["run"]["seed"])
        if tuple(result["run"][key] for key in ("pairs", "batch", "arm")) == (pairs, batch, arm)
    }
    return {seed: value for seed, value in runs.items() if value is not None}


Cell = tuple[int, int, str, str]
"""A comparison of held-out NCE: pairs, batch, arm, and the arm that it is compared with."""


def comparisons(results: Results) -> dict[Cell, Spread]:
    """Every comparison of the page's tables, paired by seed; two arms that are compared with each other count once."""
    found: dict[Cell, Spread] = {}
    for pairs, batch, _ in settings_of(results):
        nce = {arm: values_of(results, pairs=pairs, batch=batch, arm=arm, measure="nce") for arm in ARMS}
        for arm, other in itertools.product(ARMS, BASELINES):
            gain = difference(nce[arm], nce[other])
            if gain is not None and arm != other and (pairs, batch, other, arm) not in found:
                found[pairs, batch, arm, other] = gain
    return found


def both_ways(found: Mapping[Cell, Spread]) -> dict[Cell, Spread]:
    """The comparisons, and each of them the other way round."""
    turned = {(p, b, other, arm): Spread(tuple(-v for v in one.values)) for (p, b, arm, other), one in found.items()}
    return turned | dict(found)


def shared_errors(results: Results, *, pairs: int, batch: int, arm: str) -> list[float]:
    """In-use errors of a method on the shared trajectory, one per seed."""
    by_seed = values_of(results, pairs=pairs, batch=batch, arm=SHARED, measure="arms")
    return [found[arm]["error_in_use"] for found in by_seed.values() if arm in found]


def settings_of(results: Results) -> list[tuple[int, int, float]]:
    """The (pairs, batch, epochs) of all runs, sorted."""
    return sorted({(r["run"]["pairs"], r["run"]["batch"], r["run"]["epochs"]) for r in results})


def as_csv(results: Results) -> str:
    """One line per run with every measure; empty if the run does not have it."""
    labels = ("pairs", "epochs", "batch", "arm", "seed")
    figures = (*MEASURES, "cpu_seconds")
    runs = [result for result in results if result["run"]["arm"] != SHARED]
    rows = (([r["run"][key] for key in labels], [r.get(key) for key in figures], ()) for r in runs)
    return csv_of([*labels, *figures], rows)


def as_markdown(data: Mapping[str, Any], drawn: Sequence[str]) -> str:
    """The generated page: how the study was run, a table per setting, and the figures."""
    results: Results = data["runs"]
    compared = comparisons(results)
    clear = significant(compared)
    how = (
        provenance(data, reproduces=REPRODUCES, results=results)
        + f" All methods of a seed share initial weights and batches; temperature {TAU} is fixed. Measures are means "
        "± standard deviation over seeds; differences from other arms are paired by seed, mean ± standard error (t), "
        f"bold where they are significant at {LEVEL:.0%} after Holm's correction over all {len(compared)} comparisons "
        f"of this page ({len(clear)} are). {PAIRS_NOTE[all('data_seed' in one['run'] for one in results)]} Errors are "
        "mean squared errors of "
        "log-normalizers over the whole dataset, at 16 steps of each run; on the shared trajectory all methods see the "
        "same features. This page is generated from `results.json` by `neuclip study separation`; do not edit it."
    )
    lines = [f"# {TITLE}", "", how]
    for pairs, batch, epochs in settings_of(results):
        lines += ["", f"## {pairs:,} pairs, {epochs:g} {'epoch' if epochs == 1 else 'epochs'}, batch {batch}", ""]
        lines += _table(results, pairs=pairs, batch=batch, compared=both_ways(compared), clear=clear)
    for file in drawn:
        lines += ["", f"![{figure_title(file)}]({file})"]
    return "\n".join(lines) + "\n"


PAIRS_NOTE = {
    True: "Every seed has its own training and held-out pairs, weights and order.",
    False: "A seed sets weights and order; the training and held-out pairs are the same for all seeds, so the "
    "intervals say nothing about other pairs.",
}


def _table(results: Results, *, pairs: int, batch: int, compared: Mapping[Cell, Spread], clear: set[Cell]) -> list[str]:
    against = [f"NCE against `{other}`" for other in BASELINES]
    rows = [["", "seeds", *(title for title, _ in MEASURES.values()), *against, "error, shared trajectory"]]
    for arm in ARMS:
        found = {key: values_of(results, pairs=pairs, batch=batch, arm=arm, measure=key) for key in MEASURES}
        if not found["nce"]:
            continue
        cells = [shown(Spread.of(found[key].values()), form) for key, (_, form) in MEASURES.items()]
        for other in BASELINES:
            gain = compared.get((pairs, batch, arm, other))
            is_clear = (pairs, batch, arm, other) in clear or (pairs, batch, other, arm) in clear
            cells.append(shown_difference(gain, "+.3f", is_clear=is_clear))
        shared = shared_errors(results, pairs=pairs, batch=batch, arm=arm) if arm != "oracle" else ()
        rows.append([f"`{arm}`", str(len(found["nce"])), *cells, shown(Spread.of(shared), ".3f")])
    return as_lines(rows)


def draw(results: Results) -> dict[str, str]:
    """File name -> SVG: gain in held-out NCE and in-use error over the batch size, one panel per dataset size."""
    import matplotlib

    gains = both_ways(comparisons(results))

    def gain(pairs: int, batch: int, arm: str) -> Spread | None:
        return gains.get((pairs, batch, BASELINE, arm))

    def error(pairs: int, batch: int, arm: str) -> Spread | None:
        return Spread.of(values_of(results, pairs=pairs, batch=batch, arm=arm, measure="error_in_use").values())

    def shared(pairs: int, batch: int, arm: str) -> Spread | None:
        return Spread.of(shared_errors(results, pairs=pairs, batch=batch, arm=arm))

    title = f"NCE below openclip's, nats\n(logarithmic outside ±{LINEAR})"
    figures: dict[str, tuple[Value, str, Scale]] = {
        "nce-gain.svg": (gain, title, "differences"),
        "error-in-use.svg": (error, MEASURES["error_in_use"][0], "log"),
    }
    if any(result["run"]["arm"] == SHARED for result in results):
        figures["error-shared.svg"] = (shared, "error in use, one trajectory", "log")
    with matplotlib.rc_context(STYLE):
        settings = settings_of(results)
        return {file: _panels(settings, *what) for file, what in figures.items()} if results else {}


Scale = Literal["log", "differences"]
"""Of a vertical axis; "differences" is linear from -`LINEAR` to +`LINEAR` and logarithmic outside."""
LINEAR = 0.1
GAIN_TICKS = (-0.8, -0.4, -0.2, -0.1, -0.05, 0, 0.05, 0.1)
Value = Callable[[int, int, str], Spread | None]
"""The values over seeds of (pairs, batch, arm)."""


def _panels(settings: Sequence[tuple[int, int, float]], value: Value, title: str, scale: Scale) -> str:
    import matplotlib
    from matplotlib.figure import Figure

    sizes = sorted({pairs for pairs, batch, _ in settings if any(value(pairs, batch, arm) for arm in ARMS)})
    figure = Figure(figsize=(1.6 + 2.7 * len(sizes), 3.4), layout="constrained")
    panels = figure.subplots(1, len(sizes), squeeze=False, sharey=True)[0]
    palette = matplotlib.colormaps["tab20"].colors  # type: ignore[attr-defined]
    for axes, pairs in zip(panels, sizes, strict=True):
        batches = sorted({batch for p, batch, _ in settings if p == pairs})
        for number, arm in enumerate(ARMS):
            found = [(batch, value(pairs, batch, arm)) for batch in batches]
            present = [(batch, one) for batch, one in found if one is not None]
            if not present:
                continue
            axes.errorbar(
                [batch * 1.02 ** (number - 4) for batch, _ in present],  # offset, so that error bars do not overlap
                [one.mean for _, one in present],
                yerr=[one.standard_error or 0.0 for _, one in present],
                label=arm,
                color=palette[(2 * number + number // 10) % 20],
                marker="o",
                markersize=3,
                linewidth=1.3,
                capsize=2,
            )
        axes.set_xscale("log", base=2)
        axes.set_xticks(batches, [str(batch) for batch in batches])
        axes.minorticks_off()
        if scale == "log":
            axes.set_yscale("log")
        else:
            axes.set_yscale("symlog", linthresh=LINEAR, linscale=2.0)
            axes.set_yticks(GAIN_TICKS, [f"{tick:+g}" if tick else "0" for tick in GAIN_TICKS])
        axes.set_title(f"{pairs:,} pairs", loc="left")
        axes.set_xlabel("batch size")
    panels[0].set_ylabel(title)
    lines: dict[str, Any] = {
        label: line for axes in panels for line, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    order = [arm for arm in ARMS if arm in lines]
    place: Any = "outside center right"  # matplotlib's annotations leave the places outside out
    figure.legend([lines[arm] for arm in order], order, frameon=False, loc=place)
    return as_svg(figure)
