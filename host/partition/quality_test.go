package partition

import (
	"strings"
	"testing"

	"github.com/mlxcel/mlxcel/sdk"
)

// The report compares weights: caches are not there yet when a load ends.
func TestQualityReport(t *testing.T) {
	profile := &sdk.ModelProfile{Embedding: 50}
	for range 4 {
		profile.Layers = append(profile.Layers, layer(100, 1000))
	}
	plan, err := New(Request{Profile: profile, Demand: Demand{10, 1}, Hardware: Local(2, Memory{Budget: Unlimited})})
	if err != nil {
		t.Fatal(err)
	}
	if got := plan.Stages[0]; got.EstimatedMemoryBytes != 20250 || got.Load != (Load{Weights: 250, KV: 20000}) {
		t.Errorf("stage 0 is %+v", got)
	}
	q := plan.Quality([]int64{275})
	if q.MaxBytes != 250 || q.MinBytes != 200 || q.Imbalance != 1.25 || len(q.Stages) != 2 {
		t.Errorf("%+v", q)
	}
	if s := q.Stages[0]; !s.Loaded || s.ActualBytes != 275 || s.Drift() < 9.99 || s.Drift() > 10.01 {
		t.Errorf("stage 0: %+v drifts by %v", s, s.Drift())
	}
	if s := q.Stages[1]; s.Loaded || s.Drift() != 0 {
		t.Errorf("stage 1: %+v", s)
	}
	want := `pipeline partition quality: 2 stages, max=250 bytes, min=200 bytes, imbalance=1.25x
  stage 0 device 'local-stage-0' layers=2 estimated=250 actual=275 drift=+10.0%
  stage 1 device 'local-stage-1' layers=2 estimated=200 actual=unknown`
	if got := q.String(); got != want {
		t.Errorf("got\n%s\nwant\n%s", got, want)
	}
}

func TestStoredBits(t *testing.T) {
	for text, want := range map[string]float64{
		"affine 4-bit group 64": 4.5, "affine 8-bit group 32": 9, "affine 8-bit group 32, affine 4-bit group 32": 5, "mxfp4 group 32": 4.25,
		"nvfp4 group 16": 4.5, "mxfp8 group 32": 8.25, "none": 16,
	} {
		p := &sdk.ModelProfile{Quantization: text, Boundary: sdk.Boundary{Dtype: sdk.DtypeBFloat16}}
		if got, ok := storedBits(p); !ok || got != want {
			t.Errorf("%s: %v, %v, want %v", text, got, ok, want)
		}
	}
	for _, text := range []string{"", "magic", "affine 4-bit group 0", "mxfp4", "affine 4-bit group 64, magic"} {
		if got, ok := storedBits(&sdk.ModelProfile{Quantization: text}); ok {
			t.Errorf("%q: %v", text, got)
		}
	}
}

// What is proposed is what the family runs.
func TestProposesBitsThatTheFamilyRuns(t *testing.T) {
	profile := &sdk.ModelProfile{Quantization: "none", Boundary: sdk.Boundary{Dtype: sdk.DtypeFloat16}, Layers: []sdk.LayerProfile{{Weights: 1600}}}
	for _, tc := range []struct {
		budget int64
		family []string
		want   int
	}{{850, nil, 8}, {849, nil, 6}, {850, []string{"none", "affine-4"}, 4}, {850, []string{"none", "mxfp4"}, 0}, {249, nil, 0}} {
		_, err := New(Request{Profile: profile, Hardware: Separate([]int64{tc.budget}), Quantizations: tc.family})
		e, ok := err.(*InfeasibleError)
		if !ok || e.Remedies.Bits != tc.want {
			t.Errorf("%+v: %+v, %v", tc, e, err)
		}
		if told := strings.Contains(err.Error(), "-bit weights"); told != (tc.want > 0) {
			t.Errorf("%+v: %v", tc, err)
		}
	}
}
