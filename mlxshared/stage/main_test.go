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
	var line struct {
		Message string `json:"@message"`
		Family  string `json:"family"`
		End     int    `json:"end"`
	}
	if err := json.Unmarshal(lines.Bytes(), &line); err != nil || line.Message != "model loaded" || line.Family != "bigram" || line.End != 3 {
		t.Errorf("%q (%v), want one line on the load", lines.String(), err)
	}
}
