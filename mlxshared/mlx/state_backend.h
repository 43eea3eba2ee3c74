// States of fixed size, and what a back end computes with them.
#ifndef MLXCEL_MLX_STATE_BACKEND_H
#define MLXCEL_MLX_STATE_BACKEND_H

#include <memory>
#include <optional>
#include <vector>

#include "mlx/mlx.h"
#include "state.h"

namespace mlxcel {

// A matrix that one sequence keeps in one layer, zero at first. length counts rows from when their graph is built.
class State {
 public:
  State(int rows, int cols, mlx::core::Dtype dtype) : rows(rows), cols(cols), dtype(dtype) {}
  virtual ~State() = default;
  virtual uint64_t bytes() const = 0;
  virtual std::shared_ptr<State> copy() = 0;
  // The matrix, row-major without padding.
  virtual void read(char* data) = 0;
  virtual void write(const char* data) = 0;
  virtual void abandon() {} // the handle is freed: let go of the graph
  // The array behind the state, if MLX counts it.
  virtual const mlx::core::array* array() const { return nullptr; }

  const int rows, cols;
  const mlx::core::Dtype dtype;
  int64_t length = 0;
};

struct StateSegment {
  std::shared_ptr<State> state;
  int64_t row0, rows, pos;
};
using StateSegments = std::vector<StateSegment>;

// The operations on states; they advance the states' lengths. Arguments have been checked.
class RecurrentBackend {
 public:
  using array = mlx::core::array;
  virtual ~RecurrentBackend() = default;
  virtual std::shared_ptr<State> new_state(int rows, int cols, mlx::core::Dtype dtype) = 0;
  virtual array conv(const array& x, const array& weight, const std::optional<array>& bias, bool silu,
                     const StateSegments&) = 0;
  virtual array scan(const array& x, const array& dt, const array& b, const array& c, const array& a, const array& skip,
                     const StateSegments&) = 0;
  virtual array ssm(const array& xbc, const array& dt, const array& a, const array& skip, const array& dt_bias,
                    const mx_ssm_spec&, const StateSegments&) = 0;
  virtual array delta(const array& qkv, const array& gate, const array& beta, const array& a, const array& gate_bias,
                      const mx_delta_spec&, const StateSegments&) = 0;
  // gate has x's shape, or one element a row.
  virtual array sigmoid_mul(const array& x, const array& gate) = 0;
};

std::unique_ptr<RecurrentBackend> make_mlx_recurrent(mlx::core::Stream);

} // namespace mlxcel

struct mx_state {
  std::shared_ptr<mlxcel::State> state;
  mx_stream* stream;
};

#endif
