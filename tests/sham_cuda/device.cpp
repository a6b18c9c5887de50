// A CUDA device for a torch that was built without CUDA: labels and dispatch of CUDA, memory and kernels of the CPU.
//
// Preloaded before torch (LD_PRELOAD), since torch asks for its devices once. Everything runs at once, in the order of
// the calls, so results are those of the CPU, bit by bit. Two things differ as on a GPU: a copy into pinned memory that
// is not waited for holds garbage until an event after it is queried, and freed memory is overwritten.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_local_scalar_dense_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <malloc.h>
#include <torch/csrc/DynamicTypes.h>
#include <torch/extension.h>
#include <torch/library.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

namespace {
using namespace at;

constexpr auto kDevice = c10::DeviceType::CUDA;
constexpr DeviceIndex kDevices = 2;
constexpr int kGarbage = 0xFF;  // NaN, or -1: it shows where it is added, as 0xA5 (-3e-16) would not
thread_local DeviceIndex current = 0;

Device device_of(std::optional<Device> device) {
  return Device(kDevice, device && device->has_index() ? device->index() : current);
}

// ---- memory

void* allocated(size_t bytes) {
  void* memory = nullptr;
  if (bytes && posix_memalign(&memory, 512, bytes)) throw std::bad_alloc();
  if (memory) std::memset(memory, kGarbage, bytes);
  return memory;
}

std::mutex freed_lock;
bool freed_is_noted = false;
std::vector<std::pair<int64_t, int64_t>> freed_blocks;  // first address and the one behind the last

void freed(void* memory) {
  if (!memory) return;
  size_t bytes = malloc_usable_size(memory);
  std::memset(memory, kGarbage, bytes);
  {
    std::lock_guard<std::mutex> guard(freed_lock);
    auto begin = reinterpret_cast<int64_t>(memory);
    if (freed_is_noted) freed_blocks.emplace_back(begin, begin + static_cast<int64_t>(bytes));
  }
  std::free(memory);
}

std::vector<std::pair<int64_t, int64_t>> take_freed() {
  std::lock_guard<std::mutex> guard(freed_lock);
  return std::exchange(freed_blocks, {});
}

struct DeviceMemory final : c10::Allocator {
  DataPtr allocate(size_t bytes) override {
    void* memory = allocated(bytes);
    return {memory, memory, &freed, Device(kDevice, current)};
  }
  DeleterFnPtr raw_deleter() const override { return &freed; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
} device_memory;

std::mutex pinned_lock;
std::map<const char*, size_t> pinned;  // beginning and size of each block

void unpinned(void* memory) {
  {
    std::lock_guard<std::mutex> guard(pinned_lock);
    pinned.erase(static_cast<const char*>(memory));
  }
  freed(memory);
}

bool is_pinned(const void* address) {
  std::lock_guard<std::mutex> guard(pinned_lock);
  auto place = static_cast<const char*>(address);
  auto after = pinned.upper_bound(place);
  if (after == pinned.begin()) return false;
  auto block = std::prev(after);
  return place < block->first + block->second;
}

struct PinnedMemory final : at::HostAllocator {
  DataPtr allocate(size_t bytes) override {
    void* memory = allocated(bytes);
    if (memory) {
      std::lock_guard<std::mutex> guard(pinned_lock);
      pinned[static_cast<const char*>(memory)] = bytes;
    }
    return {memory, memory, &unpinned, Device(kCPU)};
  }
  DeleterFnPtr raw_deleter() const override { return &unpinned; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
  bool record_event(void*, void*, c10::Stream) override { return true; }
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
} pinned_memory;

// ---- the device for torch

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kDevice; }
  Device exchangeDevice(Device device) const override {
    Device before(kDevice, current);
    current = device.index() < 0 ? current : device.index();
    return before;
  }
  Device getDevice() const override { return Device(kDevice, current); }
  void setDevice(Device device) const override { exchangeDevice(device); }
  void uncheckedSetDevice(Device device) const noexcept override { exchangeDevice(device); }
  Stream getStream(Device device) const noexcept override { return Stream(Stream::DEFAULT, device); }
  Stream getDefaultStream(Device device) const override { return Stream(Stream::DEFAULT, device); }
  Stream exchangeStream(Stream stream) const noexcept override { return stream; }
  DeviceIndex deviceCount() const noexcept override { return kDevices; }
  void recordDataPtrOnStream(const c10::DataPtr&, const Stream&) const override {}
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard)

struct CUDAHooks : at::CUDAHooksInterface {  // torch looks for this name
  explicit CUDAHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return kDevices; }
  int getNumGPUs() const override { return kDevices; }
  void setCurrentDevice(DeviceIndex index) const override { current = index; }
  DeviceIndex getCurrentDevice() const override { return current; }
  DeviceIndex current_device() const override { return current; }
  DeviceIndex exchangeDevice(DeviceIndex index) const override { return std::exchange(current, index); }
  DeviceIndex maybeExchangeDevice(DeviceIndex index) const override { return std::exchange(current, index); }
  bool isPinnedPtr(const void* address) const override { return is_pinned(address); }
  Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  Device getDeviceFromPtr(void*) const override { return Device(kDevice, current); }
  const Generator& getDefaultGenerator(DeviceIndex) const override { return at::detail::getDefaultCPUGenerator(); }
  Generator getNewGenerator(DeviceIndex) const override { return make_generator<CPUGeneratorImpl>(); }
  void deviceSynchronize(DeviceIndex) const override {}
};
using at::CUDAHooksRegistry;
using at::RegistererCUDAHooksRegistry;
REGISTER_CUDA_HOOKS(CUDAHooks)

