"""The comparison of convolution kernels, on its first shapes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from benchmarks import convolutions
from benchmarks.convolution_shapes import GRID, Shape, square
from benchmarks.convolutions import Row, gains, measure, summary
from persample.kernels.convolution import explain_choice, use_costs


@pytest.fixture(autouse=True)
def _own_threads() -> Iterator[None]:
    """The command sets the number of threads of the whole process."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_table_and_json(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convolutions, "GRID", [square(2, 3, 4, 6, 3), square(2, 4, 4, 6, 3, groups=4, stride=2)])
    path = tmp_path / "convolutions.json"
    assert convolutions.main(["--quick", "--threads", "1", "--json", str(path)]) == 0
    printed, written = capsys.readouterr().out, json.loads(path.read_text())
    assert [row["shape"] for row in written["rows"]] == ["B2 3>4 6x6 k3x3", "B2 4>4 6x6 k3x3 s2 G4"]
    for row in written["rows"]:
        more = {"forward"} if "G4" in row["shape"] else set()
        assert set(row["ms"]) == set(row["estimated_ms"]) == {"library", "unfold"} | more
        assert row["ms"][row["best"]] == min(row["ms"].values())
        assert row["ratio"] == pytest.approx(row["ms"][row["chosen"]] / row["ms"][row["best"]])
    assert re.search(r"^B2 3>4 6x6 k3x3 +\d+\.\d\d", printed, re.MULTILINE)
    assert re.search(r"\d of 2 choices within 15% of the best kernel", printed)


def test_table_of_norms(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convolutions, "GRID", [square(2, 8, 4, 6, 3), square(2, 1, 4, 6, 3)])
    assert convolutions.main(["--norms", "--quick", "--threads", "1"]) == 0
    head, first, second, end = capsys.readouterr().out.splitlines()
    assert head.split()[1:5] == ["stack", "positions", "patches", "pixels"]
    assert re.match(r"B2 8>4 6x6 k3x3 +\d+\.\d\d +\d+\.\d\d", first)
    assert re.match(r"B2 1>4 6x6 k3x3 ", second)
    assert "of 2 choices within 15%" in end


def test_gains_by_the_model(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A way gains nothing where another one is chosen, and as much as the next best costs where it is."""
    shape = square(8, 96, 96, 56, 7, groups=96)
    with use_costs("AVX512"):
        choice = explain_choice(shape.sizes)
    table = gains([shape], "AVX512")
    first, second = sorted(choice.milliseconds.values())[:2]
    for kernel in choice.milliseconds:
        assert table["gradients", kernel].most == pytest.approx(second / first if kernel == choice.way else 1.0)
    assert table["norms", "pixels"].mean == 1.0
    monkeypatch.setattr(convolutions, "GRID", [shape])
    monkeypatch.setattr(convolutions, "draw", lambda chance: square(2, 3, 4, chance.randint(5, 9), 3))
    assert convolutions.main(["--gains"]) == 0
    assert re.search(
        r"gradients forward +\d\.\d+ on average, at most \d\.\d+ \(B8 96>96 56x56", capsys.readouterr().out
    )


def test_summary() -> None:
    slow, good = square(1, 1, 1, 5, 3), square(2, 1, 1, 5, 3)
    rows = [
        Row(slow, {"library": 4.0, "unfold": 1.0}, chosen="library"),
        Row(good, {"library": 1.0, "unfold": 2.0}, chosen="library"),
    ]
    assert [row.ratio for row in rows] == [4.0, 1.0]
    assert summary(rows) == (
        "1 of 2 choices within 15% of the best kernel (50%), geometric mean 2.000, worst 4.00 (B1 1>1 5x5 k3x3)"
    )


def test_wrong_kernels_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = convolutions.weight_per_sample
    shape = square(2, 3, 4, 6, 3)
    answers = {"library": 1.0, "unfold": 2.0}
    monkeypatch.setattr(
        convolutions, "weight_per_sample", lambda *args, kernel, **kw: plain(*args, **kw) * answers[kernel]
    )
    with pytest.raises(ArithmeticError, match="library and unfold differ on B2 3>4 6x6 k3x3: relative error"):
        measure(shape, convolutions.kernels(shape), convolutions.CLOCKS["wall"], rounds=1, budget=0.0)


def test_the_grid_has_convolutions_of_every_kind() -> None:
    assert len(set(GRID)) == len(GRID) >= 60
    assert {len(shape.size) for shape in GRID} == {1, 2, 3}
    assert {1, 2, 3} <= {shape.stride for shape in GRID}
    wanted = {
        "dilated": lambda s: s.dilation > 1,
        "transposed": lambda s: s.transposed,
        "few groups": lambda s: 1 < s.groups < s.cin,
        "depthwise": lambda s: s.groups == s.cin > 1,
        "one channel": lambda s: s.cin == 1,
        "several images": lambda s: s.R > 1,
        "double": lambda s: s.dtype == torch.float64,
        "one sample": lambda s: s.B == 1,
        "many samples": lambda s: s.B >= 256,
    }
    assert not [kind for kind, test in wanted.items() if not any(map(test, GRID))]


@pytest.mark.parametrize("shape", GRID, ids=lambda shape: shape.title)
def test_shapes_are_convolutions(shape: Shape) -> None:
    small = Shape(**{name: getattr(shape, name) for name in Shape.__dataclass_fields__} | {"B": 1, "R": 1})
    x, dy = small.tensors()
    assert dy.numel() > 0
    assert x.dtype == dy.dtype == shape.dtype
