// Package mlx owns arrays, streams and caches: a thin, explicit binding of MLX's C++ API.
//
// Ownership is explicit; nothing is freed by the garbage collector. A Stream belongs to one stage and is used by
// one goroutine at a time. Arrays are made by a Scope and die with it, all at once, except those that Keep moved
// to the caller. MLX's operations build a graph, which Scope.Eval runs; those on our CPU kernels run at once. The first
// operation that fails stores its error in the scope, later ones return the zero Array, and Eval or Err reports the
// failure, so that a forward pass needs a single check.
//
// Hidden states are flat [rows, width] over all sequences of a micro-batch. Every heavy operation is row-wise;
// only Attention knows, by its segments, which rows belong to which sequence.
package mlx
