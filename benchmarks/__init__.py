"""How much per-sample gradients cost, measured against a plain step. Run by `make bench`."""
