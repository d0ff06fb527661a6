"""The page of the study `tuned`, computed from its `runs.csv`: tables with intervals, and what survives correction."""

from __future__ import annotations

import itertools
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jobs.studies.outcomes import LEVEL, Spread, as_lines, difference, shown, shown_difference
from jobs.studies.outcomes import significant as survivors
from jobs.studies.study_figures import STYLE, as_svg

Lines = Sequence[Mapping[str, str]]
COMPARED = {"nce": ("held-out loss", "+.3f"), "recall_at_1": ("R@1, points", "+.2f")}
EQUAL_TO = ("openclip", "siglip")
"""Arms that are also run with as many samples as the CPU time of another arm allows."""
EQUAL = " at equal CPU time"
LARGER = "openclip at four times the batch"
BASELINES = (*EQUAL_TO, *(arm + EQUAL for arm in EQUAL_TO), LARGER, "neuclip_plus")
"""The last one only for the arms of `near`."""
TRIALS = 8
"""Trials of each arm where a cell's name gives no other number."""
FIGURE, METHOD = "gains.svg", "neuclip_power"
CAPTION = (
    f"what {METHOD} gains over the baselines with towers of 2,048 units, 95% intervals; right of the line is better"
)
DRAWN = {"openclip" + EQUAL: "#2b6cb0", "siglip" + EQUAL: "#c05621", LARGER: "#8a8f98"}
"""What the figure compares with, and the colours."""
WIDE = re.compile(r"(\w+)-\d+-b(\d+)-learned-w2048-16trials")
"""The cells of the figure: kind of pairs, batch."""
Comparison = tuple[str, str, str, str, str]
"""Phase, cell, arm (of the sweep: arm and eps), the arm it is compared with, measure."""


def page(lines: Lines, *, arms: Sequence[str]) -> str:
    """The whole page, in Markdown."""
    arms_of = {
        (line["phase"], line["cell"]): None for line in lines if line["phase"] in ("report", "eps")
    }  # in order of their first line
    compared: dict[Comparison, Spread] = {}
    for phase, cell in arms_of:
        compared |= comparisons(lines, phase, cell)
    significant, families = set[Comparison](), []
    for phase, title in (("report", "the tables"), ("eps", "the sweep of eps")):
        family = {name: found for name, found in compared.items() if name[0] == phase and found.p is not None}
        clear = survivors(family)
        significant |= clear
        families += [f"{title}: {len(clear)} of {len(family)}"] if family else []
    how = (
        "What was planned, before the runs, and what was changed: [plan](plan.md). This page is generated from "
        "`runs.csv` by `python -m jobs.studies.tuned page`; do not edit it. Values are means ± standard deviation over "
        "seeds that were not used for tuning; differences are paired by seed, with half of their 95% interval and t. "
        f"Bold: significant at {LEVEL:.0%} after Holm's correction, over all comparisons of each of two families "
        f"({'; '.join(families)})."
    )
    text = ["# Tuned methods on pairs that are learned", "", how, "", f"![{CAPTION}]({FIGURE})"]
    reported = [cell for phase, cell in arms_of if phase == "report"]
    for measure, (title, form) in COMPARED.items():
        text += ["", f"## All cells: {title} against `openclip`", ""]
        text += overview(reported, compared, significant, arms=arms, measure=measure, form=form)
    for phase, cell in arms_of:
        own = [line for line in lines if (line["phase"], line["cell"]) == (phase, cell)]
        text += ["", f"## {'Sweep of eps: ' if phase == 'eps' else ''}{cell}", ""]
        text += table(own, phase, cell, compared, significant, arms=arms)
    return "\n".join([*text, "", *ideas(lines), "", *tuning(lines, arms=arms)]) + "\n"


def overview(
    cells: Sequence[str],
    compared: Mapping[Comparison, Spread],
    significant: Iterable[Comparison],
    *,
    arms: Sequence[str],
    measure: str,
    form: str,
) -> list[str]:
    """A table with a row for each cell and a column for each arm: its difference from `openclip` in one measure."""
    others = [arm for arm in arms if arm != "openclip"]
    text = [["cell", *(f"`{arm}`" for arm in others)]]
    for cell in sorted(cells, key=lambda name: [int(x) if x.isdigit() else x for x in re.split(r"(\d+)", name)]):
        row = [cell]
        for arm in others:
            key = ("report", cell, arm, "openclip", measure)
            row.append(shown_difference(compared.get(key), form, is_clear=key in significant, interval=True))
        text.append(row)
    return as_lines(text)


