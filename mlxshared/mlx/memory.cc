// What a device is and how much memory there is.
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <fstream>
#include <limits>
#include <unordered_set>

#ifdef __APPLE__
#include <mach/mach.h>
#include <sys/sysctl.h>
#endif
#ifdef __GLIBC__
#include <malloc.h>
#endif

#include "internal.h"

using namespace mlxcel;

namespace {

constexpr uint64_t unlimited = std::numeric_limits<uint64_t>::max();

#ifdef __APPLE__

uint64_t host_total() {
  uint64_t bytes = 0;
  size_t size = sizeof bytes;
  sysctlbyname("hw.memsize", &bytes, &size, nullptr, 0);
  return bytes;
}

uint64_t host_free() {
  vm_statistics64_data_t vm;
  mach_msg_type_number_t count = HOST_VM_INFO64_COUNT;
  if (host_statistics64(mach_host_self(), HOST_VM_INFO64, reinterpret_cast<host_info64_t>(&vm), &count) != KERN_SUCCESS)
    return 0;
  return (uint64_t(vm.free_count) + vm.inactive_count + vm.purgeable_count) * sysconf(_SC_PAGESIZE);
}

#else

// A line "Key:   123 kB" of /proc/meminfo, in bytes.
uint64_t meminfo(const char* key) {
  std::ifstream in("/proc/meminfo");
  std::string name, unit;
  uint64_t kib;
  while (in >> name >> kib) {
    std::getline(in, unit);
    if (name == key) return kib * 1024;
  }
  return 0;
}

// A number from the memory controller of this process's control group, if there is one ("max" is no limit).
uint64_t cgroup(const char* file) {
  std::ifstream in(std::string("/sys/fs/cgroup/") + file);
  uint64_t bytes;
  return in >> bytes ? bytes : unlimited;
}

uint64_t host_total() { return std::min(meminfo("MemTotal:"), cgroup("memory.max")); }

uint64_t host_free() {
  uint64_t free = meminfo("MemAvailable:"), limit = cgroup("memory.max"), used = cgroup("memory.current");
  if (limit == unlimited || used == unlimited) return free;
  return std::min(free, limit > used ? limit - used : 0);
}

#endif

// A number that MLX knows about the GPU; 0 if it does not.
uint64_t gpu_number(std::initializer_list<const char*> keys) try {
  auto& info = mc::device_info(mc::Device(mc::Device::gpu));
  for (auto* key : keys)
    if (auto it = info.find(key); it != info.end())
      if (auto* n = std::get_if<size_t>(&it->second)) return *n;
  return 0;
} catch (const std::exception&) {
  return 0;
}

// What caches hold outside MLX's allocator.
uint64_t held_outside(const mx_stream* s) { return s ? static_cast<uint64_t>(s->backend->held().value_or(0)) : 0; }

// Bytes of arrays, those that share a buffer once.
class Tally {
 public:
  void add(const array& a) {
    const void* one = a.is_available() ? static_cast<const void*>(a.data_shared_ptr().get()) : reinterpret_cast<const void*>(a.id());
    if (seen_.insert(one).second) bytes += a.nbytes();
  }
  uint64_t bytes = 0;

 private:
  std::unordered_set<const void*> seen_;
};

} // namespace

char* mx_device_name(bool gpu) try {
  auto& info = mc::device_info(gpu ? mc::Device(mc::Device::gpu) : mc::Device(mc::Device::cpu));
  auto it = info.find("device_name");
  if (it != info.end())
    if (auto* name = std::get_if<std::string>(&it->second)) return copy_message(name->c_str());
  return copy_message("unknown");
} catch (const std::exception&) {
  return copy_message("unknown");
}

uint64_t mx_device_total_memory(bool gpu) { return gpu ? gpu_number({"total_memory", "memory_size"}) : host_total(); }

uint64_t mx_device_free_memory(bool gpu) try {
  if (!gpu) return host_free();
  if (uint64_t free = gpu_number({"free_memory"})) return free;
  return host_free(); // Metal shares the host's memory
} catch (const std::exception&) {
  return 0; // not even for asking
}

uint64_t mx_stream_held(mx_stream* s) try {
  if (s == nullptr || s->backend->held()) return held_outside(s);
  Tally tally;
  for (auto* kv : s->caches)
    for (auto* a : kv->cache->arrays()) tally.add(*a);
  for (auto* h : s->states)
    if (auto* a = h->state->array()) tally.add(*a);
  return tally.bytes;
} catch (const std::exception&) {
  return 0; // not even for counting
}

uint64_t mx_stream_scratch(mx_stream* s) { return s ? s->backend->scratch() : 0; }

void mx_stream_release_scratch(mx_stream* s) {
  if (s) s->backend->release_scratch();
}

uint64_t mx_memory_in_use(mx_stream* s) {
  try {
    if (s) mc::synchronize(s->stream); // buffers are let go at the end of the queue
  } catch (const std::exception&) {
  }
  return mc::get_active_memory() + held_outside(s);
}

uint64_t mx_memory_peak(mx_stream* s) { return mc::get_peak_memory() + held_outside(s); }

uint64_t mx_memory_cached(void) { return mc::get_cache_memory(); }

void mx_memory_reset_peak(void) { mc::reset_peak_memory(); }

void mx_memory_clear_cache(void) { mc::clear_cache(); }

void mx_memory_set_limit(size_t bytes) { mc::set_memory_limit(bytes); }

void mx_memory_set_cache_limit(size_t bytes) { mc::set_cache_limit(bytes); }

void mx_memory_trim(void) {
#ifdef __GLIBC__
  malloc_trim(0);
#endif
}
