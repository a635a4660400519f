"""The data plane: one process per rank that turns step plans into tokens. See ARCHITECTURE.md.

Reading order: ``__main__`` (start), ``worker`` (the loop), ``commands`` (what is not a step),
``model_runner`` and ``batch`` (a step), ``models`` and ``layers`` (the computing), ``loader``.
"""
