package leakyrnn

import (
	"context"
	"fmt"
	"math"
	"slices"

	"github.com/mlxcel/mlxcel/sdk"
)

// model is one stage: a range of layers, perhaps with the embedding before or the head behind them.
//
// Every sum runs in an order that depends on the row alone. So a row's result is the same bit for bit however rows
// are split over stages, batches and chunks, which the conformance tests ask for.
type model struct {
	config    *Config
	first     int       // number of the first layer in the model
	embedding []float32 // [vocab, hidden]; nil on stages without it
	layers    []layer
	head      []float32 // [vocab, hidden]; nil on stages without it
}

// layer is a leaky integrator over the sequence that also recalls what drove it before, with a residual connection:
//
//	drive  = tanh(input * normalize(hidden) + bias)
//	state  = decay * state + (1-decay) * drive
//	recall = sum over the positions so far of softmax(state . key / sqrt(width)) * value
//	hidden = hidden + output * (state + recall)
//
// The key of a position is its normalize(hidden), its value is its drive.
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
	m := &model{config: c, first: req.Layers.Start}
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

// zeros are the recurrent states of a sequence without positions.
func (m *model) zeros() [][]float32 {
	states := make([][]float32, len(m.layers))
	for i := range states {
		states[i] = make([]float32, m.config.HiddenSize)
	}
	return states
}

// cacheRow is what one layer's cache keeps of one position.
type cacheRow struct{ key, value []float32 }

func (r *cacheRow) keys() []float32   { return r.key }
func (r *cacheRow) values() []float32 { return r.value }

// forward runs the sequence's next row through the layers and appends its position to the state.
func (m *model) forward(row []float32, s *sequence) {
	p := &position{rows: make([]cacheRow, len(m.layers)), owners: 1}
	s.cache = append(s.cache, p)
	states := make([][]float32, len(m.layers))
	for i := range m.layers {
		states[i] = m.layers[i].forward(row, s.state[i], i, s.cache)
	}
	s.state = states
}

// forward runs one row through layer number i of the stage, whose part of the last position it fills in. It returns the
// state after the row.
func (l *layer) forward(row, state []float32, i int, cache []*position) []float32 {
	key := normalize(row)
	drive, next := multiply(l.input, key), make([]float32, len(row))
	for j := range drive {
		drive[j] = float32(math.Tanh(float64(drive[j] + l.bias[j])))
		next[j] = l.decay[j]*state[j] + (1-l.decay[j])*drive[j]
	}
	cache[len(cache)-1].rows[i] = cacheRow{key, drive}
	mixed := recall(next, i, cache)
	for j := range mixed {
		mixed[j] += next[j]
	}
	for j, delta := range multiply(l.output, mixed) {
		row[j] += delta
	}
	return next
}

// recall is attention: the mean of the positions' values, by how near their keys are to the state.
func recall(state []float32, layer int, cache []*position) []float32 {
	scale := float32(1 / math.Sqrt(float64(len(state))))
	weights := make([]float32, len(cache))
	for i, p := range cache {
		for j, k := range p.rows[layer].key {
			weights[i] += state[j] * k
		}
		weights[i] *= scale
	}
	top, sum := slices.Max(weights), float32(0)
	for i := range weights {
		weights[i] = float32(math.Exp(float64(weights[i] - top)))
		sum += weights[i]
	}
	mean := make([]float32, len(state))
	for i, p := range cache {
		share := weights[i] / sum
		for j, v := range p.rows[layer].value {
			mean[j] += share * v
		}
	}
	return mean
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