// ---- copies to the host that nobody has waited for

struct Copy {
  Tensor to, values;
};
std::mutex queue_lock;
std::deque<Copy> copies;
int64_t arrived = 0;  // copies that were delivered

int64_t queued() {
  std::lock_guard<std::mutex> guard(queue_lock);
  return arrived + static_cast<int64_t>(copies.size());
}

void deliver(int64_t until) {
  std::lock_guard<std::mutex> guard(queue_lock);
  for (; arrived < until && !copies.empty(); ++arrived) {
    copies.front().to.copy_(copies.front().values);
    copies.pop_front();
  }
}

// ---- operations

Tensor on_cpu(const Tensor& tensor) {  // the same memory, labelled CPU
  if (tensor.device().type() != kDevice) return tensor;
  return at::from_blob(
      tensor.data_ptr(), tensor.sizes(), tensor.strides(), [tensor](void*) {}, tensor.options().device(kCPU), kCPU);
}

Tensor empty(
    IntArrayRef size, std::optional<ScalarType> dtype, std::optional<Layout>, std::optional<Device> device,
    std::optional<bool>, std::optional<MemoryFormat> format) {
  c10::DeviceGuard guard(device_of(device));
  return at::detail::empty_generic(
      size, &device_memory, DispatchKeySet(DispatchKey::CUDA), dtype_or_default(dtype), format);
}

Tensor empty_strided(
    IntArrayRef size, IntArrayRef stride, std::optional<ScalarType> dtype, std::optional<Layout>,
    std::optional<Device> device, std::optional<bool>) {
  c10::DeviceGuard guard(device_of(device));
  return at::detail::empty_strided_generic(
      size, stride, &device_memory, DispatchKeySet(DispatchKey::CUDA), dtype_or_default(dtype));
}

Tensor& copy_(Tensor& to, const Tensor& from, bool non_blocking) {
  if (!to.numel()) return to;
  if (non_blocking && to.device().is_cpu() && is_pinned(to.data_ptr())) {
    Tensor values = on_cpu(from).to(to.scalar_type(), false, true);
    std::lock_guard<std::mutex> guard(queue_lock);
    std::memset(to.data_ptr(), kGarbage, to.nbytes());
    copies.push_back({to, values});
    return to;
  }
  on_cpu(to).copy_(on_cpu(from));
  return to;
}

Tensor copy_from(const Tensor& from, const Tensor& to, bool) {
  on_cpu(to).copy_(on_cpu(from));
  return to;
}

Tensor copy_from_and_resize(const Tensor& from, const Tensor& to) {
  if (to.sizes() != from.sizes()) const_cast<Tensor&>(to).resize_(from.sizes());
  on_cpu(to).copy_(on_cpu(from));
  return to;
}

Scalar number(const Tensor& tensor) { return at::native::_local_scalar_dense_cpu(on_cpu(tensor)); }

