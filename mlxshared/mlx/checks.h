// Checks of operations' arguments, shared by the files that face C.
#ifndef MLXCEL_MLX_CHECKS_H
#define MLXCEL_MLX_CHECKS_H

#include "internal.h"

namespace mlxcel {

// A macro, so that the message is made only where it is needed: these checks run for every op of every step.
#define want(holds, message)                            \
  do {                                                  \
    if (!(holds)) throw std::invalid_argument(message); \
  } while (false)

inline void want_float(const array& a, const char* name) {
  want(is_float(a.dtype()), format("%s is %s, want float32, float16 or bfloat16", name, describe(a).c_str()));
}

inline void want_vector(const array& a, const char* name, int size) {
  want(a.ndim() == 1 && a.shape(0) == size, format("%s is %s, want [%d]", name, describe(a).c_str(), size));
}

// A weight whose shape is `leading` dimensions, then [rows, cols].
Matrix checked_matrix(const mx_matrix&, int leading = 0);

// Rows [rows, width], flat or by heads.
void want_heads(const array&, const char* name, int rows, int width);

Attention checked_attention(const mx_attention_spec&);
// Segments that cover `rows` rows over caches that fit the attention; with append, the rows come after what they hold.
std::vector<Segment> checked_segments(const mx_segment*, int n, int rows, bool append, const Attention&, mx_stream*);

} // namespace mlxcel
#endif
