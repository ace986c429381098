// Settings, current device, faults on request, and counters.
#include "runtime.h"

#include <c10/util/Exception.h>

#include <array>
#include <atomic>
#include <cstdlib>
#include <mutex>

namespace sim {
namespace {

size_t environment(const char* name, size_t otherwise) {
  const char* text = std::getenv(name);
  if (text == nullptr || *text == '\0') {
    return otherwise;
  }
  char* end = nullptr;
  const auto value = std::strtoull(text, &end, 10);
  TORCH_CHECK(*end == '\0', name, " has to be a number, not ", text);
  return value;
}

struct Runtime {
  std::mutex count_mutex;
  Counters counters;
  std::array<std::atomic<int64_t>, 4> faults{-1, -1, -1, -1};
  std::atomic<uint64_t> dtypes{~uint64_t(0)};
};

// Never destroyed: it is used after the destructors of static objects ran, when the last tensors go.
Runtime& runtime() {
  static Runtime* it = new Runtime();
  return *it;
}

thread_local c10::DeviceIndex current = 0;

} // namespace

const Settings& settings() {
  static const Settings it = [] {
    Settings s;
    s.devices = int(environment("OMNICOMP_SIM_DEVICES", s.devices));
    s.memory = environment("OMNICOMP_SIM_MEMORY", s.memory) >> 21 << 21; // it is handed out by 2 MiB
    s.protect = environment("OMNICOMP_SIM_PROTECT", 0) != 0;
    TORCH_CHECK(s.devices >= 1 && s.devices <= kMaxDevices, "OMNICOMP_SIM_DEVICES has to be 1 to ", kMaxDevices);
    return s;
  }();
  return it;
}

c10::DeviceIndex device_count() {
  return c10::DeviceIndex(settings().devices);
}
c10::DeviceIndex current_device() {
  return current;
}
void check_index(c10::DeviceIndex index) {
  TORCH_CHECK(
      index >= 0 && index < device_count(), "sim: invalid device ordinal ", int(index), ", there are ",
      int(device_count()), " devices (OMNICOMP_SIM_DEVICES)");
}
c10::DeviceIndex exchange_device(c10::DeviceIndex index) {
  check_index(index);
  return std::exchange(current, index);
}

void set_dtypes(uint64_t mask) {
  runtime().dtypes = mask;
}
void check_dtype(c10::ScalarType type) {
  TORCH_CHECK_TYPE(
      (runtime().dtypes.load() >> int(type) & 1) != 0, "sim: tensors of dtype ", type,
      " can't be made on this device (torch.sim.set_dtypes)");
}

void inject_fault(Fault kind, int64_t after) {
  runtime().faults[static_cast<int>(kind)] = after;
}
void fault_point(Fault kind) {
  auto& left = runtime().faults[static_cast<int>(kind)];
  if (left.load() < 0 || left.fetch_sub(1) != 0) {
    return;
  }
  left = -1; // once
  static const std::array<const char*, 4> names{"allocate", "copy", "kernel", "synchronize"};
  const std::string text =
      std::string("sim: injected fault in ") + names[static_cast<int>(kind)] + " (torch.sim.inject_fault)";
  if (kind == Fault::Allocate) {
    TORCH_CHECK_WITH(OutOfMemoryError, false, "sim out of memory. ", text);
  }
  throw c10::AcceleratorError({__func__, __FILE__, static_cast<uint32_t>(__LINE__)}, 700 + int(kind), text);
}

Counters counters() {
  std::lock_guard<std::mutex> lock(runtime().count_mutex);
  return runtime().counters;
}
void reset_counters() {
  std::lock_guard<std::mutex> lock(runtime().count_mutex);
  runtime().counters = Counters();
}
void reset_fallbacks() {
  std::lock_guard<std::mutex> lock(runtime().count_mutex);
  runtime().counters.fallbacks.clear();
}
void count_fallback(const std::string& name) {
  std::lock_guard<std::mutex> lock(runtime().count_mutex);
  runtime().counters.fallbacks[name]++;
}
void count_synchronization() {
  std::lock_guard<std::mutex> lock(runtime().count_mutex);
  runtime().counters.synchronizations++;
}

Kernel::Kernel(const std::string& name, bool native) {
  fault_point(Fault::Kernel); // throws before anything was written; `access_` is there already, and is closed again
  std::lock_guard<std::mutex> lock(runtime().count_mutex);
  auto& c = runtime().counters;
  if (native) {
    c.kernels++;
    c.natives[name]++;
  } else {
    c.launches++;
  }
}

Copy::Copy(c10::Device from, c10::Device to, size_t bytes) {
  fault_point(Fault::Copy);
  std::lock_guard<std::mutex> lock(runtime().count_mutex);
  auto& c = runtime().counters;
  const bool from_sim = from.type() == kType, to_sim = to.type() == kType;
  (from_sim ? (to_sim ? c.d2d_copies : c.d2h_copies) : c.h2d_copies)++;
  (from_sim ? (to_sim ? c.d2d_bytes : c.d2h_bytes) : c.h2d_bytes) += int64_t(bytes);
}

} // namespace sim
