"""A GPU that takes no time: kernels, products, copies and waiting are functions of C that return at once. What a
program still takes is what its host pays. Nothing is computed, and what comes back is 0, with which checks of indices
are content. Between two events lies a millisecond. Memory is a large GPU's, and costs nothing until it is touched.
"""

import ctypes
import subprocess
import tempfile
from functools import cache
from pathlib import Path

SOURCE = r"""
#include <string.h>
#define AT_ONCE(name) int name(void) { return 0; }
#define COUNTED(name) int name(void) { requests++; return 0; }
int requests = 0;       /* kernels and products asked for */

int cudaGetDevice(int *device) { *device = 0; return 0; }
int cuCtxGetDevice(int *device) { *device = 0; return 0; }
int cudaStreamIsCapturing(void *stream, int *status) { *status = 0; return 0; }
int cudaMemcpy(void *to, void *from, size_t size, int kind)
{
    if (kind == 2)          /* to the host: 0 */
        memset(to, 0, size);
    return 0;
}
int cudaMemcpyAsync(void *to, void *from, size_t size, int kind, void *stream)
{
    return cudaMemcpy(to, from, size, kind);
}
int cudaEventElapsedTime(float *milliseconds, void *begin, void *end) { *milliseconds = 1; return 0; }
int cublasGetMathMode(void *handle, int *mode) { *mode = 0; return 0; }
int cublasGetPointerMode_v2(void *handle, int *mode) { *mode = 0; return 0; }
int cublasGetStream_v2(void *handle, void **stream) { *stream = 0; return 0; }
AT_ONCE(cudaMemset) AT_ONCE(cudaMemsetAsync)
AT_ONCE(cudaSetDevice) AT_ONCE(cudaGetLastError) AT_ONCE(cudaPeekAtLastError) AT_ONCE(cudaDeviceSynchronize)
AT_ONCE(cudaStreamSynchronize) AT_ONCE(cudaStreamQuery) AT_ONCE(cudaStreamWaitEvent)
AT_ONCE(cudaEventRecord) AT_ONCE(cudaEventQuery) AT_ONCE(cudaEventSynchronize)
AT_ONCE(cublasSetStream_v2) AT_ONCE(cublasSetMathMode) AT_ONCE(cublasSetPointerMode_v2) AT_ONCE(cublasSetWorkspace_v2)
COUNTED(cuLaunchKernel) COUNTED(cublasSgemm_v2) COUNTED(cublasSgemmStridedBatched) COUNTED(cublasSgemmBatched)
COUNTED(cublasGemmEx) COUNTED(cublasGemmStridedBatchedEx)
"""


@cache
def library():
    """The functions, compiled."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        (path / "idle.c").write_text(SOURCE)
        subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", path / "idle.so", path / "idle.c"], check=True)
        return ctypes.CDLL(str(path / "idle.so"))


def function(name):
    """The one of this name, or None."""
    return getattr(library(), name, None)


def requests():
    """How many kernels and products this process has asked for."""
    return ctypes.c_int.in_dll(library(), "requests").value
