package cpu_test

import (
	"fmt"
	"testing"

	"github.com/mlxcel/mlxcel/mlxshared/kernels/cpu"
)

// benchISAs calls f with a one-thread pool of every instruction set.
func benchISAs(b *testing.B, f func(b *testing.B, p *cpu.Pool)) {
	for _, isa := range isas[1:] {
		p, err := cpu.NewPool(1, isa)
		if err != nil {
			continue
		}
		b.Run(isa.String(), func(b *testing.B) { f(b, p) })
		p.Free()
	}
}

// BenchmarkRead is the machine's own bound: reading memory, and copying it, through the kernels' simplest user.
func BenchmarkRead(b *testing.B) {
	const size = 256 << 20
	from, to := make([]byte, size), make([]byte, size)
	clear(from) // untouched pages would all be the one page of zeros
	copy(to, from)
	b.Run("copy", func(b *testing.B) {
		b.SetBytes(size)
		for b.Loop() {
			copy(to, from)
		}
	})
	w := &cpu.Matrix{Format: cpu.Dense, DType: cpu.F32, Rows: size / 4 / 4096, Cols: 4096, Data: from}
	x, y := make([]byte, 4*4096), make([]byte, 4*w.Rows)
	benchISAs(b, func(b *testing.B, p *cpu.Pool) {
		b.SetBytes(size)
		for b.Loop() {
			p.Linear(w, nil, cpu.F32, x, cpu.F32, y, 1)
		}
	})
}

// BenchmarkLinear runs SmolLM2-135M's shapes. Small matrices come in as many copies as the model has layers, so that they
// are read from where a decode step reads them.
func BenchmarkLinear(b *testing.B) {
	r := source("bench")
	for _, c := range []struct {
		name       string
		l          layout
		rows, cols int
	}{
		{"q4", layout{cpu.Affine, 4, 32}, 576, 576},
		{"q4", layout{cpu.Affine, 4, 32}, 192, 576},
		{"q4", layout{cpu.Affine, 4, 32}, 1536, 576},
		{"q4", layout{cpu.Affine, 4, 32}, 576, 1536},
		{"q4/64", layout{cpu.Affine, 4, 64}, 4096, 4096},
		{"q8", layout{cpu.Affine, 8, 32}, 49152, 576},
		{"q6", layout{cpu.Affine, 6, 64}, 4096, 4096},
		{"mxfp4", layout{cpu.MXFP4, 4, 32}, 4096, 4096},
		{"mxfp8", layout{cpu.MXFP8, 8, 32}, 4096, 4096},
		{"bf16", layout{format: cpu.Dense}, 4096, 4096},
	} {
		dt := cpu.F16
		if c.name == "bf16" {
			dt = cpu.BF16
		}
		copies := max(1, min(30, (64<<20)/(c.rows*c.cols)))
		matrices := make([]*cpu.Matrix, copies)
		for i := range matrices {
			matrices[i] = matrix(r, c.l, dt, c.rows, c.cols, false)
		}
		weights := len(matrices[0].Data) + len(matrices[0].Scales) + len(matrices[0].Biases)
		for _, m := range []int{1, 2, 4, 6, 8, 16, 64, 256} {
			if m > 16 && c.rows > 5000 {
				continue
			}
			x := encode(cpu.F16, normals(r, m*c.cols, 1))
			y := make([]byte, 2*m*c.rows)
			b.Run(fmt.Sprintf("%s/%dx%d/m%d", c.name, c.rows, c.cols, m), func(b *testing.B) {
				benchISAs(b, func(b *testing.B, p *cpu.Pool) {
					i := 0
					for b.Loop() {
						p.Linear(matrices[i%copies], nil, cpu.F32, x, cpu.F16, y, m)
						i++
					}
					perSecond := float64(b.N) / b.Elapsed().Seconds() / 1e9
					b.ReportMetric(perSecond*float64(2*m*c.rows*c.cols), "GFLOP/s")
					b.ReportMetric(perSecond*float64(weights), "GB/s")
				})
			})
		}
	}
}

// BenchmarkDecode runs the matrices of SmolLM2-135M's layers in turn, as a decode step of m rows does: together they are
// larger than the caches, so that scales come from memory too.
func BenchmarkDecode(b *testing.B) {
	r := source("bench")
	var matrices []*cpu.Matrix
	weights, products := 0, 0
	for range 30 {
		for _, shape := range [][2]int{{576, 576}, {192, 576}, {192, 576}, {576, 576}, {1536, 576}, {1536, 576}, {576, 1536}} {
			w := matrix(r, layout{cpu.Affine, 4, 32}, cpu.F16, shape[0], shape[1], false)
			matrices = append(matrices, w)
			weights += len(w.Data) + len(w.Scales) + len(w.Biases)
			products += w.Rows * w.Cols
		}
	}
	for _, m := range []int{1, 3, 4, 8} {
		x, y := encode(cpu.F16, normals(r, m*1536, 1)), make([]byte, 2*m*1536)
		b.Run(fmt.Sprintf("m%d", m), func(b *testing.B) {
			benchISAs(b, func(b *testing.B, p *cpu.Pool) {
				for b.Loop() {
					for _, w := range matrices {
						p.Linear(w, nil, cpu.F32, x, cpu.F16, y, m)
					}
				}
				perSecond := float64(b.N) / b.Elapsed().Seconds() / 1e9
				b.ReportMetric(perSecond*float64(2*m*products), "GFLOP/s")
				b.ReportMetric(perSecond*float64(weights), "GB/s")
			})
		})
	}
}

