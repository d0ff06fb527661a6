/* A GPU whose memory is the host's and whose kernels do nothing, for LD_PRELOAD: real, unchanged CUDA code of PyTorch,
 * Triton and DeepSpeed runs on it up to the launch, without values. `null_gpu.py` adds a function that returns 0
 * (success) for every other function of CUDA, cuBLAS and NCCL. An H100 by its properties.
 *
 * Functions are declared with the arguments that they use: on x86-64 a C function may be called with more.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include "driver_types.h"

#define VALUE(type, name, value) int name(type *out) { *out = (type)(value); return 0; }
#define HANDLE(name) VALUE(void *, name, __sync_add_and_fetch(&handle, 16))
#define TEXT(name) const char *name(void) { return "an error of the null GPU"; }
#define LAUNCH(name, kind) int name(void) { __sync_add_and_fetch(&kind, 1); return 0; }

static uintptr_t handle = 0x1000;
static long cuda_launches, triton_launches;
long null_cuda_launches(void) { return cuda_launches; }
long null_triton_launches(void) { return triton_launches; }

/* Memory: pages are taken when they are written first, so that a device may hold more than the host has. */
enum kind { DEVICE, PINNED, REGISTERED };
static struct block { char *start; size_t size; enum kind kind; } blocks[200000];
static int count;
static size_t used;
static const size_t TOTAL = 80ull << 30;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static int add(void *start, size_t size, enum kind kind) {
    pthread_mutex_lock(&lock);
    blocks[count++] = (struct block){start, size, kind};
    if (kind == DEVICE) used += size;
    pthread_mutex_unlock(&lock);
    return 0;
}

