"""The Python half of the stand-in NPU: real torch_npu tensors, whose memory is this host's, and CPU
arithmetic behind every operation. It loads itself as a torch backend wherever `cann.py`'s output is
on the path. Proves plumbing, never bits; nothing of it ships.
"""
