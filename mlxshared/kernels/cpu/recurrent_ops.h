// What every instruction set implements of recurrent.h: each function runs a range of units of one segment-by-block grid.
#ifndef MLXCEL_KERNELS_CPU_RECURRENT_OPS_H
#define MLXCEL_KERNELS_CPU_RECURRENT_OPS_H

#include "pool.h"
#include "recurrent.h"

namespace mk {

// Units of all jobs: unit u is block u % blocks of segment u / blocks.

struct ConvJob {
  mk_conv spec;
  const float *weight, *bias;
  const unsigned char *x;
  mk_dtype dtype;
  const mk_recurrent_segment *segments;
  unsigned char *y;
};

struct ScanJob {
  mk_scan spec;
  const float *a, *skip;
  const unsigned char *x, *dt, *b, *c;
  mk_dtype dtype;
  const mk_recurrent_segment *segments;
  unsigned char *y;
};

struct SsmJob {
  mk_ssm spec;
  const float *a, *skip, *dt_bias;
  const unsigned char *xbc, *dt;
  mk_dtype dtype;
  const mk_recurrent_segment *segments;
  unsigned char *y;
};

struct DeltaJob {
  mk_delta spec;
  const float *a, *gate_bias;
  const unsigned char *qkv, *gate, *beta;
  mk_dtype dtype;
  const mk_recurrent_segment *segments;
  unsigned char *y;
};

// Values of a head that one unit of the delta rule keeps in registers.
constexpr int kDeltaValues = 64;

struct SigmoidMulJob {
  const unsigned char *x, *gate;
  mk_dtype dtype;
  int64_t dim, gate_dim;
  unsigned char *y;
};

struct RecurrentOps {
  void (*conv)(const ConvJob &, int64_t begin, int64_t end);            // blocks of sixteen channels
  void (*scan)(const ScanJob &, int64_t begin, int64_t end, Worker &);  // blocks of sixteen channels
  void (*ssm)(const SsmJob &, int64_t begin, int64_t end, Worker &);    // heads
  void (*delta)(const DeltaJob &, int64_t begin, int64_t end, Worker &); // kDeltaValues values of one head
  void (*sigmoid_mul)(const SigmoidMulJob &, int64_t begin, int64_t end); // rows
};

} // namespace mk

#endif
