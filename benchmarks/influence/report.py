"""Tables and plots from the figures in docs/benchmarks/influence.json."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from ..run import DISTURBED

Found = dict[str, Any]
PARTS = ("lds", "costs", "replay", "growth")
TOKENS = 1_000_000_000


def tables(found: Found) -> dict[str, str]:
    """Markdown by the names of a page's markers."""
    made = {"lds": accuracy, "replay": replay, "costs": costs, "examples": examples, "parameters": parameters}
    made |= {"ranks": ranks, "billion": billion}
    return {name: make(found) for name, make in made.items()} | {
        f"{part} environment": environment(found[part]) for part in PARTS
    }


def accuracy(found: Found) -> str:
    """Methods by tasks; the best of each library in bold."""
    tasks = found["lds"]["rows"]
    names = list(dict.fromkeys((row["library"], row["method"]) for task in tasks for row in task["rows"]))
    lines = []
    for library, method in names:
        title = f"persample, {method}" if library == "persample" else method
        lines.append([title, *(_score(task, library, method) for task in tasks)])
    head = [f"{task['title']} ({task['parameters']:,} parameters)" for task in tasks]
    failed = {
        f"- {row['method']} on the {task['title']}: `{row['failed']}`\n"
        for task in tasks
        for row in task["rows"]
        if row["lds"] is None
    }
    return _markdown(["", *head], lines) + ("\nFails:\n\n" + "".join(sorted(failed)) if failed else "")


def _score(task: Found, library: str, method: str) -> str:
    rows = [row for row in task["rows"] if row["library"] == library]
    best = max((row["lds"] for row in rows if row["lds"] is not None), default=None)
    (row,) = [row for row in rows if row["method"] == method] or [None]
    if row is None:
        return "–"
    if row["lds"] is None:
        return "fails"
    low, high = row["interval"]
    text = f"{row['lds']:.3f}"
    text = f"**{text}**" if row["lds"] == best else text
    return f"{text} ({low:.2f} to {high:.2f})" + (f", λ = {row['damping']}" if row.get("damping") else "")


def replay(found: Found) -> str:
    lines = [
        [f"{row['drop']:.0%}", f"{row['lds']:.3f} ({row['interval'][0]:.3f} to {row['interval'][1]:.3f})"]
        for row in found["replay"]["rows"]
    ]
    return _markdown(["dropped", "replay"], lines)


def costs(found: Found) -> str:
    lines = []
    for row in found["costs"]["rows"]:
        inside = {one["every"]: one["ratio"] for one in row["in_run"]}
        cells = [row["build"]["with_writing"], row["fit, drawn labels"]["ratio"], row["fit, stored rows"]["ratio"]]
        cells += [row["query"]["ratio"], inside[1], inside[4]]
        chunks = row["memory"]["chunks_above"]
        lines.append([row["workload"], *(f"{c:.2f}" for c in cells), f"{chunks:.1f}", f"{row['bytes_per_example']:,}"])
    head = ["build", "fit, drawn labels", "fit, stored rows", "query", "`InRun`", "`InRun(every=4)`"]
    return _markdown(["", *head, "memory of a build, chunks above a step", "bytes per example"], lines)


def examples(found: Found) -> str:
    rows = found["growth"]["examples"]
    lines = [
        [
            f"{row['examples']:,}",
            *(f"{row[part]:.2f}" for part in ("build", "fit", "query")),
            f"{row['bytes'] / 1e6:,.1f}",
            f"{row['bytes'] / row['examples']:,.0f}",
        ]
        for row in rows
    ]
    return _markdown(["examples", "build, s", "fit, s", "query, s", "MB", "bytes per example"], lines)


def parameters(found: Found) -> str:
    return _markdown(
        ["parameters", *_SKETCHED], [[f"{r['parameters']:,}", *_cells(r)] for r in found["growth"]["parameters"]]
    )


def ranks(found: Found) -> str:
    return _markdown(
        ["blocks", *_SKETCHED], [[f"{r['rank']} x {r['rank']}", *_cells(r)] for r in found["growth"]["ranks"]]
    )


_SKETCHED = ["ratio to a plain step", "tokens per second", "bytes per example", "bytes per token"]


def _cells(row: Found) -> list[str]:
    per_token = row["bytes_per_example"] * row["examples"] / row["tokens"]
    rate = row["tokens"] / row["seconds"]
    return [f"{row['ratio']:.2f}", f"{rate:,.0f}", f"{row['bytes_per_example']:,}", f"{per_token:,.0f}"]


