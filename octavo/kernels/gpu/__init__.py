"""Triton kernels, one file for each thing they do; nothing here is imported where Triton is not installed.

Every file has the kernels and one plain function for each, which picks launch sizes and returns tensors. The
oracles are in `octavo.kernels.reference`; the tests run the kernels on the CPU through Triton's interpreter.
Kernel arguments in capitals are pointers or compile-time constants. No function reads a device value on the host.
"""
