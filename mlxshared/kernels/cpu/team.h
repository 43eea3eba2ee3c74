// The fields of mk_pool; only pool.cc and api.cc look inside.
#ifndef MLXCEL_KERNELS_CPU_TEAM_H
#define MLXCEL_KERNELS_CPU_TEAM_H

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

#include "kernels.h"
#include "pool.h"

namespace mk {

struct Team {
  std::vector<Worker> workers; // workers[0] is the caller's
  std::vector<std::thread> threads;

  // The job at hand. Written only while no member is inside, read only by members that joined.
  int64_t units = 0;
  int64_t grain = 1;
  Task task = nullptr;
  void *context = nullptr;
  alignas(64) std::atomic<int64_t> next{0};
  alignas(64) std::atomic<uint64_t> state{0};

  alignas(64) std::atomic<int> sleepers{0};
  std::atomic<bool> caller_sleeps{false};
  std::atomic<bool> stop{false};
  std::mutex mutex;
  std::condition_variable wake, done;
};

} // namespace mk

struct mk_pool {
  mk_isa isa = MK_ISA_PLAIN;
  const mk::Ops *ops = nullptr;
  mk::Team team;
};

#endif
