"""The data plane: processes started by ``paddle.distributed.launch`` that run a model for the engine."""
