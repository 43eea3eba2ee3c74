// What the shim's C++ files share: the back end's interface and the objects behind shim.h's handles.
#ifndef MLXCEL_MLX_INTERNAL_H
#define MLXCEL_MLX_INTERNAL_H

#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "mlx/allocator.h"
#include "mlx/mlx.h"
#include "shim.h"
#include "state_backend.h"

namespace mlxcel {

namespace mc = mlx::core;
using mc::array;

enum class Format { dense, affine, mxfp4, mxfp8, nvfp4 };

// A checked weight matrix [rows, cols]; affine alone has biases, dense no scales.
struct Matrix {
  Format format;
  int bits, group;
  int rows, cols;
  array w;
  std::optional<array> scales, biases;
  std::string mode() const; // as MLX spells the format
};

struct Rope {
  int heads, head_dim, rot_dim;
  float scale;
  bool traditional;
};

// Keys and values of one sequence in one layer. length counts rows from when their graph is built.
class Cache {
 public:
  Cache(int kv_heads, int k_dim, int v_dim, mc::Dtype dtype, bool latent)
      : kv_heads(kv_heads), k_dim(k_dim), v_dim(v_dim), dtype(dtype), latent(latent) {}
  virtual ~Cache() = default;
  virtual uint64_t bytes() const = 0;        // what is shared counts in full
  virtual uint64_t owed() const = 0;         // of these, what the next append copies because others share it
  virtual void truncate(int64_t len) = 0;    // first <= len <= length, or len = 0
  virtual void drop_before(int64_t pos) = 0; // advances first, at most to pos
  virtual std::shared_ptr<Cache> share(int64_t keep) = 0; // the first keep positions; first <= keep <= length, or keep = 0
  virtual void begin(int64_t at) = 0;        // of an empty cache: positions before it are as if dropped
  // n rows of keys [n, kv_heads, k_dim] and of values, of a latent cache keys alone. read's lie within [first, length), and
  // either may be null.
  virtual void read(int64_t pos, int64_t n, char* k, char* v) = 0;
  virtual void append_rows(int64_t n, const char* k, const char* v) = 0;
  virtual void abandon() {} // the handle is freed: let go of the graph
  // The arrays behind the cache, if MLX counts them.
  virtual std::vector<const array*> arrays() const { return {}; }
  size_t key_bytes() const { return size_t(kv_heads) * k_dim * dtype.size(); } // of a row
  size_t value_bytes() const { return latent ? 0 : size_t(kv_heads) * v_dim * dtype.size(); }