def figure(lines: Lines) -> str:
    """An SVG of what `METHOD` gains in the cells with wide towers: a row per kind of pairs, a panel per measure."""
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    cells = {wide.groups(): cell for line in lines if (wide := WIDE.fullmatch(cell := line["cell"]))}
    kinds = sorted({kind for kind, _ in cells})
    found: dict[tuple[str, str, str], Spread] = {}  # by cell, baseline, measure
    for cell in cells.values():
        compared = comparisons(lines, "report", cell).items()
        found |= {(cell, base, measure): gain for (*_, arm, base, measure), gain in compared if arm == METHOD}
    with matplotlib.rc_context(STYLE):
        drawing = Figure(figsize=(7.4, 0.7 + 1.35 * len(kinds)), layout="constrained")
        panels = drawing.subplots(len(kinds), len(COMPARED), squeeze=False, sharey="row")
        for kind, row in zip(kinds, panels, strict=True):
            batches = sorted((int(batch) for one, batch in cells if one == kind), reverse=True)
            for axes, measure, sign, what in zip(
                row, COMPARED, (-1, 1), ("lower held-out loss, nats", "higher R@1, points"), strict=True
            ):
                for number, (base, colour) in enumerate(DRAWN.items()):
                    gains = {
                        place + 0.22 * (1 - number): gain
                        for place, batch in enumerate(batches)
                        if (gain := found.get((cells[kind, str(batch)], base, measure)))
                    }
                    axes.errorbar(
                        [sign * gain.mean for gain in gains.values()],
                        list(gains),
                        xerr=[gain.half_width or 0.0 for gain in gains.values()],
                        fmt="o",
                        markersize=4,
                        capsize=2,
                        color=colour,
                        label=base,
                    )
                axes.xaxis.set_major_locator(MaxNLocator(5))
                axes.axvline(0.0, color="#1a202c", linewidth=0.8)
                axes.set_title(f"{kind}: {what}", loc="left")
                axes.set_yticks(range(len(batches)), [f"batch {batch}" for batch in batches])
                axes.grid(axis="y", visible=False)
        place: Any = "outside lower center"  # matplotlib's annotations leave the places outside out
        drawing.legend(*panels[0][0].get_legend_handles_labels(), frameon=False, loc=place, ncols=len(DRAWN))
        return as_svg(drawing)


def trials_in(cell: str) -> tuple[str, int]:
    """The name of a cell without its number of trials, and the number."""
    found = re.fullmatch(r"(.*)-(\d+)trials", cell)
    return (found[1], int(found[2])) if found else (cell, TRIALS)


def name_of(line: Mapping[str, str]) -> str:
    """A row's name: the arm, in the sweep with its eps."""
    is_swept = line["phase"] == "eps" and has_eps(line["arm"])
    return f"{line['arm']}, eps {float(line['eps']):.3g}" if is_swept else line["arm"]


def has_eps(arm: str) -> bool:
    return arm not in ("openclip", "siglip", "amorlip", "near_openclip")


def comparisons(lines: Lines, phase: str, cell: str) -> dict[Comparison, Spread]:
    """Every row of a table with each baseline, in each measure, paired by seed."""
    rows: dict[str, list[Mapping[str, str]]] = {}
    for line in lines:
        if (line["phase"], line["cell"]) == (phase, cell):
            rows.setdefault(name_of(line), []).append(line)
    reports = lines if phase == "report" else ()
    equal = [line for line in reports if (line["phase"], line["cell"]) == ("equal", cell)]
    larger = ("report", re.sub(r"-b(\d+)-", lambda found: f"-b{4 * int(found[1])}-", cell), "openclip")
    at_larger = [line for line in reports if (line["phase"], line["cell"], line["arm"]) == larger]
    found: dict[Comparison, Spread] = {}
    for measure, base, name in itertools.product(COMPARED, BASELINES, rows):
        if base == "neuclip_plus" and not name.startswith("near_"):
            continue
        others = at_larger if base == LARGER else rows.get(base, [])
        if base.endswith(EQUAL):
            arm = base.removesuffix(EQUAL)
            others = [one for one in equal if one["arm"] == arm and one["trial"].endswith(f" for {name}")]
        gain = difference(by_seed(rows[name], measure), by_seed(others, measure))
        if gain is not None and name != base and (phase, cell, base, name, measure) not in found:
            found[phase, cell, name, base, measure] = gain
    return found


