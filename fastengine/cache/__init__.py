"""Which KV block holds what: the block pool, the prefix index over it, and the manager of both.

Pure accounting: no KV, no I/O, no thread. Reading order: :mod:`prefix_index` (keys of block contents; :mod:`branches` what
prompts share inside of a block), :mod:`block_pool` (who owns a block; :mod:`lru_order` what it evicts first),
:mod:`kv_cache_manager` (what a sequence does with both).
"""
