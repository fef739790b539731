"""Influence: indexes on disk held against gradients that autograd makes one by one."""
