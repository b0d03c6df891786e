"""How vLLM's layers reach our kernels, one module per noun. Each gives `rows()`; nothing happens
on import.
"""
