"""Weight gradients of convolutions, one for each sample.

With stride s, dilation δ and a zero-padded input x, a convolution is

    y[o, t] = Σ_ik  w[o, i, k] · x[i, s·t + δ·k]

(t and k are multi-indices over the spatial dims; o and i lie in the same group), so one sample's gradient is

    dw[o, i, k] = Σ_t  dy[o, t] · x[i, s·t + δ·k]                                                     (1)

A transposed convolution scatters where this one gathers, y[o, s·t + δ·k] += w[i, o, k] · x[i, t], hence

    dw[i, o, k] = Σ_t  x[i, t] · dy[o, s·t + δ·k]

which is (1) with x and dy exchanged. So all code below computes (1) and nothing else. Where a sample owns R images, t
also runs over them: R is one more spatial dim, in which the kernel has size 1.

Letters: B samples, R images of a sample, G groups, p and d output and input channels of *one group*,
K offsets in the kernel, T output positions of a sample (over all its images).

    gradients.py    (1) for every sample, or summed over them
    kernels.py      the ways to compute (1)
    pixel_gram.py   the norms of (1) without computing it
    patches.py      the input as (1) reads it: padded, in windows, as matrices
    sizes.py        all sizes of a convolution in one record
    costs.py        what each way costs, by counts of its work and the rates in rates.json
    choice.py       the way that costs least
"""

from ..geometry import Geometry
from .choice import Choice, applicable, choose, estimates, explain_choice, keeps_stack, use_costs, use_kernel
from .gradients import chosen_kernel, convolve, weight_per_sample, weight_summed
from .kernels import KERNELS
from .patches import as_matrices, samples_per_step
from .pixel_gram import pixel_gram_norms
from .sizes import Sizes

__all__ = [
    "KERNELS",
    "Choice",
    "Geometry",
    "Sizes",
    "applicable",
    "as_matrices",
    "choose",
    "chosen_kernel",
    "convolve",
    "estimates",
    "explain_choice",
    "keeps_stack",
    "pixel_gram_norms",
    "samples_per_step",
    "use_costs",
    "use_kernel",
    "weight_per_sample",
    "weight_summed",
]
