// A device for tests: torch's PrivateUse1, whose memory is the host's and whose operations are the CPU's.
//
// A tensor of the device has its own storage; an operation without a kernel here runs on CPU tensors that share the
// memory of its arguments. Tensors of several devices are refused, as a GPU refuses them, and so is float64 if the
// device was made without it (as on Apple's GPUs). Allocated bytes are counted.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/Generator.h>
#include <ATen/core/TensorBody.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/Allocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>

namespace {
using at::Tensor;
constexpr auto KIND = c10::DeviceType::PrivateUse1;
constexpr size_t TOTAL = size_t(1) << 33;
const c10::Device HERE(KIND, 0);
const bool narrow = std::getenv("STANDIN_WITHOUT_FLOAT64") != nullptr;

void check_dtype(c10::ScalarType kind) {
  TORCH_CHECK_TYPE(!(narrow && (kind == c10::kDouble || kind == c10::kComplexDouble)),
      "Cannot convert a standin Tensor to float64 dtype as the standin framework doesn't support float64.");
}

// memory

std::mutex lock;
c10::CachingDeviceAllocator::DeviceStats stats;
std::map<void*, size_t> sizes;
constexpr auto ALL = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);

void release(void* data) {
  std::lock_guard<std::mutex> held(lock);
  auto size = sizes.at(data);
  stats.allocated_bytes[ALL].decrease(size);
  stats.reserved_bytes[ALL].decrease(size);
  sizes.erase(data);
  std::free(data);
}

struct Memory final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t size) override {
    if (size == 0) return {nullptr, nullptr, &release_nothing, HERE};
    std::lock_guard<std::mutex> held(lock);
    void* data = std::aligned_alloc(64, (size + 63) / 64 * 64);
    sizes[data] = size;
    stats.allocated_bytes[ALL].increase(size);
    stats.reserved_bytes[ALL].increase(size);
    return {data, data, &release, HERE};
  }
  static void release_nothing(void*) {}
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t count) const override { std::memcpy(to, from, count); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr&, c10::Stream) override {}
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex) override { return stats; }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex) override {
    stats.allocated_bytes[ALL].reset_peak();
    stats.reserved_bytes[ALL].reset_peak();
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex) override {
    return {TOTAL - stats.allocated_bytes[ALL].current, TOTAL};
  }
};
Memory memory;
REGISTER_ALLOCATOR(KIND, &memory);

// streams, events, devices

thread_local c10::StreamId current = 0;
std::atomic<c10::StreamId> made{0};
double now() { return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return KIND; }
  c10::Device exchangeDevice(c10::Device) const override { return HERE; }
  c10::Device getDevice() const override { return HERE; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  c10::DeviceCapability getDeviceCapability(c10::Device) const override {
    c10::DeviceCapability able;
    if (narrow) able.capability_data.capability_bits &= ~((1ULL << c10::kIndex_Double) | (1ULL << c10::kIndex_ComplexDouble));
    return able;
  }
  static c10::Stream stream(c10::StreamId id) { return c10::Stream(c10::Stream::UNSAFE, HERE, id); }
  c10::Stream getStream(c10::Device) const override { return stream(current); }
  c10::Stream getDefaultStream(c10::Device) const override { return stream(0); }
  c10::Stream getNewStream(c10::Device, int) const override { return stream(++made); }
  c10::Stream getStreamFromGlobalPool(c10::Device, bool) const override { return stream(++made); }
  c10::Stream exchangeStream(c10::Stream next) const override {
    auto before = current;
    current = next.id();
    return stream(before);
  }
  void record(void** event, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (*event == nullptr) *event = new double;
    *static_cast<double*>(*event) = now();
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<double*>(event); }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(const c10::DeviceIndex) const override {}
  double elapsedTime(void* a, void* b, const c10::DeviceIndex) const override {
    return *static_cast<double*>(b) - *static_cast<double*>(a);
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::Allocator* getPinnedMemoryAllocator() const override { return c10::GetAllocator(c10::kCPU); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    auto data = memory.allocate(size);
    std::memcpy(data.get(), storage.data(), std::min(size, storage.nbytes()));
    storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(data));
    storage.unsafeGetStorageImpl()->set_nbytes(size);
  }
};

// tensors

bool is_here(const Tensor& x) { return x.defined() && x.device().type() == KIND; }

struct Pair { c10::Storage own, twin; };

struct Call {  // one operation: CPU twins of its tensors
  std::vector<Pair> storages;
  std::vector<std::pair<Tensor, Tensor>> tensors;

