package executor

import (
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/mlxcel/mlxcel/sdk"
	"github.com/mlxcel/mlxcel/sdk/example/leakyrnn"
)

// TestExampleExecutor takes the sdk's example the whole way: built by the go tool into a plugin folder, found
// by its family, and loaded as two stages in two processes.
func TestExampleExecutor(t *testing.T) {
	dir, model := t.TempDir(), t.TempDir()
	build := exec.Command("go", "build", "-o", filepath.Join(dir, "example"), "github.com/mlxcel/mlxcel/sdk/example")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("build the example: %v\n%s", err, out)
	}
	if err := leakyrnn.WriteRandom(model, leakyrnn.Config{HiddenSize: 8, Layers: 4, VocabSize: 16, ContextLength: 64}, 1); err != nil {
		t.Fatal(err)
	}
	c := openCatalog(t, testConfig(t, dir))
	if _, err := c.Scan(t.Context()); err != nil {
		t.Fatal(err)
	}
	choice, err := c.ForFamily(leakyrnn.Family)
	if err != nil {
		t.Fatal(err)
	}
	for i, layers := range []sdk.LayerRange{{Start: 0, End: 2}, {Start: 2, End: 4}} {
		p := start(t, c, Spec{Plugin: choice.Entry.Path})
		p.Enter(PhaseLoad)
		report, err := p.Client().Load(t.Context(), sdk.LoadRequest{
			Dir: model, Family: choice.Family.Name, Layers: layers, HasEmbedding: i == 0, HasHead: i == 1,
			Region: sdk.RegionLayout{Slots: 1, InBytes: 4 << 10, OutBytes: 4 << 10},
		}, nil)
		if err != nil {
			t.Fatal(err)
		}
		p.Enter(PhaseIdle)
		h, err := p.Health(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if !h.Stats.Loaded || h.Stats.WeightBytes != report.WeightBytes {
			t.Errorf("stage %d: stats %+v after the load report %+v", i, h.Stats, report)
		}
	}
}
