package stagetest

import (
	"math/rand/v2"
	"runtime/debug"
	"testing"

	"github.com/mlxcel/mlxcel/mlxshared/mlx"
	"github.com/mlxcel/mlxcel/mlxshared/stage"
	"github.com/mlxcel/mlxcel/sdk"
)

// The traffic of Memory.
const (
	trafficSequences = 6    // at a time
	trafficPrompt    = 100  // tokens at most
	trafficAnswer    = 40   // tokens at most
	trafficChunk     = 64   // of prefill
	trafficSteps     = 2000 // of a round
)

// Memory runs rounds of 2,000 steps in which sequences join and leave, and wants the four after the first, which fills what
// is kept for reuse, to leave no more arrays, state or resident bytes behind than the slack.
func Memory(t *testing.T, families []stage.Family, dir string, slack int64) {
	traffic := &traffic{p: Open(t, families, dir, Options{Stages: 2}), rand: rand.New(rand.NewPCG(1, 2))}
	traffic.round()
	arrays, resident := mlx.LiveArrays(), quietBytes()
	for range 4 {
		traffic.round()
	}
	for i, e := range traffic.p.Stages {
		if s, err := e.Stats(t.Context()); err != nil || s.StateBytes != 0 || s.Sequences != 0 {
			t.Errorf("stage %d: %+v, %v; want no state", i, s, err)
		}
	}
	now := quietBytes()
	t.Logf("%.1f MiB resident became %.1f", float64(resident)/(1<<20), float64(now)/(1<<20))
	if n := mlx.LiveArrays(); n != arrays || now > resident+slack {
		t.Errorf("%d live arrays became %d, %d resident bytes %d; want at most %d more", arrays, n, resident, now, slack)
	}
}

// quietBytes is what the process holds once Go has returned what it can.
func quietBytes() int64 {
	debug.FreeOSMemory()
	return sdk.ResidentBytes()
}

type traffic struct {
	p    *Pipeline
	rand *rand.Rand
	next sdk.SeqID
	live []*visitor
}

// visitor is a sequence on its way.
type visitor struct {
	id     sdk.SeqID
	prompt []int32 // what is left of it
	pos    int
	left   int // tokens to generate
}

// round ends with no sequence left.
func (f *traffic) round() {
	for range trafficSteps {
		if len(f.live) < trafficSequences && f.rand.IntN(4) == 0 {
			f.join()
		}
		f.step()
	}
	for _, v := range f.live {
		f.p.Release(v.id)
	}
	f.live = nil
}

func (f *traffic) join() {
	f.next++
	prompt := make([]int32, 1+f.rand.IntN(trafficPrompt))
	for i := range prompt {
		prompt[i] = int32(f.rand.IntN(f.p.Report.VocabSize))
	}
	v := &visitor{id: f.next, prompt: prompt, left: 1 + f.rand.IntN(trafficAnswer)}
	f.p.Reserve(sdk.Reservation{Seq: v.id, Prompt: prompt, MaxLen: len(prompt) + v.left})
	f.live = append(f.live, v)
}

// step advances every sequence by a chunk or a token, and lets go of those that are done.
func (f *traffic) step() {
	if len(f.live) == 0 {
		return
	}
	var batch []sdk.SeqStep
	for _, v := range f.live {
		batch = append(batch, v.step(int32(f.rand.IntN(f.p.Report.VocabSize))))
	}
	f.p.Step(batch...)
	staying := f.live[:0]
	for _, v := range f.live {
		if v.left > 0 {
			staying = append(staying, v)
		} else {
			f.p.Release(v.id)
		}
	}
	f.live = staying
}

func (v *visitor) step(token int32) sdk.SeqStep {
	s := sdk.SeqStep{Seq: v.id, Pos: v.pos, Rows: 1, Tokens: []int32{token}, Want: sdk.WantToken}
	if len(v.prompt) > 0 {
		n := min(trafficChunk, len(v.prompt))
		s.Rows, s.Tokens, s.Prompt, v.prompt = n, v.prompt[:n], true, v.prompt[n:]
		if len(v.prompt) > 0 {
			s.Want = sdk.WantNothing
		}
	}
	v.pos += s.Rows
	if s.Want == sdk.WantToken {
		v.left--
	}
	return s
}
