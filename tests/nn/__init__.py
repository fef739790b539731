"""Tests of the functions on gradients."""
