"""The demo: a tiny DiffusionGemma, its tasks, and the script that trained it."""
