"""Structured answers: probabilities of labels, and text under a grammar or with gaps to fill."""
