// What the files of the API share: how arguments become a task's context.
#ifndef MLXCEL_KERNELS_CPU_CALLS_H
#define MLXCEL_KERNELS_CPU_CALLS_H

#include "ops.h"
#include "team.h"

namespace mk {

inline unsigned char *bytes(void *p) { return static_cast<unsigned char *>(p); }
inline const unsigned char *bytes(const void *p) { return static_cast<const unsigned char *>(p); }

// A job with the functions of the pool's instruction set.
template <class J> struct Call {
  const Ops *ops;
  J job;
};

} // namespace mk

#endif
