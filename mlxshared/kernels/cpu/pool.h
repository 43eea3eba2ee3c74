// The team of threads behind mk_pool, and the scratch memory each member owns.
#ifndef MLXCEL_KERNELS_CPU_POOL_H
#define MLXCEL_KERNELS_CPU_POOL_H

#include <stddef.h>
#include <stdint.h>

namespace mk {

struct Ops;

// Scratch buffers of one member. A slot keeps its memory between operations and grows only.
enum ScratchSlot {
  kScratchInput,
  kScratchScales,
  kScratchBiases,
  kScratchWeights,
  kScratchOutput,
  kScratchState,
  kScratchKeys,
  kScratchValues,
  kScratchSlots
};

struct Worker {
  void *data[kScratchSlots] = {};
  size_t capacity[kScratchSlots] = {};
  ~Worker();
};

// At least bytes of memory, 64-byte aligned, contents undefined. Throws NoMemory.
void *scratch_bytes(Worker &w, ScratchSlot slot, size_t bytes);
float *scratch(Worker &w, ScratchSlot slot, int64_t floats);

// A task runs units [begin, end) as one member.
typedef void (*Task)(void *context, int64_t begin, int64_t end, Worker &worker);

// Runs units [0, n) in pieces of `grain`, shared out among the members as they become free. With one member, or
// when all the work fits in one piece, the caller runs it alone. Returns when every unit is done. A task that lacks memory
// ends the run: once no member is inside, NoMemory is thrown on the caller's thread.
void run(struct Team &team, int64_t n, int64_t grain, Task task, void *context);

} // namespace mk

#endif
