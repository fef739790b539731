"""Tests of the pure tensor functions."""
