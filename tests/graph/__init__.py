"""Tests of reading the autograd graph."""
