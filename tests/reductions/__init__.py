"""Everything that is asked of per-sample gradients."""
