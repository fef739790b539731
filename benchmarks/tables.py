"""``python -m benchmarks.tables PAGE...``: put the tables that the JSON gives between a page's markers.

``<!-- begin gradients -->`` and ``<!-- end gradients -->`` hold the table of that name.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from .processes import ROOT
from .run import DISTURBED
from .workloads import CURVES

RESULTS = ROOT / "docs" / "benchmarks"
MARKED = re.compile(r"(?P<begin><!-- begin (?P<name>[\w ]+) -->\n).*?(?P<end><!-- end (?P=name) -->)", re.DOTALL)

Report = dict[str, Any]
Row = dict[str, Any]


def filled(page: str, tables: dict[str, str]) -> str:
    """The page with all tables as they should be."""
    return MARKED.sub(lambda found: f"{found['begin']}{tables[found['name']]}{found['end']}", page)


def all_tables(
    peers: Report,
    scaling: Report,
    parts: Report,
    launches: Report,
    compiled: Report,
    compiled_private: Report,
    private: Report,
    computed: Report,
) -> dict[str, str]:
    """Markdown by name."""
    tables = {kind: ratios(peers, kind) for kind in ("gradients", "clipped sums", "norms")}
    tables |= {size: growth(scaling, size) for size in CURVES}
    return {
        **tables,
        "summary": summary(peers),
        "workloads": workloads(peers),
        "memory": memory(peers),
        "peers environment": environment(peers),
        "scaling environment": environment(scaling),
        "parts": time_parts(parts),
        "parts environment": environment(parts),
        "launches": launch_counts(launches),
        "host time": host_time(launches),
        "launches environment": environment(launches),
        "compiled": compiled_steps(compiled),
        "compiled environment": environment(compiled),
        "compiled private": private_steps(compiled_private),
        "compiled private environment": environment(compiled_private),
        "private": private_speeds(private),
        "private noise": private_noise(private),
        "private environment": environment(private),
        "computed weights": computed_weights(computed),
        "computed weights memory": computed_memory(computed),
        "computed weights environment": environment(computed),
        "failures": failures([peers, scaling, compiled]),
    }


def ratios(report: Report, kind: str) -> str:
    """Workloads by methods: the median of the ratios within a round (best against best), the lowest median in bold."""
    methods = [name for name, m in report["methods"].items() if m["kind"] == kind]
    lines = []
    for workload in report["workloads"]:
        found = [_find(report, workload, method) for method in methods]
        least = min((row["ratio"]["median"] for row in found if row["status"] == "ok"), default=0.0)
        lines.append([workload, *(_ratio(row, least) for row in found)])
    return _markdown(["", *(_title(report, name) for name in methods)], lines)


def _ratio(row: Row, least: float) -> str:
    if row["status"] != "ok":
        return str(row["status"])
    text = f"{row['ratio']['median']:.2f}"
    return (f"**{text}**" if row["ratio"]["median"] == least else text) + f" ({row['ratio']['min']:.2f})"


def summary(report: Report) -> str:
    """Every workload's medians: ours, and the fastest of the others for the same result."""
    ours, lines = ["norms", "clipped_sum", "grad_out", "grad"], []
    for workload in report["workloads"]:
        cells = []
        for method in ours:
            row = _find(report, workload, method)
            cells.append(f"{row['ratio']['median']:.2f}" if row["status"] == "ok" else row["status"])
            if method != "grad_out":
                cells.append(_fastest_peer(report, workload, method, ours))
        lines.append([workload, *cells])
    titles = [[_title(report, method), *(["fastest peer"] if method != "grad_out" else [])] for method in ours]
    return _markdown(["", *(title for pair in titles for title in pair)], lines)


def _fastest_peer(report: Report, workload: str, method: str, ours: Sequence[str]) -> str:
    kind = report["methods"][method]["kind"]
    peers = [name for name, m in report["methods"].items() if m["kind"] == kind and name not in ours]
    found = [row for row in (_find(report, workload, name) for name in peers) if row["status"] == "ok"]
    if not found:
        return "none"
    best = min(found, key=lambda row: float(row["ratio"]["median"]))
    return f"{best['ratio']['median']:.2f} {_title(report, best['method'])}"


def workloads(report: Report) -> str:
    """What is measured, and how long its plain step takes."""
    lines = []
    for name, workload in report["workloads"].items():
        plain = _find(report, name, "plain")
        size = f"{plain['parameters'] / 1e6:.2f}M"
        lines.append([name, workload["title"], str(workload["batch"]), size, f"{plain['ms']['median']:.1f}"])
    return _markdown(["", "model", "B", "parameters", "plain step, ms"], lines)


