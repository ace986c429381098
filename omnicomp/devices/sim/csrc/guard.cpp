// What torch asks of a device: guard, streams, events, generator, and the hooks of an accelerator.
#include "generator.h"
#include "runtime.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <atomic>
#include <chrono>
#include <vector>

namespace sim {
namespace {

// Streams are numbers: all work is done when the call returns, so there is nothing to order.
thread_local std::array<c10::StreamId, kMaxDevices> current_stream{};
std::atomic<c10::StreamId> last_stream{0};

struct Event {
  std::chrono::steady_clock::time_point time;
  c10::DeviceIndex device = -1;
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static c10::DeviceIndex index_of(c10::Device device) {
    return device.has_index() ? device.index() : current_device();
  }
  c10::DeviceType type() const override {
    return kType;
  }
  c10::Device exchangeDevice(c10::Device device) const override {
    TORCH_CHECK(device.type() == kType, "expected a sim device, got ", device);
    return c10::Device(kType, device.has_index() ? exchange_device(device.index()) : current_device());
  }
  c10::Device getDevice() const override {
    return c10::Device(kType, current_device());
  }
  void setDevice(c10::Device device) const override {
    exchangeDevice(device);
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.has_index() && device.index() >= 0 && device.index() < device_count()) {
      exchange_device(device.index());
    }
  }
  c10::Stream getStream(c10::Device device) const override {
    const auto index = index_of(device);
    check_index(index);
    return c10::Stream(c10::Stream::UNSAFE, c10::Device(kType, index), current_stream[index]);
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::DEFAULT, c10::Device(kType, index_of(device)));
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool = false) const override {
    return getNewStream(device);
  }
  c10::Stream getNewStream(c10::Device device, int = 0) const override {
    const auto index = index_of(device);
    check_index(index);
    return c10::Stream(c10::Stream::UNSAFE, c10::Device(kType, index), ++last_stream);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const auto before = getStream(stream.device());
    current_stream[stream.device_index()] = stream.id();
    return before;
  }
  // No `override` from here on where a supported version of torch does not know the function.
  void* getStreamNativeHandle(const c10::Stream stream) const {
    return reinterpret_cast<void*>(stream.id());
  }
  bool isStreamCapturing(const c10::Stream&) const {
    return false;
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<Event*>(event);
  }
  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (*event == nullptr) {
      *event = new Event();
    }
    auto* it = static_cast<Event*>(*event);
    it->time = std::chrono::steady_clock::now();
    it->device = stream.device_index();
  }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override {
    return true;
  }
  c10::DeviceIndex deviceCount() const noexcept override {
    return device_count();
  }
  bool queryStream(const c10::Stream&) const override {
    return true;
  }
  void synchronizeStream(const c10::Stream&) const override {
    synchronize();
  }
  void synchronizeEvent(void*) const override {
    synchronize();
  }
  void synchronizeDevice(const c10::DeviceIndex index) const override {
    check_index(index < 0 ? current_device() : index);
    synchronize();
  }
  c10::DeviceCapability getDeviceCapability(c10::Device) const {
    return c10::DeviceCapability();
  }
  double elapsedTime(void* from, void* to, const c10::DeviceIndex) const override {
    TORCH_CHECK(from != nullptr && to != nullptr, "Both events must be recorded before calculating elapsed time.");
    const auto* first = static_cast<Event*>(from);
    const auto* second = static_cast<Event*>(to);
    TORCH_CHECK(first->device == second->device, "Both events must have been recorded on the same device.");
    return std::chrono::duration<double, std::milli>(second->time - first->time).count();
  }
  static void synchronize() {
    fault_point(Fault::Synchronize);
    count_synchronization();
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct SimGenerator final : c10::GeneratorImpl {
  explicit SimGenerator(c10::DeviceIndex index, at::Generator host = at::detail::createCPUGenerator())
      : c10::GeneratorImpl(c10::Device(kType, index), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        twin(std::move(host)) {}
  void set_current_seed(uint64_t seed) override {
    twin.set_current_seed(seed);
  }
  void set_offset(uint64_t offset) override {
    twin.set_offset(offset);
  }
  uint64_t get_offset() const override {
    return twin.get_offset();
  }
  uint64_t current_seed() const override {
    return twin.current_seed();
  }
  uint64_t seed() override {
    return twin.seed();
  }
  void set_state(const c10::TensorImpl& state) override {
    twin.unsafeGetGeneratorImpl()->set_state(state);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return twin.unsafeGetGeneratorImpl()->get_state();
  }
  SimGenerator* clone_impl() const override {
    return new SimGenerator(device().index(), twin.clone());
  }
  static c10::DeviceType device_type() {
    return kType;
  }
  at::Generator twin;
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return true;
  }
  bool hasPrimaryContext(c10::DeviceIndex) const override {
    return true;
  }
  void init() const override {}
  c10::DeviceIndex deviceCount() const override {
    return device_count();
  }
  void setCurrentDevice(c10::DeviceIndex index) const override {
    exchange_device(index);
  }
  c10::DeviceIndex getCurrentDevice() const override {
    return current_device();
  }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    return exchange_device(index);
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override {
    return index < 0 ? current_device() : exchange_device(index);
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const override {
    return default_generator(index);
  }
  at::Generator getNewGenerator(c10::DeviceIndex index) const override {
    return new_generator(index);
  }
  at::Device getDeviceFromPtr(void* data) const override {
    const auto index = owner(data);
    TORCH_CHECK(index >= 0, "sim: the pointer is not of the device's memory");
    return c10::Device(kType, index);
  }
  bool isPinnedPtr(const void* data) const override {
    return is_pinned(data);
  }
  c10::Allocator* getPinnedMemoryAllocator() const override {
    return pinned_allocator();
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    auto* impl = storage.unsafeGetStorageImpl();
    TORCH_CHECK(impl->resizable(), "Trying to resize storage that is not resizable");
    const c10::Device device = storage.device();
    const auto before = exchange_device(device.index());
    c10::DataPtr fresh;
    try {
      fresh = allocator()->allocate(bytes);
    } catch (...) {
      exchange_device(before);
      throw;
    }
    exchange_device(before);
    if (const auto common = std::min(bytes, storage.nbytes())) {
      allocator()->copy_data(fresh.get(), storage.data(), common);
    }
    impl->set_data_ptr_noswap(std::move(fresh));
    impl->set_nbytes(bytes);
  }
};

const bool registered = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks());
  return true;
}();

} // namespace

const at::Generator& default_generator(c10::DeviceIndex index) {
  static const auto* all = [] {
    auto* made = new std::vector<at::Generator>();
    for (int i = 0; i < device_count(); i++) {
      made->push_back(at::make_generator<SimGenerator>(c10::DeviceIndex(i)));
      made->back().seed();
    }
    return made;
  }();
  index = index < 0 ? current_device() : index;
  check_index(index);
  return (*all)[index];
}

at::Generator new_generator(c10::DeviceIndex index) {
  index = index < 0 ? current_device() : index;
  check_index(index);
  return at::make_generator<SimGenerator>(index);
}

at::Generator host_twin(const at::Generator& generator) {
  TORCH_CHECK(
      generator.device().type() == kType, "Expected a 'sim' device type for generator but found '",
      generator.device().type(), "'");
  return static_cast<SimGenerator*>(generator.unsafeGetGeneratorImpl())->twin;
}

} // namespace sim
