"""Curvatures: what gradients are divided by, before their inner products say who influenced whom."""
