// The CUDA allocator that serves a planned step from one buffer (OLLA §3.5): stands in front of torch's caching
// allocator from the moment its module is loaded.
//
// Everything but requests and frees is the stock allocator's business and is passed on to it, so that
// statistics, snapshots, memory pools and CUDA graphs go on as before. It derives from torch's
// CUDAPluggableAllocator because that implements the whole interface, which grows from release to release; what
// it does not pass on here is what only a later release asks for.
//
// The buffer belongs to the stream that a step runs on. A request is served if the thread is in a region and
// asks on that device and stream. Where a step runs on another stream than the last one in the same buffer, its
// stream waits for the other. A block that record_stream says is used on another stream makes every later
// operator of the step wait for that stream: its place may be the next one's.

#include <memory>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include <c10/core/Event.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/cuda/CUDAPluggableAllocator.h>
#include <torch/headeronly/version.h>

#include "module.h"

namespace olla_fx {
namespace {

using c10::DeviceIndex;
using c10::MempoolId_t;
namespace caching = c10::cuda::CUDACachingAllocator;

// The stock allocator, under its own type.
caching::CUDAAllocator* native = nullptr;

void release(void* block) {
  router->release(block);
}

bool is_captured(const c10::Stream& stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  C10_CUDA_CHECK(cudaStreamIsCapturing(c10::cuda::CUDAStream(stream).stream(), &status));
  return status != cudaStreamCaptureStatusNone;
}

// Lets one stream wait for what is queued on another.
void wait(const c10::Stream& waiting, const c10::Stream& other) {
  c10::Event event(c10::DeviceType::CUDA);
  event.record(other);
  event.block(waiting);
}

class CudaSupport final : public DeviceSupport {
 public:
  c10::DeviceType type() const override {
    return c10::DeviceType::CUDA;
  }

  void fill(void* begin, int byte, size_t size_bytes) const override {
    C10_CUDA_CHECK(cudaDeviceSynchronize());
    C10_CUDA_CHECK(cudaMemset(begin, byte, size_bytes));
    C10_CUDA_CHECK(cudaDeviceSynchronize());
  }

  bool is_lack_of_memory(const c10::Error& error) const override {
    // Without caching, an allocation fails as any other call does.
    const auto* failure = dynamic_cast<const c10::AcceleratorError*>(&error);
    return failure == nullptr || failure->get_error_code() == cudaErrorMemoryAllocation;
  }

  std::optional<c10::Stream> present_stream() const override {
    return c10::cuda::getCurrentCUDAStream().unwrap();
  }

  void enter(Region& region) const override {
    Buffer* buffer = region.buffer;
    // Without an index, the stream is that of the present device.
    const DeviceIndex device =
        buffer == nullptr ? region.memory->device.index() : buffer->memory().device().index();
    const c10::cuda::CUDAStream stream = c10::cuda::getCurrentCUDAStream(device);
    region.stream = stream.unwrap();
    if (buffer == nullptr) {
      return;
    }
    // Between capturing and other streams no event may pass; who captures synchronises before.
    if (buffer->last_stream != region.stream && !is_captured(*region.stream)) {
      if (buffer->last_stream) {
        wait(*region.stream, *buffer->last_stream);
      }
      if (buffer->home_stream != region.stream) {
        // The stock allocator may give the buffer's memory to others only after this stream's work.
        native->recordStream(buffer->memory(), stream);
      }
    }
    buffer->last_stream = region.stream;
    // A graph is replayed without operators.
    if (buffer->has_side_streams()) {
      wait_for_side_streams(region);
    }
  }

  void wait_for_side_streams(Region& region) const override {
    const bool into_graph = is_captured(*region.stream);
    for (const c10::Stream& stream : region.buffer->side_streams()) {
      if (stream != *region.stream && is_captured(stream) == into_graph) {
        wait(*region.stream, stream);
      }
    }
  }
};

class CudaArenaAllocator final : public torch::cuda::CUDAPluggableAllocator::CUDAPluggableAllocator {
 public:
  CudaArenaAllocator()
      : CUDAPluggableAllocator(
            [](size_t size, int, cudaStream_t stream) { return native->raw_alloc_with_stream(size, stream); },
            [](void* block, size_t, int, cudaStream_t) { native->raw_delete(block); }) {}

