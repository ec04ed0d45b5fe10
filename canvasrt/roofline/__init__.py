"""Predicts pass times from engines' kernel lists, by the bytes that kernels move and the operations that they compute.

Nothing here runs on a GPU; all times are predictions.
"""
