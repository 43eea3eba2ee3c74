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
  std::atomic<size_t> missing{0}; // bytes that a task could not have; the run is given up
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

namespace mk {

// Below this many elementary steps per piece, waking a member costs more than it brings.
constexpr int64_t kPieceSteps = 1 << 15;

// Units per piece, of which each costs `steps`: enough to pay, and for all members several to choose from.
inline int64_t grain(const mk_pool *p, int64_t units, int64_t steps, int64_t multiple = 1) {
  int64_t pays = (kPieceSteps + steps - 1) / (steps > 0 ? steps : 1);
  int64_t fair = units / (4 * int64_t(p->team.workers.size()));
  int64_t g = pays > fair ? pays : fair;
  return (g + multiple - 1) / multiple * multiple;
}

} // namespace mk

#endif
