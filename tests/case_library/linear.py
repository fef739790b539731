"""Linear layers and matrix products: every rank, either side, any orientation."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from .registry import Program, case, param, score


@case(
    {
        f"{rank}d{'' if bias else '-no-bias'}": {"shape": shape, "bias": bias}
        for rank, shape in {2: (), 3: (3,), 4: (2, 3), 5: (2, 1, 3)}.items()
        for bias in (True, False)
    },
    batches=(4, 1, 0, 7),
)
def linear(B: int, shape: tuple[int, ...], bias: bool) -> Program:
    net, x = nn.Linear(5, 3, bias=bias), torch.randn(B, *shape, 5)
    return net, lambda: score(net(x))


@case(batches=(4, 1, 0, 2, 16, 17, 33))
def mlp(B: int) -> Program:
    net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 3))
    x, y = torch.randn(B, 6), torch.randint(3, (B,))
    return net, lambda: F.cross_entropy(net(x), y, reduction="none")


@case(batches=(300, 257))
def mlp_large_batch(B: int) -> Program:
    net = nn.Sequential(nn.Linear(3, 4), nn.Sigmoid(), nn.Linear(4, 2))
    x = torch.randn(B, 3)
    return net, lambda: score(net(x))


@case({"one-output": {"p": 1}, "one-input": {"d": 1}, "no-hidden": {"d": 1, "p": 1}})
def linear_thin(B: int, d: int = 4, p: int = 3) -> Program:
    net, x = nn.Sequential(nn.Linear(d, p), nn.Softplus(), nn.Linear(p, 1)), torch.randn(B, d)
    return net, lambda: net(x).squeeze(-1)


@case()
def linear_input_not_contiguous(B: int) -> Program:
    net, x = nn.Linear(5, 3), torch.randn(5, 4, B)
    return net, lambda: score(net(x.permute(2, 1, 0)))


@case(zeros=("weight", "bias"))
def linear_over_no_positions(B: int) -> Program:
    net, x = nn.Linear(5, 3), torch.randn(B, 0, 5)
    return net, lambda: net(x).sum((1, 2))


@case()
def linear_expanded_input(B: int) -> Program:
    net, x = nn.Linear(5, 3), torch.randn(B, 1, 5)
    return net, lambda: score(net(x.expand(B, 4, 5)))


@case()
def parameters_in_a_mapping(B: int) -> Program:
    w, b, x = param(3, 5), param(3), torch.randn(B, 5)
    return {"w": w, "b": b}, lambda: score(F.linear(x, w, b))


@case()
def parameters_in_a_sequence(B: int) -> Program:
    w, b, x = param(3, 5), param(3), torch.randn(B, 2, 5)
    return [b, w], lambda: score(F.linear(x, w, b))


@case()
def mm_parameter_right(B: int) -> Program:
    w, x = param(5, 3), torch.randn(B, 5)
    return [w], lambda: score(x @ w)


@case()
def mm_transposed_parameter(B: int) -> Program:
    w, x = param(3, 5), torch.randn(B, 5)
    return [w], lambda: score(x @ w.t())


@case()
def mm_parameter_left_sample_last(B: int) -> Program:
    w, x = param(3, 5), torch.randn(5, B)
    return [w], lambda: score((w @ x).t())


@case()
def mm_chain_sample_last(B: int) -> Program:
    v, w, b, x = param(4, 3), param(3, 5), param(3, 1), torch.randn(5, B)
    return [v, w, b], lambda: score((v @ torch.tanh(w @ x + b)).mT)


@case()
def mm_of_two_parameters(B: int) -> Program:
    u, v, x = param(5, 2), param(2, 3), torch.randn(B, 5)
    return [u, v], lambda: score(x @ (u @ v))


@case()
def mm_low_rank_in_order(B: int) -> Program:
    u, v, x = param(5, 2), param(2, 3), torch.randn(B, 5)
    return [u, v], lambda: score(x @ u @ v)


@case()
def addmm_scaled(B: int) -> Program:
    w, b, x = param(5, 3), param(3), torch.randn(B, 5)
    return [w, b], lambda: score(torch.addmm(b, x, w, beta=0.7, alpha=-1.3))


@case({"bias": {"shape": (3,)}, "column-bias": {"shape": (1, 3)}, "scalar-bias": {"shape": (1, 1)}})
def addmm_bias(B: int, shape: tuple[int, ...]) -> Program:
    w, b, x = param(5, 3), param(*shape), torch.randn(B, 5)
    return [w, b], lambda: score(torch.addmm(b, x, w))


@case()
def addmm_parameter_left(B: int) -> Program:
    w, b, x = param(3, 5), param(3, 1), torch.randn(5, B)
    return [w, b], lambda: score(torch.addmm(b, w, x, alpha=0.5).t())


@case()
def mv_per_batch(B: int) -> Program:
    w, x = param(5), torch.randn(B, 5)
    return [w], lambda: (x @ w).tanh()


@case()
def mv_three_dims(B: int) -> Program:
    w, x = param(5), torch.randn(B, 3, 5)
    return [w], lambda: score(torch.sigmoid(x @ w))


@case()
def addmv_bias(B: int) -> Program:
    w, b, x = param(5), param(1), torch.randn(B, 5)
    return [w, b], lambda: torch.addmv(b.expand(B), x, w).sin()


@case()
def bmm_parameter_expanded(B: int) -> Program:
    w, x = param(5, 3), torch.randn(B, 4, 5)
    return [w], lambda: score(torch.bmm(x, w.expand(B, 5, 3)))


@case()
def bmm_heads(B: int) -> Program:
    w, x = param(2, 5, 3), torch.randn(2, B, 5)
    return [w], lambda: score(torch.bmm(x, w).transpose(0, 1))


@case()
def bmm_parameter_left_sample_last(B: int) -> Program:
    w, x = param(2, 3, 5), torch.randn(2, 5, B)
    return [w], lambda: score(torch.bmm(w, x).permute(2, 0, 1))


@case()
def matmul_parameter_left_of_batch(B: int) -> Program:
    w, x = param(3, 5), torch.randn(B, 5, 4)
    return [w], lambda: score(w @ x)


@case()
def matmul_token_mixing(B: int) -> Program:
    w, v, x = param(6, 4), param(4, 6), torch.randn(B, 4, 5)
    return [w, v], lambda: score(v @ torch.tanh(w @ x))


@case()
def matmul_broadcast_heads(B: int) -> Program:
    w, x = param(2, 5, 3), torch.randn(B, 1, 4, 5)
    return [w], lambda: score(x @ w)


@case()
def baddbmm_experts(B: int) -> Program:
    w, b, x = param(2, 5, 3), param(2, 1, 3), torch.randn(2, B, 5)
    return [w, b], lambda: score(torch.baddbmm(b, x, w, beta=0.5, alpha=2.0).transpose(0, 1))


@case()
def baddbmm_batch_first(B: int) -> Program:
    w, b, x = param(5, 3), param(4, 3), torch.randn(B, 4, 5)
    return [w, b], lambda: score(torch.baddbmm(b.expand(B, 4, 3), x, w.expand(B, 5, 3)))


@case()
def addbmm_over_heads(B: int) -> Program:
    w, b, x = param(2, 5, 3), param(1, 3), torch.randn(2, B, 5)
    return [w, b], lambda: score(torch.addbmm(b.expand(B, 3), x, w))


@case(
    {
        "right": {"eq": "bi,ij->bj", "w": (5, 3), "x": (5,)},
        "transposed": {"eq": "bi,ji->bj", "w": (3, 5), "x": (5,)},
        "time": {"eq": "bti,ij->btj", "w": (5, 3), "x": (4, 5)},
        "heads": {"eq": "bti,hij->bhtj", "w": (2, 5, 3), "x": (4, 5)},
        "per-position": {"eq": "bti,tij->btj", "w": (4, 5, 3), "x": (4, 5)},
        "two-contracted": {"eq": "bti,tij->bj", "w": (4, 5, 3), "x": (4, 5)},
        "diagonal": {"eq": "bti,i->bti", "w": (5,), "x": (4, 5)},
        "outer": {"eq": "bi,j->bij", "w": (3,), "x": (5,)},
        "grouped": {"eq": "bgi,gij->bgj", "w": (2, 5, 3), "x": (2, 5)},
        "time-out": {"eq": "bti,ij->tjb", "w": (5, 3), "x": (4, 5)},
    },
    batches=(4, 1, 0, 5),
)
def einsum(B: int, eq: str, w: tuple[int, ...], x: tuple[int, ...]) -> Program:
    weight, data = param(*w), torch.randn(B, *x)
    out = eq.split("->")[1].index("b")
    return [weight], lambda: score(torch.einsum(eq, data, weight).movedim(out, 0))


@case()
def einsum_parameter_first(B: int) -> Program:
    w, x = param(3, 5), torch.randn(B, 5, 4)
    return [w], lambda: score(torch.einsum("ji,bit->btj", w, x))


@case()
def einsum_three_operands(B: int) -> Program:
    u, v, x, y = param(5, 2), param(3, 2), torch.randn(B, 5), torch.randn(B, 3)
    return [u, v], lambda: score(torch.einsum("bi,ir,jr,bj->br", x, u, v, y))


@case()
def tensordot(B: int) -> Program:
    w, x = param(4, 5, 3), torch.randn(B, 4, 5)
    return [w], lambda: score(torch.tensordot(x, w, dims=([1, 2], [0, 1])))


@case()
def linear_after_fold(B: int) -> Program:
    net, x = nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3)), torch.randn(B, 6, 5)
    return net, lambda: score(net(x.reshape(B * 6, 5)).reshape(B, 6, 3))


@case()
def multi_dot(B: int) -> Program:
    u, v, x = param(5, 4), param(4, 3), torch.randn(B, 5)
    return [u, v], lambda: score(torch.linalg.multi_dot([x, u, v]))
