package bringup

import (
	"context"
	"slices"
	"testing"

	"github.com/hashicorp/go-hclog"

	"github.com/mlxcel/mlxcel/sdk"
)

// A cluster answers as the unsplit model does, again after another bring-up, by whichever coordinator.
func TestClusterEqualsOneProcess(t *testing.T) {
	model := testModel(t)
	want := alone(t, model, 8)
	for _, stages := range []int{2, 3} {
		peers := startPeers(t, model, stages)
		var epoch uint64
		for range 2 {
			running := bringUp(t, newTestCoordinator(t, addresses(peers), nil))
			got, err := greedy(t.Context(), running.Pipeline, testPrompt, len(want))
			if err != nil || !slices.Equal(got, want) {
				t.Errorf("%d stages answer %v, %v, the unsplit model %v", stages, got, err, want)
			}
			if running.Epoch <= epoch {
				t.Errorf("epoch %d after %d", running.Epoch, epoch)
			}
			epoch = running.Epoch
			if err := running.Close(context.Background()); err != nil {
				t.Error(err)
			}
			for _, p := range peers {
				p.await(PhaseReady)
				p.await(PhaseWaiting)
				if n := p.runtime.running(); n > 0 {
					t.Errorf("%d executors are left", n)
				}
			}
		}
	}
}

// A mask of allowed tokens comes to the executor of the last stage: it answers with the one token that a step allows.
func TestClusterObeysMasks(t *testing.T) {
	model := testModel(t)
	have, err := (&toyRuntime{model: model}).Inspect(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	p := bringUp(t, newTestCoordinator(t, addresses(startPeers(t, model, 2)), nil)).Pipeline
	seq := p.NewSeq()
	if err := p.Reserve(t.Context(), sdk.Reservation{Seq: seq, Prompt: testPrompt, MaxLen: 2 * len(testPrompt)}); err != nil {
		t.Fatal(err)
	}
	step := sdk.SeqStep{Seq: seq, Rows: len(testPrompt), Tokens: testPrompt, Prompt: true, Want: sdk.WantToken}
	for want := range int32(3) {
		step.Allowed = make([]byte, (have.Profile.VocabSize+7)/8)
		step.Allowed[want/8] = 1 << (want % 8)
		results, err := p.Step(t.Context(), []sdk.SeqStep{step})
		if err != nil {
			t.Fatal(err)
		}
		if got := results[0].Token; got != want {
			t.Errorf("token %d came, only %d was allowed", got, want)
		}
		step = sdk.SeqStep{Seq: seq, Pos: step.End(), Rows: 1, Tokens: []int32{want}, Want: sdk.WantToken}
	}
}

// BenchmarkBringUp is the time from a coordinator's start to ready with three peers of this host, whose executors are
// processes. The weights are next to nothing.
func BenchmarkBringUp(b *testing.B) {
	peers := localPeers(b, testModel(b), 3)
	b.ResetTimer()
	for range b.N {
		running := bringUp(b, newTestCoordinator(b, addresses(peers), func(c *CoordinatorConfig) { c.Logger = hclog.NewNullLogger() }))
		b.StopTimer()
		if err := running.Close(context.Background()); err != nil {
			b.Fatal(err)
		}
		b.StartTimer()
	}
}

// BenchmarkLossNoticed is the time from the end of a peer's connections to the end of the cluster.
func BenchmarkLossNoticed(b *testing.B) {
	peers := startPeers(b, testModel(b), 2)
	for range b.N {
		b.StopTimer()
		running := bringUp(b, newTestCoordinator(b, addresses(peers), func(c *CoordinatorConfig) { c.Logger = hclog.NewNullLogger() }))
		b.StartTimer()
		peers[1].net.cut()
		<-running.Done()
		b.StopTimer()
		if err := running.Close(context.Background()); err != nil {
			b.Fatal(err)
		}
		b.StartTimer()
	}
}
