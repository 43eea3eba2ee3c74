// The back end on our CPU kernels: each operation is one MLX primitive, so the rest of MLX works around it.
#include <algorithm>
#include <cstring>

#include "internal.h"
#include "kernels.h"
#include "mlx/allocator.h"
#include "mlx/backend/cpu/encoder.h"
#include "mlx/primitives.h"

namespace mlxcel {

namespace {

using Arrays = std::vector<array>;
using Pool = std::shared_ptr<mk_pool>;

mk_dtype kernel_dtype(mc::Dtype t) { return t == mc::float32 ? MK_F32 : t == mc::float16 ? MK_F16 : MK_BF16; }

void allocate(array& a) {
  a.set_data(mc::allocator::malloc(a.nbytes()));
  if (a.nbytes() > 0 && a.buffer().raw_ptr() == nullptr)
    throw std::runtime_error(format("no memory for %zu bytes", a.nbytes()));
}

// Copies an array of any strides to a row-major one.
void copy_strided(const char* from, char* to, const mc::Shape& shape, const mc::Strides& strides, size_t item) {
  size_t inner = 1; // trailing elements that lie together
  int dims = static_cast<int>(shape.size());
  while (dims > 0 && (shape[dims - 1] == 1 || strides[dims - 1] == static_cast<int64_t>(inner))) inner *= shape[--dims];
  std::vector<int> at(dims, 0);
  for (;;) {
    int64_t offset = 0;
    for (int i = 0; i < dims; i++) offset += at[i] * strides[i];
    memcpy(to, from + offset * static_cast<int64_t>(item), inner * item);
    to += inner * item;
    int i = dims - 1;
    while (i >= 0 && ++at[i] == shape[i]) at[i--] = 0;
    if (i < 0) return;
  }
}

// A primitive that runs on a kernel pool.
class KernelPrimitive : public mc::Primitive {
 public:
  KernelPrimitive(mc::Stream s, Pool pool) : Primitive(s), pool_(std::move(pool)) {}
  void eval_gpu(const Arrays&, Arrays&) override { throw std::runtime_error(std::string(name()) + " runs on the cpu only"); }

 protected:
  mc::cpu::CommandEncoder& encoder() { return mc::cpu::get_command_encoder(stream()); }

  // The elements of a, row-major: a's own, or those of a temporary that a task before this primitive's fills.
  const void* dense(const array& a) {
    if (a.flags().row_contiguous) return a.data<void>();
    array copy(a.shape(), a.dtype(), nullptr, {});
    allocate(copy);
    auto& e = encoder();
    e.add_temporary(copy);
    e.dispatch([from = a.data<char>(), to = copy.data<char>(), shape = a.shape(), strides = a.strides(), item = a.itemsize()] {
      copy_strided(from, to, shape, strides, item);
    });
    return copy.data<void>();
  }

  // Gives out the memory of in if nobody else needs it, else new memory. Only for kernels that work in place.
  void allocate_or_donate(const array& in, array& out) {
    if (in.is_donatable() && in.flags().row_contiguous && in.nbytes() == out.nbytes())
      out.copy_shared_buffer(in);
    else
      allocate(out);
  }

  Pool pool_;
};

// The weight's inputs follow the primitive's own: w, then scales and biases as the format has them.
struct WeightInputs {
  explicit WeightInputs(const Matrix& m)
      : kernel{static_cast<mk_format>(m.format), MK_F32, m.bits, m.group, m.rows, m.cols, nullptr, nullptr, nullptr} {
    if (m.format == Format::dense) kernel.dtype = kernel_dtype(m.w.dtype());
    if (m.format == Format::affine) kernel.dtype = kernel_dtype(m.scales->dtype());
    mk_matrix probe = kernel; // the kernels look at the description; any address will do
    probe.data = probe.scales = probe.biases = &probe;
    if (const char* why = mk_matrix_check(&probe))
      throw std::invalid_argument(format("%s weight [%d,%d], %d bits, group %d: %s", m.mode().c_str(), m.rows, m.cols, m.bits,
                                         m.group, why));
  }

