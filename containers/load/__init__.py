"""Load tests of OpenAI-compatible servers: `canvasrt bench URL`."""
