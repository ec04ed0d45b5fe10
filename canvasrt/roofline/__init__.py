"""Predicts pass times from the kernel lists of engines: bytes moved and operations computed.

Nothing here runs on a GPU; all times are predictions.
"""
