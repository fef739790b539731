"""Private training on the strict device: what the CPU gives for the same seed, and hardly a wait."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import persample as ps
from persample import NonFiniteError, dp
from persample.dp import fingerprints
from persample.dp.noise import BLOCK, Scale, add_noise
from persample.dp.records import Step
from persample.dp.sources import Secure, Seeded
from persample.testing import Work, count_work
from tests.device.backend import DEVICE, DeviceTensor, no_float64, raise_refused
from tests.device.private_models import EXAMPLES, KINDS, Kind

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _plain(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An accelerator's tensors are of PyTorch's own type, and so are looked into."""
    monkeypatch.setattr(fingerprints, "is_plain", lambda t: type(t) in (Tensor, DeviceTensor))
    yield
    raise_refused()


class Run:
    """A private run of one kind of model on one device."""

    def __init__(self, kind: Kind, device: torch.device, *, steps: int = 3, momentum: float = 0.0, **options: Any):
        torch.manual_seed(0)
        self.kind, self.device = kind, device
        self.data, self.model = kind.data(), kind.make().to(device)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.5, momentum=momentum)
        plan = options.pop("plan", None) or dp.Plan(
            examples=EXAMPLES, batch_size=10, steps=steps, noise_multiplier=0.5, delta=1e-3, accountant="rdp"
        )
        self.private = dp.Private(
            self.model, self.optimizer, plan, **{"seed": 1, "clip": ps.ClippedSum(0.5), **options}
        )
        self.records: list[Step] = []
        self.works: list[Work] = []

    def go(self, **options: Any) -> Run:
        batches = self.private.batches(TensorDataset(torch.arange(EXAMPLES)), **options)
        while True:
            with count_work() as work:
                batch = next(batches, None)
            if batch is None:
                return self
            losses = self.kind.losses(self.model, self.data[batch[0]].to(self.device))
            with count_work() as step:
                self.records.append(self.private.step(losses))
            work.waits.update(step.waits)
            self.works.append(work)
            raise_refused()

    def params(self) -> dict[str, Tensor]:
        return {name: p.detach().cpu() for name, p in self.model.named_parameters()}


def check_alike(mine: Run, other: Run) -> None:
    assert mine.records == other.records
    assert mine.private.dropped == other.private.dropped
    for name, p in other.params().items():
        torch.testing.assert_close(
            mine.params()[name], p, rtol=1e-4, atol=1e-5, msg=lambda text, n=name: f"{n}: {text}"
        )


def check_both(kind: Kind, steps: int = 3, go: dict[str, Any] | None = None, **options: Any) -> tuple[Run, Run]:
    runs = [Run(kind, device, steps=steps, **options).go(**(go or {})) for device in (DEVICE, CPU)]
    check_alike(*runs)
    return runs[0], runs[1]


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_of_model_and_its_waits(name: str) -> None:
    """One wait for the parameters, one for all sums, and one for the noise, which CUDA would not wait for."""
    mine, _ = check_both(KINDS[name])
    assert mine.works[2].waits.total() <= 3, mine.works[2]
    assert {p.device for p in mine.model.parameters()} == {DEVICE}


CLIPS: dict[str, Any] = {
    "per parameter": ps.ClippedSum(0.2, per="parameter"),
    "groups": ps.ClippedSum([0.3, 0.1], per=[["0.weight", "0.bias"], ["2.weight", "2.bias"]]),
    "automatic": ps.ClippedSum(0.5, gamma=0.01),
    "weights": ps.ClippedSum(weights=lambda n: 0.5 / (n + 1), sensitivity=0.5),
    "adaptive": dp.AdaptiveClip(initial=0.7),
    "without clipping": ps.ClippedSum(1e6),
}


@pytest.mark.parametrize("clip", CLIPS.values(), ids=CLIPS)
@pytest.mark.parametrize("name", ["mlp", "positions"])
def test_kinds_of_clips(name: str, clip: Any) -> None:
    mine, other = check_both(KINDS[name], clip=clip)
    assert (mine.private.bound or 0) == pytest.approx(other.private.bound or 0, rel=1e-6)
    assert mine.works[2].waits.total() <= 4, mine.works[2]  # one more for the count, or for the user's weights


def test_weights_that_cannot_be_used() -> None:
    for bad in (float("nan"), 1e31):
        clip = ps.ClippedSum(weights=lambda n, bad=bad: torch.full_like(n, bad), sensitivity=1.0)
        with pytest.raises(ValueError, match="weights must be finite numbers below"):
            Run(KINDS["mlp"], DEVICE, clip=clip).go()


@pytest.mark.parametrize("name", ["mlp", "gpt"])
@pytest.mark.parametrize("physical", [1, 3])
def test_parts_of_a_batch_and_padding(name: str, physical: int) -> None:
    """Parts of one sample, or of three, where one that is left alone is run twice."""
    check_both(KINDS[name], steps=2, go={"physical_batch_size": physical})


@pytest.mark.parametrize("clip", [ps.ClippedSum(0.5), dp.AdaptiveClip()], ids=["fixed", "adaptive"])
def test_an_empty_batch(clip: Any) -> None:
    rare = dp.Plan(examples=EXAMPLES, batch_size=1, steps=6, noise_multiplier=0.5, delta=1e-3, accountant="rdp")
    mine, _ = check_both(KINDS["bag"], plan=rare, clip=clip)
    assert 0 in [record.size for record in mine.records]
    assert max(work.waits.total() for work in mine.works[3:]) <= 4


