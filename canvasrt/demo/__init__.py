"""The demo: two tiny DiffusionGemmas, and the questions that they answer."""
