package pipeline

import (
	"reflect"
	"testing"

	"github.com/mlxcel/mlxcel/sdk"
)

// roles are those that places have, by name.
var roles = []struct {
	name string
	role sdk.StageRole
}{
	{"the only stage", sdk.RoleOf(sdk.Place{}, 1)},
	{"the first stage", sdk.RoleOf(sdk.Place{}, 3)},
	{"another rank of it", sdk.RoleOf(sdk.Place{Rank: 1}, 3)},
	{"a stage between", sdk.RoleOf(sdk.Place{Stage: 1}, 3)},
	{"the last stage", sdk.RoleOf(sdk.Place{Stage: 2}, 3)},
	{"another rank of the last", sdk.RoleOf(sdk.Place{Stage: 2, Rank: 1}, 3)},
}

// What a place gets of a step: where its rows stand everywhere, token ids where they are embedded or counted, what is wanted where
// it is answered.
func TestPlanByRole(t *testing.T) {
	full := []sdk.SeqStep{
		{Seq: 1, Pos: 8, Rows: 2, Tokens: []int32{5, 6}, Prompt: true, Snapshot: true, Want: sdk.WantScores, Targets: []int32{6, 7}},
		{Seq: 2, Pos: 3, Rows: 1, Tokens: []int32{9}, Want: sdk.WantToken, TopN: 3, Logprob: true, Allowed: []byte{1}},
	}
	where := []sdk.SeqStep{{Seq: 1, Pos: 8, Rows: 2, Prompt: true, Snapshot: true}, {Seq: 2, Pos: 3, Rows: 1}}
	with := func(steps []sdk.SeqStep, change func(i int, s *sdk.SeqStep)) []sdk.SeqStep {
		changed := append([]sdk.SeqStep(nil), steps...)
		for i := range changed {
			change(i, &changed[i])
		}
		return changed
	}
	tokens := with(where, func(i int, s *sdk.SeqStep) { s.Tokens = full[i].Tokens })
	wanted := with(full, func(_ int, s *sdk.SeqStep) { s.Tokens = nil })
	counts := with(wanted, func(i int, s *sdk.SeqStep) {
		if i == 1 {
			s.Tokens = full[i].Tokens
		}
	})
	want := map[string][2][]sdk.SeqStep{ // where no sampler counts tokens, and where that of sequence 2 does
		"the only stage":           {full, full},
		"the first stage":          {tokens, tokens},
		"another rank of it":       {tokens, tokens},
		"a stage between":          {where, where},
		"the last stage":           {wanted, counts},
		"another rank of the last": {where, where},
	}
	for _, r := range roles {
		for i, counted := range [][]bool{nil, {false, true}} {
			plan := &StepPlan{Seqs: with(full, func(int, *sdk.SeqStep) {}), IDs: []sdk.SeqID{1, 2}, Cuts: []int{0, 1, 2}}
			got := Order{Epoch: 3, ID: 4, Trace: TraceID{5}, Plan: plan}.For(r.role, counted)
			if got.Epoch != 3 || got.ID != 4 || got.Trace != (TraceID{5}) || got.Plan.MicroBatches() != 2 || got.Plan.ids(1)[0] != 2 {
				t.Errorf("%s gets another order: %+v", r.name, got)
			}
			if !reflect.DeepEqual(got.Plan.Seqs, want[r.name][i]) {
				t.Errorf("%s, counted %v: gets\n%+v, want\n%+v", r.name, counted, got.Plan.Seqs, want[r.name][i])
			}
			if !reflect.DeepEqual(plan.Seqs, full) {
				t.Errorf("%s, counted %v: the order itself has changed", r.name, counted)
			}
		}
	}
}

// What a place gets of a reservation: what it shares and holds everywhere, the sampler where it is answered, and token ids there
// if the sampler counts them. A release goes everywhere as it is.
func TestReservationByRole(t *testing.T) {
	plain, counting := sdk.Sampler{Temperature: 1, Seed: 2}, sdk.Sampler{Temperature: 1, PresencePenalty: 0.5}
	full := sdk.Reservation{Seq: 1, Prompt: []int32{1, 2}, Generated: []int32{3}, MaxLen: 9, Adapter: "a", From: 7, Keep: 2, Snapshots: 4}
	where := full
	where.Prompt, where.Generated = nil, nil
	for _, r := range roles {
		for _, sampler := range []sdk.Sampler{plain, counting} {
			given, want := full, where
			given.Sampler = sampler
			if r.role.Answers {
				want.Sampler = sampler
				if sampler.CountsTokens() {
					want = given
				}
			}
			if got := (Order{Op: given}).For(r.role, nil).Op; !reflect.DeepEqual(got, want) {
				t.Errorf("%s gets\n%+v, want\n%+v", r.name, got, want)
			}
		}
		if got := (Order{Op: sdk.Release{Seq: 1}}).For(r.role, nil).Op; got != (sdk.Release{Seq: 1}) {
			t.Errorf("%s gets %+v", r.name, got)
		}
	}
}
