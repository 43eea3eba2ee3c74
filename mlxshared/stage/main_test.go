package stage

import (
	"bytes"
	"encoding/json"
	"testing"

	"github.com/hashicorp/go-hclog"
	"github.com/mlxcel/mlxcel/mlxshared/mlx"
	"github.com/mlxcel/mlxcel/sdk"
)

// What an executor logs goes to the logger that it was made with.
func TestLogger(t *testing.T) {
	var lines bytes.Buffer
	logger := hclog.New(&hclog.LoggerOptions{Level: hclog.Debug, Output: &lines, JSONFormat: true})
	e := New(Options{Name: "test", Families: []Family{bigram{}}, Device: mlx.DeviceCPU, Logger: logger})
	req := sdk.LoadRequest{Dir: bigramModel(t, 3), Family: "bigram", Layers: sdk.LayerRange{End: 3}, HasEmbedding: true, HasHead: true, Threads: 1}
	if _, err := e.Load(t.Context(), req, nil); err != nil {
		t.Fatal(err)
	}
	if err := e.Close(); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"loaded", "unloaded"} {
		var line struct {
			Message string `json:"@message"`
		}
		if err := next(&lines, &line); err != nil || line.Message != want {
			t.Errorf("line %+v (%v), want %q", line, err, want)
		}
	}
}

func next(lines *bytes.Buffer, line any) error {
	raw, err := lines.ReadBytes('\n')
	if err != nil {
		return err
	}
	return json.Unmarshal(raw, line)
}
