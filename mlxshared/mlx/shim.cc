// Arrays, scopes and streams.
#include <algorithm>
#include <atomic>
#include <cstdarg>
#include <cstring>
#include <mutex>
#include <unordered_set>

#ifdef __linux__
#include <sys/mman.h>
#endif

#include "internal.h"
#include "kernels.h"

using namespace mlxcel;

namespace {

std::atomic<int64_t> live_arrays{0};

// MLX cannot end a stream, so closed ones wait here for the next open, as long as the process lives.
struct IdleStreams {
  std::mutex mutex;
  std::vector<mc::Stream> streams;

  mc::Stream take(mc::Device device) {
    std::lock_guard lock(mutex);
    for (auto it = streams.begin(); it != streams.end(); ++it) {
      if (it->device == device) {
        mc::Stream s = *it;
        streams.erase(it);
        return s;
      }
    }
    return mc::new_thread_unsafe_stream(device);
  }

  void give(mc::Stream s) {
    std::lock_guard lock(mutex);
    streams.push_back(s);
  }
};

IdleStreams& idle_streams() {
  static auto* idle = new IdleStreams; // never destroyed: MLX's threads outlive static destruction
  return *idle;
}

mc::Device device_of(bool gpu) { return gpu ? mc::Device(mc::Device::gpu) : mc::Device(mc::Device::cpu); }

} // namespace

namespace mlxcel {

std::string format(const char* spec, ...) {
  char text[512];
  va_list args;
  va_start(args, spec);
  vsnprintf(text, sizeof text, spec, args);
  va_end(args);
  return text;
}

mc::Dtype dtype_of(int number) {
  switch (static_cast<mc::Dtype::Val>(number)) {
    case mc::Dtype::Val::bool_: return mc::bool_;
    case mc::Dtype::Val::uint8: return mc::uint8;
    case mc::Dtype::Val::uint16: return mc::uint16;
    case mc::Dtype::Val::uint32: return mc::uint32;
    case mc::Dtype::Val::uint64: return mc::uint64;
    case mc::Dtype::Val::int8: return mc::int8;
    case mc::Dtype::Val::int16: return mc::int16;
    case mc::Dtype::Val::int32: return mc::int32;
    case mc::Dtype::Val::int64: return mc::int64;
    case mc::Dtype::Val::float16: return mc::float16;
    case mc::Dtype::Val::float32: return mc::float32;
    case mc::Dtype::Val::float64: return mc::float64;
    case mc::Dtype::Val::bfloat16: return mc::bfloat16;
    case mc::Dtype::Val::complex64: return mc::complex64;
  }
  throw std::invalid_argument(format("%d is no dtype", number));
}

static const char* dtype_name(mc::Dtype dtype) {
  switch (dtype.val()) {
    case mc::Dtype::Val::bool_: return "bool";
    case mc::Dtype::Val::uint8: return "uint8";
    case mc::Dtype::Val::uint16: return "uint16";
    case mc::Dtype::Val::uint32: return "uint32";
    case mc::Dtype::Val::uint64: return "uint64";
    case mc::Dtype::Val::int8: return "int8";
    case mc::Dtype::Val::int16: return "int16";
    case mc::Dtype::Val::int32: return "int32";
    case mc::Dtype::Val::int64: return "int64";
    case mc::Dtype::Val::float16: return "float16";
    case mc::Dtype::Val::float32: return "float32";
    case mc::Dtype::Val::float64: return "float64";
    case mc::Dtype::Val::bfloat16: return "bfloat16";
    case mc::Dtype::Val::complex64: return "complex64";
  }
  return "unknown";
}

std::string describe(const array& a) {
  std::string text = std::string(dtype_name(a.dtype())) + "[";
  for (size_t i = 0; i < a.ndim(); i++) text += (i ? "," : "") + std::to_string(a.shape(i));
  return text + "]";
}

std::string describe_all(mx_array* const* arrays, size_t n) {
  constexpr size_t most = 16;
  std::string text;
  for (size_t i = 0; i < n && i < most; i++) {
    if (i) text += ", ";
    text += arrays[i] ? describe(arrays[i]->value) : "none";
  }
  if (n > most) text += format(" and %zu more", n - most);
  return text;
}

char* copy_message(const char* text) { return strdup(text); }

void may_fail() {
  if (mk_allocation_fails()) throw std::bad_alloc();
}

void* memory_of(const mc::allocator::Data& data) { return mc::allocator::Buffer(data.buffer()).raw_ptr(); }

mc::allocator::Data allocated(size_t bytes) {
  if (bytes > 0 && mk_allocation_fails()) throw NoMemory(bytes);
  if (auto data = mc::allocator::malloc(bytes); bytes == 0 || memory_of(data) != nullptr) return data;
  mc::clear_cache(); // which may hold many buffers that are each too small
  if (auto data = mc::allocator::malloc(bytes); memory_of(data) != nullptr) return data;
  throw NoMemory(bytes);
}

// Whether a back end's own words mean that memory ran out: MLX's allocators throw plain runtime errors.
static bool tells_no_memory(const char* text) {
  for (const char* sign : {"allocate", "out of memory", "OutOfMemory", "Insufficient Memory"})
    if (strstr(text, sign) != nullptr) return true;
  return false;
}

static int kind_of(const std::exception& e) {
  if (dynamic_cast<const NoMemory*>(&e) || dynamic_cast<const std::bad_alloc*>(&e)) return MX_NO_MEMORY;
  if (dynamic_cast<const std::logic_error*>(&e)) return MX_INVALID;
  return tells_no_memory(e.what()) ? MX_NO_MEMORY : MX_DEVICE;
}

Caught caught() noexcept {
  Caught c{MX_DEVICE, {}};
  try {
    throw;
  } catch (const std::exception& e) {
    c.kind = kind_of(e);
    try {
      c.text = dynamic_cast<const std::bad_alloc*>(&e) ? "no memory" : e.what();
    } catch (const std::exception&) {
      // The kind must do.
    }
  } catch (...) {
    c.text = "unknown"; // short enough to need no memory
  }
  return c;
}

void describe_caught(mx_failure* failure) noexcept {
  Caught c = caught();
  *failure = {copy_message(c.text.c_str()), c.kind};
}

} // namespace mlxcel

