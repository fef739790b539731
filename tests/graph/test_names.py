"""Every name in the engine's tables is that of a real autograd node: a misspelt rule would never be asked."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from persample.graph.ops.table import entries, named
from persample.graph.read.nodes import op_name
from tests.graph.names import NODES, SOME, WRAPPERS
from tests.graph.samples.leaves import c, ids, p, spd, w, z
from tests.graph.sites import find
from tests.graph.versions import TESTED, VERSION


def test_names_are_those_of_nodes() -> None:
    assert sorted({op.name for op in entries()} - NODES - set(SOME) - WRAPPERS) == []


@pytest.mark.skipif(VERSION not in TESTED, reason="says nothing of releases that were not tested")
@pytest.mark.parametrize("name", SOME)
def test_names_of_some_releases_are_those_of_nodes_there_and_only_there(name: str) -> None:
    assert (name in NODES) == (VERSION in SOME[name])


@pytest.mark.parametrize("name", SOME)
def test_names_of_some_releases_are_of_use(name: str) -> None:
    """Once no supported release has a node, or all have it, its name is to go from the tables, or from here."""
    assert set() < SOME[name] < set(TESTED)
    assert named(name).name == name


# Ops whose node is not called as one would guess.
SPELT: dict[str, Callable[[], Tensor]] = {
    "AdaptiveAvgPool2D": lambda: F.adaptive_avg_pool2d(w(1, 1, 4, 4), 2),
    "AdaptiveMaxPool2D": lambda: F.adaptive_max_pool2d(w(1, 1, 4, 4), 2),
    "AvgPool2D": lambda: F.avg_pool2d(w(1, 1, 4, 4), 2),
    "AvgPool3D": lambda: F.avg_pool3d(w(1, 1, 4, 4, 4), 2),
    "Clone": lambda: w(2, 3).t().contiguous(),
    "Col2Im": lambda: F.fold(w(1, 4, 9), 4, 2),
    "ConstantPadNd": lambda: F.pad(w(2, 3), (1, 1)),
    "CopyBackwards": lambda: c(3).copy_(w(3)),
    "CtcLoss": lambda: F.ctc_loss(w(4, 1, 3).log_softmax(2), ids(2, 1, 2) + 1, [4], [2], reduction="none"),
    "FftC2C": lambda: torch.fft.fft(z(3)),
    "FftC2R": lambda: torch.fft.irfft(z(3)),
    "FftR2C": lambda: torch.fft.rfft(w(3)),
    "GridSampler2D": lambda: F.grid_sample(w(1, 1, 3, 3), c(1, 2, 2, 2), align_corners=False),
    "Im2Col": lambda: F.unfold(w(1, 1, 4, 4), 2),
    "Index": lambda: w(3)[torch.tensor([True, False, True])],
    "LinalgCholeskyEx": lambda: torch.linalg.cholesky(spd(3)),
    "LinalgInvEx": lambda: torch.linalg.inv(w(3, 3)),
    "LinalgSolveEx": lambda: torch.linalg.solve(w(3, 3), w(3, 1)),
    "LinalgVectorNorm": lambda: w(3).norm(),
    "Log1P": lambda: p(3).log1p(),
    "LogSigmoid": lambda: F.logsigmoid(w(3)),
    "MaxPool2DWithIndices": lambda: F.max_pool1d(w(1, 1, 4), 2),
    "MaxPool3DWithIndices": lambda: F.max_pool3d(w(1, 1, 4, 4, 4), 2),
    "NativeBatchNorm": lambda: F.batch_norm(w(4, 3), None, None, training=True),
    "NllLoss": lambda: F.nll_loss(w(4, 3), ids(3, 4)),
    "NllLoss2D": lambda: F.nll_loss(w(4, 3, 2, 2), ids(3, 4, 2, 2)),
    "PixelShuffle": lambda: F.pixel_shuffle(w(1, 4, 2, 2), 2),
    "PreluKernel": lambda: F.prelu(w(2, 3), w(3)),
    "ReflectionPad2D": lambda: F.pad(w(1, 1, 3, 3), (1, 1, 1, 1), mode="reflect"),
    "Repeat": lambda: w(3).tile((2,)),
    "ReplicationPad1D": lambda: F.pad(w(1, 1, 3), (1, 1), mode="replicate"),
    "ScaledDotProductFlashAttentionForCpu": lambda: F.scaled_dot_product_attention(*[w(1, 1, 3, 4) for _ in "qkv"]),
    "SoftMarginLoss": lambda: F.soft_margin_loss(w(3), torch.ones(3)),
    "SpecialXlog1Py": lambda: torch.special.xlog1py(w(3), p(3)),
    "SplitWithSizes": lambda: w(5).split([2, 3])[0],
    "ToCopy": lambda: w(3).float(),
    "Trilinear": lambda: F.bilinear(w(2, 3), w(2, 4), w(5, 3, 4)),
    "UnsafeView": lambda: w(2, 3) @ w(2, 3, 4),
    "UpsampleBicubic2D": lambda: F.interpolate(w(1, 1, 3, 3), scale_factor=2, mode="bicubic"),
    "UpsampleBilinear2D": lambda: F.interpolate(w(1, 1, 3, 3), scale_factor=2, mode="bilinear"),
    "UpsampleBilinear2DAa": lambda: F.interpolate(w(1, 1, 3, 3), scale_factor=2, mode="bilinear", antialias=True),
    "UpsampleLinear1D": lambda: F.interpolate(w(1, 1, 3), scale_factor=2, mode="linear"),
    "UpsampleNearest2D": lambda: F.interpolate(w(1, 1, 3, 3), scale_factor=2),
    "UpsampleNearestExact1D": lambda: F.interpolate(w(1, 1, 3), scale_factor=2, mode="nearest-exact"),
    "UpsampleTrilinear3D": lambda: F.interpolate(w(1, 1, 2, 2, 2), scale_factor=2, mode="trilinear"),
    "ViewAsReal": lambda: z(3).real,
}


@pytest.mark.parametrize("name", SPELT)
def test_ops_are_known_by_the_name_of_their_node(name: str) -> None:
    assert op_name(find(SPELT[name](), name)) == name
    assert named(name).flow
