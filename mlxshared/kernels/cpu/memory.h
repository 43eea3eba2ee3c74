// How the kernels get memory, and how a lack of it travels: as an exception within, as an mk_result across the C face.
#ifndef MLXCEL_KERNELS_CPU_MEMORY_H
#define MLXCEL_KERNELS_CPU_MEMORY_H

#include <stdlib.h>

#include <memory>
#include <new>

#include "kernels.h"

namespace mk {

// Memory that could not be had.
struct NoMemory : std::bad_alloc {
  explicit NoMemory(size_t bytes) : bytes(bytes) {}
  const char *what() const noexcept override { return "cpu kernels: no memory"; }
  size_t bytes;
};

struct Free {
  void operator()(void *p) const { free(p); }
};

// 64-byte aligned memory, contents undefined. Throws NoMemory.
std::unique_ptr<void, Free> allocate(size_t bytes);

// Whether the allocation at hand is the one that mk_fail_allocation asked for.
bool fails();

// Runs f and says what memory it lacked.
template <class F> mk_result reported(F f) {
  try {
    f();
  } catch (const NoMemory &e) {
    return e.bytes > 0 ? mk_result(e.bytes) : 1;
  } catch (const std::bad_alloc &) {
    return 1;
  }
  return 0;
}

} // namespace mk

#endif
