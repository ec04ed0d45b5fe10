"""Measures any OpenAI-compatible server under load: `canvasrt bench URL`."""
