// A CUDA runtime without a device: memory is main memory, kernels do nothing, everything is done at once. See
// README.md. What torch does not look at is left at zero.

#include <cuda_runtime_api.h>
#include <malloc.h>
#include <stdlib.h>
#include <string.h>

#define SUCCEEDS(declaration)  \
  cudaError_t declaration {    \
    return cudaSuccess;        \
  }
#define GIVES(declaration, assignment) \
  cudaError_t declaration {            \
    assignment;                        \
    return cudaSuccess;                \
  }

static const size_t total_bytes = 8ull << 30;
static size_t used_bytes = 0;
static long kernel_launches = 0;
static long graph_launches = 0;
static long stream_waits = 0;
static int is_capturing = 0;
static int is_invalid = 0;
static _Thread_local int present_device = 0;
static cudaStream_t captured_stream;

// What tests ask for.

long stand_in_kernel_launches(void) {
  return kernel_launches;
}
long stand_in_graph_launches(void) {
  return graph_launches;
}
long stand_in_stream_waits(void) {
  return stream_waits;
}

// The device.

GIVES(cudaGetDeviceCount(int* count), *count = 2)
GIVES(cudaGetDevice(int* device), *device = present_device)
GIVES(cudaSetDevice(int device), present_device = device)
GIVES(cudaDriverGetVersion(int* version), *version = 13000)
GIVES(cudaRuntimeGetVersion(int* version), *version = 13000)
GIVES(cudaDeviceCanAccessPeer(int* can, int device, int other), *can = 0)
SUCCEEDS(cudaDeviceEnablePeerAccess(int device, unsigned flags))
SUCCEEDS(cudaDeviceSynchronize(void))
GIVES(cudaDeviceGetStreamPriorityRange(int* least, int* greatest), (*least = 0, *greatest = -5))
SUCCEEDS(cudaGetLastError(void))
SUCCEEDS(cudaPeekAtLastError(void))
SUCCEEDS(cudaProfilerStart(void))
SUCCEEDS(cudaProfilerStop(void))

const char* cudaGetErrorName(cudaError_t error) {
  return error == cudaErrorMemoryAllocation ? "cudaErrorMemoryAllocation" : "an error of the stand-in";
}
const char* cudaGetErrorString(cudaError_t error) {
  return error == cudaErrorMemoryAllocation ? "out of memory" : "an error of the stand-in";
}

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp* properties, int device) {
  memset(properties, 0, sizeof *properties);
  strcpy(properties->name, "stand-in");
  properties->totalGlobalMem = total_bytes;
  properties->major = 9;
  properties->multiProcessorCount = 108;
  properties->maxThreadsPerMultiProcessor = 2048;
  properties->maxThreadsPerBlock = 1024;
  properties->maxBlocksPerMultiProcessor = 32;
  properties->warpSize = 32;
  properties->sharedMemPerBlock = 49152;
  properties->sharedMemPerMultiprocessor = 167936;
  properties->sharedMemPerBlockOptin = 166912;
  properties->regsPerBlock = 65536;
  properties->regsPerMultiprocessor = 65536;
  properties->l2CacheSize = 40 << 20;
  properties->maxGridSize[0] = 2147483647;
  properties->maxGridSize[1] = properties->maxGridSize[2] = 65535;
  properties->maxThreadsDim[0] = properties->maxThreadsDim[1] = 1024;
  properties->maxThreadsDim[2] = 64;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, enum cudaDeviceAttr attribute, int device) {
  switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor:
      *value = 9;
      break;
    case cudaDevAttrMultiProcessorCount:
      *value = 108;
      break;
    case cudaDevAttrMaxSharedMemoryPerBlock:
      *value = 49152;
      break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      *value = 166912;
      break;
    case cudaDevAttrMaxGridDimX:
      *value = 2147483647;
      break;
    default:
      *value = 0;
  }
  return cudaSuccess;
}

cudaError_t cudaGetDriverEntryPointByVersion(const char* symbol, void** function, unsigned version,
                                             unsigned long long flags,
                                             enum cudaDriverEntryPointQueryResult* result) {
  *function = NULL;
  if (result != NULL) {
    *result = cudaDriverEntryPointSymbolNotFound;
  }
  return cudaErrorSymbolNotFound;
}

// Memory.

cudaError_t cudaMalloc(void** block, size_t size) {
  *block = NULL;
  if (used_bytes + size > total_bytes || posix_memalign(block, 2 << 20, size) != 0) {
    return cudaErrorMemoryAllocation;
  }
  used_bytes += malloc_usable_size(*block);
  return cudaSuccess;
}

