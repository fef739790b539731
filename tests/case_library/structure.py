"""Networks whose shape is unusual: hypernetworks, gates at zero, frozen and unused parts, many inputs."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .registry import Program, case, ints, param, score, shaken


@case()
def hypernetwork_vector(B: int) -> Program:
    net, z, x = (
        nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 4)),
        torch.randn(B, 3),
        torch.randn(B, 4),
    )
    return net, lambda: (net(z) * x).sum(1).sin()


@case()
def hypernetwork_matrix(B: int) -> Program:
    net, z, x = nn.Linear(3, 20), torch.randn(B, 3), torch.randn(B, 6, 4)
    return net, lambda: score(x @ net(z).view(B, 4, 5))


@case()
def hypernetwork_einsum(B: int) -> Program:
    net, z, x = nn.Linear(3, 20), torch.randn(B, 3), torch.randn(B, 4)
    return net, lambda: score(torch.einsum("bij,bi->bj", net(z).view(B, 4, 5), x).tanh())


@case()
def hypernetwork_from_a_shared_code(B: int) -> Program:
    net, z, x = nn.Linear(3, 20), param(3), torch.randn(B, 4)
    params = {"z": z, **dict(net.named_parameters())}
    return params, lambda: score(F.linear(x, net(z).view(5, 4)).tanh())


@case(batches=(4, 1, 3))
def dynamic_convolution(B: int) -> Program:
    """The batch is folded into the channels, and each sample's generated kernel is one group."""
    net, z, x = nn.Linear(3, 2 * 3 * 9), torch.randn(B, 3), torch.randn(B, 3, 5, 5)

    def losses() -> Tensor:
        kernels = net(z).view(B * 2, 3, 3, 3)
        return score(F.conv2d(x.reshape(1, B * 3, 5, 5), kernels, groups=B).view(B, 2, 3, 3))

    return net, losses


@case(batches=(4, 1, 3))
def dynamic_convolution_after_convolution(B: int) -> Program:
    net = nn.ModuleList([nn.Conv2d(3, 4, 3, padding=1), nn.Linear(4, 4 * 9)])
    x = torch.randn(B, 3, 5, 5)

    def losses() -> Tensor:
        h = net[0](x).relu()
        kernels = net[1](h.mean((2, 3))).view(B * 4, 1, 3, 3)
        return score(F.conv2d(h.view(1, B * 4, 5, 5), kernels, groups=B * 4).view(B, 4, 3, 3))

    return net, losses


@case(batches=(4, 1))
def kernel_bank_with_attention(B: int) -> Program:
    bank, net, x = param(3, 4, 2, 3), nn.Linear(2, 3), torch.randn(B, 2, 6)
    params = {"bank": bank, **dict(net.named_parameters())}

    def losses() -> Tensor:
        mix = net(x.mean(2)).softmax(1)
        kernels = torch.einsum("bk,kois->bois", mix, bank).reshape(B * 4, 2, 3)
        return score(F.conv1d(x.reshape(1, B * 2, 6), kernels, groups=B).view(B, 4, 4))

    return params, losses


@case()
def modulated_weight(B: int) -> Program:
    w, style, x = param(4, 3), nn.Linear(2, 3), torch.randn(B, 3)
    z = torch.randn(B, 2)

    def losses() -> Tensor:
        own = w * style(z)[:, None]
        own = own * torch.rsqrt(own.square().sum(2, keepdim=True) + 1e-8)
        return score(torch.bmm(own, x.unsqueeze(2)).squeeze(2))

    return {"w": w, **dict(style.named_parameters())}, losses


@case()
def film_conditioning(B: int) -> Program:
    net = nn.ModuleDict({"conv": nn.Conv2d(3, 4, 3), "norm": nn.GroupNorm(2, 4, affine=False), "film": nn.Linear(2, 8)})
    x, z = torch.randn(B, 3, 5, 5), torch.randn(B, 2)

    def losses() -> Tensor:
        scale, shift = net["film"](z)[:, :, None, None].chunk(2, 1)
        return score(net["norm"](net["conv"](x)) * (1 + scale) + shift)

    return net, losses


@case()
def squeeze_and_excite(B: int) -> Program:
    net = nn.ModuleList([nn.Conv2d(3, 4, 3), nn.Conv2d(4, 2, 1), nn.Conv2d(2, 4, 1)])
    x = torch.randn(B, 3, 5, 5)

    def losses() -> Tensor:
        h = net[0](x)
        return score(h * net[2](net[1](F.adaptive_avg_pool2d(h, 1)).relu()).sigmoid())

    return net, losses


@case(zeros=("inner.weight", "inner.bias"))
def gate_at_zero(B: int) -> Program:
    net = nn.ModuleDict({"inner": nn.Linear(4, 4), "outer": nn.Linear(4, 3)})
    net.register_parameter("gate", nn.Parameter(torch.zeros(())))
    x = torch.randn(B, 4)
    return net, lambda: score(net["outer"](x + net.gate * net["inner"](x).tanh()))


@case(zeros=("0.weight", "0.bias"))
def last_layer_at_zero(B: int) -> Program:
    net, x = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)), torch.randn(B, 4)
    nn.init.zeros_(net[2].weight)
    return net, lambda: score(net(x))