static int allocate(void **out, size_t size, enum kind kind) {
    *out = mmap(0, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return *out == MAP_FAILED ? cudaErrorMemoryAllocation : add(*out, size, kind);
}

static struct block *block_of(const void *address) {
    for (int i = count - 1; i >= 0; i--)
        if ((char *)address >= blocks[i].start && (char *)address < blocks[i].start + blocks[i].size) return &blocks[i];
    return 0;
}

static int drop(void *start) {
    pthread_mutex_lock(&lock);
    struct block *block = block_of(start);
    if (block) {
        if (block->kind != REGISTERED) munmap(block->start, block->size);
        if (block->kind == DEVICE) used -= block->size;
        *block = blocks[--count];
    }
    pthread_mutex_unlock(&lock);
    return 0;
}

int cudaMalloc(void **out, size_t size) { return allocate(out, size, DEVICE); }
int cudaHostAlloc(void **out, size_t size) { return allocate(out, size, PINNED); }
int cudaHostRegister(void *start, size_t size) { return add(start, size, REGISTERED); }
int cudaFree(void *start) { return drop(start); }
int cudaFreeHost(void *start) { return drop(start); }
int cudaHostUnregister(void *start) { return drop(start); }
int cudaMemGetInfo(size_t *left, size_t *total) { *left = (*total = TOTAL) - used; return 0; }

int cudaPointerGetAttributes(struct cudaPointerAttributes *out, const void *address) {
    memset(out, 0, sizeof *out);
    pthread_mutex_lock(&lock);
    struct block *block = block_of(address);
    if (block) {
        out->type = block->kind == DEVICE ? cudaMemoryTypeDevice : cudaMemoryTypeHost;
        out->devicePointer = out->hostPointer = (void *)address;
    }
    pthread_mutex_unlock(&lock);
    return 0;
}

int cudaMemcpyAsync(void *to, const void *from, size_t size, int kind) {
    pthread_mutex_lock(&lock);
    struct block *block = block_of(from);
    int from_device = block && block->kind == DEVICE;
    pthread_mutex_unlock(&lock);
    if (kind == cudaMemcpyDeviceToDevice) return 0;
    if (from_device) memset(to, 0, size); /* what kernels would have computed */
    else memcpy(to, from, size);
    return 0;
}
int cudaMemcpy(void *to, const void *from, size_t size, int kind) { return cudaMemcpyAsync(to, from, size, kind); }

/* The device. */
static __thread int current;
int cudaGetDevice(int *out) { *out = current; return 0; }
int cudaSetDevice(int device) { current = device; return 0; }
VALUE(int, cudaGetDeviceCount, 1) VALUE(int, cuDeviceGetCount, 1) VALUE(int, cuDeviceGet, 0)
VALUE(int, cudaDriverGetVersion, 13000) VALUE(int, cudaRuntimeGetVersion, 13000) VALUE(int, cuDriverGetVersion, 13000)
int cudaDeviceGetPCIBusId(char *out, int size) { strncpy(out, "0000:01:00.0", size); return 0; }

int cudaDeviceGetAttribute(int *out, int attribute) {
    switch (attribute) {
        case cudaDevAttrMaxThreadsPerBlock: *out = 1024; break;
        case cudaDevAttrMaxSharedMemoryPerBlock: *out = 49152; break;
        case cudaDevAttrWarpSize: *out = 32; break;
        case cudaDevAttrMaxRegistersPerBlock: case cudaDevAttrMaxRegistersPerMultiprocessor: *out = 65536; break;
        case cudaDevAttrClockRate: *out = 1980000; break;
        case cudaDevAttrMultiProcessorCount: *out = 132; break;
        case cudaDevAttrMemoryClockRate: *out = 2619000; break;
        case cudaDevAttrGlobalMemoryBusWidth: *out = 5120; break;
        case cudaDevAttrL2CacheSize: *out = 50 << 20; break;
        case cudaDevAttrMaxThreadsPerMultiProcessor: *out = 2048; break;
        case cudaDevAttrComputeCapabilityMajor: *out = 9; break;
        case cudaDevAttrComputeCapabilityMinor: *out = 0; break;
        case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *out = 233472; break;
        case cudaDevAttrMaxSharedMemoryPerBlockOptin: *out = 232448; break;
        case cudaDevAttrMaxBlocksPerMultiprocessor: *out = 32; break;
        default: *out = 1;
    }
    return 0;
}
int cuDeviceGetAttribute(int *out, int attribute) { return cudaDeviceGetAttribute(out, attribute); }

int cudaGetDeviceProperties(struct cudaDeviceProp *out) {
    *out = (struct cudaDeviceProp){
        .name = "NVIDIA H100 80GB HBM3", .major = 9, .minor = 0, .multiProcessorCount = 132, .totalGlobalMem = TOTAL,
        .warpSize = 32, .maxThreadsPerMultiProcessor = 2048, .regsPerMultiprocessor = 65536, .regsPerBlock = 65536,
        .sharedMemPerBlock = 49152, .sharedMemPerBlockOptin = 232448, .sharedMemPerMultiprocessor = 233472,
        .l2CacheSize = 50 << 20, .maxThreadsPerBlock = 1024, .maxThreadsDim = {1024, 1024, 64},
        .maxGridSize = {2147483647, 65535, 65535}, .maxBlocksPerMultiProcessor = 32, .asyncEngineCount = 3,
        .concurrentKernels = 1, .unifiedAddressing = 1, .textureAlignment = 512, .memoryBusWidth = 5120,
        .canMapHostMemory = 1,
    };
    return 0;
}

/* Errors, streams, events, functions. */
TEXT(cudaGetErrorString) TEXT(cudaGetErrorName) TEXT(ncclGetErrorString) TEXT(ncclGetLastError)
int cuGetErrorString(int error, const char **out) { *out = cudaGetErrorString(); return 0; }
int cuGetErrorName(int error, const char **out) { *out = cudaGetErrorName(); return 0; }
HANDLE(cudaStreamCreateWithPriority) HANDLE(cudaStreamCreate) HANDLE(cudaEventCreate) HANDLE(cudaEventCreateWithFlags)
int cudaDeviceGetStreamPriorityRange(int *least, int *greatest) { *least = 0; *greatest = -5; return 0; }
int cudaStreamGetPriority(void *stream, int *out) { *out = 0; return 0; }
int cudaStreamIsCapturing(void *stream, int *out) { *out = 0; return 0; }
int cudaStreamGetCaptureInfo(void *stream, int *out) { *out = 0; return 0; }
VALUE(float, cudaEventElapsedTime, 1)
int cudaFuncGetAttributes(struct cudaFuncAttributes *out) {
    *out = (struct cudaFuncAttributes){.maxThreadsPerBlock = 1024, .numRegs = 32, .binaryVersion = 90, .ptxVersion = 90};
    return 0;
}
int cuFuncGetAttribute(int *out, int attribute) { *out = attribute == 4 ? 32 : 0; return 0; } /* registers */
VALUE(int, cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags, 2)
VALUE(int, cuOccupancyMaxActiveBlocksPerMultiprocessor, 2) VALUE(int, cuOccupancyMaxActiveClusters, 2)
int cudaGetSymbolAddress(void **out) { *out = malloc(65536); return 0; }
void **__cudaRegisterFatBinary(void) { static void *binary[4]; return binary; }
int __cudaGetKernel(void **out, void *function) { *out = function; return 0; }

/* The driver, which torch and Triton look up by name. */
int cudaGetDriverEntryPointByVersion(const char *name, void **out, unsigned version, unsigned long long flags, int *found) {
    *out = dlsym(RTLD_DEFAULT, name);
    if (found) *found = *out ? 0 : 1;
    return 0;
}
int cuGetProcAddress_v2(const char *name, void **out) { *out = dlsym(RTLD_DEFAULT, name); return 0; }
VALUE(void *, cuCtxGetCurrent, 0x10) VALUE(void *, cuDevicePrimaryCtxRetain, 0x10)
int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) { *flags = 0; *active = 1; return 0; }
HANDLE(cuModuleLoad) HANDLE(cuModuleLoadData) HANDLE(cuModuleLoadDataEx) HANDLE(cuModuleGetFunction)
int cuPointerGetAttribute(uintptr_t *out, int attribute, uintptr_t address) { *out = address; return 0; }

