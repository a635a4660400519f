"""Custom operators: one Python face for CUDA and CPU."""
