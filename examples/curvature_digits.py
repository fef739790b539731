"""The curvature of a classifier of scikit-learn's digits, and how sure a Laplace approximation is of its predictions.

Both are made from the Jacobian of the logits (B, 10). Products with the Gauss-Newton matrix do not write it out: J v is
`ps.dot`, and `ps.WeightedSum` takes weights (B, 10) back to the parameters. The variance of predictions needs the
Jacobian itself, `ps.jacobian`. Where `curvlinops` and `laplace-torch` are installed, both are compared with them.
"""

import sys

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import persample as ps

WIDTH, EPOCHS, BATCH, PRIOR = 16, 20, 100, 1.0
Vector = dict[str, Tensor]


def load() -> tuple[TensorDataset, TensorDataset]:
    """Images as (N, 64) in [0, 1] with labels, for training and for testing."""
    digits = load_digits()
    x, y = torch.tensor(digits.data) / 16, torch.tensor(digits.target)
    order = torch.randperm(len(x))
    train, test = order[:1000], order[1000:]
    return TensorDataset(x[train], y[train]), TensorDataset(x[test], y[test])


def train(model: nn.Module, data: TensorDataset) -> None:
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(EPOCHS):
        for x, y in DataLoader(data, BATCH, shuffle=True):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()


def hessian_times(logits: Tensor, v: Tensor) -> Tensor:
    """(B, K): the Hessian of every cross entropy with respect to its logits, diag(p) - p pᵀ, times v."""
    p = logits.softmax(1)
    return p * v - p * (p * v).sum(1, keepdim=True)


def gauss_newton_times(model: nn.Module, data: TensorDataset, v: Vector) -> Vector:
    """The Gauss-Newton matrix of the mean cross entropy times a vector: mean over samples of Jᵀ H J v."""
    total = {name: torch.zeros_like(p) for name, p in v.items()}
    for x, _ in DataLoader(data, BATCH):
        logits = model(x)
        along = ps.dot(logits, model, v, retain_graph=True)
        (back,) = ps.reduce(logits, model, ps.WeightedSum(hessian_times(logits.detach(), along) / len(data)))
        total = {name: total[name] + back[name] for name in total}
    return total


def by_torch_func(model: nn.Module, data: TensorDataset, v: Vector) -> Vector:
    """The same by ``torch.func``, forwards and backwards through the model."""
    x = data.tensors[0]

    def logits_of(params: Vector) -> Tensor:
        return torch.func.functional_call(model, params, (x,))  # type: ignore[no-any-return]

    params = {name: p.detach() for name, p in model.named_parameters()}
    logits, along = torch.func.jvp(logits_of, (params,), (v,))
    _, pull = torch.func.vjp(logits_of, params)
    (product,) = pull(hessian_times(logits, along) / len(data))
    return product  # type: ignore[no-any-return]


def jacobian_rows(model: nn.Module, x: Tensor) -> Tensor:
    """(B, K, P): the Jacobian of the logits, all parameters side by side."""
    return torch.cat([rows.flatten(2) for rows in ps.jacobian(model(x), model).values()], 2)


def posterior_covariance(model: nn.Module, data: TensorDataset) -> Tensor:
    """(P, P): the inverse of the Gauss-Newton matrix of all losses and the prior's precision."""
    count = sum(p.numel() for p in model.parameters())
    precision = PRIOR * torch.eye(count)
    for x, _ in DataLoader(data, BATCH):
        rows = jacobian_rows(model, x)
        p = model(x).detach().softmax(1)
        hessian = torch.diag_embed(p) - p.unsqueeze(2) * p.unsqueeze(1)
        precision += torch.einsum("bkp,bkq->pq", rows, hessian @ rows)
    return torch.linalg.inv(precision)


def predictive_covariance(model: nn.Module, x: Tensor, covariance: Tensor) -> Tensor:
    """(B, K, K): how the logits vary under the posterior."""
    rows = jacobian_rows(model, x)
    return rows @ covariance @ rows.mT


def difference(got: Vector, want: Vector) -> float:
    """Relative, over all parameters."""
    apart = sum(float((got[name] - want[name]).square().sum()) for name in want)
    size = sum(float(w.square().sum()) for w in want.values())
    return float((apart / size) ** 0.5)


def compare_with_curvlinops(model: nn.Module, data: TensorDataset, v: Vector, product: Vector) -> None:
    try:
        from curvlinops import GGNLinearOperator
    except ImportError:
        print("curvlinops is not installed: pip install curvlinops-for-pytorch to compare with it")
        return
    operator = GGNLinearOperator(model, nn.CrossEntropyLoss(), list(model.parameters()), [data.tensors])
    theirs = dict(zip(v, operator @ list(v.values()), strict=True))
    print(f"Gauss-Newton product, difference from curvlinops: {difference(product, theirs):.0e}")


def compare_with_laplace(model: nn.Module, data: TensorDataset, x: Tensor, covariance: Tensor) -> None:
    try:
        from laplace import Laplace
    except ImportError:
        print("laplace-torch is not installed: pip install laplace-torch to compare with it")
        return
    theirs = Laplace(model, "classification", "all", "full", prior_precision=PRIOR)
    theirs.fit(DataLoader(data, BATCH))
    _, want = theirs._glm_predictive_distribution(x)
    print(f"predictive covariance, difference from laplace-torch: {difference({'': covariance}, {'': want}):.0e}")


def main() -> int:
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    data, test = load()
    model = nn.Sequential(nn.Linear(64, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 10))
    train(model, data)
    v = {name: torch.randn_like(p) for name, p in model.named_parameters()}
    product = gauss_newton_times(model, data, v)
    reference = by_torch_func(model, data, v)
    print(f"Gauss-Newton product, difference from torch.func: {difference(product, reference):.0e}")
    x, y = test.tensors
    covariance = predictive_covariance(model, x, posterior_covariance(model, data))
    found = model(x).argmax(1)
    spread = covariance.diagonal(dim1=1, dim2=2).gather(1, found.unsqueeze(1)).sqrt().squeeze(1)
    right = found == y
    print(f"{100 * right.double().mean():.0f}% of {len(y)} digits are right")
    means = f"{spread[right].mean():.2f} if right, {spread[~right].mean():.2f} if wrong"
    print(f"standard deviation of the winning logit: {means}")
    compare_with_curvlinops(model, data, v, product)
    compare_with_laplace(model, data, x, covariance)
    return 0


if __name__ == "__main__":
    sys.exit(main())