cudaError_t cudaFree(void* block) {
  if (block != NULL) {
    used_bytes -= malloc_usable_size(block);
    free(block);
  }
  return cudaSuccess;
}

cudaError_t cudaMallocAsync(void** block, size_t size, cudaStream_t stream) {
  return cudaMalloc(block, size);
}
cudaError_t cudaFreeAsync(void* block, cudaStream_t stream) {
  return cudaFree(block);
}
GIVES(cudaDeviceGetDefaultMemPool(cudaMemPool_t* pool, int device), *pool = (cudaMemPool_t)8)
SUCCEEDS(cudaMemPoolSetAttribute(cudaMemPool_t pool, enum cudaMemPoolAttr attribute, void* value))
GIVES(cudaMemPoolGetAttribute(cudaMemPool_t pool, enum cudaMemPoolAttr attribute, void* value),
      *(unsigned long long*)value = used_bytes)
SUCCEEDS(cudaMemPoolTrimTo(cudaMemPool_t pool, size_t size))
SUCCEEDS(cudaMemPoolSetAccess(cudaMemPool_t pool, const struct cudaMemAccessDesc* access, size_t count))
GIVES(cudaMemGetInfo(size_t* unused, size_t* total), (*total = total_bytes, *unused = total_bytes - used_bytes))
GIVES(cudaHostAlloc(void** block, size_t size, unsigned flags), *block = malloc(size))
GIVES(cudaFreeHost(void* block), free(block))
SUCCEEDS(cudaHostRegister(void* block, size_t size, unsigned flags))
SUCCEEDS(cudaHostUnregister(void* block))
GIVES(cudaMemcpy(void* to, const void* from, size_t size, enum cudaMemcpyKind kind), memmove(to, from, size))
GIVES(cudaMemcpyAsync(void* to, const void* from, size_t size, enum cudaMemcpyKind kind, cudaStream_t stream),
      memmove(to, from, size))
GIVES(cudaMemcpyPeerAsync(void* to, int device, const void* from, int other, size_t size, cudaStream_t stream),
      memmove(to, from, size))
SUCCEEDS(cudaMemcpyToSymbol(const void* to, const void* from, size_t size, size_t at, enum cudaMemcpyKind kind))
GIVES(cudaMemset(void* block, int value, size_t size), memset(block, value, size))
GIVES(cudaMemsetAsync(void* block, int value, size_t size, cudaStream_t stream), memset(block, value, size))
GIVES(cudaGetSymbolAddress(void** address, const void* symbol), *address = (void*)symbol)
GIVES(cudaPointerGetAttributes(struct cudaPointerAttributes* attributes, const void* block),
      (memset(attributes, 0, sizeof *attributes), attributes->type = cudaMemoryTypeUnregistered))

// Streams and events.

GIVES(cudaStreamCreate(cudaStream_t* stream), *stream = malloc(8))
GIVES(cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int priority), *stream = malloc(8))
GIVES(cudaStreamDestroy(cudaStream_t stream), free(stream))
GIVES(cudaStreamGetPriority(cudaStream_t stream, int* priority), *priority = 0)
SUCCEEDS(cudaStreamQuery(cudaStream_t stream))
GIVES(cudaEventCreate(cudaEvent_t* event), *event = calloc(1, 8))
GIVES(cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags), *event = calloc(1, 8))
GIVES(cudaEventDestroy(cudaEvent_t event), free(event))
GIVES(cudaEventElapsedTime(float* milliseconds, cudaEvent_t start, cudaEvent_t end), *milliseconds = 1)
SUCCEEDS(cudaEventQuery(cudaEvent_t event))
SUCCEEDS(cudaEventSynchronize(cudaEvent_t event))

static int is_captured(cudaStream_t stream) {
  return is_capturing && stream == captured_stream;
}

// An event is whether it was recorded on a stream that was being captured.
GIVES(cudaEventRecord(cudaEvent_t event, cudaStream_t stream), *(int*)event = is_captured(stream))
GIVES(cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags),
      *(int*)event = is_captured(stream))

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) {
  ++stream_waits;
  if (is_captured(stream) && !*(int*)event) {
    is_invalid = 1;
    return cudaErrorStreamCaptureIsolation;
  }
  return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  is_invalid |= is_capturing;
  return is_capturing ? cudaErrorStreamCaptureUnsupported : cudaSuccess;
}

// Graphs.