mx_array::mx_array(mc::array value) : value(std::move(value)) { live_arrays.fetch_add(1, std::memory_order_relaxed); }
mx_array::~mx_array() { live_arrays.fetch_sub(1, std::memory_order_relaxed); }

mx_array* mx_scope::own(mc::array value) {
  may_fail();
  auto a = std::make_unique<mx_array>(std::move(value));
  adopt(a.get());
  return a.release();
}

void mx_scope::adopt(mx_array* a) {
  arrays.push_back(a);
  a->owner = this;
  a->slot = arrays.size() - 1;
}

void mx_scope::release(mx_array* a) {
  arrays[a->slot] = arrays.back();
  arrays[a->slot]->slot = a->slot;
  arrays.pop_back();
  a->owner = nullptr;
}

void mx_scope::fail(const char* op_name, mx_array* const* list, size_t n) noexcept {
  Caught c = caught();
  if (failed) return;
  failed = true;
  op = op_name;
  kind = c.kind;
  reason = std::move(c.text);
  try {
    inputs = describe_all(list, n);
  } catch (const std::exception&) {
    inputs.clear();
  }
}

// Streams.

mx_stream* mx_stream_open(bool gpu, bool kernels, int threads, int isa, mx_failure* failure) try {
  if (gpu && !mx_gpu_available()) throw std::runtime_error("device gpu: this build of MLX finds none");
  if (gpu && kernels) throw std::runtime_error("the kernels back end runs on the cpu only");
  auto stream = idle_streams().take(device_of(gpu));
  try {
    auto backend = kernels ? make_kernel_backend(stream, threads, isa) : make_mlx_backend(stream);
    return new mx_stream{stream, std::move(backend)};
  } catch (...) {
    idle_streams().give(stream);
    throw;
  }
} catch (...) {
  describe_caught(failure);
  return nullptr;
}