  c10::DataPtr allocate(size_t size) override {
    if (C10_LIKELY(!router->listens()) || size == 0) {
      return native->allocate(size);
    }
    const DeviceIndex device = c10::cuda::current_device();
    return router->allocate(size, c10::Device(c10::DeviceType::CUDA, device),
                            is_planned(c10::cuda::getCurrentCUDAStream(device).unwrap()));
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return &release;
  }
  void* raw_alloc(size_t size) override {
    return size == 0 ? nullptr : allocate(size).release_context();
  }
  void* raw_alloc_with_stream(size_t size, cudaStream_t stream) override {
    const bool on_current_stream = c10::cuda::getCurrentCUDAStream().stream() == stream;
    return on_current_stream ? raw_alloc(size) : native->raw_alloc_with_stream(size, stream);
  }
  void raw_delete(void* block) override {
    if (block != nullptr) {
      release(block);
    }
  }

  void recordStream(const c10::DataPtr& block, c10::cuda::CUDAStream stream) override {
    if (block.get_deleter() != &release) {
      native->recordStream(block, stream);
    } else if (!router->buffers.used_on(address_of(block.get()), stream.unwrap())) {
      // A stock block whose free is being recorded; the stock allocator knows it by its own deleter.
      c10::DataPtr known(block.get(), block.get(), router->stock_deleter(), block.device());
      native->recordStream(known, stream);
      known.release_context();
    }
  }

  // From here on all is passed on.