@pytest.mark.parametrize("name", ["mlp", "positions", "cnn", "bfloat16"])
def test_samples_that_are_not_finite_are_dropped(name: str) -> None:
    kind = Kind(KINDS[name].make, lambda: _spoilt(KINDS[name].data()), KINDS[name].losses)
    mine, _ = check_both(kind, clip=ps.ClippedSum(0.5, nonfinite="drop"))
    assert mine.private.dropped > 0


def test_samples_that_are_not_finite_raise() -> None:
    kind = Kind(KINDS["mlp"].make, lambda: _spoilt(KINDS["mlp"].data()), KINDS["mlp"].losses)
    said = []
    for device in (DEVICE, CPU):
        run = Run(kind, device)
        with pytest.raises(NonFiniteError) as error:
            run.go()
        said.append((str(error.value), run.private.steps))
    assert said[0] == said[1]


def _spoilt(data: Tensor) -> Tensor:
    data[::3, ..., 0] = float("nan")
    data[1::6, ..., 0] = float("inf")
    return data


def test_save_and_resume(tmp_path: Path) -> None:
    first = Run(KINDS["mlp"], DEVICE, steps=4, momentum=0.9).go(steps=2)
    first.private.save(tmp_path / "run.safetensors")
    second = Run(KINDS["mlp"], DEVICE, steps=4, momentum=0.9)
    second.private.resume(tmp_path / "run.safetensors")
    for name, p in first.params().items():
        assert torch.equal(second.params()[name], p)
    assert {p.device for p in second.model.parameters()} == {DEVICE}
    second.go()
    assert second.private.steps == 4


class _Centered(nn.Module):
    """Detached statistics of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(x - x.mean(0).detach())


def test_the_guard_finds_samples_that_interact() -> None:
    with pytest.raises(ps.InteractionError, match="run again on a few samples"):
        Run(Kind(_Centered, KINDS["mlp"].data, KINDS["mlp"].losses), DEVICE).go()


def test_parameters_that_change_are_found() -> None:
    class Counts(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.bias[0] += 1e-3
            return super().forward(x)

    kind = Kind(lambda: Counts(6, 3), KINDS["mlp"].data, KINDS["mlp"].losses)
    with pytest.raises(dp.PrivacyError, match=r"'bias'.*were changed between the batch and private\.step"):
        Run(kind, DEVICE, check_every=0).go()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_noise_is_that_of_the_cpu_bit_by_bit(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over blocks, several copies, and tensors that end within a block."""
    monkeypatch.setattr("persample.dp.noise._AT_A_TIME", 2)
    sizes = [3, BLOCK - 1, 0, 2 * BLOCK + 17, 5]
    sums = [torch.randn(n, dtype=dtype) * 10.0 ** (i - 2) for i, n in enumerate(sizes)]
    scale, moved = Scale(0.3, 1.1, sum(sizes)), [t.to(DEVICE) for t in sums]
    mixed = [t.to(DEVICE) if i % 2 else t.clone() for i, t in enumerate(sums)]
    for each in (sums, moved, mixed):
        add_noise(each, scale, Seeded(4), 7, stream=2)
    for want, *others in zip(sums, moved, mixed, strict=True):
        assert all(torch.equal(want, t.cpu()) for t in others)


def test_noise_where_there_is_no_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums go to the host and back."""
    monkeypatch.setattr("persample.dp.noise.has_float64", lambda device: device.type == "cpu")
    want = torch.randn(50)
    with no_float64():
        found = want.to(DEVICE)
        add_noise([found], Scale(1.0, 1.0, 50), Seeded(0), 0)
    add_noise([want], Scale(1.0, 1.0, 50), Seeded(0), 0)
    assert torch.equal(found.cpu(), want)


def test_noise_is_copied_once_for_many_small_sums() -> None:
    sums = [torch.zeros(9, dtype=torch.float64, device=DEVICE) for _ in range(30)]
    with count_work() as work:
        add_noise(sums, Scale(1.0, 1.0, 270), Seeded(0), 0)
    assert work.waits.total() == 1


def test_secure_noise_is_made_on_the_device() -> None:
    """Of the right size, on its grid, never the same; and only a key is copied."""
    scale, size = Scale(0.3, 1.1, 2 * BLOCK), 2 * BLOCK
    found = []
    for _ in range(2):
        sums = [torch.zeros(size - 5, dtype=torch.float64, device=DEVICE), torch.zeros(5, device=DEVICE)]
        with count_work() as work:
            add_noise(sums, scale, Secure(), 0)
        assert work.waits.total() <= 1  # for the key
        found.append(torch.cat([t.cpu().double() for t in sums]))
    for noise in found:
        assert torch.equal((noise[:-5] / scale.grid).round() * scale.grid, noise[:-5])
        assert abs(float(noise.std()) / scale.std - 1) < 6 / math.sqrt(2 * size)
        assert abs(float(noise.mean())) < 6 * scale.std / math.sqrt(size)
    assert float((found[0] * found[1]).mean().abs()) < 6 * scale.std**2 / math.sqrt(size)


def test_a_run_without_a_seed() -> None:
    """Nothing is drawn on the host, not even ahead."""
    run = Run(KINDS["mlp"], DEVICE, seed=None)
    drawn: list[int] = []
    run.private._source._source.normals = lambda *_: drawn.append(1)  # type: ignore[attr-defined]
    run.go()
    assert not drawn
    assert run.works[2].waits.total() <= 3, run.works[2]