  static void append(const Matrix& m, Arrays& inputs) {
    inputs.push_back(m.w);
    if (m.scales) inputs.push_back(*m.scales);
    if (m.biases) inputs.push_back(*m.biases);
  }

  mk_matrix kernel;
};

static_assert(int(Format::dense) == MK_DENSE && int(Format::affine) == MK_AFFINE && int(Format::mxfp4) == MK_MXFP4 &&
              int(Format::mxfp8) == MK_MXFP8 && int(Format::nvfp4) == MK_NVFP4);

class WeightPrimitive : public KernelPrimitive {
 public:
  WeightPrimitive(mc::Stream s, Pool pool, const Matrix& m) : KernelPrimitive(s, std::move(pool)), weight_(m) {}

 protected:
  // Takes the weight's arrays from inputs at i, and moves i past them.
  mk_matrix weight(const Arrays& inputs, size_t& i) {
    mk_matrix m = weight_.kernel;
    m.data = dense(inputs[i++]);
    if (m.format != MK_DENSE) m.scales = dense(inputs[i++]);
    if (m.format == MK_AFFINE) m.biases = dense(inputs[i++]);
    return m;
  }

 private:
  WeightInputs weight_;
};

class Linear final : public WeightPrimitive {
 public:
  using WeightPrimitive::WeightPrimitive;
  const char* name() const override { return "linear"; }

  void eval_cpu(const Arrays& in, Arrays& out) override {
    allocate(out[0]);
    size_t i = 1;
    const void* x = dense(in[0]);
    mk_matrix w = weight(in, i);
    const void* bias = i < in.size() ? dense(in[i]) : nullptr;
    mk_dtype bias_type = bias ? kernel_dtype(in[i].dtype()) : MK_F32;
    encoder().dispatch([pool = pool_, w, bias, bias_type, x, t = kernel_dtype(in[0].dtype()), y = out[0].data<void>(),
                        rows = static_cast<int64_t>(in[0].size()) / w.cols] {
      mk_linear(pool.get(), &w, bias, bias_type, x, t, y, rows);
    });
  }
};

class Embedding final : public WeightPrimitive {
 public:
  using WeightPrimitive::WeightPrimitive;
  const char* name() const override { return "embedding"; }

  void eval_cpu(const Arrays& in, Arrays& out) override {
    allocate(out[0]);
    size_t i = 1;
    auto* ids = static_cast<const int32_t*>(dense(in[0]));
    mk_matrix w = weight(in, i);
    encoder().dispatch([pool = pool_, w, ids, n = static_cast<int64_t>(in[0].size()), y = out[0].data<void>(),
                        t = kernel_dtype(out[0].dtype())] {
      for (int64_t i = 0; i < n; i++)
        if (ids[i] < 0 || ids[i] >= w.rows)
          throw std::out_of_range(format("embedding: id %d, want 0 to %lld", ids[i], static_cast<long long>(w.rows) - 1));
      mk_embed(pool.get(), &w, ids, n, y, t);
    });
  }
};

class RmsNorm final : public KernelPrimitive {
 public:
  RmsNorm(mc::Stream s, Pool pool, float eps, float offset)
      : KernelPrimitive(s, std::move(pool)), eps_(eps), offset_(offset) {}
  const char* name() const override { return "rms_norm"; }

  void eval_cpu(const Arrays& in, Arrays& out) override {
    allocate(out[0]);
    const void* x = dense(in[0]);
    const void* weight = in.size() > 1 ? dense(in[1]) : nullptr;
    int64_t dim = in[0].shape(-1);
    encoder().dispatch([pool = pool_, x, t = kernel_dtype(in[0].dtype()), weight,
                        wt = weight ? kernel_dtype(in[1].dtype()) : MK_F32, offset = offset_, eps = eps_, dim,
                        rows = static_cast<int64_t>(in[0].size()) / dim, y = out[0].data<void>()] {
      mk_rms_norm(pool.get(), x, t, weight, wt, offset, eps, rows, dim, y);
    });
  }

