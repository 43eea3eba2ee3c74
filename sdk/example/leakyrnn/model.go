package leakyrnn

import (
	"context"
	"fmt"
	"math"

	"github.com/mlxcel/mlxcel/sdk"
)

// model is one stage: a range of layers, perhaps with the embedding before or the head behind them.
//
// Every sum runs in an order that depends on the row alone. So a row's result is the same bit for bit however rows
// are split over stages, batches and chunks, which the conformance tests ask for.
type model struct {
	config    *Config
	embedding []float32 // [vocab, hidden]; nil on stages without it
	layers    []layer
	head      []float32 // [vocab, hidden]; nil on stages without it
}

// layer is a leaky integrator over the sequence, with a residual connection:
//
//	state = decay * state + (1-decay) * tanh(input * normalize(hidden) + bias)
//	hidden = hidden + output * state
type layer struct {
	input  []float32 // [hidden, hidden]
	bias   []float32 // [hidden]
	decay  []float32 // [hidden], each in 0..1
	output []float32 // [hidden, hidden]
}

func loadModel(ctx context.Context, c *Config, req sdk.LoadRequest, progress func(sdk.LoadProgress)) (*model, *sdk.LoadReport, error) {
	specs := c.specs(req.Layers, req.HasEmbedding, req.HasHead)
	weights, err := readWeights(ctx, req.Dir, specs, progress)
	if err != nil {
		return nil, nil, err
	}
	m := &model{config: c}
	if req.HasEmbedding {
		m.embedding = weights[embeddingName]
	}
	if req.HasHead {
		m.head = weights[headName]
		if c.Tied {
			m.head = weights[embeddingName]
		}
	}
	for i := req.Layers.Start; i < req.Layers.End; i++ {
		prefix := fmt.Sprintf("layers.%d.", i)
		m.layers = append(m.layers, layer{
			input:  weights[prefix+"input.weight"],
			bias:   weights[prefix+"input.bias"],
			decay:  weights[prefix+"decay"],
			output: weights[prefix+"output.weight"],
		})
	}
	report := &sdk.LoadReport{Tensors: len(specs), Boundary: c.boundary(), VocabSize: c.VocabSize}
	for _, s := range specs {
		report.WeightBytes += s.bytes()
	}
	return m, report, nil
}

// embed makes the hidden row of a token at a position: its embedding, plus sines of the position.
func (m *model) embed(token int32, pos int) []float32 {
	h := m.config.HiddenSize
	row := make([]float32, h)
	copy(row, m.embedding[int(token)*h:])
	for i := range row {
		frequency := math.Pow(10000, -float64(i)/float64(h))
		row[i] += 0.1 * float32(math.Sin(float64(pos)*frequency))
	}
	return row
}

// forward runs one row through the layers. states holds each layer's state before the row; the states after it
// are returned.
func (m *model) forward(row []float32, states [][]float32) [][]float32 {
	next := make([][]float32, len(m.layers))
	for i := range m.layers {
		next[i] = m.layers[i].forward(row, states[i])
	}
	return next
}

func (l *layer) forward(row, state []float32) []float32 {
	next := multiply(l.input, normalize(row))
	for i := range next {
		drive := float32(math.Tanh(float64(next[i] + l.bias[i])))
		next[i] = l.decay[i]*state[i] + (1-l.decay[i])*drive
	}
	for i, delta := range multiply(l.output, next) {
		row[i] += delta
	}
	return next
}

// logits returns the scores of every token after a hidden row.
func (m *model) logits(row []float32) []float32 { return multiply(m.head, normalize(row)) }

// multiply returns matrix * vector; the matrix has rows of the vector's length.
func multiply(matrix, vector []float32) []float32 {
	n := len(vector)
	out := make([]float32, len(matrix)/n)
	for i := range out {
		var sum float32
		for j, w := range matrix[i*n : (i+1)*n] {
			sum += w * vector[j]
		}
		out[i] = sum
	}
	return out
}

// normalize scales a row to a root mean square of 1.
func normalize(row []float32) []float32 {
	var sum float32
	for _, v := range row {
		sum += v * v
	}
	scale := 1 / float32(math.Sqrt(float64(sum/float32(len(row))+1e-6)))
	out := make([]float32, len(row))
	for i, v := range row {
		out[i] = v * scale
	}
	return out
}
