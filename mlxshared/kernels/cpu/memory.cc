#include "memory.h"

#include <atomic>

namespace mk {

static std::atomic<int64_t> countdown{0}; // allocations up to the one that fails; 0 or less: none does

bool fails() {
  return countdown.load(std::memory_order_relaxed) > 0 && countdown.fetch_sub(1, std::memory_order_relaxed) == 1;
}

std::unique_ptr<void, Free> allocate(size_t bytes) {
  void *p = fails() ? nullptr : aligned_alloc(64, (bytes + 63) & ~size_t(63));
  if (!p && bytes > 0)
    throw NoMemory(bytes);
  return std::unique_ptr<void, Free>(p);
}

} // namespace mk

extern "C" {

int64_t mk_fail_allocation(int64_t n) { return mk::countdown.exchange(n, std::memory_order_relaxed); }

int mk_allocation_fails(void) { return mk::fails(); }

} // extern "C"
