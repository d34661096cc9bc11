/* A CUDA runtime and driver of one GPU that computes nothing: in front of the real ones (LD_PRELOAD), so that a CUDA
   build of torch runs its own CUDA branches under FakeTensorMode on a machine without a GPU. What would touch a GPU's
   memory (cudaMalloc, kernels) is missing on purpose: it fails, as it should. */
#include <driver_types.h>
#include <stdlib.h>
#include <string.h>

#ifndef MAJOR
#define MAJOR 9
#endif
#ifndef MINOR
#define MINOR 0
#endif
#define OK(name, ...) int name(__VA_ARGS__) { return 0; }
#define MADE(name, ...) int name(void **made, ##__VA_ARGS__) { *made = malloc(8); return 0; }
#define SAYS(name, type, value, ...) int name(type *said, ##__VA_ARGS__) { *said = value; return 0; }

SAYS(cudaGetDeviceCount, int, 1)
SAYS(cudaGetDevice, int, 0)
SAYS(cudaDriverGetVersion, int, 13000)
SAYS(cudaRuntimeGetVersion, int, 13000)
SAYS(cudaDeviceCanAccessPeer, int, 0, int device, int peer)
OK(cudaSetDevice, int device)
OK(cudaDeviceSynchronize, void)
OK(cudaDeviceEnablePeerAccess, int device, unsigned flags)
OK(cudaGetLastError, void)
OK(cudaPeekAtLastError, void)
OK(cudaFree, void *at)
OK(cudaThreadExchangeStreamCaptureMode, int *mode)
const char *cudaGetErrorString(int error) { return "of the stand-in"; }
const char *cudaGetErrorName(int error) { return "of the stand-in"; }

static int properties(struct cudaDeviceProp *of) {
    memset(of, 0, sizeof *of);
    strcpy(of->name, "Stand-in");
    of->major = MAJOR, of->minor = MINOR;
    of->totalGlobalMem = 80UL << 30;
    of->multiProcessorCount = 132, of->warpSize = 32, of->maxThreadsPerMultiProcessor = 2048;
    return 0;
}
int cudaGetDeviceProperties(struct cudaDeviceProp *of, int device) { return properties(of); }
int cudaGetDeviceProperties_v2(struct cudaDeviceProp *of, int device) { return properties(of); }
int cudaDeviceGetAttribute(int *value, int attribute, int device) {
    *value = attribute == cudaDevAttrComputeCapabilityMajor ? MAJOR : attribute == cudaDevAttrComputeCapabilityMinor ? MINOR : 0;
    return 0;
}
int cudaDeviceGetPCIBusId(char *id, int size, int device) { return strncpy(id, "0000:01:00.0", size), 0; }
int cudaMemGetInfo(size_t *of_it, size_t *all) { *of_it = 79UL << 30, *all = 80UL << 30; return 0; }
int cudaHostAlloc(void **at, size_t size, unsigned flags) { *at = malloc(size); return 0; }
int cudaFreeHost(void *at) { free(at); return 0; }
OK(cudaHostRegister, void *at, size_t size, unsigned flags)
OK(cudaHostUnregister, void *at)
int cudaPointerGetAttributes(struct cudaPointerAttributes *of, const void *at) { memset(of, 0, sizeof *of); return 0; }

int cudaDeviceGetStreamPriorityRange(int *least, int *most) { *least = 0, *most = -5; return 0; }
MADE(cudaStreamCreateWithPriority, unsigned flags, int priority)
SAYS(cudaDeviceGetDefaultMemPool, void *, (void *)8, int device)
int cudaMemPoolGetAttribute(void *pool, int which, void *value) { *(unsigned long *)value = 0; return 0; }
OK(cudaMemPoolSetAttribute, void *pool, int which, void *value)
OK(cudaStreamDestroy, void *stream)
OK(cudaStreamQuery, void *stream)
OK(cudaStreamSynchronize, void *stream)
OK(cudaStreamWaitEvent, void *stream, void *event, unsigned flags)
int cudaStreamIsCapturing(void *stream, int *status) { *status = 0; return 0; }
int cudaStreamGetCaptureInfo(void *stream, int *status) { *status = 0; return 0; }
int cudaStreamGetCaptureInfo_v2(void *stream, int *status) { *status = 0; return 0; }
int cudaStreamGetPriority(void *stream, int *priority) { *priority = 0; return 0; }
MADE(cudaEventCreate)
MADE(cudaEventCreateWithFlags, unsigned flags)
OK(cudaEventDestroy, void *event)
OK(cudaEventRecord, void *event, void *stream)
OK(cudaEventRecordWithFlags, void *event, void *stream, unsigned flags)
OK(cudaEventQuery, void *event)
OK(cudaEventSynchronize, void *event)
int cudaGetDriverEntryPointByVersion(const char *name, void **at, unsigned version, unsigned long flags, int *found) {
    *at = NULL;
    if (found) *found = 1;
    return 0;
}

OK(cuInit, unsigned flags)
SAYS(cuDriverGetVersion, int, 13000)
SAYS(cuDeviceGetCount, int, 1)
SAYS(cuCtxGetCurrent, void *, (void *)8)
int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) { *flags = 0, *active = 1; return 0; }
int cuGetErrorString(int error, const char **text) { *text = "of the stand-in"; return 0; }
int cuGetProcAddress_v2(const char *name, void **at, int version, unsigned long flags, int *found) {
    *at = NULL;
    if (found) *found = 1;
    return 500; /* CUDA_ERROR_NOT_FOUND */
}
