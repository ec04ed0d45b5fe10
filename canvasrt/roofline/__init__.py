"""An engine's kernels, as its builder lists them: what they move and compute, and how long a pass should take.

Nothing here runs on a GPU; every time is a prediction.
"""
