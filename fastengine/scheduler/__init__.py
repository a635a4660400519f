"""Where requests wait before an engine takes them up: one small interface, one module per place."""
