"""Answers that a program can use: probabilities of labels, constrained text, scores."""
