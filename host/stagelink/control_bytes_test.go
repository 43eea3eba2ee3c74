package stagelink

import (
	"net"
	"sync/atomic"
	"testing"
	"testing/synctest"

	"github.com/mlxcel/mlxcel/host/pipeline"
	"github.com/mlxcel/mlxcel/sdk"
)

// counted counts what is written on a connection.
type counted struct {
	net.Conn
	bytes *atomic.Int64
}

func (c counted) Write(b []byte) (int, error) {
	c.bytes.Add(int64(len(b)))
	return c.Conn.Write(b)
}

// placeConn is the data connection to a place, which does nothing with its orders.
type placeConn struct {
	port  *Port
	up    *uplink
	role  sdk.StageRole
	place sdk.Place
}

func newPlaceConn(at sdk.Place, places int, bytes *atomic.Int64) *placeConn {
	near, far := net.Pipe()
	c := &placeConn{
		port: NewPort(counted{near, bytes}, at, 1, Config{}), up: newUplink(counted{far, bytes}, at, "node", Config{}),
		role: sdk.RoleOf(at, places), place: at,
	}
	c.port.Start(make(reports, 10_000))
	c.up.wait.Go(func() { c.up.serve(make(orders, 10_000)) })
	return c
}

// order gives the place what its role needs of an order.
func (c *placeConn) order(o pipeline.Order) { c.port.Order(o.For(c.role, nil)) }

// someIDs are token ids as large as those of today's vocabularies.
func someIDs(n int) []int32 {
	ids := make([]int32, n)
	for i := range ids {
		ids[i] = 90_000 + int32(i)
	}
	return ids
}

const (
	controlStreams, controlGroups = 8, 2
	controlPrompt, controlAnswers = 200, 64

	// What the same took with frames of 40 bytes and every order whole at every place: all of it, and a decode step of one group.
	controlBytesBefore, controlStepBefore = 62778, 307
)

// TestControlBytes counts what orders and reports of two stages take, prompts included.
func TestControlBytes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var bytes atomic.Int64
		var places []*placeConn
		for i := range 2 {
			places = append(places, newPlaceConn(sdk.Place{Stage: i}, 2, &bytes))
		}
		id := uint64(1000)
		order := func(op sdk.Op, plan *pipeline.StepPlan) {
			id++
			for _, p := range places {
				p.order(pipeline.Order{Epoch: 1, ID: id, Op: op, Plan: plan})
				if op != nil {
					p.up.Answered(p.place, 1, id, nil)
				}
			}
			if plan == nil {
				return
			}
			results := make([]sdk.SeqResult, len(plan.Seqs))
			for i, s := range plan.Seqs {
				results[i] = sdk.SeqResult{Seq: s.Seq, Token: 100_000}
			}
			places[1].up.Finished(pipeline.Tag{Epoch: 1, Step: id}, results)
			synctest.Wait() // all is written
		}
		step := func(first sdk.SeqID, n, pos, rows int) {
			plan := &pipeline.StepPlan{Cuts: []int{0, n}}
			for i := range n {
				seq := first + sdk.SeqID(i)
				plan.IDs = append(plan.IDs, seq)
				plan.Seqs = append(plan.Seqs, sdk.SeqStep{Seq: seq, Pos: pos, Rows: rows, Tokens: someIDs(rows), Prompt: rows > 1, Want: sdk.WantToken})
			}
			order(nil, plan)
		}
		sampler := sdk.Sampler{Temperature: 0.7, TopP: 0.95, TopK: 40, Seed: 1 << 60}
		for seq := range sdk.SeqID(controlStreams) {
			order(sdk.Reservation{Seq: 300 + seq, Prompt: someIDs(controlPrompt), MaxLen: controlPrompt + controlAnswers, Sampler: sampler}, nil)
			step(300+seq, 1, 0, controlPrompt)
		}
		before := bytes.Load()
		const per = controlStreams / controlGroups
		for i := 1; i < controlAnswers; i++ {
			for group := range sdk.SeqID(controlGroups) {
				step(300+group*per, per, controlPrompt+i-1, 1)
			}
		}
		perStep := (bytes.Load() - before) / ((controlAnswers - 1) * controlGroups)
		for seq := range sdk.SeqID(controlStreams) {
			order(sdk.Release{Seq: 300 + seq}, nil)
		}
		synctest.Wait()
		t.Logf("%d bytes, %d a step of a group", bytes.Load(), perStep)
		if all := bytes.Load(); 2*all > controlBytesBefore || 2*perStep > controlStepBefore {
			t.Errorf("%d bytes, %d a step, want at most half of %d and %d", all, perStep, controlBytesBefore, controlStepBefore)
		}
		for _, p := range places {
			p.port.Close()
			p.up.close()
		}
	})
}
