// The simulated driver: memory, copies and launches. Everything else reaches the device's memory through it.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <map>
#include <string>
#include <utility>

namespace sim {

constexpr c10::DeviceType kType = c10::DeviceType::PrivateUse1;
constexpr int kMaxDevices = 16;

// ---- devices -------------------------------------------------------------------------------------------------------
struct Settings {
  int devices = 2; // OMNICOMP_SIM_DEVICES
  size_t memory = size_t(8) << 30; // OMNICOMP_SIM_MEMORY, bytes a device
  bool protect = false; // OMNICOMP_SIM_PROTECT
};
const Settings& settings();
c10::DeviceIndex device_count();
c10::DeviceIndex current_device();
// Throws if there is no such device.
c10::DeviceIndex exchange_device(c10::DeviceIndex index);
void check_index(c10::DeviceIndex index);

// ---- memory --------------------------------------------------------------------------------------------------------
c10::DeviceAllocator* allocator();
// The device whose memory holds the address, or -1.
c10::DeviceIndex owner(const void* pointer);
// Pinned host memory is ordinary host memory that is remembered.
c10::Allocator* pinned_allocator();
bool is_pinned(const void* pointer);
// Called once, before the first allocation.
void set_first_use(void (*callback)());

// The dtypes that tensors can be made of, one bit for each c10::ScalarType; all at first.
void set_dtypes(uint64_t mask);
void check_dtype(c10::ScalarType type);

// ---- faults --------------------------------------------------------------------------------------------------------
enum class Fault { Allocate, Copy, Kernel, Synchronize };
// The (after + 1)-th operation of that kind from now on fails, once. A negative number disarms it.
void inject_fault(Fault kind, int64_t after);
// Throws c10::OutOfMemoryError (Allocate) or c10::AcceleratorError if the fault is due.
void fault_point(Fault kind);

// ---- what happened -------------------------------------------------------------------------------------------------
struct Counters {
  int64_t h2d_copies = 0, h2d_bytes = 0, d2h_copies = 0, d2h_bytes = 0, d2d_copies = 0, d2d_bytes = 0;
  int64_t kernels = 0; // own kernels, all of `natives` together
  int64_t launches = 0; // kernels that someone else brought, such as generated code
  int64_t synchronizations = 0;
  std::map<std::string, int64_t> natives, fallbacks;
};
Counters counters();
void reset_counters();
void reset_fallbacks();
void count_fallback(const std::string& name);
void count_synchronization();

// ---- access --------------------------------------------------------------------------------------------------------
// While one of these lives, the memory of all devices can be touched by the host's instructions, which play the device.
// Nestable; shared by all threads.
class Access {
 public:
  Access();
  ~Access();
  Access(const Access&) = delete;
  Access& operator=(const Access&) = delete;
};

// One kernel. Counts it under its name as native, or as a launch from outside.
class Kernel {
 public:
  explicit Kernel(const std::string& name, bool native = true);

 private:
  Access access_;
};

// One copy of `bytes`, in the direction that the two devices tell.
class Copy {
 public:
  Copy(c10::Device from, c10::Device to, size_t bytes);

 private:
  Access access_;
};

} // namespace sim
