"""Attention row statistics, causal top-K pooling and Comp-GAE behind one interface.

The eager reference in this folder defines what compiled ops compute; `select.select` chooses between them.
"""
