package mlx

// MLX and its headers come from the PyPI wheel, unpacked under .deps of the checkout. A built binary looks for the
// library next to itself (lib/mlx/lib beside or above its folder), so that bin/ can be moved as a whole.

// #cgo CXXFLAGS: -std=c++20 -O2 -fvisibility=hidden -I${SRCDIR}/../../.deps/mlx/include -I${SRCDIR}/../kernels/cpu
// #cgo LDFLAGS: -L${SRCDIR}/../../.deps/mlx/lib -lmlx
// #cgo linux LDFLAGS: -Wl,-rpath,$ORIGIN/lib/mlx/lib -Wl,-rpath,$ORIGIN/../lib/mlx/lib
// #cgo darwin CXXFLAGS: -mmacosx-version-min=14.0
// #cgo darwin LDFLAGS: -mmacosx-version-min=14.0
import "C"

// The kernels' objects must be in every binary that holds this package's.
import _ "github.com/mlxcel/mlxcel/mlxshared/kernels/cpu"
