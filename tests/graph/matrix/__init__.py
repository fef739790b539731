"""The matrix: every entry of the engine's tables × every form of its operands × every place of the samples.

Nodes are taken from the graphs of all samples that these tests have (`nodes`), under every dtype, memory format and
choice of trainable operands (`variants`). Samples are put in every place (`places`), cotangents come in every form
(tests/forms.py), and what a rule, flow or lift says is held against the node itself, called on one sample's cotangents
at a time (`definition`).
"""
