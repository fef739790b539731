"""Elementwise arithmetic with parameters of every shape, and views, joins and reads of parameters."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .registry import Program, case, ints, param, score

SHAPES: dict[str, tuple[int, ...]] = {
    "scalar": (),
    "one": (1,),
    "last": (4,),
    "column": (3, 1),
    "full": (3, 4),
    "leading-one": (1, 3, 4),
    "gap": (1, 1, 4),
}
OPERATIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": torch.div,
}


@case({f"{op}-{shape}": {"op": op, "shape": shape} for op in OPERATIONS for shape in SHAPES})
def parameter_on_the_right(B: int, op: str, shape: str) -> Program:
    w, x = nn.Parameter(torch.rand(SHAPES[shape]) + 0.5), torch.randn(B, 3, 4)
    return [w], lambda: score(OPERATIONS[op](x, w).tanh())


@case({f"{op}-{shape}": {"op": op, "shape": shape} for op in OPERATIONS for shape in ("scalar", "last", "column")})
def parameter_on_the_left(B: int, op: str, shape: str) -> Program:
    w, x = nn.Parameter(torch.rand(SHAPES[shape]) + 0.5), torch.rand(B, 3, 4) + 0.5
    return [w], lambda: score(OPERATIONS[op](w, x).tanh())


@case()
def add_with_alpha(B: int) -> Program:
    w, x = param(4), torch.randn(B, 4)
    return [w], lambda: score(torch.add(torch.sub(x, w, alpha=0.3), w, alpha=-2).sin())


@case()
def reversed_with_numbers(B: int) -> Program:
    w, x = nn.Parameter(torch.rand(4) + 0.5), torch.randn(B, 4)
    return [w], lambda: score((1.0 - w) * x + 2.0 / w)


@case(batches=(3, 4))
def parameter_with_a_row_per_sample(B: int) -> Program:
    w, x = param(B, 4), torch.randn(B, 4)
    return [w], lambda: score((x * w).tanh())


@case(batches=(4, 3))
def parameter_as_long_as_the_batch_last(B: int) -> Program:
    w, x = param(B), torch.randn(B, B)
    return [w], lambda: score((x * w + w).tanh())


@case()
def power_and_maximum(B: int) -> Program:
    w, x = param(4), torch.rand(B, 4) + 0.5
    return [w], lambda: score(x.pow(w) + torch.maximum(x, w) + torch.minimum(x, 2 * w))


@case()
def lerp_addcmul_addcdiv(B: int) -> Program:
    w, v, x = nn.Parameter(torch.rand(4) + 0.5), param(4), torch.randn(B, 4)
    return [w, v], lambda: score(torch.lerp(x, v, w) + torch.addcmul(v, x, w) + torch.addcdiv(x, v, w, value=0.5))


@case()
def atan2_and_hypot(B: int) -> Program:
    w, v, x = param(4), param(1), torch.randn(B, 4)
    return [w, v], lambda: score(torch.atan2(x, w) + torch.hypot(x, v))


@case({"one": {"n": 1}, "channels": {"n": 4}}, nodes=("PreluKernelBackward0",))
def prelu(B: int, n: int) -> Program:
    net, x = nn.PReLU(n), torch.randn(B, 4, 3)
    return net, lambda: score(net(x))


@case()
def prelu_2d_in_cnn(B: int) -> Program:
    net, x = (
        nn.Sequential(nn.Conv2d(3, 4, 3), nn.PReLU(4), nn.Conv2d(4, 2, 3), nn.PReLU()),
        torch.randn(B, 3, 6, 6),
    )
    return net, lambda: score(net(x))


@case({"plain": {}, "no-bias": {"bias": False}})
def bilinear(B: int, bias: bool = True) -> Program:
    net, x, y = nn.Bilinear(3, 4, 5, bias=bias), torch.randn(B, 3), torch.randn(B, 4)
    return net, lambda: score(net(x, y))


@case()
def bilinear_over_time(B: int) -> Program:
    net, x, y = nn.Bilinear(3, 4, 5), torch.randn(B, 2, 3), torch.randn(B, 2, 4)
    return net, lambda: score(net(x, y))


@case()
def bilinear_with_a_learned_side(B: int) -> Program:
    net, x, y = nn.Bilinear(3, 4, 5), torch.randn(B, 3), param(4)
    return {**dict(net.named_parameters()), "y": y}, lambda: score(net(x, y.expand(B, 4)))


@case()
def expanded_token(B: int) -> Program:
    token, net, x = param(1, 1, 4), nn.Linear(4, 3), torch.randn(B, 3, 4)
    params = {"token": token, **dict(net.named_parameters())}
    return params, lambda: score(net(torch.cat([token.expand(B, -1, -1), x], 1)).tanh())


@case()
def repeated_token(B: int) -> Program:
    token, x = param(1, 4), torch.randn(B, 4)
    return [token], lambda: score((token.repeat(B, 1) * x).tanh())


@case()
def stacked_parameters(B: int) -> Program:
    a, b, x = param(4), param(4), torch.randn(B, 2, 4)
    return [a, b], lambda: score((x * torch.stack([a, b])).tanh())


@case()
def concatenated_weights(B: int) -> Program:
    q, k, b, x = param(3, 4), param(2, 4), param(5), torch.randn(B, 4)
    return [q, k, b], lambda: score(F.linear(x, torch.cat([q, k]), b).tanh())


@case()
def sliced_weights(B: int) -> Program:
    w, x = param(9, 4), torch.randn(B, 4)
    return [w], lambda: score(F.linear(x, w[:3]).tanh() * F.linear(x, w[3:6]) + F.linear(x, w[6:]))


@case()
def chunked_weights(B: int) -> Program:
    w, x = param(6, 4), torch.randn(B, 4)

    def losses() -> Tensor:
        q, k = w.chunk(2)
        return score((x @ q.t()).sigmoid() * (x @ k.t()))

    return [w], losses


@case()
def selected_and_gathered_parameters(B: int) -> Program:
    w, x, ids = param(3, 5), torch.randn(B, 4), ints(5, B, 4)
    return [w], lambda: score(x * w[1, 2] + w[0].expand(B, 5).gather(1, ids) + w.select(1, 0).sum())


@case()
def indexed_twice(B: int) -> Program:
    w, i, j, x = param(3, 5), ints(3, B), ints(5, B), torch.randn(B)
    return [w], lambda: (w[i, j] * x + w[j % 3, i]).tanh()


@case()
def take_and_index_select(B: int) -> Program:
    w, i, x = param(3, 5), ints(15, B, 4), torch.randn(B, 4)
    return [w], lambda: score(w.take(i) * x + w.index_select(1, torch.tensor([0, 2, 2, 4]))[0])


@case()
def views_of_parameters(B: int) -> Program:
    w, x = param(2, 3, 4), torch.randn(B, 4)
    return [w], lambda: score(x @ w.permute(2, 0, 1).reshape(4, 6) + w.flatten()[:6] + w.unsqueeze(0)[0, 0, 0, 0])


@case()
def flipped_rolled_and_padded_parameters(B: int) -> Program:
    w, x = param(4), torch.randn(B, 6)
    return [w], lambda: score(x * F.pad(w.flip(0) + w.roll(1), (1, 1), value=1.0))


@case()
def cast_parameter(B: int) -> Program:
    net, x = nn.Linear(4, 3).float(), torch.randn(B, 4)
    return net, lambda: score(F.linear(x, net.weight.double(), net.bias.double()))


@case(rtol=1e-5)
def cast_through_float32(B: int) -> Program:
    w, b, x = param(3, 4), param(3), torch.randn(B, 2, 4).float()
    return [w, b], lambda: score(F.linear(x, w.float(), b.to(torch.float32))).double()


@case()
def several_dtypes(B: int) -> Program:
    net = nn.ModuleList([nn.Linear(4, 3).float(), nn.Linear(3, 2)])
    x = torch.randn(B, 4).float()
    return net, lambda: score(net[1](net[0](x).tanh().double()))


@case()
def temperature_and_bias(B: int) -> Program:
    t, b, net = param(), param(), nn.Linear(4, 3)
    x, y = torch.randn(B, 4), ints(3, B)
    params = {"t": t, "b": b, **dict(net.named_parameters())}
    return params, lambda: F.cross_entropy(net(x) * t.exp() + b * torch.arange(3), y, reduction="none")


@case()
def masked_weight(B: int) -> Program:
    w, x, mask = param(5, 5), torch.randn(B, 3, 5), torch.ones(5, 5).tril()
    return [w], lambda: score(x @ (w * mask) + x @ w.masked_fill(mask == 0, 0.0).softmax(-1))


@case()
def where_between_parameter_and_data(B: int) -> Program:
    token, x, scale = param(4), torch.randn(B, 5, 4), torch.randn(B, 1, 1)
    mask = torch.rand(B, 5, 1) < 0.5
    mask[:, 0] = True
    return [token], lambda: score(torch.where(mask, token, x).tanh() * scale)


@case()
def triangular_and_diagonal_parameters(B: int) -> Program:
    w, d, x = param(4, 4), param(4), torch.randn(B, 4)
    return [w, d], lambda: score(x @ (w.tril(-1) + torch.diag(d.exp()) + torch.diag_embed(w.diagonal())))


@case()
def outer_and_kron_of_parameters(B: int) -> Program:
    u, v, x = param(2), param(3), torch.randn(B, 6)
    a, b = param(2, 2), param(3, 3)
    return [u, v, a, b], lambda: score(x @ torch.kron(a, b) + torch.outer(u, v).flatten())
