"""Training of the bundled demo checkpoints: `python -m bench train-demo`."""