def memory(report: Report) -> str:
    """The peak of a step in MB, activations included."""
    methods = [name for name in report["methods"] if name != "grad_out"]  # its result is there before the step
    lines = [[w, *(_megabytes(_find(report, w, method)) for method in methods)] for w in report["workloads"]]
    return _markdown(["", *(_title(report, name) for name in methods)], lines)


def growth(report: Report, size: str) -> str:
    """Methods by sizes: ms of the fastest step, and MB."""
    points = [name for name, w in report["workloads"].items() if w["group"] == size]
    lines = []
    for method in report["methods"]:
        rows = [_find(report, point, method) for point in points]
        lines.append([_title(report, method), *(_point(row) for row in rows)])
    return _markdown([size, *(str(report["workloads"][point]["value"]) for point in points)], lines)


def _point(row: Row) -> str:
    return f"{row['ms']['min']:.3g} / {_megabytes(row)}" if row["status"] == "ok" else str(row["status"])


def time_parts(report: Report) -> str:
    """What the time of ``ps.norms`` is made of, beside a plain step's backward: each as a ratio to a plain step."""
    lines = []
    for workload in report["workloads"]:
        medians = {m: _find(report, workload, m)["ratio"]["median"] for m in report["methods"] if m != "plain"}
        forward, plan, bare, capture, norms = (medians[m] for m in ("forward", "plan", "bare", "capture", "norms"))
        parts = [forward, 1 - forward, bare, plan, capture - bare - plan, norms - forward - capture, norms]
        lines.append([workload, *(f"{part:.2f}" for part in parts)])
    head = [
        "forward",
        "plain backward",
        "backward to the frontier",
        "graph read",
        "factors made",
        "norms",
        "`ps.norms`",
    ]
    return _markdown(["", *head], lines)


def compiled_steps(report: Report) -> str:
    """Ratios to a plain eager step, and the seconds that a build takes."""
    methods = [name for name in report["methods"] if name != "plain"]
    lines = []
    for workload in report["workloads"]:
        found = [_find(report, workload, method) for method in methods]
        lines.append([workload, *(_with_build(row) for row in found)])
    return _markdown(["", *(_title(report, name) for name in methods)], lines)


def private_steps(report: Report) -> str:
    """Private steps, noise and optimizer included, as ratios to a plain training step."""
    return _private_table(report, lambda row: f"{row['ratio']['plain']['median']:.2f}", leave_out=["plain"])


def private_speeds(report: Report) -> str:
    """Samples per second of private steps."""
    return _private_table(report, lambda row: f"{row['samples_per_second']['median']:,.0f}")


def private_noise(report: Report) -> str:
    """What the noise of a private step takes by itself."""
    lines = []
    for row in report["rows"]:
        if row["trainer"] == "private":
            noise, size = row["noise_ms"]["median"], row["parameters"]
            share = f"{noise / row['ms']['median']:.0%}"
            lines.append([row["workload"], f"{size:,}", f"{noise:.3g}", f"{1e6 * noise / size:.1f}", share])
    return _markdown(["", "parameters", "noise, ms", "ns a number", "of the step"], lines)


def _private_table(report: Report, cell: Callable[[Row], str], leave_out: Sequence[str] = ()) -> str:
    """Workloads by trainers."""
    names = [name for name in report["trainers"] if name not in leave_out]
    by_workload: dict[str, dict[str, Row]] = {}
    for row in report["rows"]:
        by_workload.setdefault(row["workload"], {})[row["trainer"]] = row
    lines = [
        [workload, *(cell(rows[name]) if rows[name]["status"] == "ok" else rows[name]["status"] for name in names)]
        for workload, rows in by_workload.items()
    ]
    return _markdown(["", *(f"`{report['trainers'][name]['title']}`" for name in names)], lines)


def computed_weights(report: Report) -> str:
    """Weights that are computed, by what is asked: ratios to a plain step in CPU time, medians and lower quartiles."""
    by_title: dict[str, dict[str, str]] = {}
    for row in report["rows"]:
        _, _, positions = row["workload"].partition(", ")
        asked = f"`ps.{row['method']}`" + (f", {positions}" if positions else "")
        ratio = row["ratio"]
        by_title.setdefault(row["title"], {})[asked] = f"{ratio['median']:.2f} ({ratio['q1']:.2f})"
    weights = {title: cells for title, cells in by_title.items() if any("T=" in asked for asked in cells)}
    tables = {title: cells for title, cells in by_title.items() if title not in weights}
    return "\n".join(_by_column(some) for some in (weights, tables) if some)