// BenchmarkAttention: SmolLM2's heads; rows at the end of the context.
func BenchmarkAttention(b *testing.B) {
	for _, dt := range []cpu.DType{cpu.F32, cpu.F16, cpu.BF16} {
		for _, length := range []int{128, 1024, 8192} {
			kv, err := cpu.NewKV(3, 64, 64, dt, nil)
			if err != nil {
				b.Fatal(err)
			}
			r := source("bench")
			n := length * 3 * 64
			if err := kv.Append(0, encode(dt, normals(r, n, 1)), encode(dt, normals(r, n, 1)), length); err != nil {
				b.Fatal(err)
			}
			for _, rows := range []int{1, 128} {
				q := encode(dt, normals(r, rows*9*64, 1))
				y := make([]byte, len(q))
				b.Run(fmt.Sprintf("%v/%d/rows%d", dt, length, rows), func(b *testing.B) {
					benchISAs(b, func(b *testing.B, p *cpu.Pool) {
						segments := []cpu.Segment{{KV: kv, N: rows, Pos: length - rows}}
						for b.Loop() {
							p.Attention(cpu.Attention{Heads: 9, Scale: 0.125}, q, dt, segments, y)
						}
						perSecond := float64(b.N) / b.Elapsed().Seconds() / 1e9
						b.ReportMetric(perSecond*4*64*9*float64(rows)*(float64(length)-float64(rows-1)/2), "GFLOP/s")
						b.ReportMetric(perSecond*float64(kv.Bytes()), "GB/s")
					})
				})
			}
			kv.Free()
		}
	}
}

// BenchmarkRows: the small operations of one decode step's layer.
func BenchmarkRows(b *testing.B) {
	r := source("bench")
	x := encode(cpu.F16, normals(r, 1536, 1))
	weight, y := encode(cpu.F16, normals(r, 1536, 1)), make([]byte, len(x))
	step := encode(cpu.F16, normals(r, 4*576, 1)) // of four rows
	sum := make([]byte, len(step))
	shape := cpu.RoPE{Heads: 9, HeadDim: 64, RotDim: 64, Scale: 1, InvFreq: inverseFrequencies(64, 10000)}
	benchISAs(b, func(b *testing.B, p *cpu.Pool) {
		b.Run("norm576", func(b *testing.B) {
			for b.Loop() {
				p.RMSNorm(x, cpu.F16, weight, cpu.F16, 0, 1e-5, 1, 576, y)
			}
		})
		b.Run("addnorm576", func(b *testing.B) {
			for b.Loop() {
				p.AddRMSNorm(x, weight, cpu.F16, weight, cpu.F16, 0, 1e-5, 1, 576, sum, y)
			}
		})
		b.Run("add2304", func(b *testing.B) {
			for b.Loop() {
				p.Binary(cpu.Add, step, step, cpu.F16, 2304, 2304, sum)
			}
		})
		b.Run("rope9x64", func(b *testing.B) {
			for b.Loop() {
				p.RoPE(shape, x, cpu.F16, []int32{12345}, y)
			}
		})
		b.Run("silu1536", func(b *testing.B) {
			for b.Loop() {
				p.SiluMul(x, weight, cpu.F16, 1536, y)
			}
		})
	})
}

// BenchmarkThreads: what a second member brings, and what it costs when there is nothing to share.
func BenchmarkThreads(b *testing.B) {
	r := source("bench")
	for _, rows := range []int{192, 1536, 49152} {
		w := matrix(r, layout{cpu.Affine, 4, 32}, cpu.F16, rows, 576, false)
		x, y := encode(cpu.F16, normals(r, 576, 1)), make([]byte, 2*rows)
		for _, threads := range []int{1, 2} {
			p, err := cpu.NewPool(threads, cpu.Auto)
			if err != nil {
				b.Fatal(err)
			}
			b.Run(fmt.Sprintf("q4/%dx576/threads%d", rows, threads), func(b *testing.B) {
				for b.Loop() {
					p.Linear(w, nil, cpu.F32, x, cpu.F16, y, 1)
				}
			})
			p.Free()
		}
	}
}
