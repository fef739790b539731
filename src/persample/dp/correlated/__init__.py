"""Correlated noise: what one step adds, later ones take away again in part (matrix mechanisms, DP-FTRL).

The workload ``A`` (prefix sums) is factored as ``A = B C``. The encoder ``C`` gets independent noise ``Z``, and what is
released is ``x + C⁻¹ Z``, row by row: a function of ``C x + Z``. See docs/correlated-noise.md.
"""
