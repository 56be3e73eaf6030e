/* The driver's functions that Triton, torch's launchers and whoever looks for GPUs call. */
#define _GNU_SOURCE
#include "device.h"

#include <cuda.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#undef cuDeviceTotalMem
#undef cuMemGetAddressRange

static char context, module, function;

EXPORTED CUresult cuInit(unsigned flags)
{
    return (int)setting(DEVICES) ? CUDA_SUCCESS : CUDA_ERROR_NO_DEVICE;
}

EXPORTED CUresult cuGetErrorString(CUresult error, const char **text)
{
    *text = error ? "an error of the stand-in" : "no error";
    return CUDA_SUCCESS;
}

EXPORTED CUresult cuGetErrorName(CUresult error, const char **text)
{
    return cuGetErrorString(error, text);
}

EXPORTED CUresult cuDriverGetVersion(int *version)
{
    *version = CUDA_VERSION;
    return CUDA_SUCCESS;
}

EXPORTED CUresult cuDeviceGetCount(int *devices)
{
    *devices = (int)setting(DEVICES);
    return CUDA_SUCCESS;
}

EXPORTED CUresult cuDeviceGet(CUdevice *device, int number)
{
    *device = number;
    return CUDA_SUCCESS;
}

EXPORTED CUresult cuDeviceGetName(char *name, int size, CUdevice device)
{
    struct cudaDeviceProp of;
    cudaGetDeviceProperties(&of, device);
    snprintf(name, size, "%s", of.name);
    return CUDA_SUCCESS;
}

EXPORTED CUresult cuDeviceTotalMem_v2(size_t *size, CUdevice device)
{
    *size = memory_of_device();
    return CUDA_SUCCESS;
}

EXPORTED CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device)
{
    return (CUresult)cudaDeviceGetAttribute(value, (enum cudaDeviceAttr)attribute, device); /* they have one numbering */
}

EXPORTED CUresult cuCtxGetCurrent(CUcontext *current)
{
    *current = (CUcontext)&context;
    return CUDA_SUCCESS;
}

EXPORTED CUresult cuCtxSetCurrent(CUcontext current)
{
    return CUDA_SUCCESS;
}

EXPORTED CUresult cuCtxGetDevice(CUdevice *device)
{
    *device = current_device();
    return CUDA_SUCCESS;
}

EXPORTED CUresult cuDevicePrimaryCtxRetain(CUcontext *current, CUdevice device)
{
    return cuCtxGetCurrent(current);
}

EXPORTED CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *active)
{
    *flags = 0;
    *active = 1;
    return CUDA_SUCCESS;
}

EXPORTED CUresult cuModuleLoad(CUmodule *loaded, const char *file)
{
    *loaded = (CUmodule)&module;
    return CUDA_SUCCESS;
}

EXPORTED CUresult cuModuleLoadData(CUmodule *loaded, const void *image)
{
    return cuModuleLoad(loaded, NULL);
}

EXPORTED CUresult cuModuleUnload(CUmodule loaded)
{
    return CUDA_SUCCESS;
}

EXPORTED CUresult cuModuleGetFunction(CUfunction *found, CUmodule loaded, const char *name)
{
    *found = (CUfunction)&function;
    return CUDA_SUCCESS;
}

EXPORTED CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction of)
{
    *value = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0;
    return CUDA_SUCCESS;
}

EXPORTED CUresult cuFuncSetAttribute(CUfunction of, CUfunction_attribute attribute, int value)
{
    return CUDA_SUCCESS;
}

EXPORTED CUresult cuFuncSetCacheConfig(CUfunction of, CUfunc_cache config)
{
    return CUDA_SUCCESS;
}

EXPORTED CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, CUfunction of, int size, size_t shared)
{
    *blocks = 2;
    return CUDA_SUCCESS;
}

EXPORTED CUresult cuOccupancyMaxActiveClusters(int *clusters, CUfunction of, const CUlaunchConfig *config)
{
    *clusters = 54;
    return CUDA_SUCCESS;
}

EXPORTED CUresult cuLaunchKernel(
    CUfunction kernel, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared,
    CUstream stream, void **arguments, void **more)
{
    enqueue_kernel(stream_of(stream));
    return CUDA_SUCCESS;
}

EXPORTED CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction kernel, void **arguments, void **more)
{
    enqueue_kernel(stream_of(config->hStream));
    return CUDA_SUCCESS;
}

EXPORTED CUresult cuPointerGetAttribute(void *value, CUpointer_attribute attribute, CUdeviceptr pointer)
{
    int device;
    void *base;
    size_t size;
    if (place_of((void *)pointer, &device, &base, &size) == PAGEABLE)
        return CUDA_ERROR_INVALID_VALUE;
    switch (attribute) {
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER: *(CUdeviceptr *)value = pointer; break;
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL: *(int *)value = device; break;
    case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR: *(void **)value = base; break;
    case CU_POINTER_ATTRIBUTE_RANGE_SIZE: *(size_t *)value = size; break;
    default: *(unsigned *)value = 0;
    }
    return CUDA_SUCCESS;
}

EXPORTED CUresult cuMemGetAddressRange_v2(CUdeviceptr *base, size_t *size, CUdeviceptr pointer)
{
    return place_of((void *)pointer, NULL, (void **)base, size) == PAGEABLE ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

EXPORTED CUresult cuMemGetAllocationGranularity(
    size_t *size, const CUmemAllocationProp *of, CUmemAllocationGranularity_flags option)
{
    *size = 2 << 20;
    return CUDA_SUCCESS;
}

EXPORTED CUresult cuLogsRegisterCallback(CUlogsCallback callback, void *argument, CUlogsCallbackHandle *made)
{
    return CUDA_SUCCESS; /* there is nothing to log */
}

static void unknown(void)
{
    give_up("a function of CUDA's driver that is not stood in for was asked for by name before, and is called now");
}

/* torch asks for all that it may need once, and calls few of them. */
EXPORTED cudaError_t cudaGetDriverEntryPointByVersion(
    const char *name, void **found, unsigned version, unsigned long long flags, enum cudaDriverEntryPointQueryResult *status)
{
    char newer[256];
    snprintf(newer, sizeof newer, "%s_v2", name);
    *found = dlsym(RTLD_DEFAULT, name);
    if (!*found)
        *found = dlsym(RTLD_DEFAULT, newer);
    if (!*found)
        *found = (void *)unknown;
    if (status)
        *status = cudaDriverEntryPointSuccess;
    return cudaSuccess;
}

/* NVML: torch counts devices with it, which leaves a process free to fork, and asks who holds memory that is lacking. */
EXPORTED int nvmlInit(void)
{
    return 0;
}

EXPORTED int nvmlDeviceGetCount_v2(int *devices)
{
    return (int)cuDeviceGetCount(devices);
}

EXPORTED int nvmlInit_v2(void)
{
    return 0;
}

EXPORTED int nvmlDeviceGetHandleByPciBusId_v2(const char *bus, void **device)
{
    *device = NULL;
    return 0;
}

EXPORTED int nvmlDeviceGetComputeRunningProcesses(void *device, unsigned *many, void *processes)
{
    *many = 0;
    return 0;
}

#define NOT_SUPPORTED(name) EXPORTED int name(void) { return 3; }
NOT_SUPPORTED(nvmlDeviceGetNvLinkRemoteDeviceType)
NOT_SUPPORTED(nvmlDeviceGetNvLinkRemotePciInfo_v2)
NOT_SUPPORTED(nvmlDeviceGetGpuFabricInfoV)
NOT_SUPPORTED(nvmlSystemGetCudaDriverVersion_v2)
