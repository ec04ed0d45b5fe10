"""Predicts how long passes take, from the bytes that the engines' kernels move and the operations that they compute.

Nothing here runs on a GPU; all times are predictions.
"""
