package generate

import (
	"github.com/mlxcel/mlxcel/host/pipeline"
	"github.com/mlxcel/mlxcel/host/tokenize"
)

// What requests run on and decode with in production fits.
var (
	_ Runtime = (*pipeline.Pipeline)(nil)
	_ Decoder = (*tokenize.Stream)(nil)
)