def by_seed(lines: Lines, measure: str) -> dict[str, float]:
    """A measure of the lines that have it."""
    return {line["seed"]: float(line[measure]) for line in lines if line[measure]}


def table(
    own: Lines,
    phase: str,
    cell: str,
    compared: Mapping[Comparison, Spread],
    significant: Iterable[Comparison],
    *,
    arms: Sequence[str],
) -> list[str]:
    """One cell's table."""
    bases = [base for base in BASELINES if any(base in key[3:4] for key in compared if key[:2] == (phase, cell))]
    heads = ["", "seeds", "held-out loss, nats", "R@1, %", "error: batch", "in use", "tau", "CPU s"]
    heads += [f"{title} against `{base}`" for base in bases for title, _ in COMPARED.values()]
    text = [heads]
    order = {arm: number for number, arm in enumerate(arms)}
    names = sorted(
        {name_of(line): line for line in own}.items(), key=lambda item: (order[item[1]["arm"]], float(item[1]["eps"]))
    )
    for name, first in names:
        rows = [line for line in own if name_of(line) == name]
        cells = [f"`{first['arm']}`{name[len(first['arm']) :]}", str(len(rows))]
        forms = {"nce": ".3f", "recall_at_1": ".2f", "error_batch": ".2f", "error_in_use": ".3f", "tau_end": ".3f"}
        cells += [spread(rows, measure, form) for measure, form in {**forms, "cpu_seconds": ".1f"}.items()]
        for base in bases:
            for measure, (_, form) in COMPARED.items():
                key = (phase, cell, name, base, measure)
                cells.append(shown_difference(compared.get(key), form, is_clear=key in significant, interval=True))
        text.append(cells)
    return as_lines(text)


def spread(rows: Lines, measure: str, form: str) -> str:
    return shown(Spread.of(float(line[measure]) for line in rows if line[measure]), form)


def ideas(lines: Lines) -> list[str]:
    """What variants of `neuclip_power` change, on tuning pairs: pilots, outside of the families of comparisons."""
    runs: dict[tuple[str, str], list[Mapping[str, str]]] = {}  # by cell and arm
    for line in lines:
        if line["phase"] == "idea":
            runs.setdefault((line["cell"], line["arm"]), []).append(line)
    rows = [["cell", "idea", "seeds", "held-out loss", "R@1, points", "CPU s"]]
    for (cell, arm), own in runs.items():
        row = [cell, f"`{arm}`", str(len(own))]
        for measure, (_, form) in COMPARED.items():
            if arm == "base":
                row.append(spread(own, measure, form.removeprefix("+")))
                continue
            gain = difference(by_seed(own, measure), by_seed(runs[cell, "base"], measure))
            row.append(shown_difference(gain, form, is_clear=False, interval=True))
        rows.append([*row, spread(own, "cpu_seconds", ".1f")])
    how = (
        "Variants of `neuclip_power` with its tuned values, on tuning pairs and seeds that have tuned nothing: "
        "`base` is `neuclip_power` itself, the others are differences from it with half of their 95% interval and "
        "t, not corrected. [The plan](plan.md) says what they are and what became of them."
    )
    return ["## Ideas", "", how, "", *as_lines(rows)]


def tuning(lines: Lines, *, arms: Sequence[str]) -> list[str]:
    """How many trials each arm had, and the values of the one that is reported."""
    text = ["## Tuning", "", "The trials of each arm, and the values that are reported.", ""]
    keys = ("lr", "tau", "tau_lr", "eps", "rho", "bias", "power")
    rows = [["cell", "arm", "trials", "chosen", *keys, "loss in tuning"]]
    for cell in dict.fromkeys(line["cell"] for line in lines):
        base, limit = trials_in(cell)
        for arm in arms:
            tried = [line for line in lines if (line["phase"], line["cell"], line["arm"]) == ("tune", base, arm)]
            tried = [line for line in tried if int(line["trial"]) < limit]
            report = [line for line in lines if (line["phase"], line["cell"], line["arm"]) == ("report", cell, arm)]
            if not tried or not report:
                continue
            one = report[0]
            losses = [float(line["nce"]) for line in tried if line["trial"] == one["trial"]]
            values = [f"{float(one[key]):.3g}" if one[key] else "–" for key in keys]
            mean = f"{statistics.fmean(losses):.3f}"
            trials = str(len({line["trial"] for line in tried}))
            rows.append([cell, f"`{arm}`", trials, one["trial"], *values, mean])
    return [*text, *as_lines(rows, labels=2)]