  void init(int device_count) override {
    native->init(device_count);
  }
  bool initialized() override {
    return native->initialized();
  }
  double getMemoryFraction(DeviceIndex device) override {
    return native->getMemoryFraction(device);
  }
  void setMemoryFraction(double fraction, DeviceIndex device) override {
    native->setMemoryFraction(fraction, device);
  }
  std::vector<caching::StreamSegmentSize> getExpandableSegmentSizes(DeviceIndex device) override {
    return native->getExpandableSegmentSizes(device);
  }
  void emptyCache(MempoolId_t pool = {0, 0}) override {
    native->emptyCache(pool);
  }
  void enable(bool value) override {
    native->enable(value);
  }
  bool isEnabled() const override {
    return native->isEnabled();
  }
  void cacheInfo(DeviceIndex device, size_t* largest_block) override {
    native->cacheInfo(device, largest_block);
  }
  void* getBaseAllocation(void* block, size_t* size) override {
    return native->getBaseAllocation(block, size);
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex device) override {
    return native->getDeviceStats(device);
  }
  void resetAccumulatedStats(DeviceIndex device) override {
    native->resetAccumulatedStats(device);
  }
  void resetPeakStats(DeviceIndex device) override {
    native->resetPeakStats(device);
  }
  std::pair<size_t, size_t> getMemoryInfo(DeviceIndex device) override {
    return native->getMemoryInfo(device);
  }
  caching::SnapshotInfo snapshot(MempoolId_t pool, bool include_traces = true) override {
    return native->snapshot(pool, include_traces);
  }
  void beginAllocateToPool(DeviceIndex device, MempoolId_t pool,
                           std::function<bool(cudaStream_t)> filter) override {
    native->beginAllocateToPool(device, pool, std::move(filter));
  }
  void endAllocateToPool(DeviceIndex device, MempoolId_t pool) override {
    native->endAllocateToPool(device, pool);
  }
  void releasePool(DeviceIndex device, MempoolId_t pool) override {
    native->releasePool(device, pool);
  }
  int getPoolUseCount(DeviceIndex device, MempoolId_t pool) override {
    return native->getPoolUseCount(device, pool);
  }
  void createOrIncrefPool(DeviceIndex device, MempoolId_t pool,
                          std::shared_ptr<caching::CUDAAllocator> allocator = nullptr) override {
    native->createOrIncrefPool(device, pool, std::move(allocator));
  }
  void setUseOnOOM(DeviceIndex device, MempoolId_t pool, bool use_on_oom) override {
    native->setUseOnOOM(device, pool, use_on_oom);
  }
  void setNoSplit(DeviceIndex device, MempoolId_t pool) override {
    native->setNoSplit(device, pool);
  }
  bool checkPoolLiveAllocations(DeviceIndex device, MempoolId_t pool,
                                const std::unordered_set<void*>& expected) override {
    return native->checkPoolLiveAllocations(device, pool, expected);
  }
  caching::ShareableHandle shareIpcHandle(void* block) override {
    return native->shareIpcHandle(block);
  }
  std::shared_ptr<void> getIpcDevPtr(std::string handle) override {
    return native->getIpcDevPtr(std::move(handle));
  }
  bool isHistoryEnabled() override {
    return native->isHistoryEnabled();
  }
  void recordHistory(bool enabled, caching::CreateContextFn context_recorder, size_t most_entries,
                     caching::RecordContext when, bool clear_history,
                     const std::vector<std::string>& skipped_actions) override {
    native->recordHistory(enabled, context_recorder, most_entries, when, clear_history, skipped_actions);
  }
  void recordAnnotation(const std::vector<std::pair<std::string, std::string>>& annotation) override {
    native->recordAnnotation(annotation);
  }
  void pushCompileContext(std::string& context) override {
    native->pushCompileContext(context);
  }
  void popCompileContext() override {
    native->popCompileContext();
  }
  void setUserMetadata(const std::string& metadata) override {
    native->setUserMetadata(metadata);
  }
  std::string getUserMetadata() override {
    return native->getUserMetadata();
  }
  void attachOutOfMemoryObserver(caching::OutOfMemoryObserver observer) override {
    native->attachOutOfMemoryObserver(std::move(observer));
  }
  void attachAllocatorTraceTracker(caching::AllocatorTraceTracker tracker) override {
    native->attachAllocatorTraceTracker(std::move(tracker));
  }
  void enablePeerAccess(DeviceIndex device, DeviceIndex device_to_access) override {
    native->enablePeerAccess(device, device_to_access);
  }
  cudaError_t memcpyAsync(void* destination, int destination_device, const void* source, int source_device,
                          size_t count, cudaStream_t stream, bool p2p_enabled) override {
    return native->memcpyAsync(destination, destination_device, source, source_device, count, stream, p2p_enabled);
  }
  std::shared_ptr<caching::AllocatorState> getCheckpointState(DeviceIndex device, MempoolId_t pool) override {
    return native->getCheckpointState(device, pool);
  }
  caching::CheckpointDelta setCheckpointPoolState(DeviceIndex device,
                                                  std::shared_ptr<caching::AllocatorState> state) override {
    return native->setCheckpointPoolState(device, std::move(state));
  }
  std::string name() override {
    return native->name();
  }

  // What only later releases ask for overrides without saying so.

  void markCaptureBegin(DeviceIndex device) {
    pass_on([&](auto* stock) -> decltype(stock->markCaptureBegin(device)) { stock->markCaptureBegin(device); });
  }
  void markCaptureEnd(DeviceIndex device) {
    pass_on([&](auto* stock) -> decltype(stock->markCaptureEnd(device)) { stock->markCaptureEnd(device); });
  }
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 13
  std::shared_ptr<c10::GatheredContext> getContextForPointer(const void* block) override {
    return native->getContextForPointer(block);
  }
  void attachOomRejectionObserver(caching::OomRejectionObserver observer) override {
    native->attachOomRejectionObserver(std::move(observer));
  }
  c10::DataPtr allocateWithAddress(size_t size, void* address) override {
    return native->allocateWithAddress(size, address);
  }
#endif

 private:
  template <typename Call>
  static void pass_on(Call call) {
    if constexpr (std::is_invocable_v<Call, caching::CUDAAllocator*>) {
      call(native);
    }
  }

  static bool is_planned(const c10::Stream& stream) {
    return current_region == nullptr || current_region->stream == stream;
  }
};

}  // namespace
}  // namespace olla_fx

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  using namespace olla_fx;
  native = caching::get();
  bind(module, *new Router(native, &release), *new CudaSupport());
  caching::allocator.store(new CudaArenaAllocator());
}
