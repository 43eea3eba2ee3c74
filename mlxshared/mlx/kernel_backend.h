// What the back ends on our CPU kernels share: how they see arrays. Their operations run at once, on the caller's thread: kernels
// take all of a processor, and a graph of them would only be built, walked and handed to another thread beside the work.
#ifndef MLXCEL_MLX_KERNEL_BACKEND_H
#define MLXCEL_MLX_KERNEL_BACKEND_H

#include <cstring>

#include "internal.h"
#include "kernels.h"

namespace mlxcel {

using Arrays = std::vector<array>;
using Pool = std::shared_ptr<mk_pool>;

inline mk_dtype kernel_dtype(mc::Dtype t) { return t == mc::float32 ? MK_F32 : t == mc::float16 ? MK_F16 : MK_BF16; }
inline mk_dtype kernel_dtype(const array& a) { return kernel_dtype(a.dtype()); }
inline mk_dtype kernel_dtype(const std::optional<array>& a) { return a ? kernel_dtype(a->dtype()) : MK_F32; }

// Throws what a kernel reports.
inline void checked(mk_result r) {
  if (r > 0) throw NoMemory(static_cast<uint64_t>(r));
  if (r < 0) throw std::logic_error("the positions do not fit what the cache holds");
}

// A row-major array for a kernel to fill.
inline array fresh(mc::Shape shape, mc::Dtype dtype) {
  size_t bytes = dtype.size();
  for (int n : shape) bytes *= n;
  return array(allocated(bytes), std::move(shape), dtype);
}

// Copies an array of any strides to a row-major one.
inline void copy_strided(const char* from, char* to, const mc::Shape& shape, const mc::Strides& strides, size_t item) {
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

// A weight as kernels take it, and the arrays that it points into.
struct KernelMatrix {
  mk_matrix kernel;
  array data;
  std::optional<array> scales, biases;
};

static_assert(int(Format::dense) == MK_DENSE && int(Format::affine) == MK_AFFINE && int(Format::mxfp4) == MK_MXFP4 &&
              int(Format::mxfp8) == MK_MXFP8 && int(Format::nvfp4) == MK_NVFP4);

// A back end's share of this: it derives from it.
class KernelOps {
 public:
  KernelOps(mc::Stream s, Pool pool) : stream_(s), pool_(std::move(pool)) {}

 protected:
  // The elements of a, row-major: a itself, if it is computed and lies so.
  array dense(const array& a) const {
    if (!a.is_available()) compute(stream_, {a});
    if (a.flags().row_contiguous) return a;
    array copy = fresh(a.shape(), a.dtype());
    copy_strided(a.data<char>(), copy.data<char>(), a.shape(), a.strides(), a.itemsize());
    return copy;
  }

  std::optional<array> dense(const std::optional<array>& a) const {
    if (!a) return std::nullopt;
    return dense(*a);
  }

  // dense(a) in a dtype of floats.
  array dense_as(const array& a, mc::Dtype dtype) const {
    array x = dense(a);
    if (x.dtype() == dtype) return x;
    array y = fresh(x.shape(), dtype);
    mk_convert(pool(), x.data<void>(), kernel_dtype(x), x.size(), y.data<void>(), kernel_dtype(y));
    return y;
  }

  KernelMatrix dense(const Matrix& m) const {
    KernelMatrix w{{static_cast<mk_format>(m.format), MK_F32, m.bits, m.group, m.rows, m.cols, nullptr, nullptr, nullptr},
                   dense(m.w), dense(m.scales), dense(m.biases)};
    if (m.format == Format::dense) w.kernel.dtype = kernel_dtype(m.w);
    if (m.format == Format::affine) w.kernel.dtype = kernel_dtype(*m.scales);
    w.kernel.data = w.data.data<void>();
    if (w.scales) w.kernel.scales = w.scales->data<void>();
    if (w.biases) w.kernel.biases = w.biases->data<void>();
    if (const char* why = mk_matrix_check(&w.kernel))
      throw std::invalid_argument(format("%s weight [%d,%d], %d bits, group %d: %s", m.mode().c_str(), m.rows, m.cols, m.bits,
                                         m.group, why));
    return w;
  }

  mk_pool* pool() const { return pool_.get(); }

  mc::Stream stream_; // where MLX computes what it is left
  Pool pool_;
};

inline const void* data(const std::optional<array>& a) { return a ? a->data<void>() : nullptr; }

std::unique_ptr<MoeBackend> make_kernel_moe(mc::Stream, Pool);
// held counts the bytes of states and of blocks, each once.
std::unique_ptr<RecurrentBackend> make_kernel_recurrent(mc::Stream, Pool, std::shared_ptr<int64_t> held);
std::unique_ptr<LatentBackend> make_kernel_latent(mc::Stream, Pool, std::shared_ptr<int64_t> held);
std::unique_ptr<ActivationBackend> make_kernel_activation(mc::Stream, Pool);

} // namespace mlxcel
#endif
