// Package stage owns the executor that every family shares: it loads a range of layers, keeps the sequences' state,
// and runs steps. What is special to a family comes in through Family and Model.
package stage

import (
	"github.com/mlxcel/mlxcel/mlxshared/nn"
	"github.com/mlxcel/mlxcel/mlxshared/weights"
	"github.com/mlxcel/mlxcel/sdk"
	"github.com/mlxcel/mlxcel/sdk/config"
)

// Family is one wire family.
type Family interface {
	// Info names the family, its model types and what it can do.
	Info() sdk.Family
	// Model reads a config. Faults are recorded in c, values that are not built among them; the stage looks at
	// c.Err before it uses the model.
	Model(c *config.Object) Model
}

// Info describes a family that pipelines and runs all that package nn does.
func Info(name string, modelTypes ...string) sdk.Family {
	return sdk.Family{Name: name, ModelTypes: modelTypes, Pipeline: true, Quantizations: nn.Quantizations()}
}

// Importer is a Family that knows foreign containers, those in Info().Imports.
type Importer interface {
	Import(req *sdk.ImportRequest) (*sdk.ImportPlan, error)
}

// Model is a family with the sizes of one config: a list of modules to be loaded.
type Model interface {
	Shape() Shape
	Embedding(b *nn.Builder) nn.Embedder
	Layer(b *nn.Builder, i int) nn.Layer
	Head(b *nn.Builder) nn.Head
}

// Shape is what the stage must know of a model.
type Shape struct {
	Layers        int
	Width         int                  // of the residual stream
	Carried       int                  // elements of nn.Pass.Carried in each row; 0 for none
	Vocab         int                  // rows of the output projection
	Context       int                  // positions; 0 when unbounded
	EmbeddingPath string               // module whose values' type is the checkpoint's own dtype
	Names         weights.Names        // tensors that the family leaves aside
	Adjacency     []sdk.AdjacencyGroup // layers that must share a stage
}

// boundaryWidth is the elements of a row between stages: the residual stream, then what the embedding carries along.
func (s *Shape) boundaryWidth() int { return s.Width + s.Carried }
