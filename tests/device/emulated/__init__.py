"""A real CuPy on a machine without a GPU: CUDA's functions, answered by Python, run its kernels in the emulator.

    machine.py      GPUs: memory, streams, events, graphs, kernels
    cuda.py         CUDA's runtime and driver interface, a table of functions on them
    libraries.py    cuBLAS, cuSOLVER and Thrust, by NumPy
    nccl.py         NCCL: communicators, calls
    operations.py   … what its operations do, and when
    processes.py    … what the processes that share it tell each other
    idle.py         a GPU that takes no time: what is left is the host's
    symbols.py      what an ELF file names
    hooks.py        puts all that under CuPy
    __main__.py     runs a program so
"""
