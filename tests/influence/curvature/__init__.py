"""Curvatures, against the matrices that they stand for."""
