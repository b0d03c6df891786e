"""A Triton backend that says it is there and compiles nothing: kernels run in the interpreter."""