bool mx_stream_close(mx_stream* s, mx_failure* failure) {
  if (size_t held = s->caches.size() + s->states.size(); s->scopes > 0 || held > 0) {
    *failure = {copy_message(format("%d scopes and %zu caches are still open", s->scopes, held).c_str()), MX_INVALID};
    return false;
  }
  try {
    mc::synchronize(s->stream);
  } catch (const std::exception&) {
    // The work that failed was reported by its evaluation.
  }
  idle_streams().give(s->stream);
  delete s;
  return true;
}

const char* mx_version(void) { return mc::version(); }

bool mx_gpu_available(void) { return mc::is_available(mc::Device(mc::Device::gpu)); }

// Arrays.

int64_t mx_live_arrays(void) { return live_arrays.load(std::memory_order_relaxed); }

int mx_array_ndim(const mx_array* a) { return static_cast<int>(a->value.ndim()); }

int mx_array_dim(const mx_array* a, int i) {
  int n = static_cast<int>(a->value.ndim());
  if (i < 0) i += n;
  return i < 0 || i >= n ? 0 : a->value.shape(i);
}

size_t mx_array_size(const mx_array* a) { return a->value.size(); }

int mx_array_dtype(const mx_array* a) { return static_cast<int>(a->value.dtype().val()); }

void mx_array_free(mx_array* a) {
  if (a->owner) a->owner->release(a);
  delete a;
}

// Scopes.

mx_scope* mx_scope_new(mx_stream* s) {
  if (s == nullptr || mk_allocation_fails()) return nullptr;
  auto* scope = new (std::nothrow) mx_scope{s};
  if (scope) s->scopes++;
  return scope;
}

void mx_scope_free(mx_scope* s) {
  for (auto* a : s->arrays) delete a;
  s->stream->scopes--;
  delete s;
}

void mx_scope_release(mx_scope* s, mx_array* a) {
  if (a->owner == s) s->release(a);
}

bool mx_scope_adopt(mx_scope* s, mx_array* a) {
  if (a->owner != nullptr) return true;
  try {
    may_fail();
    s->adopt(a);
    return true;
  } catch (...) {
    s->fail("adopt", &a, 1);
    return false;
  }
}

const char* mx_scope_error(mx_scope* s, int part) {
  return part == 0 ? s->op : part == 1 ? s->inputs.c_str() : s->reason.c_str();
}

int mx_scope_error_kind(const mx_scope* s) { return s->kind; }

// MLX's allocator of the CPU hands out null pointers when memory runs out, and its operations write to them. So what a graph
// takes at most must be there before it runs: its results' bytes, freed at once.
static void want_room(mc::Stream s, const std::vector<array>& roots) {
  if (s.device != mc::Device(mc::Device::cpu)) return;
  size_t bytes = 0;
  std::unordered_set<uintptr_t> seen;
  std::vector<array> open = roots;
  while (!open.empty()) {
    array a = std::move(open.back());
    open.pop_back();
    if (a.is_available() || a.status() != array::Status::unscheduled || !seen.insert(a.id()).second) continue;
    bytes += a.nbytes();
    open.insert(open.end(), a.inputs().begin(), a.inputs().end());
    open.insert(open.end(), a.siblings().begin(), a.siblings().end());
  }
  if (bytes > 0) allocated(bytes);
}