static enum cudaStreamCaptureStatus status_of(cudaStream_t stream) {
  if (!is_captured(stream)) {
    return cudaStreamCaptureStatusNone;
  }
  return is_invalid ? cudaStreamCaptureStatusInvalidated : cudaStreamCaptureStatusActive;
}

GIVES(cudaStreamBeginCapture(cudaStream_t stream, enum cudaStreamCaptureMode mode),
      (is_capturing = 1, captured_stream = stream))

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  const int was_invalid = is_invalid;
  is_capturing = is_invalid = 0;
  *graph = was_invalid ? NULL : malloc(8);
  return was_invalid ? cudaErrorStreamCaptureInvalidated : cudaSuccess;
}

GIVES(cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus* status), *status = status_of(stream))
SUCCEEDS(cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode* mode))
SUCCEEDS(cudaGraphDestroy(cudaGraph_t graph))
SUCCEEDS(cudaGraphExecDestroy(cudaGraphExec_t graph))
GIVES(cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t* nodes, size_t* count), *count = 1)
GIVES(cudaGraphNodeGetDependencies(cudaGraphNode_t node, cudaGraphNode_t* nodes, cudaGraphEdgeData* edges,
                                   size_t* count),
      *count = 0)
GIVES(cudaGraphInstantiate(cudaGraphExec_t* executable, cudaGraph_t graph, unsigned long long flags),
      *executable = malloc(8))
GIVES(cudaGraphInstantiateWithFlags(cudaGraphExec_t* executable, cudaGraph_t graph, unsigned long long flags),
      *executable = malloc(8))
GIVES(cudaGraphLaunch(cudaGraphExec_t graph, cudaStream_t stream), ++graph_launches)

cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, enum cudaStreamCaptureStatus* status,
                                     unsigned long long* identity, cudaGraph_t* graph,
                                     const cudaGraphNode_t** dependencies, const cudaGraphEdgeData** edges,
                                     size_t* count) {
  *status = status_of(stream);
  if (identity != NULL) *identity = 7;
  if (graph != NULL) *graph = NULL;
  if (dependencies != NULL) *dependencies = NULL;
  if (edges != NULL) *edges = NULL;
  if (count != NULL) *count = 0;
  return cudaSuccess;
}

// Kernels.

cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes* attributes, const void* function) {
  memset(attributes, 0, sizeof *attributes);
  attributes->maxThreadsPerBlock = 1024;
  attributes->numRegs = 32;
  attributes->ptxVersion = attributes->binaryVersion = 90;
  return cudaSuccess;
}

SUCCEEDS(cudaFuncSetAttribute(const void* function, enum cudaFuncAttribute attribute, int value))
GIVES(cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void* function, int threads,
                                                             size_t shared, unsigned flags),
      *blocks = 2)
GIVES(cudaLaunchKernel(const void* function, dim3 grid, dim3 block, void** arguments, size_t shared,
                       cudaStream_t stream),
      ++kernel_launches)
GIVES(cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* function, void** arguments),
      ++kernel_launches)
SUCCEEDS(cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* argument))

// What the compiler of CUDA calls behind a launch.

GIVES(__cudaLaunchKernel(void* function, dim3 grid, dim3 block, void** arguments, size_t shared, cudaStream_t stream),
      ++kernel_launches)
GIVES(__cudaGetKernel(void** kernel, const void* function), *kernel = (void*)function)
SUCCEEDS(__cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream))
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void* stream) {
  return 0;
}
void** __cudaRegisterFatBinary(void* binary) {
  static void* handle;
  return &handle;
}
void __cudaRegisterFatBinaryEnd(void** handle) {}
void __cudaUnregisterFatBinary(void** handle) {}
void __cudaRegisterFunction() {}
void __cudaRegisterVar() {}
void __cudaInitModule() {}

// cuBLAS: run.py adds what has nothing to give back.

int cublasCreate_v2(void** handle) {
  *handle = malloc(64);
  return 0;
}
int cublasLtCreate(void** handle) {
  *handle = malloc(64);
  return 0;
}
int cublasGetMathMode(void* handle, int* mode) {
  *mode = 0;
  return 0;
}
int cublasGetPointerMode_v2(void* handle, int* mode) {
  *mode = 0;
  return 0;
}
int cublasLtMatmulAlgoGetHeuristic(void* handle, void* operation, void* a, void* b, void* c, void* d,
                                   void* preference, int wanted, void* results, int* found) {
  *found = 1;
  return 0;
}
