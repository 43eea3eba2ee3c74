// What the shim's C++ files share: the back end's interface and the objects behind shim.h's handles.
#ifndef MLXCEL_MLX_INTERNAL_H
#define MLXCEL_MLX_INTERNAL_H

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "mlx/mlx.h"
#include "shim.h"

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
  Cache(int kv_heads, int k_dim, int v_dim, mc::Dtype dtype)
      : kv_heads(kv_heads), k_dim(k_dim), v_dim(v_dim), dtype(dtype) {}
  virtual ~Cache() = default;
  virtual uint64_t bytes() const = 0;
  virtual bool counted_by_mlx() const { return false; } // bytes are within MLX's active memory
  virtual void truncate(int64_t len) = 0;    // first <= len <= length
  virtual void drop_before(int64_t pos) = 0; // advances first, at most to pos
  virtual std::shared_ptr<Cache> fork() = 0;
  virtual void evaluated() {} // the graph built so far has run
  virtual void abandon() {}   // the handle is freed: let go of the graph

  const int kv_heads, k_dim, v_dim;
  const mc::Dtype dtype;
  int64_t length = 0;
  int64_t first = 0; // positions before it were dropped
};

struct Attention {
  int heads, kv_heads, head_dim, value_dim;
  float scale;
  int64_t window;
  float softcap;
  std::optional<array> sinks;
};

struct Segment {
  std::shared_ptr<Cache> cache;
  int64_t row0, rows, pos;
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
  // Without k and v the caches hold the rows already; with them, the caches' lengths grow here.
  virtual array attention(const array& q, const std::optional<array>& k, const std::optional<array>& v,
                          const Attention& spec, const std::vector<Segment>& segments) = 0;
  virtual std::shared_ptr<Cache> new_cache(int kv_heads, int k_dim, int v_dim, mc::Dtype dtype) = 0;
};

std::unique_ptr<Backend> make_kernel_backend(mc::Stream, int threads, int isa);
std::unique_ptr<Backend> make_mlx_backend(mc::Stream);

// printf into a std::string.
std::string format(const char* spec, ...) __attribute__((format(printf, 1, 2)));
std::string describe(const array&); // "float32[4,8]"
mc::Dtype dtype_of(int number);
char* copy_message(const char*); // for a caller that frees it

} // namespace mlxcel

struct mx_kv {
  std::shared_ptr<mlxcel::Cache> cache;
  mx_stream* stream;
  bool pending = false; // in stream->pending
};

struct mx_stream {
  mlx::core::Stream stream;
  std::unique_ptr<mlxcel::Backend> backend;
  int scopes = 0;
  std::vector<mx_kv*> caches;
  std::vector<mx_kv*> pending; // caches that the graph built since the last evaluation writes
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
  std::string op, inputs, reason;

  mx_array* own(mlx::core::array value);
  void adopt(mx_array*);
  void release(mx_array*);
  void fail(const char* op, std::string inputs, std::string reason);
};

namespace mlxcel {

std::string describe_all(mx_array* const* arrays, size_t n);

// Runs f, which builds an array from inputs, and turns what it throws into the scope's error.
template <class F>
auto guarded(mx_scope* s, const char* op, std::initializer_list<mx_array*> inputs, F f) -> decltype(f()) {
  if (s == nullptr || s->failed) return {};
  try {
    return f();
  } catch (const std::exception& e) {
    s->fail(op, describe_all(inputs.begin(), inputs.size()), e.what());
  } catch (...) {
    s->fail(op, describe_all(inputs.begin(), inputs.size()), "unknown failure");
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