Tensor view(const Tensor& tensor, IntArrayRef size) { return at::native::view(tensor, size); }

Tensor as_strided(const Tensor& tensor, IntArrayRef size, IntArrayRef stride, std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(tensor, size, stride, offset);
}

Tensor reshape_alias(const Tensor& tensor, IntArrayRef size, IntArrayRef stride) {
  return at::native::_reshape_alias(tensor, size, stride);
}

const Tensor& resize_(const Tensor& tensor, IntArrayRef size, std::optional<MemoryFormat> format) {
  return at::native::resize_(tensor, size, format);
}

Tensor& set_to_tensor(Tensor& tensor, const Tensor& source) { return at::native::set_tensor_(tensor, source); }

Tensor& set_to_storage(Tensor& tensor, Storage source) { return at::native::set_(tensor, source); }

Tensor& set_to_part(Tensor& tensor, Storage source, int64_t offset, IntArrayRef size, IntArrayRef stride) {
  return at::native::set_storage_cpu_(tensor, source, offset, size, stride);
}

Tensor unfold(const Tensor& tensor, int64_t dim, int64_t size, int64_t step) {
  return at::native::unfold(tensor, dim, size, step);
}

std::optional<Tensor> on_cpu(const std::optional<Tensor>& tensor) {
  return tensor && tensor->defined() ? std::optional<Tensor>(on_cpu(*tensor)) : std::nullopt;
}

std::tuple<Tensor, Tensor, Tensor> batch_norm(  // changes the running statistics, which its schema does not tell
    const Tensor& input, const std::optional<Tensor>& weight, const std::optional<Tensor>& bias,
    const std::optional<Tensor>& mean, const std::optional<Tensor>& var, bool training, double momentum, double eps) {
  auto [output, saved_mean, saved_scale] = at::native_batch_norm(
      on_cpu(input), on_cpu(weight), on_cpu(bias), on_cpu(mean), on_cpu(var), training, momentum, eps);
  auto device = input.device();
  return {output.to(device), saved_mean.to(device), saved_scale.to(device)};
}

void resize_storage(const py::object& object, size_t bytes) {  // `UntypedStorage.resize_`, by which FSDP2 frees memory
  Storage storage = torch::createStorage(object.ptr());
  c10::DeviceGuard guard(storage.device());
  DataPtr memory = device_memory.allocate(bytes);
  if (bytes && storage.nbytes()) std::memcpy(memory.get(), storage.data(), std::min(bytes, storage.nbytes()));
  storage.set_data_ptr_noswap(std::move(memory));
  storage.set_nbytes(bytes);
}

void on_cpu_kernel(const c10::OperatorHandle& op, torch::jit::Stack* stack) { at::native::cpu_fallback(op, stack); }

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("copy_", copy_);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", number);
  m.impl("view", view);
  m.impl("as_strided", as_strided);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("resize_", resize_);
  m.impl("set_.source_Tensor", set_to_tensor);
  m.impl("set_.source_Storage", set_to_storage);
  m.impl("set_.source_Storage_storage_offset", set_to_part);
  m.impl("unfold", unfold);
  m.impl("native_batch_norm", batch_norm);
}

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&on_cpu_kernel>()); }

}  // namespace

PYBIND11_MODULE(sham_device, m) {
  c10::SetAllocator(kDevice, &device_memory, 200);
  at::setHostAllocator(kDevice, &pinned_memory, 200);
  m.def("on_cpu", [](const Tensor& tensor) { return on_cpu(tensor); }, "The same memory as a tensor of the CPU.");
  m.def("resize_storage", &resize_storage, "Give the storage of a device this many bytes.");
  m.def("queued", &queued, "Number of copies to the host so far that did not wait.");
  m.def("deliver", &deliver, "Let the first so many of them arrive.");
  m.def("note_freed", [](bool noted) { freed_is_noted = noted; }, "Whether to remember what is freed.");
  m.def("take_freed", &take_freed, "The blocks of memory that were freed since the last call.");
  m.def("device_count", [] { return static_cast<int>(kDevices); });
  m.def("current_device", [] { return static_cast<int>(current); });
  m.def("set_device", [](int index) { current = static_cast<DeviceIndex>(index); });
}