 private:
  float eps_, offset_;
};

template <class T>
void add_rows(const void* a, const void* b, void* sum, size_t n) {
  auto *x = static_cast<const T*>(a), *y = static_cast<const T*>(b);
  auto* z = static_cast<T*>(sum);
  for (size_t i = 0; i < n; i++) z[i] = static_cast<T>(static_cast<float>(x[i]) + static_cast<float>(y[i]));
}

class AddRmsNorm final : public KernelPrimitive {
 public:
  AddRmsNorm(mc::Stream s, Pool pool, float eps, float offset)
      : KernelPrimitive(s, std::move(pool)), eps_(eps), offset_(offset) {}
  const char* name() const override { return "add_rms_norm"; }

  void eval_cpu(const Arrays& in, Arrays& out) override {
    allocate(out[0]);
    allocate(out[1]);
    const void *x = dense(in[0]), *y = dense(in[1]);
    const void* weight = in.size() > 2 ? dense(in[2]) : nullptr;
    int64_t dim = in[0].shape(-1);
    encoder().dispatch([pool = pool_, x, y, t = kernel_dtype(in[0].dtype()), weight,
                        wt = weight ? kernel_dtype(in[2].dtype()) : MK_F32, offset = offset_, eps = eps_, dim,
                        n = in[0].size(), sum = out[0].data<void>(), norm = out[1].data<void>()] {
      switch (t) {
        case MK_F32: add_rows<float>(x, y, sum, n); break;
        case MK_F16: add_rows<mc::float16_t>(x, y, sum, n); break;
        case MK_BF16: add_rows<mc::bfloat16_t>(x, y, sum, n); break;
      }
      mk_rms_norm(pool.get(), sum, t, weight, wt, offset, eps, static_cast<int64_t>(n) / dim, dim, norm);
    });
  }

 private:
  float eps_, offset_;
};

class Rotary final : public KernelPrimitive {
 public:
  Rotary(mc::Stream s, Pool pool, const Rope& rope) : KernelPrimitive(s, std::move(pool)), rope_(rope) {}
  const char* name() const override { return "rope"; }

  void eval_cpu(const Arrays& in, Arrays& out) override {
    allocate_or_donate(in[0], out[0]);
    const void* x = dense(in[0]);
    auto* pos = static_cast<const int32_t*>(dense(in[1]));
    auto* inv_freq = static_cast<const float*>(dense(in[2]));
    encoder().dispatch([pool = pool_, r = rope_, x, t = kernel_dtype(in[0].dtype()), pos, inv_freq,
                        rows = static_cast<int64_t>(in[0].shape(0)), y = out[0].data<void>()] {
      mk_rope(pool.get(), x, t, pos, inv_freq, rows, r.heads, r.head_dim, r.rot_dim, r.scale, r.traditional, y);
    });
  }

 private:
  Rope rope_;
};

class SiluMul final : public KernelPrimitive {
 public:
  using KernelPrimitive::KernelPrimitive;
  const char* name() const override { return "silu_mul"; }

  void eval_cpu(const Arrays& in, Arrays& out) override {
    allocate(out[0]);
    const void *gate = dense(in[0]), *up = dense(in[1]);
    encoder().dispatch([pool = pool_, gate, up, t = kernel_dtype(in[0].dtype()), n = static_cast<int64_t>(in[0].size()),
                        y = out[0].data<void>()] { mk_silu_mul(pool.get(), gate, up, t, n, y); });
  }
};

class BlockCache final : public Cache {
 public:
  BlockCache(int kv_heads, int k_dim, int v_dim, mc::Dtype dtype, mk_kv* kv)
      : Cache(kv_heads, k_dim, v_dim, dtype), kv(kv) {
    if (kv == nullptr) throw std::runtime_error("no memory for a cache");
    length = mk_kv_len(kv);
  }
  ~BlockCache() override { mk_kv_free(kv); }

  uint64_t bytes() const override { return mk_kv_bytes(kv); }

  void truncate(int64_t len) override {
    int64_t held = mk_kv_len(kv);
    if (len > held) throw std::runtime_error(format("only %lld positions were evaluated", static_cast<long long>(held)));
    mk_kv_truncate(kv, len);
    length = len;
    last.reset();
  }

