"""Whole files of requests, in the form of OpenAI's Batch API."""
