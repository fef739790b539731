"""Pure tensor functions that know neither graph nor modules.

convolution/            weight gradients of convolutions for each sample, and their norms
geometry.py             the options of a convolution in one record
gram.py                 norms of sums of outer products from Gram matrices
norms.py                Euclidean norms that neither overflow, underflow nor drift
rows.py                 rows added up by index
recurrence.py           the cotangents inside one LSTM layer
stacked_recurrences.py  the same for GRUs and plain ones, and for layers above one another, in both directions
cross_entropy.py        the gradient of cross entropy at logits that were not kept
library.py              PyTorch's own kernels, called below autograd
devices.py              which devices may be looked at, and which have float64
streams.py              who waits for whom on an accelerator
pages.py                large blocks of memory that are cheap to touch
"""
