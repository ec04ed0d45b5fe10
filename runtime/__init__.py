"""Engines to text."""