@case(zeros=("0.weight", "0.bias"))
def norm_scale_at_zero(B: int) -> Program:
    net, x = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)), torch.randn(B, 4)
    nn.init.zeros_(net[1].weight)
    return net, lambda: score(x + net(x))


@case()
def frozen_layers(B: int) -> Program:
    net, x = (
        nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 3)),
        torch.randn(B, 4),
    )
    net[2].requires_grad_(False)
    net[4].weight.requires_grad_(False)
    return net, lambda: score(net(x))


@case()
def frozen_backbone(B: int) -> Program:
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(36, 3))
    net[0].requires_grad_(False)
    x = torch.randn(B, 3, 5, 5)
    return net, lambda: score(net(x))


@case()
def only_biases_trained(B: int) -> Program:
    net = shaken(nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(36, 3)))
    for name, p in net.named_parameters():
        p.requires_grad_(name.endswith("bias"))
    x = torch.randn(B, 3, 5, 5)
    return net, lambda: score(net(x))


@case(zeros=("spare.weight", "spare.bias", "lone"))
def unused_parameters(B: int) -> Program:
    net = nn.ModuleDict({"used": nn.Linear(4, 3), "spare": nn.Linear(4, 3)})
    net.register_parameter("lone", param(2, 2))
    x = torch.randn(B, 4)
    return net, lambda: score(net["used"](x))


@case(batches=(4, 3))
def used_by_some_samples_only(B: int) -> Program:
    net, x = nn.ModuleList([nn.Linear(4, 3), nn.Linear(4, 3)]), torch.randn(B, 4)
    return net, lambda: torch.cat([score(net[0](x[:2])), score(net[1](x[2:]))])


@case(zeros=("0.weight", "0.bias"))
def detached_branch(B: int) -> Program:
    net, x = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 3)), torch.randn(B, 4)
    return net, lambda: score(net[1](net[0](x).detach()))


@case()
def stop_gradient_target(B: int) -> Program:
    net, head, x = nn.Linear(4, 3), nn.Linear(3, 3), torch.randn(B, 4)
    return nn.ModuleList([net, head]), lambda: (head(net(x)) - net(x).detach()).square().sum(1)


@case()
def several_inputs_and_outputs(B: int) -> Program:
    net = nn.ModuleDict({"a": nn.Linear(3, 4), "b": nn.Conv1d(2, 4, 3), "cls": nn.Linear(4, 3), "reg": nn.Linear(4, 1)})
    x, z, y, r = torch.randn(B, 3), torch.randn(B, 2, 6), ints(3, B), torch.randn(B)

    def losses() -> Tensor:
        h = (net["a"](x) + net["b"](z).amax(2)).relu()
        return F.cross_entropy(net["cls"](h), y, reduction="none") + (net["reg"](h).squeeze(1) - r) ** 2

    return net, losses


@case()
def auxiliary_heads(B: int) -> Program:
    net = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3), nn.Linear(4, 3)])
    x, y = torch.randn(B, 4), ints(3, B)

    def losses() -> Tensor:
        h = net[0](x).relu()
        late = F.cross_entropy(net[3](net[1](h).relu()), y, reduction="none")
        return late + 0.3 * F.cross_entropy(net[2](h), y, reduction="none")

    return net, losses


@case()
def losses_are_a_function_of_the_last_bias(B: int) -> Program:
    b, x = param(1), torch.randn(B)
    return [b], lambda: (x + b).square()


@case()
def losses_are_the_output_of_a_layer(B: int) -> Program:
    net, x = nn.Linear(4, 1), torch.randn(B, 4)
    return net, lambda: net(x)[:, 0]


@case(batches=(4, 3))
def parameter_is_the_losses(B: int) -> Program:
    w = param(B)
    return [w], lambda: w * 1.0


@case()
def losses_reach_nothing_but_a_constant(B: int) -> Program:
    w = param(3)
    return [w], lambda: w.square().sum().expand(B) * torch.arange(1.0, B + 1)


@case()
def losses_from_an_expanded_scalar(B: int) -> Program:
    w = param(3)
    return [w], lambda: w.square().sum().expand(B)


@case()
def variational_autoencoder(B: int) -> Program:
    net = nn.ModuleDict({"enc": nn.Linear(6, 4), "dec": nn.Linear(2, 6)})
    x = torch.rand(B, 6)

    def losses() -> Tensor:
        mean, log_var = net["enc"](x).chunk(2, 1)
        z = mean + torch.randn_like(mean) * (0.5 * log_var).exp()
        rebuilt = F.binary_cross_entropy_with_logits(net["dec"](z), x, reduction="none").sum(1)
        return rebuilt - 0.5 * (1 + log_var - mean.square() - log_var.exp()).sum(1)

    return net, losses


@case()
def diffusion_step(B: int) -> Program:
    net = nn.ModuleDict(
        {
            "time": nn.Embedding(8, 4),
            "conv": nn.Conv2d(1, 4, 3, padding=1),
            "out": nn.Conv2d(4, 1, 3, padding=1),
        }
    )
    x, t, noise = torch.randn(B, 1, 5, 5), ints(8, B), torch.randn(B, 1, 5, 5)

    def losses() -> Tensor:
        h = F.silu(net["conv"](x + noise) + net["time"](t)[:, :, None, None])
        return (net["out"](h) - noise).square().mean((1, 2, 3))

    return net, losses
