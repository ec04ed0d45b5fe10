"""The third stage: engines generate text."""
