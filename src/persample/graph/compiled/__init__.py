"""Reading the backwards of regions that ``torch.compile`` has made: where samples lie inside, what sums over them.

A compiled region is one node of autograd's graph. Its backward was traced as a graph of aten ops, each of which, where
it is applied to cotangents, is the backward of an op of the table. So that graph is followed as autograd's own is, and
the gradients of its parameters are factors made by the same rules.
"""