/* What takes time on a GPU. */
LAUNCH(cudaLaunchKernel, cuda_launches) LAUNCH(__cudaLaunchKernel, cuda_launches)
LAUNCH(cudaLaunchKernelExC, cuda_launches) LAUNCH(cublasGemmEx, cuda_launches) LAUNCH(cublasLtMatmul, cuda_launches)
LAUNCH(cublasGemmStridedBatchedEx, cuda_launches)
LAUNCH(cuLaunchKernel, triton_launches) LAUNCH(cuLaunchKernelEx, triton_launches)

/* cuBLAS and NCCL: one rank. */
static int math_mode, pointer_mode;
int cublasGetMathMode(void *context, int *out) { *out = math_mode; return 0; }
int cublasSetMathMode(void *context, int mode) { math_mode = mode; return 0; }
int cublasGetPointerMode_v2(void *context, int *out) { *out = pointer_mode; return 0; }
int cublasSetPointerMode_v2(void *context, int mode) { pointer_mode = mode; return 0; }
size_t cublasLtGetVersion(void) { return 130100; }
HANDLE(cublasCreate_v2) HANDLE(cublasLtMatmulDescCreate) HANDLE(cublasLtMatmulPreferenceCreate)
HANDLE(cublasLtMatrixLayoutCreate)
int cublasLtMatmulAlgoGetHeuristic(void *context, void *operation, void *a, void *b, void *c, void *d, void *preference,
                                   int asked, void *results, int *found) {
    memset(results, 0, 96); /* one cublasLtMatmulHeuristicResult_t */
    *found = 1;
    return 0;
}
VALUE(int, ncclGetVersion, 22907)
int ncclGetUniqueId(char *out) { memset(out, 7, 128); return 0; }
HANDLE(ncclCommInitRank) HANDLE(ncclCommInitRankConfig) HANDLE(ncclCommInitRankScalable)
int ncclCommSplit(void *whole, int color, int key, void **out) { return ncclCommInitRank(out); }
int ncclCommGetAsyncError(void *communicator, int *out) { *out = 0; return 0; }
int ncclCommCount(void *communicator, int *out) { *out = 1; return 0; }
int ncclCommUserRank(void *communicator, int *out) { *out = 0; return 0; }
int ncclCommCuDevice(void *communicator, int *out) { *out = 0; return 0; }