def billion(found: Found) -> str:
    """Worked out, step by step, from the row of 16 x 16 blocks."""
    (row,) = [r for r in found["growth"]["ranks"] if r["rank"] == 16]
    rate, length = row["tokens"] / row["seconds"], row["tokens"] // row["examples"]
    sequences = TOKENS / length
    lines = [
        ["sequences", f"{TOKENS:,} / {length}", f"{sequences / 1e6:.1f} million"],
        ["tokens per second", f"{row['tokens']} / {row['seconds']:.3f} s", f"{rate:,.0f}"],
        ["build on one core", f"{TOKENS:,} / {rate:,.0f} / 3600", f"{TOKENS / rate / 3600:,.0f} hours"],
        [
            "the same tokens, plain steps",
            f"{TOKENS:,} / {row['tokens'] / row['plain']:,.0f} / 3600",
            f"{TOKENS * row['plain'] / row['tokens'] / 3600:,.0f} hours",
        ],
    ]
    for dtype, size in (("float32", 4), ("float16", 2), ("int8", 1)):
        of_row = row["bytes_per_example"] * size / 4
        lines.append(
            [f"disk, {dtype}", f"{sequences / 1e6:.1f} million x {of_row:,.0f} bytes", _size(sequences * of_row)]
        )
    return _markdown(["", "from", ""], lines)


def _size(count: float) -> str:
    return f"{count / 1e12:.1f} TB" if count >= 1e12 else f"{count / 1e9:.0f} GB"


def environment(part: Found) -> str:
    where, busy = part["environment"], part["others"]
    commit = f"commit {str(where['commit'])[:12]}" + (" with changes in `src`" if where["source_changed"] else "")
    doubt = f"; **doubtful**, other programs kept {busy:.1f} cores busy" if busy > DISTURBED else ""
    return f"{where['date'][:10]}, {commit}, torch {where['torch']}, one thread on {where['cpu']}{doubt}.\n"


def _markdown(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    rule = ["---", *("---:" for _ in head[1:])]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in [head, rule, *lines])


COLOURS = {"persample": "#0072B2", "dattri": "#E69F00", "kronfluence": "#009E73", "traker": "#CC79A7"}


def plot(found: Found, folder: Path) -> None:
    """Two pictures: the best of every library by task, and how an index grows."""
    import matplotlib as mpl
    from matplotlib import pyplot as plt

    from ..plots import STYLE

    folder.mkdir(parents=True, exist_ok=True)
    with mpl.rc_context(STYLE):
        for name, figure in {"influence": libraries(found), "influence-growth": curves(found)}.items():
            figure.savefig(folder / f"{name}.svg", metadata={"Date": None})
            plt.close(figure)


def libraries(found: Found) -> Any:
    from matplotlib import pyplot as plt

    tasks = found["lds"]["rows"]
    figure, axes = plt.subplots(figsize=(9, 3.2), layout="constrained")
    for k, (library, colour) in enumerate(COLOURS.items()):
        for at, task in enumerate(tasks):
            rows = [r for r in task["rows"] if r["library"] == library and r["lds"] is not None]
            if not rows:
                continue
            best = max(rows, key=lambda r: r["lds"])
            place = at + (k - 1.5) * 0.2
            low, high = best["interval"]  # of resampled halves, whose ties lower ranks: it may end below the score
            error = [[max(0.0, best["lds"] - low)], [max(0.0, high - best["lds"])]]
            axes.bar(place, best["lds"], 0.18, color=colour, label=library if at == 0 else None, yerr=error)
            axes.text(place, 0.01, f"{best['lds']:.2f}", ha="center", fontsize=7, color="white")
    axes.set_xticks(range(len(tasks)), [task["title"] for task in tasks])
    axes.set_ylabel("linear datamodelling score")
    axes.legend(ncols=4, frameon=False, loc="upper right")
    return figure


def curves(found: Found) -> Any:
    from matplotlib import pyplot as plt

    grown = found["growth"]
    figure, (first, second, third) = plt.subplots(1, 3, figsize=(12, 3.2), layout="constrained")
    figure.get_layout_engine().set(wspace=0.08)
    counts = [row["examples"] for row in grown["examples"]]
    for part, colour in (("build", "#0072B2"), ("fit", "#009E73"), ("query", "#D55E00")):
        first.loglog(counts, [row[part] for row in grown["examples"]], "o-", color=colour, label=f"{part}, s")
    first.loglog(counts, [row["bytes"] / 1e6 for row in grown["examples"]], "s:", color="#888888", label="MB")
    first.set(xlabel="examples", title="MLP on digits, float16")
    first.legend(frameon=False)
    ranks = [row["rank"] for row in grown["ranks"]]
    _ratios(second, grown["parameters"], "parameters", "GPT, 16 x 16 blocks")
    _ratios(third, grown["ranks"], "rank", "GPT of 5.8 M parameters")
    third.set_xticks(ranks, [str(rank) for rank in ranks])
    third.minorticks_off()
    return figure


def _ratios(axes: Any, rows: Sequence[Found], key: str, title: str) -> None:
    """Time and bytes against one of the settings, each with an axis of its own."""
    values, most = [row[key] for row in rows], max(row["ratio"] for row in rows)
    axes.semilogx(values, [row["ratio"] for row in rows], "o-", color="#0072B2")
    axes.set(xlabel=key, title=title, ylim=(0, 1.15 * most))
    axes.set_ylabel("build, in plain steps", color="#0072B2")
    size = axes.twinx()
    size.loglog(values, [row["bytes_per_example"] for row in rows], "s:", color="#888888")
    size.set_ylabel("bytes per example (dotted)")
    size.set_ylim(1e3, 1e6)
    size.minorticks_off()