def _by_column(cells: dict[str, dict[str, str]]) -> str:
    columns = list(dict.fromkeys(column for row in cells.values() for column in row))
    return _markdown(["", *columns], [[title, *(row.get(c, "–") for c in columns)] for title, row in cells.items()])


def computed_memory(report: Report) -> str:
    """MB that a step takes, forward pass included."""
    lines = [[row["weight"], *(f"{size / 1e6:.0f}" for size in row["bytes"].values())] for row in report["memory"]]
    return _markdown(["", "plain step", "`ps.norms`", "`ps.clipped_sum`"], lines)


def _with_build(row: Row) -> str:
    if row["status"] != "ok":
        return str(row["status"])
    built = f", {row['seconds_before']:.0f} s" if "compiled" in row["method"] else ""
    return f"{row['ratio']['median']:.2f}{built}"


def launch_counts(report: Report) -> str:
    """Launches of every verb, as a ratio to a plain step's; and waits of the host, where there are any."""
    lines = []
    for workload in report["workloads"]:
        rows = {method: _find(report, workload, method) for method in report["methods"]}
        plain = rows["plain"]["launches"]
        cells = [f"{row['launches'] / plain:.2f}{_waits(row)}" for method, row in rows.items() if method != "plain"]
        lines.append([workload, str(plain), *cells])
    titles = [_title(report, method) for method in report["methods"] if method != "plain"]
    return _markdown(["", "plain step: launches", *titles], lines)


def _waits(row: Row) -> str:
    waits = sum(row["waits"].values())
    return f", {waits} wait{'s' * (waits > 1)}" if waits else ""


def host_time(report: Report) -> str:
    """Microseconds per node of the graph, medians and quartiles."""
    lines = []
    for row in report["host"]:
        cells = [
            f"{row[p]['median']:.1f} ({row[p]['q1']:.1f} to {row[p]['q3']:.1f})" for p in ("read", "capture", "plain")
        ]
        lines.append([row["workload"], str(row["nodes"]), *cells])
    return _markdown(
        ["µs per node", "nodes", "graph read", "graph read, hooks and factors", "a whole plain step"], lines
    )


def environment(report: Report) -> str:
    """One line that says where and of what."""
    where = report["environment"]
    commit = f"commit {str(where['commit'])[:12]}" + (" with changes in `src`" if where["source_changed"] else "")
    busy = max((row.get("others", 0.0) for row in [*report["rows"], *report.get("host", ())]), default=0.0)
    machine = f"{where['threads']} threads on {where['cores']} cores of {where['cpu']}"
    disturbed = f"; **doubtful**, other programs kept up to {busy:.1f} cores busy" if busy > DISTURBED else ""
    return f"{where['date'][:10]}, {commit}, torch {where['torch']}, {machine}{disturbed}.\n"


def failures(reports: Sequence[Report]) -> str:
    """What was not measured, and why."""
    told: dict[str, list[str]] = {}
    for report in reports:
        for row in report["rows"]:
            if row["status"] != "ok":
                reason = row.get("reason", "a smaller size took too long or too much memory")
                told.setdefault(f"{_title(report, row['method'])}, {row['status']}: {reason}", []).append(
                    row["workload"]
                )
    return "".join(f"- {text} ({', '.join(names)})\n" for text, names in told.items()) or "None.\n"


def _find(report: Report, workload: str, method: str) -> Row:
    for row in report["rows"]:
        if (row["workload"], row["method"]) == (workload, method):
            return row  # type: ignore[no-any-return]
    return {"status": "-"}


def _title(report: Report, method: str) -> str:
    title = str(report["methods"][method]["title"])
    return f"`{title}`" if title.startswith("ps.") else title


def _megabytes(row: Row) -> str:
    return f"{sum(row['bytes'].values()) / 1e6:.0f}" if "bytes" in row else "–"


def _markdown(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    rule = ["---", *("---:" for _ in head[1:])]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in [head, rule, *lines])


def load(folder: Path = RESULTS) -> tuple[Report, ...]:
    """The figures that the pages show."""
    read: Callable[[str], Report] = lambda name: json.loads((folder / name).read_text())  # noqa: E731
    names = "peers scaling parts launches compiled compiled-private private computed-weights".split()
    return tuple(read(f"{name}.json") for name in names)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tables", description=__doc__)
    parser.add_argument("pages", nargs="+", type=Path)
    tables = all_tables(*load())
    for page in parser.parse_args(argv).pages:
        page.write_text(filled(page.read_text(), tables))


if __name__ == "__main__":
    main()