void mlxcel::compute(mc::Stream s, std::vector<array> arrays) {
  if (std::all_of(arrays.begin(), arrays.end(), [](const array& a) { return a.is_available(); })) return;
  want_room(s, arrays);
  // MLX would else make a stream of its own for this thread.
  mc::set_default_stream(s);
  try {
    mc::eval(std::move(arrays));
  } catch (...) {
    // Waits for the rest and clears the stream's stored error, so that the next evaluation starts clean.
    for (int i = 0; i < 2; i++) {
      try {
        mc::synchronize(s);
        break;
      } catch (const std::exception&) {
      }
    }
    throw;
  }
}

bool mx_eval(mx_scope* s, mx_array* const* list, int n) {
  if (s == nullptr || s->failed) return false;
  try {
    std::vector<array> arrays;
    arrays.reserve(n);
    for (int i = 0; i < n; i++) arrays.push_back(need(list[i], "an argument"));
    compute(s->stream->stream, std::move(arrays));
    return true;
  } catch (...) {
    s->fail("eval", list, n);
    return false;
  }
}

// Weights are read from end to end in every step, and page tables with them: whole huge pages take a fraction of those.
static void want_huge_pages(void* data, size_t bytes) {
#ifdef MADV_HUGEPAGE
  constexpr uintptr_t huge = 2 << 20;
  const uintptr_t begin = (reinterpret_cast<uintptr_t>(data) + huge - 1) / huge * huge;
  const uintptr_t end = (reinterpret_cast<uintptr_t>(data) + bytes) / huge * huge;
  if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE); // a wish
#endif
}

mx_array* mx_uninitialized(mx_scope* s, int dtype, const int* shape, int ndim, void** data, size_t* size) {
  return guarded(s, "from_bytes", {}, [&] {
    mc::Dtype t = dtype_of(dtype);
    size_t bytes = t.size();
    std::string text;
    for (int i = 0; i < ndim; i++) {
      text += (i ? "," : "") + std::to_string(shape[i]);
      if (shape[i] < 0) throw std::invalid_argument("negative dimension in [" + text + "]");
      if (__builtin_mul_overflow(bytes, static_cast<size_t>(shape[i]), &bytes))
        throw std::invalid_argument("size of [" + text + "] overflows");
    }
    if (*size != SIZE_MAX && *size != bytes)
      throw std::invalid_argument(format("%zu bytes for %s[%s], want %zu", *size, dtype_name(t), text.c_str(), bytes));
    auto buffer = allocated(bytes); // which frees it where what follows fails
    void* memory = bytes ? memory_of(buffer) : nullptr;
    want_huge_pages(memory, bytes);
    auto* made = s->own(array(std::move(buffer), mc::Shape(shape, shape + ndim), t));
    *data = memory;
    *size = bytes;
    return made;
  });
}

mx_array* mx_from_bytes(mx_scope* s, const void* data, size_t bytes, int dtype, const int* shape, int ndim) {
  void* to = nullptr;
  mx_array* a = mx_uninitialized(s, dtype, shape, ndim, &to, &bytes);
  if (a && bytes) memcpy(to, data, bytes);
  return a;
}

array mlxcel::row_major(mc::Stream s, array value) {
  compute(s, {value});
  if (value.flags().row_contiguous) return value;
  value = mc::contiguous(value, false, s);
  compute(s, {value});
  return value;
}

bool mx_elements(mx_scope* s, mx_array* a, void** data) {
  return guarded(s, "elements", {a}, [&] {
    array value = row_major(s->stream->stream, need(a, "the array"));
    a->value = value; // whose memory is handed out
    *data = value.data<void>();
    return true;
  });
}

bool mx_copy_to(mx_scope* s, mx_array* a, void* dst, size_t bytes) {
  return guarded(s, "copy_to", {a}, [&] {
    size_t size = need(a, "the array").nbytes();
    if (size != bytes) throw std::invalid_argument(format("buffer of %zu bytes, want %zu", bytes, size));
    array value = row_major(s->stream->stream, a->value);
    if (bytes) memcpy(dst, value.data<void>(), bytes);
    return true;
  });
}
