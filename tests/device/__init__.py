"""A device that exists only for tests: it computes on the CPU, and is as strict as an accelerator.

Importing this package registers it with PyTorch, for this process and for good.
"""

from tests.device import chosen  # noqa: F401  before any backward: the engine has threads for the devices it knows then
