"""What the control plane must know of a model, read from its files without Paddle."""
