"""A device that exists only for tests: it computes on the CPU, and is as strict as an accelerator.

Importing this package registers it with PyTorch, for this process and for good.
"""