  const int kv_heads, k_dim, v_dim;
  const mc::Dtype dtype;
  const bool latent; // the values are the first v_dim elements of the keys
  int64_t length = 0;
  int64_t first = 0; // positions before it were dropped
};

struct Attention {
  int heads, kv_heads, head_dim, value_dim;
  float scale;
  int64_t window;
  float softcap;
  std::optional<array> sinks;
  int64_t chunk = 0; // excludes window, softcap and sinks
};

struct Segment {
  std::shared_ptr<Cache> cache;
  int64_t row0, rows, pos;
};

// How a router chooses; moe.go describes it.
struct Route {
  int experts, top_k, scores; // MX_ROUTE_
  bool normalize;
  float epsilon, scale;
  int groups, top_groups;
  bool high_ties;
  std::optional<array> bias;
};

// The operations of mixtures of experts. Arguments have been checked.
class MoeBackend {
 public:
  virtual ~MoeBackend() = default;
  // x is [rows, cols] or [rows, k, cols], w a stack, ids [rows, k]: [rows, k, w.rows].
  virtual array linear_gather(const array& x, const Matrix& w, const std::optional<array>& bias, const array& ids) = 0;
  virtual std::vector<array> route(const array& logits, const Route& route) = 0; // ids, weights
  virtual array weighted_sum(const array& x, const array& weights) = 0;
  virtual array clamped_swiglu(const array& gate, const array& up, float alpha, float limit) = 0;
};

// What picks the positions of a sparse attention; latent.go describes it.
struct Index {
  int heads, dim;
  int64_t top_k;
  array q, k, weights;
};

// The operations of multi-head latent attention. Arguments have been checked.
class LatentBackend {
 public:
  virtual ~LatentBackend() = default;
  // x is [rows, heads*cols], w a stack of one matrix per head: [rows, heads*w.rows].
  virtual array multi_linear(const array& x, const Matrix& w) = 0;
  // Caches of one head without values of their own. index has the segments over the indexer's caches.
  virtual std::shared_ptr<Cache> new_cache(int k_dim, int v_dim, mc::Dtype dtype) = 0;
  virtual array sparse_attention(const array& q, const array& k, const Attention& spec, const std::vector<Segment>& segments,
                                 const Index& x, const std::vector<Segment>& index) = 0;
};

// Activations made of tanh. Arguments have been checked.
class ActivationBackend {
 public:
  virtual ~ActivationBackend() = default;
  virtual array gelu_mul(const array& gate, const array& up) = 0;
  virtual array softcap(const array& x, float cap) = 0;
};

// The operations that carry a transformer's work. Arguments have been checked.
class Backend {
 public:
  virtual ~Backend() = default;
  virtual array linear(const array& x, const Matrix& w, const std::optional<array>& bias) = 0;
  virtual array embedding(const array& ids, const Matrix& w, mc::Dtype dtype) = 0;
  virtual array rms_norm(const array& x, const std::optional<array>& weight, float eps, float offset) = 0;
  virtual std::vector<array> add_rms_norm(const array& x, const array& y, const std::optional<array>& weight,
                                          float eps, float offset) = 0;
  virtual array rope(const array& x, const array& pos, const array& inv_freq, const Rope& rope) = 0;
  virtual array silu_mul(const array& gate, const array& up) = 0;
  virtual array add(const array& a, const array& b) = 0; // these two broadcast and promote
  virtual array multiply(const array& a, const array& b) = 0;
  virtual array convert(const array& x, mc::Dtype dtype) = 0;
  virtual array concatenate(std::vector<array> parts, int axis) = 0;
  virtual array select_rows(const array& x, const int32_t* rows, int n) = 0;
  // Without k and v the caches hold the rows already; with them, the caches' lengths grow here. Latent caches take no v.
  virtual array attention(const array& q, const std::optional<array>& k, const std::optional<array>& v,
                          const Attention& spec, const std::vector<Segment>& segments) = 0;
  virtual std::shared_ptr<Cache> new_cache(int kv_heads, int k_dim, int v_dim, mc::Dtype dtype) = 0;
  virtual MoeBackend& moe() = 0;
  virtual RecurrentBackend& recurrent() = 0;
  virtual LatentBackend& latent() = 0;
  virtual ActivationBackend& activation() = 0;
  // Bytes of caches and states if they are no arrays of MLX's, each block once, else nothing; and of working memory.
  virtual std::optional<int64_t> held() const { return std::nullopt; }
  virtual uint64_t scratch() const { return 0; }
  virtual void release_scratch() {}
};

std::unique_ptr<Backend> make_kernel_backend(mc::Stream, int threads, int isa);
std::unique_ptr<Backend> make_mlx_backend(mc::Stream);
std::unique_ptr<MoeBackend> make_mlx_moe(mc::Stream);
std::unique_ptr<LatentBackend> make_mlx_latent(mc::Stream);
std::unique_ptr<ActivationBackend> make_mlx_activation(mc::Stream);

// printf into a std::string.
std::string format(const char* spec, ...) __attribute__((format(printf, 1, 2)));
std::string describe(const array&); // "float32[4,8]"
mc::Dtype dtype_of(int number);
inline bool is_float(mc::Dtype t) { return t == mc::float32 || t == mc::float16 || t == mc::bfloat16; }
char* copy_message(const char*); // for a caller that frees it

// Memory that could not be had.
class NoMemory : public std::runtime_error {
 public:
  explicit NoMemory(uint64_t bytes) : std::runtime_error(format("no memory for %llu bytes", (unsigned long long)bytes)) {}
};

// Throws if a test wants the allocation that comes next to fail.
void may_fail();
// MLX's memory; NoMemory where MLX itself would hand out a null pointer.
mc::allocator::Data allocated(size_t bytes);
void* memory_of(const mc::allocator::Data&);

// The exception that is being handled: MX_INVALID, MX_NO_MEMORY or MX_DEVICE, and its text.
struct Caught {
  int kind;
  std::string text;
};
Caught caught() noexcept;
void describe_caught(mx_failure*) noexcept;

// Runs f and describes what it throws.
template <class F>
auto reported(mx_failure* failure, F f) -> decltype(f()) {
  try {
    return f();
  } catch (...) {
    describe_caught(failure);
  }
  return {};
}

// Computes the arrays and what they depend on, and waits for them.
void compute(mc::Stream, std::vector<array>);
// The array's elements, computed and row-major.
array row_major(mc::Stream, array);

} // namespace mlxcel

struct mx_kv {
  std::shared_ptr<mlxcel::Cache> cache;
  mx_stream* stream;
};

struct mx_stream {
  mlx::core::Stream stream;
  std::unique_ptr<mlxcel::Backend> backend;
  int scopes = 0;
  std::vector<mx_kv*> caches;
  std::vector<mx_state*> states;
};

struct mx_array {
  explicit mx_array(mlx::core::array value);
  ~mx_array();
  mlx::core::array value;
  mx_scope* owner = nullptr;
  size_t slot = 0; // in owner->arrays
};

struct mx_scope {
  mx_stream* stream;
  std::vector<mx_array*> arrays;
  bool failed = false;
  int kind = MX_INVALID;
  const char* op = "";
  std::string inputs, reason;

  mx_array* own(mlx::core::array value);
  void adopt(mx_array*);
  void release(mx_array*);
  // Notes the exception that is being handled, unless there was another before.
  void fail(const char* op, mx_array* const* inputs, size_t n) noexcept;
};

namespace mlxcel {

std::string describe_all(mx_array* const* arrays, size_t n);

// Runs f, which builds an array from inputs, and turns what it throws into the scope's error.
template <class F>
auto guarded(mx_scope* s, const char* op, std::initializer_list<mx_array*> inputs, F f) -> decltype(f()) {
  if (s == nullptr || s->failed) return {};
  try {
    return f();
  } catch (...) {
    s->fail(op, inputs.begin(), inputs.size());
  }
  return {};
}

inline const array& need(const mx_array* a, const char* name) {
  if (a == nullptr) throw std::invalid_argument(std::string(name) + " is the zero array");
  return a->value;
}

inline std::optional<array> maybe(const mx_array* a) {
  return a == nullptr ? std::nullopt : std::optional<array>(a->value);
}

} // namespace mlxcel
#endif
