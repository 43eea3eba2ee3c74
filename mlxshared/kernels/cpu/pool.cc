#include "pool.h"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <mutex>
#include <new>
#include <thread>
#include <vector>

#include "memory.h"
#include "ops.h"
#include "team.h"

namespace mk {

Worker::~Worker() {
  for (void *p : data)
    free(p);
}

void *scratch_bytes(Worker &w, ScratchSlot slot, size_t bytes) {
  if (w.capacity[slot] >= bytes && w.data[slot])
    return w.data[slot];
  size_t capacity = (bytes + bytes / 4 + 4095) & ~size_t(4095);
  free(w.data[slot]);
  w.data[slot] = nullptr;
  w.capacity[slot] = 0;
  w.data[slot] = allocate(capacity).release();
  w.capacity[slot] = capacity;
  return w.data[slot];
}

float *scratch(Worker &w, ScratchSlot slot, int64_t floats) {
  return static_cast<float *>(scratch_bytes(w, slot, size_t(floats) * sizeof(float)));
}

namespace {

// How long an idle member, or a caller waiting for the last piece, burns its core before it sleeps. Longer than the
// gap between two operations of a decode step, far shorter than a scheduler's time slice.
constexpr std::chrono::microseconds kSpin(30);

inline void relax() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

// Polls ready() for the spin time; true as soon as it holds.
template <class F> bool spin_until(F ready) {
  if (ready())
    return true;
  auto deadline = std::chrono::steady_clock::now() + kSpin;
  do {
    for (int i = 0; i < 32; i++) {
      relax();
      if (ready())
        return true;
    }
  } while (std::chrono::steady_clock::now() < deadline);
  return false;
}

} // namespace

// state: the job's number in the upper half, then one bit "members may join", then the count of those inside. A member
// that never gets a core simply never joins, so the caller waits only for members that really hold a piece.
constexpr uint64_t kOpen = uint64_t(1) << 31;
constexpr uint64_t kCount = kOpen - 1;

static uint32_t job_of(uint64_t state) { return uint32_t(state >> 32); }

// Leaves no unit for anyone to begin.
static void give_up(Team &t, size_t bytes) {
  t.missing.store(bytes, std::memory_order_relaxed);
  t.next.store(t.units, std::memory_order_relaxed);
}

static void work(Team &t, Worker &w) {
  for (;;) {
    int64_t begin = t.next.fetch_add(t.grain, std::memory_order_relaxed);
    if (begin >= t.units)
      return;
    int64_t end = begin + t.grain < t.units ? begin + t.grain : t.units;
    try {
      t.task(t.context, begin, end, w);
    } catch (const NoMemory &e) {
      give_up(t, e.bytes);
    } catch (const std::bad_alloc &) {
      give_up(t, 1);
    }
  }
}

static bool join(Team &t, uint32_t &last) {
  uint64_t s = t.state.load(std::memory_order_acquire);
  while ((s & kOpen) && job_of(s) != last) {
    if (t.state.compare_exchange_weak(s, s + 1, std::memory_order_acq_rel)) {
      last = job_of(s);
      return true;
    }
  }
  return false;
}

static void leave(Team &t) {
  uint64_t s = t.state.fetch_sub(1, std::memory_order_seq_cst) - 1;
  if (!(s & kOpen) && (s & kCount) == 0 && t.caller_sleeps.load(std::memory_order_seq_cst)) {
    std::lock_guard<std::mutex> lock(t.mutex);
    t.done.notify_one();
  }
}

static void member(Team &t, Worker &w) {
  uint32_t last = 0;
  auto ready = [&] {
    uint64_t s = t.state.load(std::memory_order_acquire);
    return t.stop.load(std::memory_order_acquire) || ((s & kOpen) && job_of(s) != last);
  };
  for (;;) {
    if (!spin_until(ready)) {
      std::unique_lock<std::mutex> lock(t.mutex);
      t.sleepers.fetch_add(1, std::memory_order_seq_cst);
      t.wake.wait(lock, ready);
      t.sleepers.fetch_sub(1, std::memory_order_seq_cst);
    }
    if (t.stop.load(std::memory_order_acquire))
      return;
    if (join(t, last)) {
      work(t, w);
      leave(t);
    }
  }
}

void run(Team &t, int64_t n, int64_t grain, Task task, void *context) {
  if (n <= 0)
    return;
  if (grain < 1)
    grain = 1;
  if (t.threads.empty() || n <= grain) {
    task(context, 0, n, t.workers[0]);
    return;
  }
  t.units = n;
  t.grain = grain;
  t.task = task;
  t.context = context;
  t.missing.store(0, std::memory_order_relaxed);
  t.next.store(0, std::memory_order_relaxed);
  uint64_t job = uint64_t(job_of(t.state.load(std::memory_order_relaxed))) + 1;
  if ((job & 0xffffffff) == 0)
    job = 1;
  t.state.store(job << 32 | kOpen, std::memory_order_seq_cst);
  if (t.sleepers.load(std::memory_order_seq_cst) > 0) {
    std::lock_guard<std::mutex> lock(t.mutex);
    t.wake.notify_all();
  }
  work(t, t.workers[0]);
  t.state.fetch_and(~kOpen, std::memory_order_seq_cst);
  auto empty = [&] { return (t.state.load(std::memory_order_seq_cst) & kCount) == 0; };
  if (!spin_until(empty)) {
    std::unique_lock<std::mutex> lock(t.mutex);
    t.caller_sleeps.store(true, std::memory_order_seq_cst);
    t.done.wait(lock, empty);
    t.caller_sleeps.store(false, std::memory_order_seq_cst);
  }
  if (size_t bytes = t.missing.load(std::memory_order_relaxed))
    throw NoMemory(bytes);
}

static void stop(Team &t) {
  t.stop.store(true, std::memory_order_seq_cst);
  {
    std::lock_guard<std::mutex> lock(t.mutex);
    t.wake.notify_all();
  }
  for (std::thread &thread : t.threads)
    thread.join();
}

} // namespace mk

extern "C" {

mk_pool *mk_pool_new(int threads, mk_isa isa) {
  if (isa == MK_ISA_AUTO)
    isa = mk_best_isa();
  const mk::Ops *ops = mk::ops_for(isa);
  if (!ops || threads < 1)
    return nullptr;
  mk_pool *p = new (std::nothrow) mk_pool;
  if (!p)
    return nullptr;
  try {
    p->isa = isa;
    p->ops = ops;
    p->team.workers = std::vector<mk::Worker>(size_t(threads));
    for (int i = 1; i < threads; i++)
      p->team.threads.emplace_back([p, i] { mk::member(p->team, p->team.workers[size_t(i)]); });
  } catch (...) {
    mk_pool_free(p);
    return nullptr;
  }
  return p;
}

void mk_pool_free(mk_pool *p) {
  if (!p)
    return;
  mk::stop(p->team);
  delete p;
}

int mk_pool_threads(const mk_pool *p) { return int(p->team.workers.size()); }

mk_isa mk_pool_isa(const mk_pool *p) { return p->isa; }

size_t mk_pool_scratch(const mk_pool *p) {
  size_t bytes = 0;
  for (const mk::Worker &w : p->team.workers)
    for (size_t n : w.capacity)
      bytes += n;
  return bytes;
}

void mk_pool_release(mk_pool *p) {
  for (mk::Worker &w : p->team.workers)
    for (int slot = 0; slot < mk::kScratchSlots; slot++) {
      free(w.data[slot]);
      w.data[slot] = nullptr;
      w.capacity[slot] = 0;
    }
}

} // extern "C"
