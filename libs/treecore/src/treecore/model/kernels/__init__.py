"""Triton kernels and what launches them. Knows tensors and triton; must not know requests, weights or files.

Importing this package imports no triton: the modules in it do, and only a triton backend imports those.
"""
