// Memory of the devices and of the pinned host, and who may touch it.
#include "runtime.h"

#include <c10/util/Exception.h>
#include <sys/mman.h>
#include <unistd.h>

#include <array>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <mutex>

namespace sim {
namespace {

constexpr size_t kAlign = 512; // of a block, as on most devices
constexpr size_t kSegment = size_t(2) << 20; // what the driver hands out at once

size_t round_up(size_t value, size_t unit) {
  return (value + unit - 1) / unit * unit;
}

// Blocks are served best fit from one contiguous range of addresses; its part that was handed out grows by segments.
struct Arena {
  char* base = nullptr;
  size_t mapped = 0;
  std::map<size_t, size_t> free_by_offset; // of the mapped part: offset -> size
  std::map<size_t, size_t> used; // offset -> size
  c10::CachingDeviceAllocator::DeviceStats stats;
};

struct Memory {
  std::mutex mutex; // arenas, except for what the next one guards
  std::array<Arena, kMaxDevices> arenas;
  std::mutex access_mutex; // protection of the mapped part, and how far it goes
  int accesses = 0;
  std::mutex pinned_mutex;
  std::map<const char*, size_t> pinned;
  std::once_flag first_use;
  void (*on_first_use)() = nullptr;
};

// Never destroyed: tensors may be freed after the destructors of static objects ran.
Memory& state() {
  static Memory* it = new Memory();
  return *it;
}

size_t all = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);
size_t pool(size_t bytes) {
  using c10::CachingAllocator::StatType;
  return static_cast<size_t>(bytes < (1 << 20) ? StatType::SMALL_POOL : StatType::LARGE_POOL);
}
void increase(c10::CachingAllocator::StatArray& stat, size_t amount, size_t of) {
  stat[all].increase(amount);
  stat[pool(of)].increase(amount);
}
void decrease(c10::CachingAllocator::StatArray& stat, size_t amount, size_t of) {
  stat[all].decrease(amount);
  stat[pool(of)].decrease(amount);
}

struct sigaction earlier_handler;

// The difference between a bug of the host's code and any other crash, said before the process dies of it.
void on_segmentation_fault(int, siginfo_t* info, void*) {
  if (owner(info->si_addr) >= 0) {
    constexpr char text[] = "omnicomp.devices.sim: the host touched the device's memory outside of a kernel or copy\n";
    [[maybe_unused]] const auto written = ::write(STDERR_FILENO, text, sizeof(text) - 1);
  }
  sigaction(SIGSEGV, &earlier_handler, nullptr); // the faulting instruction runs again, and meets what was there before
}

void open_arena(Arena& arena) {
  if (arena.base != nullptr) {
    return;
  }
  const size_t size = settings().memory;
  void* base = mmap(nullptr, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  TORCH_CHECK(base != MAP_FAILED, "sim: the host has no room for ", size, " bytes: ", std::strerror(errno));
  arena.base = static_cast<char*>(base);
  static std::once_flag once;
  std::call_once(once, [] {
    if (settings().protect) {
      struct sigaction handler {};
      handler.sa_sigaction = on_segmentation_fault;
      handler.sa_flags = SA_SIGINFO;
      sigaction(SIGSEGV, &handler, &earlier_handler);
    }
  });
}

void set_protection(char* from, size_t bytes, bool open) {
  if (bytes != 0) {
    const int result = mprotect(from, bytes, open ? PROT_READ | PROT_WRITE : PROT_NONE);
    TORCH_INTERNAL_ASSERT(result == 0, "sim: mprotect: ", std::strerror(errno));
  }
}

void give_free(Arena& arena, size_t offset, size_t size) {
  auto [here, fresh] = arena.free_by_offset.emplace(offset, size);
  TORCH_INTERNAL_ASSERT(fresh);
  if (auto next = std::next(here); next != arena.free_by_offset.end() && here->first + here->second == next->first) {
    here->second += next->second;
    arena.free_by_offset.erase(next);
  }
  if (here != arena.free_by_offset.begin()) {
    auto before = std::prev(here);
    if (before->first + before->second == here->first) {
      before->second += here->second;
      arena.free_by_offset.erase(here);
    }
  }
}

bool grow(Arena& arena, size_t size) {
  size_t tail = 0; // the free block that ends where the mapped part does
  if (!arena.free_by_offset.empty()) {
    const auto& last = *arena.free_by_offset.rbegin();
    tail = last.first + last.second == arena.mapped ? last.second : 0;
  }
  const size_t more = round_up(size - tail, kSegment);
  if (arena.mapped + more > settings().memory) {
    return false;
  }
  {
    std::lock_guard<std::mutex> lock(state().access_mutex);
    set_protection(arena.base + arena.mapped, more, !settings().protect || state().accesses > 0);
    arena.mapped += more;
  }
  give_free(arena, arena.mapped - more, more);
  increase(arena.stats.segment, more / kSegment, kSegment);
  increase(arena.stats.reserved_bytes, more, kSegment);
  arena.stats.num_device_alloc++;
  return true;
}

void* take(c10::DeviceIndex index, size_t bytes) {
  auto& s = state();
  std::lock_guard<std::mutex> lock(s.mutex);
  Arena& arena = s.arenas[index];
  open_arena(arena);
  const size_t size = round_up(bytes, kAlign);
  auto best = arena.free_by_offset.end();
  for (int attempt = 0; attempt < 2 && best == arena.free_by_offset.end(); attempt++) {
    for (auto it = arena.free_by_offset.begin(); it != arena.free_by_offset.end(); ++it) {
      if (it->second >= size && (best == arena.free_by_offset.end() || it->second < best->second)) {
        best = it;
      }
    }
    if (best == arena.free_by_offset.end() && !grow(arena, size)) {
      arena.stats.num_ooms++;
      using c10::CachingAllocator::format_size;
      TORCH_CHECK_WITH(
          OutOfMemoryError,
          false,
          "sim out of memory. Tried to allocate ", format_size(bytes), ". Device ", int(index), " has ",
          format_size(settings().memory), ", of which ", format_size(arena.stats.allocated_bytes[all].current),
          " are in use (OMNICOMP_SIM_MEMORY sets the size in bytes).");
    }
  }
  const size_t offset = best->first;
  const size_t rest = best->second - size;
  arena.free_by_offset.erase(best);
  if (rest != 0) {
    arena.free_by_offset.emplace(offset + size, rest);
  }
  arena.used.emplace(offset, size);
  for (auto* stat : {&arena.stats.allocation, &arena.stats.active}) {
    increase(*stat, 1, size);
  }
  for (auto* stat : {&arena.stats.allocated_bytes, &arena.stats.active_bytes, &arena.stats.requested_bytes}) {
    increase(*stat, size, size);
  }
  return arena.base + offset;
}

void release(void* pointer) {
  if (pointer == nullptr) {
    return;
  }
  auto& s = state();
  const auto index = owner(pointer);
  TORCH_INTERNAL_ASSERT(index >= 0);
  size_t size = 0, total = 0, reserved = 0;
  {
    std::lock_guard<std::mutex> lock(s.mutex);
    Arena& arena = s.arenas[index];
    const auto block = arena.used.find(static_cast<char*>(pointer) - arena.base);
    TORCH_INTERNAL_ASSERT(block != arena.used.end());
    const size_t offset = block->first;
    size = block->second;
    arena.used.erase(block);
    give_free(arena, offset, size);
    for (auto* stat : {&arena.stats.allocation, &arena.stats.active}) {
      decrease(*stat, 1, size);
    }
    for (auto* stat : {&arena.stats.allocated_bytes, &arena.stats.active_bytes, &arena.stats.requested_bytes}) {
      decrease(*stat, size, size);
    }
    total = arena.stats.allocated_bytes[all].current;
    reserved = arena.stats.reserved_bytes[all].current;
  }
  c10::reportMemoryUsageToProfiler(pointer, -int64_t(size), total, reserved, c10::Device(kType, index));
}

struct SimAllocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    auto& s = state();
    if (s.on_first_use != nullptr) {
      std::call_once(s.first_use, s.on_first_use);
    }
    const auto index = current_device();
    const c10::Device device(kType, index);
    if (bytes == 0) {
      return {nullptr, nullptr, &release, device};
    }
    fault_point(Fault::Allocate);
    void* pointer = take(index, bytes);
    const auto stats = getDeviceStats(index);
    c10::reportMemoryUsageToProfiler(
        pointer, round_up(bytes, kAlign), stats.allocated_bytes[all].current, stats.reserved_bytes[all].current,
        device);
    return {pointer, pointer, &release, device};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return &release;
  }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    Copy copy(c10::Device(kType, owner(from)), c10::Device(kType, owner(to)), bytes);
    std::memcpy(to, from, bytes);
  }
  bool initialized() override {
    return true;
  }
  void emptyCache(c10::MempoolId_t = {0, 0}) override {
    auto& s = state();
    std::lock_guard<std::mutex> lock(s.mutex);
    for (auto& arena : s.arenas) {
      if (arena.free_by_offset.empty()) {
        continue;
      }
      const auto last = std::prev(arena.free_by_offset.end());
      const size_t keep = round_up(last->first, kSegment);
      if (last->first + last->second != arena.mapped || keep >= arena.mapped) {
        continue;
      }
      const size_t less = arena.mapped - keep;
      last->second -= less;
      if (last->second == 0) {
        arena.free_by_offset.erase(last);
      }
      std::lock_guard<std::mutex> access(s.access_mutex);
      madvise(arena.base + keep, less, MADV_DONTNEED);
      set_protection(arena.base + keep, less, false);
      arena.mapped = keep;
      decrease(arena.stats.segment, less / kSegment, kSegment);
      decrease(arena.stats.reserved_bytes, less, kSegment);
      arena.stats.num_device_free++;
    }
  }
  void recordStream(const c10::DataPtr&, c10::Stream) override {} // nothing is ever in flight
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex index) override {
    check_index(index);
    std::lock_guard<std::mutex> lock(state().mutex);
    return state().arenas[index].stats;
  }
  template <typename F>
  void each_stat(c10::DeviceIndex index, F change) {
    check_index(index);
    std::lock_guard<std::mutex> lock(state().mutex);
    auto& stats = state().arenas[index].stats;
    for (auto* array : {&stats.allocation, &stats.segment, &stats.active, &stats.inactive_split,
                        &stats.allocated_bytes, &stats.reserved_bytes, &stats.active_bytes,
                        &stats.inactive_split_bytes, &stats.requested_bytes}) {
      for (auto& stat : *array) {
        change(stat);
      }
    }
  }
  void resetAccumulatedStats(c10::DeviceIndex index) override {
    each_stat(index, [](auto& stat) { stat.reset_accumulated(); });
    std::lock_guard<std::mutex> lock(state().mutex);
    auto& stats = state().arenas[index].stats;
    stats.num_ooms = stats.num_device_alloc = stats.num_device_free = 0;
  }
  void resetPeakStats(c10::DeviceIndex index) override {
    each_stat(index, [](auto& stat) { stat.reset_peak(); });
  }
  // No `override`: not all versions of torch ask for it.
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex index) {
    const auto used = getDeviceStats(index).allocated_bytes[all].current;
    return {settings().memory - used, settings().memory};
  }
};

