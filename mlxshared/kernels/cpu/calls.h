// What the files of the API share: how arguments become a task's context.
#ifndef MLXCEL_KERNELS_CPU_CALLS_H
#define MLXCEL_KERNELS_CPU_CALLS_H

#include <tuple>

#include "memory.h"
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

// Runs a kernel of the pool's instruction set over a job's n units, `grain` of them at a time.
template <class J>
void run_job(mk_pool *p, void (*f)(const J &, int64_t, int64_t, Worker &), const J &job, int64_t n, int64_t grain) {
  auto both = std::tie(f, job);
  run(
      p->team, n, grain,
      [](void *c, int64_t begin, int64_t end, Worker &worker) {
        auto &[f, job] = *static_cast<decltype(both) *>(c);
        f(job, begin, end, worker);
      },
      &both);
}
// The same for one that needs no memory of its own.
template <class J> void run_job(mk_pool *p, void (*f)(const J &, int64_t, int64_t), const J &job, int64_t n, int64_t grain) {
  auto both = std::tie(f, job);
  run(
      p->team, n, grain,
      [](void *c, int64_t begin, int64_t end, Worker &) {
        auto &[f, job] = *static_cast<decltype(both) *>(c);
        f(job, begin, end);
      },
      &both);
}

} // namespace mk

#endif
