"""Structured answers: probabilities of labels, text that follows a grammar, and text whose gaps are filled."""
