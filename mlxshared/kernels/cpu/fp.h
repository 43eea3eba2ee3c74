// Included before any code that computes: no multiplication and addition may be fused unless the source says so, and
// functions of the C library keep no errno. cgo lets a package pass no flags for that, so pragmas do it.
#ifndef MLXCEL_KERNELS_CPU_FP_H
#define MLXCEL_KERNELS_CPU_FP_H

#if defined(__clang__)
#pragma STDC FP_CONTRACT OFF
#elif defined(__GNUC__)
#pragma GCC optimize("fp-contract=off", "no-math-errno")
#endif

#endif
