"""The kernels of an engine as its builder printed them: what they are, what they cost, what a pass should take.

Nothing here runs on a GPU; every time is a prediction.
"""
