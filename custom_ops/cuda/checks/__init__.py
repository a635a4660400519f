"""Every kernel as a workload: fresh random inputs, poisoned outputs, a float64 reference, the bytes and operations it
needs. ``scripts/gpu_check.py`` runs them on a GPU, the tests on the host shim. Uses the standard library and numpy
alone (and PyTorch for memory on a GPU), and imports nothing of fastengine outside this package."""
