"""What runs around Triton: `canvasrt serve` and what it starts, watches and stops."""
