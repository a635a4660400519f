"""The CUDA operators: kernels, their host shim for tests, the build, and the C interface. See README.md."""