  void drop_before(int64_t pos) override {
    pos = std::min(pos, mk_kv_len(kv)); // the graph may be ahead
    mk_kv_drop_before(kv, pos);
    first = std::max(first, pos / MK_KV_BLOCK * MK_KV_BLOCK);
  }

  std::shared_ptr<Cache> fork() override {
    if (mk_kv_len(kv) != length)
      throw std::runtime_error(format("%lld positions were not evaluated yet", static_cast<long long>(length - mk_kv_len(kv))));
    auto copy = std::make_shared<BlockCache>(kv_heads, k_dim, v_dim, dtype, mk_kv_fork(kv));
    copy->first = first;
    return copy;
  }

  void evaluated() override {
    if (last && last->status() != array::Status::unscheduled) last.reset();
  }
  void abandon() override { last.reset(); }

  mk_kv* const kv;
  // The last attention built on this cache and not evaluated yet. The next one takes it as an input, since MLX
  // would else be free to run them in any order.
  std::optional<array> last;
};

struct BlockSegment {
  std::shared_ptr<BlockCache> cache;
  int64_t row0, rows, pos;
};

class CachedAttention final : public KernelPrimitive {
 public:
  CachedAttention(mc::Stream s, Pool pool, const Attention& spec, bool append, std::vector<BlockSegment> segments)
      : KernelPrimitive(s, std::move(pool)), heads_(spec.heads), scale_(spec.scale), window_(spec.window),
        softcap_(spec.softcap), append_(append), sinks_(spec.sinks.has_value()), segments_(std::move(segments)) {}
  const char* name() const override { return "attention"; }

  // Inputs: q, then k and v if it appends, then sinks if there are any, then the attentions to run after.
  void eval_cpu(const Arrays& in, Arrays& out) override {
    allocate(out[0]);
    size_t i = 0;
    const void* q = dense(in[i++]);
    const char *k = nullptr, *v = nullptr;
    size_t k_row = 0, v_row = 0; // bytes
    if (append_) {
      k_row = in[i].nbytes() / in[i].shape(0);
      k = static_cast<const char*>(dense(in[i++]));
      v_row = in[i].nbytes() / in[i].shape(0);
      v = static_cast<const char*>(dense(in[i++]));
    }
    auto* sinks = sinks_ ? static_cast<const float*>(dense(in[i++])) : nullptr;
    encoder().dispatch([pool = pool_, q, t = kernel_dtype(in[0].dtype()), k, v, k_row, v_row, sinks, heads = heads_,
                        scale = scale_, window = window_, softcap = softcap_, segments = std::move(segments_),
                        y = out[0].data<void>()] {
      std::vector<mk_segment> parts;
      parts.reserve(segments.size());
      for (auto& g : segments) {
        if (k && mk_kv_append(g.cache->kv, g.pos, k + g.row0 * k_row, v + g.row0 * v_row, g.rows) != 0)
          throw std::runtime_error(format("attention: no memory for %lld positions, or the cache holds %lld, want %lld",
                                          static_cast<long long>(g.rows), static_cast<long long>(mk_kv_len(g.cache->kv)),
                                          static_cast<long long>(g.pos)));
        if (mk_kv_len(g.cache->kv) < g.pos + g.rows) throw std::runtime_error("attention: the cache lost positions");
        parts.push_back({g.cache->kv, g.row0, g.rows, g.pos});
      }
      mk_attention(pool.get(), q, t, heads, scale, window, softcap, sinks, parts.data(), static_cast<int64_t>(parts.size()), y);
    });
  }

 private:
  int heads_;
  float scale_;
  int64_t window_;
  float softcap_;
  bool append_, sinks_;
  std::vector<BlockSegment> segments_;
};

class KernelBackend final : public Backend {
 public:
  KernelBackend(mc::Stream s, Pool pool) : stream_(s), pool_(std::move(pool)) {}

  array linear(const array& x, const Matrix& w, const std::optional<array>& bias) override {
    mc::Shape shape = x.shape();
    shape.back() = w.rows;
    Arrays inputs{x};
    WeightInputs::append(w, inputs);
    if (bias) inputs.push_back(*bias);
    return array(std::move(shape), x.dtype(), std::make_shared<Linear>(stream_, pool_, w), std::move(inputs));
  }

