// What primitives on our CPU kernels are made of.
#ifndef MLXCEL_MLX_KERNEL_PRIMITIVE_H
#define MLXCEL_MLX_KERNEL_PRIMITIVE_H

#include <cstring>

#include "internal.h"
#include "kernels.h"
#include "mlx/allocator.h"
#include "mlx/backend/cpu/encoder.h"
#include "mlx/primitives.h"

namespace mlxcel {

using Arrays = std::vector<array>;
using Pool = std::shared_ptr<mk_pool>;

inline mk_dtype kernel_dtype(mc::Dtype t) { return t == mc::float32 ? MK_F32 : t == mc::float16 ? MK_F16 : MK_BF16; }

inline void allocate(array& a) {
  a.set_data(mc::allocator::malloc(a.nbytes()));
  if (a.nbytes() > 0 && a.buffer().raw_ptr() == nullptr)
    throw std::runtime_error(format("no memory for %zu bytes", a.nbytes()));
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

std::unique_ptr<MoeBackend> make_kernel_moe(mc::Stream, Pool);
std::unique_ptr<RecurrentBackend> make_kernel_recurrent(mc::Stream, Pool);
std::unique_ptr<LatentBackend> make_kernel_latent(mc::Stream, Pool);
std::unique_ptr<ActivationBackend> make_kernel_activation(mc::Stream, Pool);

} // namespace mlxcel
#endif