struct PinnedAllocator final : c10::Allocator {
  static void release_pinned(void* pointer) {
    if (pointer != nullptr) {
      std::lock_guard<std::mutex> lock(state().pinned_mutex);
      state().pinned.erase(static_cast<char*>(pointer));
      std::free(pointer);
    }
  }
  c10::DataPtr allocate(size_t bytes) override {
    if (bytes == 0) {
      return {nullptr, nullptr, &release_pinned, c10::DeviceType::CPU};
    }
    void* pointer = std::aligned_alloc(64, round_up(bytes, 64));
    TORCH_CHECK_WITH(OutOfMemoryError, pointer != nullptr, "sim: the host has no ", bytes, " bytes to pin");
    std::lock_guard<std::mutex> lock(state().pinned_mutex);
    state().pinned[static_cast<char*>(pointer)] = bytes;
    return {pointer, pointer, &release_pinned, c10::DeviceType::CPU};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return &release_pinned;
  }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }
};

SimAllocator* the_allocator = new SimAllocator();
const bool allocator_set = [] {
  c10::SetAllocator(kType, the_allocator);
  return true;
}();

} // namespace

c10::DeviceAllocator* allocator() {
  return the_allocator;
}
c10::DeviceIndex owner(const void* pointer) {
  const auto address = static_cast<const char*>(pointer);
  for (int i = 0; i < kMaxDevices; i++) {
    const char* base = state().arenas[i].base;
    if (base != nullptr && address >= base && address < base + settings().memory) {
      return c10::DeviceIndex(i);
    }
  }
  return -1;
}
c10::Allocator* pinned_allocator() {
  static auto* it = new PinnedAllocator();
  return it;
}
bool is_pinned(const void* pointer) {
  auto& s = state();
  std::lock_guard<std::mutex> lock(s.pinned_mutex);
  const auto address = static_cast<const char*>(pointer);
  auto after = s.pinned.upper_bound(address);
  if (after == s.pinned.begin()) {
    return false;
  }
  --after;
  return address < after->first + after->second;
}
void set_first_use(void (*callback)()) {
  state().on_first_use = callback;
}

Access::Access() {
  if (!settings().protect) {
    return;
  }
  auto& s = state();
  std::lock_guard<std::mutex> lock(s.access_mutex);
  if (s.accesses++ == 0) {
    for (auto& arena : s.arenas) {
      set_protection(arena.base, arena.mapped, true);
    }
  }
}
Access::~Access() {
  if (!settings().protect) {
    return;
  }
  auto& s = state();
  std::lock_guard<std::mutex> lock(s.access_mutex);
  if (--s.accesses == 0) {
    for (auto& arena : s.arenas) {
      set_protection(arena.base, arena.mapped, false);
    }
  }
}

} // namespace sim
