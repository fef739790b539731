"""The benchmark of loops runs, and writes what it has measured."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from benchmarks import loops


def test_a_program_is_measured_and_written(tmp_path: Path) -> None:
    threads, path, name = torch.get_num_threads(), tmp_path / "loops.json", "loop over chunks, MLP, 60 by 7, width 64"
    try:
        assert loops.main(["--programs", name, "--rounds", "1", "--json", str(path)]) == 0
    finally:
        torch.set_num_threads(threads)
    (row,) = json.loads(path.read_text())["rows"]
    assert row["program"] == name
    assert min(row["plain_ms"], row["norms"], row["clipped_sum"]) > 0
