"""Capture: read the autograd graph, find each sample in it, contract what backward would have summed."""
