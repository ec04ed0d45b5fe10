"""The supervisor: `canvasrt serve`, and the processes that it starts, watches and stops."""
