// Arrays, scopes and streams.
#include <algorithm>
#include <atomic>
#include <cstdarg>
#include <cstring>
#include <mutex>

#ifdef __linux__
#include <sys/mman.h>
#endif

#include "internal.h"

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

} // namespace mlxcel

mx_array::mx_array(mc::array value) : value(std::move(value)) { live_arrays.fetch_add(1, std::memory_order_relaxed); }
mx_array::~mx_array() { live_arrays.fetch_sub(1, std::memory_order_relaxed); }

mx_array* mx_scope::own(mc::array value) {
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

void mx_scope::fail(const char* op_name, std::string in, std::string why) {
  if (failed) return;
  failed = true;
  op = op_name;
  inputs = std::move(in);
  reason = std::move(why);
}

// Streams.

mx_stream* mx_stream_open(bool gpu, bool kernels, int threads, int isa, char** error) try {
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
} catch (const std::exception& e) {
  *error = copy_message(e.what());
  return nullptr;
}

bool mx_stream_close(mx_stream* s, char** error) {
  if (size_t held = s->caches.size() + s->states.size(); s->scopes > 0 || held > 0) {
    *error = copy_message(format("%d scopes and %zu caches are still open", s->scopes, held).c_str());
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
  if (s == nullptr) return nullptr;
  s->scopes++;
  auto* scope = new mx_scope{s};
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

void mx_scope_adopt(mx_scope* s, mx_array* a) {
  if (a->owner == nullptr) s->adopt(a);
}

const char* mx_scope_error(mx_scope* s, int part) {
  return part == 0 ? s->op.c_str() : part == 1 ? s->inputs.c_str() : s->reason.c_str();
}

void mlxcel::compute(mc::Stream s, std::vector<array> arrays) {
  if (std::all_of(arrays.begin(), arrays.end(), [](const array& a) { return a.is_available(); })) return;
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
  } catch (const std::exception& e) {
    s->fail("eval", describe_all(list, n), e.what());
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
    auto buffer = mc::allocator::malloc(bytes);
    *data = bytes ? mc::allocator::Buffer(buffer.buffer()).raw_ptr() : nullptr;
    if (bytes && *data == nullptr) throw std::runtime_error(format("no memory for %zu bytes", bytes));
    want_huge_pages(*data, bytes);
    *size = bytes;
    return s->own(array(std::move(buffer), mc::Shape(shape, shape + ndim), t));
  });
}

mx_array* mx_from_bytes(mx_scope* s, const void* data, size_t bytes, int dtype, const int* shape, int ndim) {
  void* to = nullptr;
  mx_array* a = mx_uninitialized(s, dtype, shape, ndim, &to, &bytes);
  if (a && bytes) memcpy(to, data, bytes);
  return a;
}

// The value of a, computed and row-major.
static array row_major(mx_scope* s, const mx_array* a) {
  array value = need(a, "the array");
  compute(s->stream->stream, {value});
  if (value.flags().row_contiguous) return value;
  value = mc::contiguous(value, false, s->stream->stream);
  compute(s->stream->stream, {value});
  return value;
}

bool mx_elements(mx_scope* s, mx_array* a, void** data) {
  return guarded(s, "elements", {a}, [&] {
    array value = row_major(s, a);
    a->value = value; // whose memory is handed out
    *data = value.data<void>();
    return true;
  });
}

bool mx_copy_to(mx_scope* s, mx_array* a, void* dst, size_t bytes) {
  return guarded(s, "copy_to", {a}, [&] {
    size_t size = need(a, "the array").nbytes();
    if (size != bytes) throw std::invalid_argument(format("buffer of %zu bytes, want %zu", bytes, size));
    array value = row_major(s, a);
    if (bytes) memcpy(dst, value.data<void>(), bytes);
    return true;
  });
}