  Tensor twin(const Tensor& x) {
    check_dtype(x.scalar_type());
    auto* own = x.storage().unsafeGetStorageImpl();
    const c10::Storage* found = nullptr;
    for (auto& pair : storages) if (pair.own.unsafeGetStorageImpl() == own) found = &pair.twin;
    c10::Storage storage;
    if (found) {
      storage = *found;
    } else {
      storage = c10::Storage(c10::Storage::use_byte_size_t{}, x.storage().nbytes(),
          c10::DataPtr(x.storage().mutable_data(), c10::Device(c10::kCPU)), c10::GetAllocator(c10::kCPU), true);
      storages.push_back({x.storage(), storage});
    }
    auto y = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU), x.dtype());
    y.unsafeGetTensorImpl()->set_storage_offset(x.storage_offset());
    y.unsafeGetTensorImpl()->set_sizes_and_strides(x.sizes(), x.strides());
    if (x.unsafeGetTensorImpl()->is_wrapped_number()) y.unsafeGetTensorImpl()->set_wrapped_number(true);
    tensors.emplace_back(x, y);
    return y;
  }

  static Tensor shaped(Tensor y, const Tensor& like) {
    y.unsafeGetTensorImpl()->set_storage_offset(like.storage_offset());
    y.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides());
    return y;
  }

  Tensor back(const Tensor& y) {
    if (!y.defined()) return y;
    check_dtype(y.scalar_type());
    for (auto& pair : tensors) if (pair.second.is_same(y)) return pair.first;
    for (auto& pair : tensors)
      if (pair.second.storage().unsafeGetStorageImpl() == y.storage().unsafeGetStorageImpl()) return shaped(
          at::detail::make_tensor<c10::TensorImpl>(
              c10::TensorImpl::VIEW, c10::Storage(pair.first.storage()), pair.first.key_set(), y.dtype()), y);
    auto size = y.storage().nbytes();
    c10::Storage storage(c10::Storage::use_byte_size_t{}, size, memory.allocate(size), &memory, true);
    if (size) std::memcpy(storage.mutable_data(), y.storage().data(), size);
    return shaped(at::detail::make_tensor<c10::TensorImpl>(
        std::move(storage), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), y.dtype()), y);
  }

  void settle() {  // an output that the operation resized
    for (auto& pair : storages) {
      if (pair.twin.data() == pair.own.data()) continue;
      at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(pair.own, pair.twin.nbytes());
      std::memcpy(pair.own.mutable_data(), pair.twin.data(), pair.twin.nbytes());
    }
    for (auto& pair : tensors)
      if (pair.first.sizes() != pair.second.sizes())
        pair.first.unsafeGetTensorImpl()->set_sizes_and_strides(pair.second.sizes(), pair.second.strides());
  }
};

// Operations that index by tensors of the host, as CUDA's do.
bool takes_host(const std::string& name) {
  for (const char* each : {"index", "index_put", "index_put_", "_index_put_impl_"})
    if (name == std::string("aten::") + each) return true;
  return false;
}

void on_cpu(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  at::AutoDispatchBelowADInplaceOrView below;
  const auto& schema = op.schema();
  const auto count = schema.arguments().size(), base = stack->size() - count;
  Call call;
  std::string stray;
  auto take = [&](const Tensor& x) -> Tensor {
    if (!x.defined()) return x;
    if (is_here(x)) return call.twin(x);
    if (x.dim() > 0 && !takes_host(schema.name())) stray = c10::str(schema.name(), ": a tensor ", x.sizes(), " on ", x.device());
    return x;
  };
  for (size_t i = base; i < stack->size(); ++i) {
    auto& value = (*stack)[i];
    if (value.isTensor()) {
      value = take(value.toTensor());
    } else if (value.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor& x : value.toTensorVector()) list.push_back(take(x));
      value = list;
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> list;
      for (const auto& x : value.toOptionalTensorVector()) list.push_back(x ? std::optional<Tensor>(take(*x)) : x);
      value = list;
    } else if (value.isDevice()) {
      if (value.toDevice().type() == KIND) value = c10::Device(c10::kCPU);
    }
  }
  TORCH_CHECK(stray.empty(), "Expected all tensors to be on the same device, standin:0: ", stray);
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  call.settle();
  for (size_t i = stack->size() - schema.returns().size(); i < stack->size(); ++i) {
    auto& value = (*stack)[i];
    if (value.isTensor()) {
      value = call.back(value.toTensor());
    } else if (value.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor& x : value.toTensorVector()) list.push_back(call.back(x));
      value = list;
    }
  }
}

Tensor empty(c10::SymIntArrayRef size, std::optional<at::ScalarType> kind, std::optional<at::Layout>,
             std::optional<at::Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  auto dtype = c10::dtype_or_default(kind);
  check_dtype(dtype);
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), &memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), dtype, format);
}

Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> kind,
                     std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
  auto dtype = c10::dtype_or_default(kind);
  check_dtype(dtype);
  return at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), &memory,
      c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), dtype);
}

Tensor copy_from(const Tensor& from, const Tensor& to, bool) {
  Call call;
  auto a = is_here(from) ? call.twin(from) : from, b = is_here(to) ? call.twin(to) : to;
  b.copy_(a);
  return to;
}

Tensor& set_storage(Tensor& self, at::Storage storage, c10::SymInt offset, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  auto* x = self.unsafeGetTensorImpl();
  x->set_storage_keep_dtype(std::move(storage));
  x->set_storage_offset(offset.expect_int());
  x->set_sizes_and_strides(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
  return self;
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", [](const Tensor& from, const Tensor& to) { return copy_from(from, to, false); });
  m.impl("set_.source_Storage_storage_offset", set_storage);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&on_cpu>());
}

const bool hooked = (at::RegisterPrivateUse1HooksInterface(new Hooks), true);
}  // namespace
