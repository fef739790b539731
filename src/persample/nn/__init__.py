"""Counterparts of `torch.nn`'s functions on gradients.

>>> import torch, persample as ps
>>> image, g = torch.ones(5, 3, 8, 8), torch.ones(5, 4, 6, 6)
>>> ps.nn.grad.conv2d_weight_per_sample(image, (4, 3, 3, 3), g).shape
torch.Size([5, 4, 3, 3, 3])
"""

from . import grad

__all__ = ["grad"]