  array embedding(const array& ids, const Matrix& w, mc::Dtype dtype) override {
    mc::Shape shape = ids.shape();
    shape.push_back(w.cols);
    Arrays inputs{ids};
    WeightInputs::append(w, inputs);
    return array(std::move(shape), dtype, std::make_shared<Embedding>(stream_, pool_, w), std::move(inputs));
  }

  array rms_norm(const array& x, const std::optional<array>& weight, float eps, float offset) override {
    Arrays inputs{x};
    if (weight) inputs.push_back(*weight);
    return array(x.shape(), x.dtype(), std::make_shared<RmsNorm>(stream_, pool_, eps, offset), std::move(inputs));
  }

  Arrays add_rms_norm(const array& x, const array& y, const std::optional<array>& weight, float eps,
                      float offset) override {
    Arrays inputs{x, y};
    if (weight) inputs.push_back(*weight);
    return array::make_arrays({x.shape(), x.shape()}, {x.dtype(), x.dtype()},
                              std::make_shared<AddRmsNorm>(stream_, pool_, eps, offset), inputs);
  }

  array rope(const array& x, const array& pos, const array& inv_freq, const Rope& rope) override {
    return array(x.shape(), x.dtype(), std::make_shared<Rotary>(stream_, pool_, rope), {x, pos, inv_freq});
  }

  array silu_mul(const array& gate, const array& up) override {
    return array(gate.shape(), gate.dtype(), std::make_shared<SiluMul>(stream_, pool_), {gate, up});
  }

  array attention(const array& q, const std::optional<array>& k, const std::optional<array>& v, const Attention& spec,
                  const std::vector<Segment>& segments) override {
    Arrays inputs{q};
    std::vector<BlockSegment> parts;
    parts.reserve(segments.size());
    for (auto& g : segments)
      parts.push_back({std::static_pointer_cast<BlockCache>(g.cache), g.row0, g.rows, g.pos});
    if (k) {
      inputs.push_back(mc::astype(*k, segments[0].cache->dtype, stream_));
      inputs.push_back(mc::astype(*v, segments[0].cache->dtype, stream_));
    }
    if (spec.sinks) inputs.push_back(*spec.sinks);
    for (auto& g : parts) {
      if (g.cache->dtype != parts[0].cache->dtype) throw std::invalid_argument("the segments' caches differ in dtype");
      if (g.cache->last) inputs.push_back(*g.cache->last);
    }
    auto out = array({q.shape(0), spec.heads * spec.value_dim}, q.dtype(),
                     std::make_shared<CachedAttention>(stream_, pool_, spec, k.has_value(), parts), std::move(inputs));
    for (auto& g : parts) {
      g.cache->last = out;
      if (k) g.cache->length += g.rows;
    }
    return out;
  }

  std::shared_ptr<Cache> new_cache(int kv_heads, int k_dim, int v_dim, mc::Dtype dtype) override {
    return std::make_shared<BlockCache>(kv_heads, k_dim, v_dim, dtype, mk_kv_new(kv_heads, k_dim, v_dim, kernel_dtype(dtype)));
  }

 private:
  mc::Stream stream_;
  Pool pool_;
};

} // namespace

static_assert(MX_ISA_AUTO == int(MK_ISA_AUTO) && MX_ISA_PLAIN == int(MK_ISA_PLAIN) && MX_ISA_AVX2 == int(MK_ISA_AVX2) &&
              MX_ISA_AVX512 == int(MK_ISA_AVX512) && MX_ISA_NEON == int(MK_ISA_NEON));

std::unique_ptr<Backend> make_kernel_backend(mc::Stream s, int threads, int isa) {
  Pool pool(mk_pool_new(threads, static_cast<mk_isa>(isa)), mk_pool_free);
  if (!pool) throw std::runtime_error(format("this machine cannot start %d kernel threads of that instruction set", threads));
  return std::make_unique<KernelBackend>(s, std::move(pool));
}

} // namespace mlxcel
